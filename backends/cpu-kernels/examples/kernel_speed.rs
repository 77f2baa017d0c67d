//! Prints the speed of the products on this machine, for tuning:
//! `cargo run --release -p mlxcel-cpu-kernels --example kernel_speed [threads] [instruction set] [cached]`.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a tool for developers"
)]

use std::sync::Mutex;
use std::time::Instant;

use mlxcel_cpu_kernels::{Isa, Pool, QuantizedMatrix, Scales, gemm, gemm_integers, qmatmul};
use qmatmul::Precision;

fn best_of(times: usize, mut body: impl FnMut()) -> f64 {
    (0..times)
        .map(|_| {
            let start = Instant::now();
            body();
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min)
}

fn main() {
    let threads = std::env::args()
        .nth(1)
        .and_then(|t| t.parse().ok())
        .unwrap_or(2);
    let mut pool = Pool::new(threads).unwrap();
    let scratch: Vec<Mutex<gemm::Scratch>> = (0..threads).map(|_| Mutex::default()).collect();
    let rounded: Vec<Mutex<gemm_integers::Scratch>> =
        (0..threads).map(|_| Mutex::default()).collect();
    let mut prepared = qmatmul::Prepared::default();
    let only = std::env::args().nth(2).unwrap_or_default();
    for isa in Isa::ALL
        .into_iter()
        .filter(|isa| isa.is_available() && isa.name().ends_with(&only))
    {
        println!("{} with {threads} threads", isa.name());
        for (rows, columns, bits) in [
            (576, 576, 4),
            (1536, 576, 4),
            (576, 1536, 4),
            (49152, 576, 8),
            (4864, 896, 5),
            (896, 4864, 6),
            (4096, 4096, 4),
        ] {
            // Several copies, so that the weights come from memory and not from a cache.
            let bytes = rows * columns * bits / 8 + rows * columns / 32 * 4;
            let copies = if std::env::args().nth(3).is_some() {
                1
            } else {
                (200_000_000 / bytes).clamp(1, 64)
            };
            let words = vec![0x1234_5678u32; rows * columns * bits / 32 * copies];
            let factors = vec![0x1c00u16; rows * columns / 32 * copies];
            let at = |i: usize| {
                let (w, f) = (rows * columns * bits / 32, rows * columns / 32);
                let s = Scales::F16(&factors[i * f..(i + 1) * f]);
                QuantizedMatrix::new(&words[i * w..(i + 1) * w], s, s, rows, columns, bits, 32)
                    .unwrap()
            };
            for (precision, m) in [Precision::Exact, Precision::Int16, Precision::Int8]
                .into_iter()
                .flat_map(|p| [1usize, 4, 8, 16].map(|m| (p, m)))
            {
                let x = vec![0.5f32; m * columns];
                let mut y = vec![0.0f32; m * rows];
                let seconds = best_of(5, || {
                    for i in 0..copies {
                        let mut targets = [qmatmul::Target {
                            w: at(i),
                            y: &mut y,
                        }];
                        assert!(qmatmul::matmul(
                            isa,
                            precision,
                            &mut pool,
                            &x,
                            &mut targets,
                            &mut prepared
                        ));
                    }
                }) / copies as f64;
                println!(
                    "  {rows:>6} x {columns:<5} {bits} bits, {m:>3} rows, {precision:?}: {:>8.1} us, {:>6.2} GB/s",
                    seconds * 1e6,
                    bytes as f64 / seconds / 1e9
                );
            }
            let m = 256;
            let x = vec![0.5f32; m * columns];
            let mut y = vec![0.0f32; m * rows];
            let weight = gemm::Weight::Quantized(at(0));
            let seconds = best_of(3, || {
                assert!(gemm::matmul(
                    isa,
                    &mut pool,
                    &gemm::Product {
                        x: &x,
                        weight,
                        rows,
                        columns
                    },
                    &mut y,
                    &scratch
                ))
            });
            println!(
                "  {rows:>6} x {columns:<5} {bits} bits, {m:>3} rows: {:>8.1} us, {:>6.1} GFLOP/s",
                seconds * 1e6,
                2.0 * (m * rows * columns) as f64 / seconds / 1e9
            );
            for (precision, m) in [Precision::Int16, Precision::Int8]
                .into_iter()
                .flat_map(|p| [8usize, 16, 256].map(|m| (p, m)))
            {
                let x = vec![0.5f32; m * columns];
                let mut y = vec![0.0f32; m * rows];
                let seconds = best_of(3, || {
                    assert!(gemm_integers::matmul(
                        isa,
                        precision,
                        &mut pool,
                        &x,
                        &at(0),
                        &mut y,
                        &mut prepared,
                        &rounded
                    ))
                });
                println!(
                    "  {rows:>6} x {columns:<5} {bits} bits, {m:>3} rows in panels, {precision:?}: {:>8.1} us, {:>6.1} GFLOP/s",
                    seconds * 1e6,
                    2.0 * (m * rows * columns) as f64 / seconds / 1e9
                );
            }
        }
    }
}
