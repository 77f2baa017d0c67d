//! Prints the speed of the products on this machine, for tuning:
//! `cargo run --release -p mlxcel-cpu-kernels --example kernel_speed [threads] [instruction set] [cached|memory] [precision] [part of a form]`.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a tool for developers"
)]

use std::sync::Mutex;
use std::time::Instant;

use mlxcel_cpu_kernels::{Isa, Pool, QuantizedMatrix, Scales, gemm, gemm_integers, qmatmul};
use qmatmul::Precision;

/// `(rows, columns, bits, group)`; groups of 16 and 5 bits are centred, as Q6_K and Q5_0 are.
const FORMS: [(usize, usize, usize, usize); 8] = [
    (576, 576, 4, 32),
    (1536, 576, 4, 32),
    (576, 1536, 4, 32),
    (49152, 576, 8, 32),
    (4864, 896, 5, 32),
    (896, 4864, 6, 16),
    (896, 4864, 4, 32),
    (4096, 4096, 4, 32),
];

fn best_of(times: usize, mut body: impl FnMut()) -> f64 {
    (0..times)
        .map(|_| {
            let start = Instant::now();
            body();
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min)
}

/// What is measured with one form.
struct Bench {
    isa: Isa,
    pool: Pool,
    prepared: qmatmul::Prepared,
    scratch: Vec<Mutex<gemm::Scratch>>,
    rounded: Vec<Mutex<gemm_integers::Scratch>>,
}

fn main() {
    let argument = |n: usize| std::env::args().nth(n).unwrap_or_default();
    let threads = argument(1).parse().unwrap_or(2);
    let cached = argument(3) == "cached";
    let (only, form) = (argument(4), argument(5));
    for isa in Isa::ALL
        .into_iter()
        .filter(|isa| isa.is_available() && isa.name().ends_with(&argument(2)))
    {
        println!("{} with {threads} threads", isa.name());
        let mut bench = Bench {
            isa,
            pool: Pool::new(threads).unwrap(),
            prepared: qmatmul::Prepared::default(),
            scratch: (0..threads).map(|_| Mutex::default()).collect(),
            rounded: (0..threads).map(|_| Mutex::default()).collect(),
        };
        for (rows, columns, bits, group) in FORMS {
            let name = format!("{rows:>6} x {columns:<5} {bits} bits in {group}");
            if !name.contains(&form) {
                continue;
            }
            // Several copies, so that the weights come from memory and not from a cache.
            let factor_bytes = if group == 16 || bits == 5 { 4 } else { 8 };
            let bytes = rows * columns * bits / 8 + rows * columns / group * factor_bytes;
            let copies = if cached {
                1
            } else {
                (200_000_000 / bytes).clamp(1, 64)
            };
            let words = vec![0x1234_5678u32; rows * columns * bits / 32 * copies];
            let factors = vec![0.01f32; rows * columns / group * copies];
            let matrices: Vec<QuantizedMatrix<'_>> = (0..copies)
                .map(|i| {
                    let (w, f) = (rows * columns * bits / 32, rows * columns / group);
                    let s = Scales::F32(&factors[i * f..(i + 1) * f]);
                    let words = &words[i * w..(i + 1) * w];
                    if group == 16 || bits == 5 {
                        return QuantizedMatrix::centred(words, s, rows, columns, bits, group);
                    }
                    QuantizedMatrix::new(words, s, s, rows, columns, bits, group)
                })
                .map(Option::unwrap)
                .collect();
            for precision in [Precision::Exact, Precision::Int16, Precision::Int8] {
                if format!("{precision:?}").contains(&only) {
                    bench.few(&name, &matrices, precision, bytes);
                    bench.many(&name, &matrices, precision);
                }
            }
        }
    }
}

impl Bench {
    fn few(
        &mut self,
        name: &str,
        matrices: &[QuantizedMatrix<'_>],
        precision: Precision,
        bytes: usize,
    ) {
        for m in [1usize, 4, 8, 16] {
            let (rows, columns) = (matrices[0].rows(), matrices[0].columns());
            let x = vec![0.5f32; m * columns];
            let mut y = vec![0.0f32; m * rows];
            let seconds = best_of(5, || {
                for w in matrices {
                    let mut targets = [qmatmul::Target { w: *w, y: &mut y }];
                    assert!(qmatmul::matmul(
                        self.isa,
                        precision,
                        &mut self.pool,
                        &x,
                        &mut targets,
                        &mut self.prepared
                    ));
                }
            }) / matrices.len() as f64;
            println!(
                "  {name}, {m:>3} rows, {precision:?}: {:>8.1} us, {:>6.2} GB/s, {:>6.1} GFLOP/s",
                seconds * 1e6,
                bytes as f64 / seconds / 1e9,
                2.0 * (m * rows * columns) as f64 / seconds / 1e9
            );
        }
    }

    fn many(&mut self, name: &str, matrices: &[QuantizedMatrix<'_>], precision: Precision) {
        for m in [8usize, 16, 256, 512] {
            let (rows, columns) = (matrices[0].rows(), matrices[0].columns());
            let x = vec![0.5f32; m * columns];
            let mut y = vec![0.0f32; m * rows];
            let seconds = best_of(4, || {
                let done = match precision {
                    Precision::Exact => gemm::matmul(
                        self.isa,
                        &mut self.pool,
                        &gemm::Product {
                            x: &x,
                            weight: gemm::Weight::Quantized(matrices[0]),
                            rows,
                            columns,
                        },
                        &mut y,
                        &self.scratch,
                    ),
                    _ => gemm_integers::matmul(
                        self.isa,
                        precision,
                        &mut self.pool,
                        &x,
                        &matrices[0],
                        &mut y,
                        &mut self.prepared,
                        &self.rounded,
                    ),
                };
                assert!(done);
            });
            println!(
                "  {name}, {m:>3} rows in panels, {precision:?}: {:>8.1} us, {:>6.1} GFLOP/s",
                seconds * 1e6,
                2.0 * (m * rows * columns) as f64 / seconds / 1e9
            );
        }
    }
}
