//! Metadata embedded in the plugin file, readable without running any of its code.
//!
//! The section [`SECTION`] holds JSON records, one a line: one `{"plugin": {..}}` and, for a
//! family, one `{"arch": {..}}` for every architecture, each written by the file that implements
//! it. The linker joins them. `docs/ABI.md` lists the keys.

/// Name of the section in the plugin file.
#[cfg(target_vendor = "apple")]
pub const SECTION: &str = "__mlxcelpl";
/// Name of the section in the plugin file.
#[cfg(not(target_vendor = "apple"))]
pub const SECTION: &str = ".mlxcel.plugin";

/// Version of the record format.
pub const FORMAT: u32 = 1;

/// CPU architecture of this build.
pub const TARGET_ARCH: &str = if cfg!(target_arch = "x86_64") {
    "x86_64"
} else if cfg!(target_arch = "aarch64") {
    "aarch64"
} else if cfg!(target_arch = "riscv64") {
    "riscv64"
} else {
    "other"
};

/// Operating system of this build.
pub const TARGET_OS: &str = if cfg!(target_os = "linux") {
    "linux"
} else if cfg!(target_os = "macos") {
    "macos"
} else if cfg!(target_os = "windows") {
    "windows"
} else {
    "other"
};

/// Total length of the parts.
#[doc(hidden)]
pub const fn total_len(parts: &[&str]) -> usize {
    let mut total = 0;
    let mut i = 0;
    while i < parts.len() {
        total += parts[i].len();
        i += 1;
    }
    total
}

/// Joins the parts into one array at compile time.
#[doc(hidden)]
pub const fn concat_bytes<const N: usize>(parts: &[&str]) -> [u8; N] {
    let mut out = [0u8; N];
    let (mut at, mut i) = (0, 0);
    while i < parts.len() {
        let bytes = parts[i].as_bytes();
        let mut j = 0;
        while j < bytes.len() {
            out[at] = bytes[j];
            at += 1;
            j += 1;
        }
        i += 1;
    }
    out
}

/// Refuses, at compile time, text that would need escaping in JSON.
#[doc(hidden)]
pub const fn plain(text: &str) -> &str {
    let bytes = text.as_bytes();
    let mut i = 0;
    while i < bytes.len() {
        assert!(
            bytes[i] != b'"' && bytes[i] != b'\\' && bytes[i] >= 0x20,
            "plugin metadata must not hold quotes, backslashes or control characters"
        );
        i += 1;
    }
    text
}

/// A `u32` below 1000 as text, for versions.
#[doc(hidden)]
pub const fn digits(value: u32) -> &'static str {
    const TABLE: [u8; 3000] = {
        let mut table = [b'0'; 3000];
        let mut i = 0;
        while i < 1000 {
            table[i * 3] = b'0' + (i / 100) as u8;
            table[i * 3 + 1] = b'0' + (i / 10 % 10) as u8;
            table[i * 3 + 2] = b'0' + (i % 10) as u8;
            i += 1;
        }
        table
    };
    assert!(value < 1000, "version part above 999");
    let i = value as usize;
    let skip = if i >= 100 {
        0
    } else if i >= 10 {
        1
    } else {
        2
    };
    let (_, rest) = TABLE.split_at(i * 3 + skip);
    let (text, _) = rest.split_at(3 - skip);
    match core::str::from_utf8(text) {
        Ok(text) => text,
        Err(_) => "",
    }
}

/// Embeds one record in the plugin file and names it `$name: &str`.
#[macro_export]
macro_rules! embed_record {
    ($(#[$meta:meta])* $vis:vis const $name:ident = $parts:expr) => {
        $(#[$meta])*
        $vis const $name: &str = {
            const PARTS: &[&str] = $parts;
            const LEN: usize = $crate::metadata::total_len(PARTS);
            const BYTES: [u8; LEN] = $crate::metadata::concat_bytes::<LEN>(PARTS);
            // Read from the file by the host, never through this name.
            #[used]
            #[cfg_attr(target_vendor = "apple", unsafe(link_section = "__DATA,__mlxcelpl"))]
            #[cfg_attr(not(target_vendor = "apple"), unsafe(link_section = ".mlxcel.plugin"))]
            static RECORD: [u8; LEN] = BYTES;
            match ::core::str::from_utf8(&BYTES) {
                Ok(text) => text,
                Err(_) => ::core::panic!("metadata is not UTF-8"),
            }
        };
    };
}

/// Embeds the plugin's own record. `extra` is raw JSON that starts with a comma, or empty.
#[macro_export]
macro_rules! embed_plugin_record {
    ($vis:vis const $name:ident = { kind: $kind:expr, name: $plugin:expr, version: $version:expr, vendor: $vendor:expr, needs_minor: $needs:expr, extra: $extra:expr $(,)? }) => {
        $crate::embed_record! {
            /// This plugin's record, as embedded in its file.
            $vis const $name = &[
                "{\"plugin\":{\"format\":", $crate::metadata::digits($crate::metadata::FORMAT),
                ",\"abi\":[", $crate::metadata::digits($crate::version::ABI_MAJOR), ",",
                $crate::metadata::digits($crate::version::ABI_MINOR), "],\"needs_minor\":",
                $crate::metadata::digits($needs),
                ",\"kind\":\"", $crate::metadata::plain($kind),
                "\",\"name\":\"", $crate::metadata::plain($plugin),
                "\",\"version\":\"", $crate::metadata::plain($version),
                "\",\"vendor\":\"", $crate::metadata::plain($vendor),
                "\",\"arch\":\"", $crate::metadata::TARGET_ARCH,
                "\",\"os\":\"", $crate::metadata::TARGET_OS,
                "\",\"panic\":\"unwind\"", $extra, "}}\n",
            ]
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    embed_plugin_record! {
        const RECORD = { kind: "family", name: "test", version: "1.2.3", vendor: "us", needs_minor: 0, extra: ",\"requires_ops\":[\"rope\"]" }
    }

    #[test]
    fn record_is_one_line_of_json() {
        let minor = crate::version::ABI_MINOR;
        assert!(RECORD.starts_with(&format!(
            "{{\"plugin\":{{\"format\":1,\"abi\":[1,{minor}],\"needs_minor\":0,\"kind\":\"family\""
        )));
        assert!(RECORD.ends_with("\"requires_ops\":[\"rope\"]}}\n"));
        assert_eq!(RECORD.matches('\n').count(), 1);
    }

    #[test]
    fn digits_have_no_leading_zeros() {
        assert_eq!(
            (digits(0), digits(7), digits(42), digits(999)),
            ("0", "7", "42", "999")
        );
    }
}
