//! Operations that go wrong at their n-th call: `error`, `full`, `panic`, `hang` or `nan`, then the operation, then the
//! number from 0, as in `hang_eval_12`.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use mlxcel_abi::{AbiError, Result, status};

use crate::fault;

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// An error.
    Error,
    /// The error of a device whose memory is used up.
    Full,
    /// What a C++ exception is to Rust: unwinding into the guard of the call.
    Panic,
    /// The call never returns.
    Hang,
    /// The first element that is read, or the first logit that is sampled from, is not a number.
    Nan,
}

struct Misstep {
    kind: Kind,
    op: &'static str,
    at: u64,
    calls: AtomicU64,
}

fn parse(name: &'static str) -> Option<Misstep> {
    let (kind, rest) = name.split_once('_')?;
    let (op, at) = rest.rsplit_once('_')?;
    let kind = match kind {
        "error" => Kind::Error,
        "full" => Kind::Full,
        "panic" => Kind::Panic,
        "hang" => Kind::Hang,
        "nan" => Kind::Nan,
        _ => return None,
    };
    Some(Misstep {
        kind,
        op,
        at: at.parse().ok()?,
        calls: AtomicU64::new(0),
    })
}

/// Counts a call and goes wrong if it is the one. Whether what it reads has to be spoilt.
pub fn step(op: &str) -> Result<bool> {
    static MISSTEP: OnceLock<Option<Misstep>> = OnceLock::new();
    let misstep = MISSTEP.get_or_init(|| parse(fault::name()));
    let Some(misstep) = misstep.as_ref().filter(|misstep| misstep.op == op) else {
        return Ok(false);
    };
    if misstep.calls.fetch_add(1, Ordering::Relaxed) != misstep.at {
        return Ok(false);
    }
    match misstep.kind {
        Kind::Error => Err(AbiError::new(status::INTERNAL, "the device fails as told")),
        Kind::Full => {
            let text = "the device's memory is used up as told";
            Err(AbiError::new(status::RESOURCE_EXHAUSTED, text))
        }
        Kind::Panic => panic!("the device throws as told"),
        Kind::Hang => loop {
            std::thread::park();
        },
        Kind::Nan => Ok(true),
    }
}
