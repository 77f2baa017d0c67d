//! Attention over caches of half types: what the caches can hold exactly gives what f32
//! caches give, whichever way it is computed.
#![allow(clippy::unwrap_used, reason = "a test fails that way")]

#[macro_use]
mod harness;

use harness::{Device, close_to, noise};
use mlxcel_abi::cache_args::SparseIndexArgs;
use mlxcel_abi::ops_args::PagedAttentionArgs;
use mlxcel_abi::{DType, Tensor};

const HALF: [DType; 2] = [DType::F16, DType::BF16];
const PAGES: i64 = 5;
const PAGE: i64 = 4;
const HEADS: i64 = 4;
const KV_HEADS: i64 = 2;
const WIDTH: i64 = 8;
const V_WIDTH: i64 = 6;
const ROWS: i64 = 4;

/// A chunk of three rows behind five, and one row behind two.
const SLOTS: [i32; 4] = [5, 6, 7, 18];
const POSITIONS: [i32; 4] = [5, 6, 7, 2];
const ROW_SEQUENCES: [i32; 4] = [0, 0, 0, 1];
const TABLE: [i32; 4] = [3, 1, 4, 0];
const STARTS: [u32; 3] = [0, 3, 4];

/// Ways to compute, those of the kernels and those that they leave to MLX.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    Packed,
    /// Without the boundaries of sequences.
    Unpacked,
    ReadOnly,
    Latent,
    /// Latent, without rows of this step.
    LatentReadOnly,
    Chosen,
}

/// Ways that one kernel computes whatever the cache's type, with what it stands for.
const WIDENED: [Way; 3] = [Way::Latent, Way::LatentReadOnly, Way::Chosen];

/// Values that both half types hold exactly.
fn exact(seed: u32, shape: &[i64]) -> Vec<f32> {
    let count = shape.iter().product::<i64>() as usize;
    let eighths = |x: &f32| (x * 8.0).round() / 8.0;
    noise(seed, count).iter().map(eighths).collect()
}

/// What attention gives: the result, and the caches as f32.
fn attend(d: &Device, [activations, kv]: [DType; 2], way: Way) -> [Vec<f32>; 3] {
    let is_latent = matches!(way, Way::Latent | Way::LatentReadOnly);
    let reads = matches!(way, Way::ReadOnly | Way::LatentReadOnly);
    let kv_heads = if is_latent { 1 } else { KV_HEADS };
    let given = |seed, shape: &[i64]| d.of(activations, &exact(seed, shape), shape);
    let pool = |seed, shape: &[i64]| d.of(kv, &exact(seed, shape), shape);
    let unless = |is_left_out: bool, make: &dyn Fn() -> Tensor| {
        if is_left_out { Tensor::NONE } else { make() }
    };
    let args = PagedAttentionArgs {
        q: given(1, &[ROWS, HEADS, WIDTH]),
        k: unless(reads, &|| given(2, &[ROWS, kv_heads, WIDTH])),
        v: unless(reads || is_latent, &|| given(3, &[ROWS, kv_heads, V_WIDTH])),
        k_pool: pool(4, &[PAGES, PAGE, kv_heads, WIDTH]),
        v_pool: unless(is_latent, &|| pool(5, &[PAGES, PAGE, kv_heads, V_WIDTH])),
        slots: d.i32s(&SLOTS, &[ROWS]),
        row_sequences: d.i32s(&ROW_SEQUENCES, &[ROWS]),
        positions: d.i32s(&POSITIONS, &[ROWS]),
        page_table: d.i32s(&TABLE, &[2, 2]),
        row_starts: match way {
            Way::Unpacked => std::ptr::null(),
            _ => STARTS.as_ptr(),
        },
        n_sequences: 2,
        scale: 0.35,
        read_only: u32::from(reads),
        latent_dim: if is_latent { V_WIDTH as u32 } else { 0 },
        selection: unless(way != Way::Chosen, &|| {
            d.i32s(&[0, 3, 1, 6, 7, 2, 2, -1], &[ROWS, 2])
        }),
        ..PagedAttentionArgs::default()
    };
    let mut out = [Tensor::NONE; 3];
    run!(d, paged_attention, &raw const args, &raw mut out).unwrap();
    assert_eq!(
        (d.dtype(out[0]), d.dtype(out[1])),
        (activations, kv),
        "{way:?}"
    );
    let values = if is_latent {
        Vec::new()
    } else {
        d.read(out[2])
    };
    [d.read(out[0]), d.read(out[1]), values]
}

#[test]
fn half_caches_give_what_f32_caches_give() {
    let d = Device::open();
    for way in [
        Way::Packed,
        Way::Unpacked,
        Way::ReadOnly,
        Way::Latent,
        Way::LatentReadOnly,
        Way::Chosen,
    ] {
        let [result, keys, values] = attend(&d, [DType::F32; 2], way);
        assert!(result.iter().any(|x| x.abs() > 0.01), "{way:?}");
        for kv in HALF {
            let [half_result, half_keys, half_values] = attend(&d, [DType::F32, kv], way);
            close_to(&half_result, &result, 1e-5);
            if WIDENED.contains(&way) {
                assert_eq!(half_result, result, "{way:?} {kv:?}");
            }
            assert_eq!(
                (&half_keys, &half_values),
                (&keys, &values),
                "{way:?} {kv:?}"
            );
        }
    }
}

