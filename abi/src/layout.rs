//! The two macros every ABI type is declared with, and the layout facts they record.
//!
//! `abi_struct!` declares a plain size-prefixed struct; `abi_table!` declares a table of functions
//! together with its stubs and its import. Both record field offsets, so that the surface dump and
//! the golden assertions come from the compiler and cannot drift from the code.

use crate::types::Str;

/// Where one field of an ABI struct lies.
#[derive(Debug, Clone, Copy)]
pub struct FieldLayout {
    /// Field name.
    pub name: &'static str,
    /// Type as written in the source.
    pub ty: &'static str,
    /// Offset in bytes.
    pub offset: usize,
    /// Size in bytes.
    pub size: usize,
}

/// Size, alignment and fields of one ABI struct.
#[derive(Debug, Clone, Copy)]
pub struct TypeLayout {
    /// Type name.
    pub name: &'static str,
    /// Size in bytes.
    pub size: usize,
    /// Alignment in bytes.
    pub align: usize,
    /// Fields in declaration order.
    pub fields: &'static [FieldLayout],
}

/// One function of a table: its name, signature and offset.
#[derive(Debug, Clone, Copy)]
pub struct SlotLayout {
    /// Slot name.
    pub name: &'static str,
    /// Parameters between `ctx` and `err`, as written in the source.
    pub params: &'static str,
    /// Offset in bytes.
    pub offset: usize,
}

/// A table of functions that grows by appending.
pub trait Table: Copy {
    /// The table's name, as it appears in error messages and in the surface dump.
    const NAME: &'static str;
    /// Every slot this build knows, in order.
    const SLOTS: &'static [SlotLayout];

    /// A table whose every slot answers `UNIMPLEMENTED`, naming itself.
    fn stubs() -> Self;

    /// Copies the table at `source` over stubs. Slots that the writer of `source` did not know
    /// stay stubs; slots that this build does not know are left out.
    ///
    /// # Safety
    /// `source` must point to a table of this type written by any build of this ABI major, whose
    /// `struct_size` is truthful, and which outlives the use of the copied function pointers.
    unsafe fn import(source: *const Self) -> Self;

    /// Whether a table of `struct_size` bytes holds the slot called `name`.
    fn covers(struct_size: usize, name: &str) -> bool {
        Self::SLOTS
            .iter()
            .any(|slot| slot.name == name && slot.offset + size_of::<usize>() <= struct_size)
    }
}

/// Number of slots that fit in a table of `struct_size` bytes.
pub fn table_entries<T: Table>(struct_size: usize) -> usize {
    T::SLOTS
        .iter()
        .filter(|slot| slot.offset + size_of::<usize>() <= struct_size)
        .count()
}

/// Borrowed view of a name for messages built in stubs.
pub(crate) fn slot_message(table: &str, slot: &str) -> String {
    format!("{table}.{slot} is not implemented by the other side of the plugin interface")
}

/// Returns the text of a [`Str`] or a placeholder, for error paths that must not fail.
pub fn lossy(text: Str) -> String {
    // SAFETY: a `Str` is valid for the duration of the call that received it (types.rs).
    match unsafe { text.as_str() } {
        Ok(s) => s.to_owned(),
        Err(_) => "<invalid utf-8>".to_owned(),
    }
}

