//! The whole ABI as text, for `abi/surface.txt`: CI compares it, so that no layout changes unseen.

use core::fmt::Write;

use crate::envelope::{HostHello, PluginHello};
use crate::layout::{SlotLayout, Table, TypeLayout};
use crate::{
    backend, cache_args, collectives, family, fused_args, host, kinds, metadata, ops, ops_args,
    status, types, version,
};

/// Every plain struct and table header of the ABI.
pub fn types() -> Vec<TypeLayout> {
    vec![
        types::TensorInfo::LAYOUT,
        ops_args::FromHostArgs::LAYOUT,
        ops_args::SliceArgs::LAYOUT,
        ops_args::GatherArgs::LAYOUT,
        ops_args::QuantSpec::LAYOUT,
        ops_args::QuantizedWeight::LAYOUT,
        ops_args::QuantizedMatmulArgs::LAYOUT,
        ops_args::ConvArgs::LAYOUT,
        ops_args::RopeArgs::LAYOUT,
        ops_args::AttentionArgs::LAYOUT,
        ops_args::PagedAttentionArgs::LAYOUT,
        ops_args::RandomArgs::LAYOUT,
        ops_args::MemoryInfo::LAYOUT,
        ops_args::MemoryLimits::LAYOUT,
        backend::OpenArgs::LAYOUT,
        family::LoadArgs::LAYOUT,
        family::AttendArgs::LAYOUT,
        family::StepArgs::LAYOUT,
        family::StepOutput::LAYOUT,
        family::EncodeArgs::LAYOUT,
        family::IndexArgs::LAYOUT,
        family::ShortConvArgs::LAYOUT,
        family::GatedDeltaArgs::LAYOUT,
        cache_args::StateRows::LAYOUT,
        cache_args::ShortConvPoolArgs::LAYOUT,
        cache_args::GatedDeltaPoolArgs::LAYOUT,
        cache_args::SparseIndexArgs::LAYOUT,
        fused_args::LinearWeight::LAYOUT,
        fused_args::InputNorm::LAYOUT,
        fused_args::ProjectArgs::LAYOUT,
        fused_args::GatedMlpArgs::LAYOUT,
        fused_args::RotateArgs::LAYOUT,
        fused_args::SampleArgs::LAYOUT,
        fused_args::RouteArgs::LAYOUT,
        fused_args::MixtureArgs::LAYOUT,
        collectives::JoinArgs::LAYOUT,
    ]
}

/// Every table with its slots.
pub fn tables() -> Vec<(TypeLayout, &'static [SlotLayout])> {
    vec![
        (host::HostApi::LAYOUT, host::HostApi::SLOTS),
        (host::WeightsApi::LAYOUT, host::WeightsApi::SLOTS),
        (ops::BackendOps::LAYOUT, ops::BackendOps::SLOTS),
        (backend::BackendTable::LAYOUT, backend::BackendTable::SLOTS),
        (family::KvApi::LAYOUT, family::KvApi::SLOTS),
        (family::FamilyTable::LAYOUT, family::FamilyTable::SLOTS),
        (
            collectives::Collectives::LAYOUT,
            collectives::Collectives::SLOTS,
        ),
    ]
}

/// Source types print with the spacing of the compiler that built them; this makes it one.
fn tidy(text: &str) -> String {
    let mut out = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for (from, to) in [
        (" :", ":"),
        (" ,", ","),
        ("* ", "*"),
        (" <", "<"),
        ("< ", "<"),
        (" >", ">"),
    ] {
        out = out.replace(from, to);
    }
    out.trim_end_matches(',').to_owned()
}

fn plain_struct(out: &mut String, name: &str, size: usize, align: usize) {
    let _ = writeln!(out, "struct {name} size={size} align={align}");
}

