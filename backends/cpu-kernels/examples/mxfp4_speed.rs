//! Prints the speed of products with weights in mxfp4 beside affine ones of 4 bits, from memory:
//! `cargo run --release -p mlxcel-cpu-kernels --example mxfp4_speed [threads]`.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a tool for developers"
)]

use std::time::Instant;

use mlxcel_cpu_kernels::{Isa, Pool, QuantizedMatrix, Scales, qmatmul};
use qmatmul::{Precision, Prepared, Target};

/// Weights that no cache holds.
const BYTES: usize = 200_000_000;

/// Seconds of the best of seven products with each of some matrices.
fn seconds<'a>(
    (isa, precision): (Isa, Precision),
    pool: &mut Pool,
    m: usize,
    matrices: usize,
    at: impl Fn(usize) -> QuantizedMatrix<'a>,
) -> f64 {
    let (rows, columns) = (at(0).rows(), at(0).columns());
    let (x, mut y) = (vec![0.5f32; m * columns], vec![0.0f32; m * rows]);
    let mut prepared = Prepared::default();
    let mut best = f64::INFINITY;
    for _ in 0..7 {
        let start = Instant::now();
        for i in 0..matrices {
            let mut targets = [Target {
                w: at(i),
                y: &mut y,
            }];
            assert!(qmatmul::matmul(
                isa,
                precision,
                pool,
                &x,
                &mut targets,
                &mut prepared
            ));
        }
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

fn main() {
    let threads = std::env::args()
        .nth(1)
        .and_then(|threads| threads.parse().ok())
        .unwrap_or(2);
    let mut pool = Pool::new(threads).unwrap();
    for (rows, columns) in [(4096, 4096), (768, 2048), (2048, 768)] {
        let elements = rows * columns;
        let matrices = BYTES / (elements / 2);
        let words = vec![0x1234_5678u32; elements / 8 * matrices];
        let factors = vec![0x1c00u16; elements / 32 * matrices];
        let exponents = vec![120u8; elements / 32 * matrices];
        let part = |i: usize, of: usize| i * elements / of..(i + 1) * elements / of;
        let affine = |group: usize| {
            let (words, factors) = (&words, &factors);
            move |i: usize| {
                let s = Scales::F16(&factors[part(i, group)]);
                QuantizedMatrix::new(&words[part(i, 8)], s, s, rows, columns, 4, group).unwrap()
            }
        };
        let floats = |i: usize| {
            let (words, exponents) = (&words[part(i, 8)], &exponents[part(i, 32)]);
            QuantizedMatrix::mxfp4(words, exponents, rows, columns).unwrap()
        };
        for precision in [Precision::Exact, Precision::Int16, Precision::Int8] {
            for m in [1, 4, 8, 16] {
                let how = (Isa::best(), precision);
                print!("{rows:>5} x {columns:<5} {m:>2} rows, {precision:?}:");
                let print = |name: &str, bits: f64, seconds: f64| {
                    let bytes = elements as f64 * bits / 8.0 * matrices as f64;
                    let us = seconds / matrices as f64 * 1e6;
                    print!("  {name} {us:>7.1} us {:>5.1} GB/s", bytes / seconds / 1e9);
                };
                for group in [32, 64] {
                    let t = seconds(how, &mut pool, m, matrices, affine(group));
                    let bits = 4.0 + 32.0 / group as f64;
                    print(&format!("affine {group}"), bits, t);
                }
                print("mxfp4", 4.25, seconds(how, &mut pool, m, matrices, floats));
                println!();
            }
        }
    }
}
