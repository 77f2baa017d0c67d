//! The checked-in surface equals the code's; old and new tables import over stubs.

use core::ffi::c_void;
use mlxcel_abi::host::HostApi;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::ops_args::RopeArgs;
use mlxcel_abi::{AbiError, Table, Tensor, status};

#[test]
fn surface_file_is_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/surface.txt");
    let stored = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        stored == mlxcel_abi::surface::dump(),
        "abi/surface.txt differs from the code. If a slot or field was appended on purpose, raise \
         ABI_MINOR and run `cargo xtask abi-dump`; any other change breaks every plugin"
    );
}

#[test]
fn a_shorter_table_leaves_stubs_that_name_themselves() {
    unsafe extern "C" fn retain(
        _: *mut c_void,
        _: Tensor,
        _: *mut *mut mlxcel_abi::ErrorObj,
    ) -> i32 {
        status::OK
    }
    let mut old = BackendOps::stubs();
    old.retain = retain;
    old.struct_size = BackendOps::SLOTS[1].offset;
    // SAFETY: `old` is a live table whose size covers its first slot.
    let ops = unsafe { BackendOps::import(&old) };
    let mut err = core::ptr::null_mut();
    // SAFETY: the slots ignore their context; `err` is a writable slot.
    unsafe {
        assert_eq!(
            (ops.retain)(core::ptr::null_mut(), Tensor(1), &mut err),
            status::OK
        );
        let code = (ops.synchronize)(core::ptr::null_mut(), &mut err);
        let error = AbiError::from_raw(code, err);
        assert_eq!(error.code, status::UNIMPLEMENTED);
        assert!(
            error
                .message
                .starts_with("BackendOps.synchronize is not implemented"),
            "{error}"
        );
    }
    assert!(BackendOps::covers(old.struct_size, "retain"));
    assert!(!BackendOps::covers(old.struct_size, "release"));
}

#[test]
fn a_longer_table_is_cut_to_what_this_side_knows() {
    #[repr(C)]
    struct Newer {
        known: HostApi,
        appended: [usize; 4],
    }
    let mut newer = Newer {
        known: HostApi::stubs(),
        appended: [7; 4],
    };
    newer.known.struct_size = size_of::<Newer>();
    newer.known.minor = 9;
    // SAFETY: `newer` is a live table with a truthful size.
    let host = unsafe { HostApi::import(&raw const newer.known) };
    assert_eq!(host.minor, 9);
    assert_eq!(newer.appended, [7; 4]);
}

#[test]
fn argument_structs_of_an_older_build_keep_new_defaults() {
    let mut args = RopeArgs {
        dims: 64,
        base: 5.0,
        scale: 3.0,
        ..RopeArgs::default()
    };
    args.struct_size = core::mem::offset_of!(RopeArgs, scale);
    // SAFETY: a live struct with a size that covers what is set.
    let read = unsafe { RopeArgs::read(&args) }.unwrap();
    assert_eq!((read.dims, read.base, read.scale), (64, 5.0, 1.0));
    args.struct_size = 3;
    // SAFETY: as above; the absurd size is what is tested.
    assert!(unsafe { RopeArgs::read(&args) }.is_err());
    // SAFETY: null is answered with an error.
    assert!(unsafe { RopeArgs::read(core::ptr::null()) }.is_err());
}