/// The dump.
pub fn dump() -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "abi {}.{} oldest_plugin_minor={}",
        version::ABI_MAJOR,
        version::ABI_MINOR,
        version::OLDEST_PLUGIN_MINOR
    );
    let _ = writeln!(out, "pointer_bytes {}", size_of::<usize>());
    let _ = writeln!(out, "metadata format={}", metadata::FORMAT);

    out.push_str("\n# envelope (frozen)\n");
    plain_struct(
        &mut out,
        "HostHello",
        size_of::<HostHello>(),
        align_of::<HostHello>(),
    );
    plain_struct(
        &mut out,
        "PluginHello",
        size_of::<PluginHello>(),
        align_of::<PluginHello>(),
    );

    out.push_str("\n# values\n");
    plain_struct(
        &mut out,
        "Str",
        size_of::<types::Str>(),
        align_of::<types::Str>(),
    );
    plain_struct(
        &mut out,
        "Bytes",
        size_of::<types::Bytes>(),
        align_of::<types::Bytes>(),
    );
    plain_struct(
        &mut out,
        "OwnedBytes",
        size_of::<types::OwnedBytes>(),
        align_of::<types::OwnedBytes>(),
    );
    plain_struct(
        &mut out,
        "ErrorObj",
        size_of::<crate::ErrorObj>(),
        align_of::<crate::ErrorObj>(),
    );
    plain_struct(
        &mut out,
        "Tensor",
        size_of::<types::Tensor>(),
        align_of::<types::Tensor>(),
    );

    out.push_str("\n# argument structs (append-only)\n");
    for layout in self::types() {
        plain_struct(&mut out, layout.name, layout.size, layout.align);
        for field in layout.fields {
            let _ = writeln!(
                out,
                "  {:>4} +{:<3} {}: {}",
                field.offset,
                field.size,
                field.name,
                tidy(field.ty)
            );
        }
    }

    out.push_str("\n# tables (append-only)\n");
    for (layout, slots) in tables() {
        let _ = writeln!(
            out,
            "table {} size={} align={} slots={}",
            layout.name,
            layout.size,
            layout.align,
            slots.len()
        );
        for slot in slots {
            let _ = writeln!(
                out,
                "  {:>4} {}({})",
                slot.offset,
                slot.name,
                tidy(slot.params)
            );
        }
    }

    out.push_str("\n# codes\n");
    for (name, code) in status::ALL {
        let _ = writeln!(out, "status {name} = {code}");
    }
    for dtype in types::DType::ALL {
        let _ = writeln!(
            out,
            "dtype {} = {} bytes={}",
            dtype.name(),
            dtype.0,
            dtype.size_bytes()
        );
    }
    for (group, all) in kinds::GROUPS {
        let codes: Vec<String> = all
            .iter()
            .map(|(code, name)| format!("{name}={code}"))
            .collect();
        let _ = writeln!(out, "{group}: {}", codes.join(" "));
    }
    out
}

/// Rust source of `golden.rs`: sizes and offsets as compile-time assertions.
pub fn golden_source() -> String {
    let mut out = String::from(
        "//! Frozen sizes and offsets of ABI 1, asserted by the compiler on 64-bit targets.\n\
         //!\n\
         //! Written by `cargo xtask abi-dump`. A line may be added when a field or slot is appended;\n\
         //! no line may ever change within a major.\n\n\
         #![cfg(target_pointer_width = \"64\")]\n\n\
         use core::mem::offset_of;\n\n\
         macro_rules! frozen {\n    ($ty:path: $($field:ident @ $offset:literal),* $(,)?) => {\n        \
         $(const _: () = assert!(offset_of!($ty, $field) == $offset);)*\n    };\n}\n\n",
    );
    for layout in types() {
        let module = module_of(layout.name);
        let fields: Vec<String> = layout
            .fields
            .iter()
            .map(|f| format!("{} @ {}", f.name, f.offset))
            .collect();
        let _ = writeln!(
            out,
            "frozen! {{{module}::{}: {}}}",
            layout.name,
            fields.join(", ")
        );
    }
    for (layout, slots) in tables() {
        let module = module_of(layout.name);
        let fields: Vec<String> = slots
            .iter()
            .map(|s| format!("{} @ {}", s.name, s.offset))
            .collect();
        let _ = writeln!(
            out,
            "frozen! {{{module}::{}: struct_size @ 0, minor @ 8, ctx @ 16, {}}}",
            layout.name,
            fields.join(", ")
        );
    }
    out
}

fn module_of(name: &str) -> &'static str {
    match name {
        "TensorInfo" => "crate::types",
        "HostApi" | "WeightsApi" => "crate::host",
        "BackendOps" => "crate::ops",
        "OpenArgs" | "BackendTable" => "crate::backend",
        "LoadArgs" | "AttendArgs" | "StepArgs" | "StepOutput" | "EncodeArgs" | "KvApi"
        | "FamilyTable" | "IndexArgs" | "ShortConvArgs" | "GatedDeltaArgs" => "crate::family",
        "StateRows" | "ShortConvPoolArgs" | "GatedDeltaPoolArgs" | "SparseIndexArgs" => {
            "crate::cache_args"
        }
        "LinearWeight" | "InputNorm" | "ProjectArgs" | "GatedMlpArgs" | "RotateArgs"
        | "SampleArgs" | "RouteArgs" | "MixtureArgs" => "crate::fused_args",
        "JoinArgs" | "Collectives" => "crate::collectives",
        _ => "crate::ops_args",
    }
}
