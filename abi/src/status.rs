//! Status codes. The numbers are those of absl/gRPC, which PJRT and XLA use as well, so that
//! tools and people know them. They are plain integers: an enum with an unknown value would be
//! undefined behaviour.

/// Result of every table function: 0 is success.
pub type Status = i32;

macro_rules! codes {
    ($($(#[$meta:meta])* $name:ident = $value:literal, $text:literal;)*) => {
        $($(#[$meta])* pub const $name: Status = $value;)*

        /// The code's name, or `unknown status`.
        pub fn name(code: Status) -> &'static str {
            match code { $($value => $text,)* _ => "unknown status" }
        }

        pub(crate) const ALL: &[(&str, Status)] = &[$((stringify!($name), $value),)*];
    };
}

codes! {
    /// Success.
    OK = 0, "ok";
    /// The request was cancelled.
    CANCELLED = 1, "cancelled";
    /// An argument is wrong: shape, dtype, stale handle, malformed text.
    INVALID_ARGUMENT = 3, "invalid argument";
    /// Something named does not exist.
    NOT_FOUND = 5, "not found";
    /// Memory or another budget is used up; the caller may free something and try again.
    RESOURCE_EXHAUSTED = 8, "resource exhausted";
    /// The object is not in a state for this call (for instance poisoned by an earlier panic).
    FAILED_PRECONDITION = 9, "failed precondition";
    /// The other side does not have this function or this variant of it; a fallback may exist.
    UNIMPLEMENTED = 12, "unimplemented";
    /// A bug or an unexpected failure on the other side, panics included.
    INTERNAL = 13, "internal error";
    /// The device or driver is not there.
    UNAVAILABLE = 14, "unavailable";
    /// Data is damaged.
    DATA_LOSS = 15, "data loss";
}