macro_rules! abi_struct {
    ($(#[$meta:meta])* pub struct $name:ident {
        $($(#[$fmeta:meta])* pub $field:ident : $ty:ty),* $(,)?
    }) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy)]
        pub struct $name {
            $($(#[$fmeta])* pub $field: $ty,)*
        }

        impl $name {
            /// Layout facts for the surface dump.
            pub const LAYOUT: $crate::TypeLayout = $crate::TypeLayout {
                name: stringify!($name),
                size: size_of::<$name>(),
                align: align_of::<$name>(),
                fields: &[$($crate::FieldLayout {
                    name: stringify!($field),
                    ty: stringify!($ty),
                    offset: core::mem::offset_of!($name, $field),
                    size: size_of::<$ty>(),
                },)*],
            };
        }
    };
}

/// Declares an argument struct whose first field is `struct_size`, so that parameters can be
/// appended. `read` copies what the caller's build knew over the defaults of this build.
macro_rules! abi_args {
    ($(#[$meta:meta])* pub struct $name:ident {
        $($(#[$fmeta:meta])* pub $field:ident : $ty:ty = $default:expr),* $(,)?
    }) => {
        abi_struct! {
            $(#[$meta])*
            pub struct $name {
                /// `size_of` this struct in the build that filled it.
                pub struct_size: usize,
                $($(#[$fmeta])* pub $field: $ty,)*
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self { struct_size: size_of::<Self>(), $($field: $default,)* }
            }
        }

        impl $name {
            /// Reads arguments written by any build of this ABI major: fields that the writer did
            /// not know keep their defaults.
            ///
            /// # Safety
            /// `source` must point to a live struct of this type with a truthful `struct_size`.
            pub unsafe fn read(source: *const Self) -> $crate::Result<Self> {
                // SAFETY: forwarded to the caller.
                unsafe { $crate::ops_args::read_args(source, Self::default()) }
            }
        }
    };
}

macro_rules! abi_table {
    ($(#[$meta:meta])* pub struct $name:ident {
        $($(#[$smeta:meta])* fn $slot:ident ( $($arg:ident : $aty:ty),* $(,)? );)*
    }) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy)]
        pub struct $name {
            /// `size_of` this table in the build that filled it.
            pub struct_size: usize,
            /// ABI minor the table was built at.
            pub minor: u32,
            /// Zero.
            pub reserved: u32,
            /// Passed back as the first argument of every slot.
            pub ctx: *mut core::ffi::c_void,
            $(
                $(#[$smeta])*
                pub $slot: unsafe extern "C" fn(
                    ctx: *mut core::ffi::c_void,
                    $($arg: $aty,)*
                    err: *mut *mut $crate::ErrorObj,
                ) -> $crate::Status,
            )*
        }

        const _: () = {
            $(
                unsafe extern "C" fn $slot(
                    _ctx: *mut core::ffi::c_void,
                    $(_: $aty,)*
                    err: *mut *mut $crate::ErrorObj,
                ) -> $crate::Status {
                    // SAFETY: `err` is null or a slot of the caller (contract of every table).
                    unsafe { $crate::error::report_unimplemented(err, stringify!($name), stringify!($slot)) }
                }
            )*

            impl $crate::Table for $name {
                const NAME: &'static str = stringify!($name);
                const SLOTS: &'static [$crate::SlotLayout] = &[$($crate::SlotLayout {
                    name: stringify!($slot),
                    params: stringify!($($arg: $aty),*),
                    offset: core::mem::offset_of!($name, $slot),
                },)*];

                fn stubs() -> Self {
                    Self {
                        struct_size: size_of::<Self>(),
                        minor: $crate::version::ABI_MINOR,
                        reserved: 0,
                        ctx: core::ptr::null_mut(),
                        $($slot,)*
                    }
                }

                unsafe fn import(source: *const Self) -> Self {
                    let mut table = Self::stubs();
                    // SAFETY: the caller vouches for `source`; at most `struct_size` bytes of it
                    // are read, and at most `size_of::<Self>()` are written.
                    unsafe {
                        let theirs = (*source).struct_size;
                        let bytes = theirs.min(size_of::<Self>());
                        core::ptr::copy_nonoverlapping(
                            source.cast::<u8>(),
                            (&raw mut table).cast::<u8>(),
                            bytes,
                        );
                    }
                    table
                }
            }
        };

        impl $name {
            /// Layout facts for the surface dump.
            pub const LAYOUT: $crate::TypeLayout = $crate::TypeLayout {
                name: stringify!($name),
                size: size_of::<$name>(),
                align: align_of::<$name>(),
                fields: &[],
            };
        }
    };
}
