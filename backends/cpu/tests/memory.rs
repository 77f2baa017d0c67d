//! Figures and limits. One test: the figures are those of the whole process.
#![allow(clippy::unwrap_used, reason = "a test fails that way")]

#[macro_use]
mod harness;

use std::ptr::null;

use harness::Device;
use mlxcel_abi::kinds::{reduce, unary};
use mlxcel_abi::ops_args::{FromHostArgs, MemoryLimits, PagedAttentionArgs};
use mlxcel_abi::{DType, Tensor, status};

const MEBIBYTE: u64 = 1 << 20;

#[test]
fn memory_is_counted_bounded_and_not_copied() {
    let d = Device::open();
    figures_follow_the_tensors(&d);
    borrowed_memory_is_not_copied(&d);
    a_decode_step_writes_into_the_pool(&d);
    limits_are_kept(&d);
    assert_eq!(d.memory().live_tensors, 0);
}

fn zeros(d: &Device, bytes: u64) -> Tensor {
    let dims = [(bytes / 4) as i64];
    let t = op!(d, full, 0.0, DType::F32, dims.as_ptr(), 1).unwrap();
    d.eval(&[t]);
    t
}

fn reset_peak(d: &Device) {
    run!(d, clear_cache).unwrap();
    d.set_limits(MemoryLimits {
        reset_peak: 1,
        ..MemoryLimits::default()
    })
    .unwrap();
}

fn figures_follow_the_tensors(d: &Device) {
    let before = d.memory();
    assert!(before.total_bytes > 0 && before.limit_bytes > 0);
    let t = zeros(d, 8 * MEBIBYTE);
    let with = d.memory();
    assert!(with.active_bytes >= before.active_bytes + 8 * MEBIBYTE);
    assert!(with.peak_bytes >= with.active_bytes);
    assert_eq!(with.live_tensors, before.live_tensors + 1);
    d.release(t);
    let after = d.memory();
    assert!(after.active_bytes < before.active_bytes + MEBIBYTE);
    assert!(
        after.cache_bytes >= 8 * MEBIBYTE,
        "a freed buffer is kept for reuse"
    );
    reset_peak(d);
    let reset = d.memory();
    assert!(reset.cache_bytes < MEBIBYTE && reset.peak_bytes < MEBIBYTE);
}

unsafe extern "C" fn no_release(_: *mut core::ffi::c_void) {}

fn borrowed_memory_is_not_copied(d: &Device) {
    let data = vec![1.0_f32; 1 << 20];
    let dims = [data.len() as i64];
    let args = FromHostArgs {
        data: data.as_ptr().cast(),
        byte_len: size_of_val(data.as_slice()),
        dtype: DType::F32,
        ndim: 1,
        dims: dims.as_ptr(),
        release: Some(no_release),
        ..FromHostArgs::default()
    };
    reset_peak(d);
    let t = op!(d, from_host, &raw const args).unwrap();
    let sum = op!(d, reduce, reduce::SUM, t, null(), 0, 0).unwrap();
    assert_eq!(d.read(sum), [(1 << 20) as f32]);
    assert!(
        d.memory().peak_bytes < MEBIBYTE,
        "{} bytes were allocated",
        d.memory().peak_bytes
    );
    // The result of an operation may reuse its input's memory, but never borrowed memory.
    let negated = op!(d, unary, unary::NEG, t).unwrap();
    d.release(t);
    d.eval(&[negated]);
    assert!(data.iter().all(|&value| value == 1.0));
    d.release(negated);
    d.release(sum);
}

