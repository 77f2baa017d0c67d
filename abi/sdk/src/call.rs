//! The one place where table functions are called.

/// Calls a slot of an operation table that gives a tensor.
macro_rules! op {
    ($backend:expr, $slot:ident $(, $arg:expr)* $(,)?) => {{
        let backend: &$crate::Backend = $backend;
        let mut out = $crate::abi::Tensor::NONE;
        let mut err = core::ptr::null_mut();
        // SAFETY: the table was imported over stubs and outlives the model (LoadArgs::ops); the
        // arguments are live for the call; `out` and `err` are writable.
        let checked = unsafe {
            let code = (backend.table().$slot)(backend.table().ctx $(, $arg)*, &mut out, &mut err);
            $crate::abi::AbiError::check(code, err)
        };
        match checked {
            Ok(()) => Ok($crate::Tensor::from_handle(backend, out)),
            Err(source) => Err($crate::Error::Backend { op: stringify!($slot).to_owned(), source }),
        }
    }};
}

/// Calls a slot that gives nothing but a status.
macro_rules! command {
    ($table:expr, $slot:ident $(, $arg:expr)* $(,)?) => {{
        let table = $table;
        let mut err = core::ptr::null_mut();
        // SAFETY: as for `op!`: an imported table, live arguments, a writable error slot.
        let checked = unsafe {
            let code = (table.$slot)(table.ctx $(, $arg)*, &mut err);
            $crate::abi::AbiError::check(code, err)
        };
        checked.map_err(|source| $crate::Error::Backend { op: stringify!($slot).to_owned(), source })
    }};
}
