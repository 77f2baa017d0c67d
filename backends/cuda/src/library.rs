//! NVIDIA's libraries, opened by name when they are first asked for: this crate is built and loaded where there are none.

/// A struct of entry points that are read from a library by name, and the library, which stays open as long as they are there.
macro_rules! entry_points {
    ($(#[$about:meta])* $name:ident { $($field:ident = $symbol:literal ( $($ty:ty),* $(,)? );)* }) => {
        $(#[$about])*
        struct $name {
            $($field: unsafe extern "C" fn($($ty),*) -> core::ffi::c_int,)*
            _library: libloading::Library,
        }

        impl $name {
            /// Opens the first of `names` that is there.
            fn open(names: &[&str]) -> core::result::Result<Self, String> {
                let library = $crate::library::first_of(names)?;
                // SAFETY: the types are those of the library's documented interface.
                let found = || unsafe {
                    Ok(($(*library.get(concat!($symbol, "\0").as_bytes())?,)*))
                };
                let found: core::result::Result<_, libloading::Error> = found();
                let ($($field,)*) = found.map_err(|error| $crate::library::said(&error))?;
                Ok(Self { $($field,)* _library: library })
            }
        }
    };
}
pub(crate) use entry_points;

/// The first library of these names that can be opened, or why the last one cannot.
pub(crate) fn first_of(names: &[&str]) -> Result<libloading::Library, String> {
    let mut problem = String::from("no name was given");
    for name in names {
        // SAFETY: NVIDIA's library, which MLX links too; its constructors are its own.
        match unsafe { libloading::Library::new(*name) } {
            Ok(library) => return Ok(library),
            Err(error) => problem = said(&error),
        }
    }
    Err(problem)
}

/// What the linker said: libloading keeps it in the error's source.
pub(crate) fn said(error: &libloading::Error) -> String {
    use core::error::Error as _;
    error
        .source()
        .map_or_else(|| error.to_string(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_is_not_there_is_named() {
        let problem = super::first_of(&["libmlxcel_none.so.2", "libmlxcel_none.so.1"]).unwrap_err();
        assert!(problem.contains("libmlxcel_none.so.1"), "{problem}");
    }
}