/// Two pools of 16 MiB: a step must need far less than one of them.
fn a_decode_step_writes_into_the_pool(d: &Device) {
    let (pages, page, heads, width) = (1024_i64, 16_i64, 4_i64, 64_i64);
    let dims = [pages, page, heads, width];
    let pool = || op!(d, full, 0.0, DType::F32, dims.as_ptr(), 4).unwrap();
    let (mut k_pool, mut v_pool) = (pool(), pool());
    d.eval(&[k_pool, v_pool]);
    let rows = d.f32s(&vec![1.0; (heads * width) as usize], &[1, heads, width]);
    let starts = [0_u32, 1];
    let mut last = Tensor::NONE;
    for step in 0..3_i32 {
        let position = d.i32s(&[step], &[1]);
        let args = PagedAttentionArgs {
            q: rows,
            k: rows,
            v: rows,
            k_pool,
            v_pool,
            slots: d.i32s(&[16 + step], &[1]),
            row_sequences: d.i32s(&[0], &[1]),
            positions: position,
            page_table: d.i32s(&[1, 0], &[1, 2]),
            row_starts: starts.as_ptr(),
            n_sequences: 1,
            ..PagedAttentionArgs::default()
        };
        reset_peak(d);
        let before = d.memory().active_bytes;
        let mut out = [Tensor::NONE; 3];
        run!(d, paged_attention, &raw const args, &raw mut out).unwrap();
        // The old pools go before evaluation, so nothing but the step holds them.
        d.release(k_pool);
        d.release(v_pool);
        [last, k_pool, v_pool] = {
            if !last.is_none() {
                d.release(last);
            }
            out
        };
        d.eval(&[last, k_pool, v_pool]);
        let extra = d.memory().peak_bytes.saturating_sub(before);
        assert!(extra < 2 * MEBIBYTE, "step {step} allocated {extra} bytes");
        for t in [
            args.slots,
            args.row_sequences,
            args.positions,
            args.page_table,
        ] {
            d.release(t);
        }
    }
    assert!(d.read(last).iter().all(|&value| (value - 1.0).abs() < 1e-5));
    for t in [rows, last, k_pool, v_pool] {
        d.release(t);
    }
    run!(d, clear_cache).unwrap();
}

fn limits_are_kept(d: &Device) {
    let used = d.memory().active_bytes;
    let limit = used + 10 * MEBIBYTE;
    d.set_limits(MemoryLimits {
        limit_bytes: limit,
        cache_limit_bytes: 0,
        ..MemoryLimits::default()
    })
    .unwrap();
    assert_eq!(d.memory().limit_bytes, limit);
    let dims = [(20 * MEBIBYTE / 4) as i64];
    let single = op!(d, full, 0.0, DType::F32, dims.as_ptr(), 1).unwrap_err();
    assert_eq!(single.code, status::RESOURCE_EXHAUSTED, "{single}");
    let some = zeros(d, 8 * MEBIBYTE);
    let data = vec![0.0_f32; (4 * MEBIBYTE / 4) as usize];
    let dims = [data.len() as i64];
    let args = FromHostArgs {
        data: data.as_ptr().cast(),
        byte_len: size_of_val(data.as_slice()),
        dtype: DType::F32,
        ndim: 1,
        dims: dims.as_ptr(),
        ..FromHostArgs::default()
    };
    let copy = op!(d, from_host, &raw const args).unwrap_err();
    assert_eq!(copy.code, status::RESOURCE_EXHAUSTED);
    assert!(copy.message.contains("4194304 more are needed"), "{copy}");
    let more = zeros(d, 4 * MEBIBYTE);
    let over = run!(d, eval, &raw const more, 1).unwrap_err();
    assert!(over.message.contains("raise the limit"), "{over}");
    d.release(more);
    d.release(some);
    assert_eq!(
        d.memory().cache_bytes,
        0,
        "a cache limit of 0 keeps nothing"
    );
    let wired = MemoryLimits {
        wired_limit_bytes: 1,
        limit_bytes: 1,
        ..MemoryLimits::default()
    };
    assert_eq!(d.set_limits(wired).unwrap_err().code, status::UNIMPLEMENTED);
    assert_eq!(
        d.memory().limit_bytes,
        limit,
        "a refused call changes nothing"
    );
    d.set_limits(MemoryLimits {
        limit_bytes: 0,
        ..MemoryLimits::default()
    })
    .unwrap();
    assert_eq!(d.memory().limit_bytes, 0);
}