#[test]
fn half_activations_give_what_f32_gives_rounded_once() {
    let d = Device::open();
    for way in WIDENED {
        let [result, keys, values] = attend(&d, [DType::F32; 2], way);
        for (activations, kv) in HALF.iter().flat_map(|a| {
            [DType::F32, DType::F16, DType::BF16]
                .iter()
                .map(move |kv| (*a, *kv))
        }) {
            let rounded = d.read(d.of(activations, &result, &[result.len() as i64]));
            let found = attend(&d, [activations, kv], way);
            assert_eq!(
                found,
                [rounded, keys.clone(), values.clone()],
                "{way:?} {activations:?} {kv:?}"
            );
        }
    }
}

/// Rows of 32 elements behind their scale in eight and in four bits, and rows of no type.
#[test]
fn latent_keys_may_be_quantised() {
    let d = Device::open();
    let starts = [0_u32, 3];
    let attend = |dtype: DType, stored: i64| {
        let rows = noise(6, 3 * 32);
        let args = PagedAttentionArgs {
            q: d.f32s(&noise(7, 3 * 2 * 32), &[3, 2, 32]),
            k: d.f32s(&rows, &[3, 1, 32]),
            k_pool: d.of(dtype, &vec![0.0; 8 * stored as usize], &[2, 4, 1, stored]),
            slots: d.i32s(&[4, 5, 6], &[3]),
            row_sequences: d.i32s(&[0; 3], &[3]),
            positions: d.i32s(&[0, 1, 2], &[3]),
            page_table: d.i32s(&[1], &[1, 1]),
            row_starts: starts.as_ptr(),
            n_sequences: 1,
            scale: 0.5,
            latent_dim: 20,
            ..PagedAttentionArgs::default()
        };
        let mut out = [Tensor::NONE; 3];
        run!(d, paged_attention, &raw const args, &raw mut out).map(|()| d.read(out[0]))
    };
    let wanted = attend(DType::F32, 32).unwrap();
    close_to(&attend(DType::U8, 34).unwrap(), &wanted, 0.02);
    close_to(&attend(DType::U8, 18).unwrap(), &wanted, 0.2);
    assert!(attend(DType::U8, 32).is_err());
}

#[test]
fn what_is_appended_is_rounded_to_the_type_of_the_cache() {
    let d = Device::open();
    for (kv, step) in [(DType::F16, 1024.0), (DType::BF16, 128.0)] {
        let rows = [1.0 + 0.7 / step, 1.0 + 1.3 / step, -1.0 - 0.2 / step, 3.0];
        let starts = [0_u32, 1];
        let args = PagedAttentionArgs {
            q: d.f32s(&[1.0; 4], &[1, 1, 4]),
            k: d.f32s(&rows, &[1, 1, 4]),
            v: d.f32s(&rows, &[1, 1, 4]),
            k_pool: d.of(kv, &[0.0; 16], &[2, 2, 1, 4]),
            v_pool: d.of(kv, &[0.0; 16], &[2, 2, 1, 4]),
            slots: d.i32s(&[2], &[1]),
            row_sequences: d.i32s(&[0], &[1]),
            positions: d.i32s(&[0], &[1]),
            page_table: d.i32s(&[1], &[1, 1]),
            row_starts: starts.as_ptr(),
            n_sequences: 1,
            scale: 1.0,
            ..PagedAttentionArgs::default()
        };
        let mut out = [Tensor::NONE; 3];
        run!(d, paged_attention, &raw const args, &raw mut out).unwrap();
        let rounded = [1.0 + 1.0 / step, 1.0 + 1.0 / step, -1.0, 3.0];
        // One key has the whole weight.
        close_to(&d.read(out[0]), &rounded, 1e-6);
        assert_eq!(d.read(out[1])[8..12], rounded);
    }
}

#[test]
fn keys_are_chosen_alike_from_half_caches() {
    let d = Device::open();
    let choose = |activations, kv| {
        let given = |seed, shape: &[i64]| d.of(activations, &exact(seed, shape), shape);
        let args = SparseIndexArgs {
            q: given(1, &[ROWS, HEADS, WIDTH]),
            k: given(2, &[ROWS, WIDTH]),
            weights: given(3, &[ROWS, HEADS]),
            pool: d.of(kv, &exact(4, &[PAGES, PAGE, WIDTH]), &[PAGES, PAGE, WIDTH]),
            slots: d.i32s(&SLOTS, &[ROWS]),
            row_sequences: d.i32s(&ROW_SEQUENCES, &[ROWS]),
            positions: d.i32s(&POSITIONS, &[ROWS]),
            page_table: d.i32s(&TABLE, &[2, 2]),
            row_starts: STARTS.as_ptr(),
            n_sequences: 2,
            top_k: 3,
            scale: 0.5,
            ..SparseIndexArgs::default()
        };
        let mut out = [Tensor::NONE; 2];
        run!(d, sparse_index, &raw const args, &raw mut out).unwrap();
        assert_eq!(d.dtype(out[1]), kv);
        let bytes = d.read_bytes(out[0]);
        let four = bytes.chunks_exact(4);
        let mut chosen: Vec<i32> = four
            .map(|four| i32::from_le_bytes(four.try_into().unwrap()))
            .collect();
        chosen.chunks_mut(3).for_each(<[i32]>::sort_unstable);
        (chosen, d.read(out[1]))
    };
    let wanted = choose(DType::F32, DType::F32);
    for kv in HALF {
        assert_eq!(choose(DType::F32, kv), wanted);
        assert_eq!(choose(kv, kv), wanted);
    }
}
