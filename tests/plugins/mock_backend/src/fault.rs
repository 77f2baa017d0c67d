//! Which fault this copy of the file was given.
//!
//! The name lies in the library's read-only data behind a mark, where a test replaces it. So a bad plugin is a file like
//! any other and needs nothing from its environment.

use std::sync::OnceLock;

/// Starts the place that tests look for.
const MARK_LEN: usize = "mlxcel-test-fault:".len();

#[used]
static PLACE: [u8; 64] = *b"mlxcel-test-fault:none__________________________________________";

/// The name of the fault; `none` in a healthy copy.
pub fn name() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| {
        // SAFETY: a static of this type. Volatile because the file is changed after compilation.
        let bytes = unsafe { std::ptr::read_volatile(&raw const PLACE) };
        let text = String::from_utf8_lossy(bytes.get(MARK_LEN..).unwrap_or_default());
        text.trim_end_matches('_').to_owned()
    })
}
