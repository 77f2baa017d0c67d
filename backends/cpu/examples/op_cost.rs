//! What the plugin boundary costs: nanoseconds a call through the operation table takes beyond the
//! same call made by C++ alone.
//!
//! `cargo run --release -p mlxcel-backend-cpu --example op_cost`
//!
//! Only graph nodes are built, nothing is evaluated.

use std::hint::black_box;
use std::ptr::null_mut;
use std::time::Instant;

use mlxcel_abi::backend::{BackendTable, OpenArgs};
use mlxcel_abi::kinds::binary;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{AbiError, DType, Result, Table, Tensor, TensorInfo};

const CALLS: u64 = 200_000;
const ROUNDS: usize = 7;

fn main() -> Result<()> {
    // SAFETY: the table lives as long as the process.
    let entry = unsafe { BackendTable::import(mlxcel_backend_cpu::backend_table()) };
    let args = OpenArgs::default();
    let mut table = std::ptr::null();
    let mut err = null_mut();
    // SAFETY: arguments and results live for the call.
    let ops = unsafe {
        let code = (entry.open)(entry.ctx, &raw const args, &raw mut table, &raw mut err);
        AbiError::check(code, err)?;
        BackendOps::import(table)
    };
    let a = scalar(&ops, 1.0)?;
    let b = scalar(&ops, 2.0)?;
    let add = median(|| add_ns(&ops, a, b))?;
    let info = median(|| info_ns(&ops, a))?;
    let direct = median(|| mlxcel_backend_mlx::direct_add_ns(CALLS))?;
    report("info through the table", info);
    report("add and release through the table", add);
    report("add by C++ alone", direct);
    report("boundary per operation", add - direct);
    // SAFETY: the table came from `open` above and is not used again.
    let code = unsafe { (entry.close)(entry.ctx, table, &raw mut err) };
    // SAFETY: both come from the line above.
    unsafe { AbiError::check(code, err) }
}

#[expect(
    clippy::print_stdout,
    reason = "the figures are what the example is for"
)]
fn report(what: &str, nanoseconds: f64) {
    println!("{what:<36} {nanoseconds:>8.1} ns");
}

fn median(mut measure: impl FnMut() -> Result<f64>) -> Result<f64> {
    let mut rounds = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        rounds.push(measure()?);
    }
    rounds.sort_by(f64::total_cmp);
    Ok(rounds.get(ROUNDS / 2).copied().unwrap_or(f64::NAN))
}

fn scalar(ops: &BackendOps, value: f64) -> Result<Tensor> {
    let mut out = Tensor::NONE;
    let mut err = null_mut();
    // SAFETY: no dimension is read, and the results live for the call.
    let code = unsafe {
        (ops.full)(
            ops.ctx,
            value,
            DType::F32,
            std::ptr::null(),
            0,
            &raw mut out,
            &raw mut err,
        )
    };
    // SAFETY: both come from the line above.
    unsafe { AbiError::check(code, err) }.map(|()| out)
}

fn add_ns(ops: &BackendOps, a: Tensor, b: Tensor) -> Result<f64> {
    let start = Instant::now();
    for _ in 0..CALLS {
        let mut out = Tensor::NONE;
        let mut err = null_mut();
        // SAFETY: the handles are live and the results live for the calls.
        let code = unsafe { (ops.binary)(ops.ctx, binary::ADD, a, b, &raw mut out, &raw mut err) };
        // SAFETY: both come from the line above.
        unsafe { AbiError::check(code, err) }?;
        // SAFETY: as above.
        let code = unsafe { (ops.release)(ops.ctx, black_box(out), &raw mut err) };
        // SAFETY: as above.
        unsafe { AbiError::check(code, err) }?;
    }
    Ok(start.elapsed().as_nanos() as f64 / CALLS as f64)
}

fn info_ns(ops: &BackendOps, a: Tensor) -> Result<f64> {
    let start = Instant::now();
    for _ in 0..CALLS {
        let mut info = TensorInfo::ZERO;
        let mut err = null_mut();
        // SAFETY: the handle is live and the results live for the call.
        let code = unsafe { (ops.info)(ops.ctx, a, &raw mut info, &raw mut err) };
        // SAFETY: both come from the line above.
        unsafe { AbiError::check(code, err) }?;
        black_box(info.ndim);
    }
    Ok(start.elapsed().as_nanos() as f64 / CALLS as f64)
}
