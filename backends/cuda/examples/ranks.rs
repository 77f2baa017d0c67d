//! Checks and times sums over ranks on the devices of this machine, a process for each:
//! `cargo run --release -p mlxcel-backend-cuda --example ranks [RANKS]`. `MLXCEL_CUDA_RANKS=mlx` is how MLX does it.

#![allow(
    clippy::exit,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "a tool for developers"
)]

use std::net::TcpListener;
use std::process::{Child, Command};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use mlxcel_abi::backend::{BackendTable, OpenArgs};
use mlxcel_abi::collectives::{COLLECTIVES, Collectives, JoinArgs};
use mlxcel_abi::host::HostApi;
use mlxcel_abi::kinds::binary;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::ops_args::FromHostArgs;
use mlxcel_abi::{AbiError, DType, ErrorObj, OwnedBytes, Result, Status, Str, Table, Tensor};
use mlxcel_backend_mlx::serde_json::{self, Value};

const RANK: &str = "MLXCEL_EXAMPLE_RANK";
const ADDRESSES: &str = "MLXCEL_EXAMPLE_ADDRESSES";
/// Elements of the tensors that are summed: around every border there is, up to 64 MB, and such as are MLX's.
const SIZES: [usize; 16] = [
    8, 1024, 4096, 8192, 8200, 65_536, 131_072, 131_080, 262_144, 1_000_000, 2_097_152, 2_097_160,
    8_388_608, 33_554_432, 4097, 7,
];
/// Elements of a row of an 8B model, and rows of what is timed.
const WIDTH: usize = 4096;
const ROWS: [usize; 8] = [1, 4, 8, 32, 64, 128, 512, 4096];

/// Calls a slot of a table.
macro_rules! call {
    ($table:expr, $slot:ident $(, $arg:expr)* $(,)?) => {{
        let mut err = null_mut();
        // SAFETY: the backend is open, and every pointer lives for the call.
        unsafe {
            let code = ($table.$slot)($table.ctx $(, $arg)*, &raw mut err);
            AbiError::check(code, err)
        }
    }};
}

/// Prints what the backend says of how it sums.
unsafe extern "C" fn log(
    _: *mut core::ffi::c_void,
    _: u32,
    _: Str,
    message: Str,
    _: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: valid for the call.
    let message = unsafe { message.as_str() }.unwrap_or("?");
    if message.contains("over ranks") || message.contains("step programs") {
        println!("{message}");
    }
    0
}

struct Rank {
    ops: BackendOps,
    table: *const BackendOps,
    group: Collectives,
    rank: usize,
    size: usize,
}

impl Rank {
    fn join(rank: usize, addresses: &str) -> Self {
        // SAFETY: tables of this process, which live as long as it.
        let (entry, group) = unsafe {
            let address = mlxcel_backend_cuda::extension(COLLECTIVES);
            assert_ne!(address, 0, "this MLX has no NCCL");
            (
                BackendTable::import(mlxcel_backend_cuda::backend_table()),
                Collectives::import(address as *const Collectives),
            )
        };
        let host = Box::leak(Box::new(HostApi {
            log,
            ..HostApi::stubs()
        }));
        let open = OpenArgs {
            host,
            ..OpenArgs::default()
        };
        let mut table = std::ptr::null();
        call!(entry, open, &raw const open, &raw mut table).expect("opens");
        // SAFETY: as the slot gave it.
        let ops = unsafe { BackendOps::import(table) };
        let size = serde_json::from_str::<Vec<String>>(addresses)
            .expect("a list")
            .len();
        let args = JoinArgs {
            rank: rank as u32,
            size: size as u32,
            addresses: Str::new(addresses),
            ..JoinArgs::default()
        };
        call!(group, join, ops.ctx, &raw const args).expect("joins");
        Self {
            ops,
            table,
            group,
            rank,
            size,
        }
    }

    fn halves(&self, values: &[u16]) -> Tensor {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
        let dims = [values.len() as i64];
        let args = FromHostArgs {
            data: bytes.as_ptr(),
            byte_len: bytes.len(),
            dtype: DType::BF16,
            ndim: 1,
            dims: dims.as_ptr(),
            ..FromHostArgs::default()
        };
        let mut out = Tensor::NONE;
        call!(self.ops, from_host, &raw const args, &raw mut out).expect("uploads");
        out
    }

    fn read(&self, t: Tensor, len: usize) -> Result<Vec<u16>> {
        let mut bytes = vec![0_u8; 2 * len];
        call!(self.ops, read, t, bytes.as_mut_ptr(), bytes.len())?;
        let pairs = bytes.chunks_exact(2);
        Ok(pairs.map(|b| u16::from_ne_bytes([b[0], b[1]])).collect())
    }

    fn all_sum(&self, t: Tensor) -> Result<Tensor> {
        let mut out = Tensor::NONE;
        call!(self.group, all_sum, self.ops.ctx, t, &raw mut out).map(|()| out)
    }

    fn add(&self, a: Tensor, b: Tensor) -> Tensor {
        let mut out = Tensor::NONE;
        call!(self.ops, binary, binary::ADD, a, b, &raw mut out).expect("adds");
        out
    }

    fn release(&self, t: Tensor) {
        call!(self.ops, release, t).expect("releases");
    }

    fn eval(&self, t: Tensor) {
        call!(self.ops, eval, &raw const t, 1).expect("evaluates");
    }

    /// Compares sums of so many elements, and what they are added to, with sums of this processor.
    fn check(&self, len: usize, seed: u32) {
        let parts: Vec<Vec<u16>> = (0..self.size)
            .map(|rank| noise(seed.wrapping_mul(31).wrapping_add(rank as u32), len))
            .collect();
        let residual = noise(seed ^ 0x5555, len);
        let x = self.halves(&parts[self.rank]);
        let base = self.halves(&residual);
        let sum = self.all_sum(x).expect("sums");
        let total = self.add(base, sum);
        let (found, found_total) = (
            self.read(sum, len).expect("reads"),
            self.read(total, len).expect("reads"),
        );
        for i in 0..len {
            let all: f32 = parts.iter().map(|part| wide(part[i])).sum();
            let expected = narrow(all);
            let expected_total = narrow(wide(residual[i]) + wide(expected));
            // Other sizes are MLX's, which may round in between.
            let is_exact = len.is_multiple_of(8) || self.size == 2;
            let close = |a: u16, b: u16| {
                a == b || !is_exact && (wide(a) - wide(b)).abs() <= 0.02 * wide(b).abs().max(1.0)
            };
            assert!(
                close(found[i], expected) && close(found_total[i], expected_total),
                "{len} elements, rank {}, element {i}: {} and {}, expected {} and {}",
                self.rank,
                wide(found[i]),
                wide(found_total[i]),
                wide(expected),
                wide(expected_total)
            );
        }
        for t in [x, base, sum, total] {
            self.release(t);
        }
    }

    /// Long chains, so that launches come again and become programs; each sum depends on the one before.
    fn check_chain(&self, lens: &[usize], rounds: usize) {
        let mut totals: Vec<(Tensor, Tensor)> = Vec::new();
        for &len in lens {
            let ones = vec![narrow(1.0); len];
            totals.push((self.halves(&ones), self.halves(&vec![0; len])));
        }
        for round in 0..rounds {
            for (ones, total) in &mut totals {
                let sum = self.all_sum(*ones).expect("sums");
                let next = self.add(*total, sum);
                self.release(sum);
                self.release(*total);
                *total = next;
            }
            for (_, total) in &totals {
                self.eval(*total);
            }
            // Ranks are not at the same place at the same time.
            if round % 7 == self.rank {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        for (&len, (_, total)) in lens.iter().zip(&totals) {
            let mut expected = 0.0;
            for _ in 0..rounds {
                expected = wide(narrow(expected + self.size as f32));
            }
            let found = self.read(*total, len).expect("reads");
            let wrong = found.iter().position(|v| wide(*v) != expected);
            assert_eq!(wrong, None, "{len} elements after {rounds} rounds");
        }
    }

    fn time(&self) {
        const TIMES: usize = 400;
        for rows in ROWS {
            let len = rows * WIDTH;
            let x = self.halves(&vec![narrow(1.0); len]);
            let base = self.halves(&vec![0; len]);
            let mut best = f64::INFINITY;
            for _ in 0..5 {
                let times = if rows > 512 { TIMES / 10 } else { TIMES };
                // All begin together.
                let first = self.all_sum(x).expect("sums");
                self.eval(first);
                self.release(first);
                let start = Instant::now();
                let mut total = self.add(base, base);
                for _ in 0..times {
                    let sum = self.all_sum(x).expect("sums");
                    let next = self.add(total, sum);
                    self.release(sum);
                    self.release(total);
                    total = next;
                }
                self.eval(total);
                self.release(total);
                best = best.min(start.elapsed().as_secs_f64() * 1e6 / times as f64);
            }
            if self.rank == 0 {
                println!(
                    "{rows} rows of {WIDTH}: {best:.2} us a sum, {:.1} GB/s",
                    2.0 * len as f64 / best * 1e-3
                );
            }
            self.release(x);
            self.release(base);
        }
    }
}

fn wide(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

fn narrow(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16
}

fn noise(seed: u32, count: usize) -> Vec<u16> {
    let mut state = seed.wrapping_mul(2_654_435_769).wrapping_add(12_345);
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        narrow((state >> 8) as f32 / (1 << 20) as f32 - 8.0)
    };
    std::iter::repeat_with(next).take(count).collect()
}

fn one_rank(rank: usize, addresses: &str, dies: bool) {
    let this = Rank::join(rank, addresses);
    if dies {
        let x = this.halves(&vec![narrow(1.0); WIDTH]);
        let sum = this.all_sum(x).expect("sums");
        this.eval(sum);
        if rank == this.size - 1 {
            std::process::exit(0);
        }
        let start = Instant::now();
        let error = loop {
            match this.all_sum(x).and_then(|sum| this.read(sum, WIDTH)) {
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        println!(
            "rank {rank}: the end of the last one was told after {:.0} ms: {}",
            start.elapsed().as_secs_f64() * 1e3,
            error.message
        );
        std::process::exit(0);
    }
    for (i, len) in SIZES.into_iter().enumerate() {
        this.check(len, i as u32);
        if rank == 0 {
            println!("{len} elements: as expected");
        }
    }
    this.check_chain(&[WIDTH, 32 * WIDTH, 33 * WIDTH, 512 * WIDTH, 8], 300);
    if rank == 0 {
        println!("chains: as expected");
    }
    this.time();
    // SAFETY: as when it was opened.
    let entry = unsafe { BackendTable::import(mlxcel_backend_cuda::backend_table()) };
    call!(entry, close, this.table).expect("closes");
}

/// What makes a process see each device alone, from the probe.
fn alone() -> Vec<Vec<(String, String)>> {
    // SAFETY: the table lives as long as the process.
    let entry = unsafe { BackendTable::import(mlxcel_backend_cuda::backend_table()) };
    let mut out = OwnedBytes::EMPTY;
    call!(entry, probe, &raw mut out).expect("probes");
    // SAFETY: what the slot wrote, taken once.
    let text = unsafe { out.take() };
    let probe: Value = serde_json::from_slice(&text).expect("JSON");
    println!("{}", probe["reason"]);
    let each = probe["details"]["alone"].as_array().cloned();
    let variables = |one: &Value| {
        let all = one.as_object().into_iter().flatten();
        all.map(|(name, value)| (name.clone(), value.as_str().unwrap_or_default().to_owned()))
            .collect()
    };
    each.unwrap_or_default().iter().map(variables).collect()
}

fn run(size: usize, devices: &[Vec<(String, String)>], mode: &str) -> bool {
    let listeners: Vec<TcpListener> = (0..size)
        .map(|_| TcpListener::bind(("127.0.0.1", 0)).expect("binds"))
        .collect();
    let at = |listener: &TcpListener| listener.local_addr().expect("is bound").to_string();
    let addresses: Vec<String> = listeners.iter().map(at).collect();
    drop(listeners);
    let addresses = serde_json::to_string(&addresses).expect("is JSON");
    let children: Vec<Child> = (0..size)
        .map(|rank| {
            Command::new(std::env::current_exe().expect("has a file"))
                .arg(mode)
                .env(RANK, rank.to_string())
                .env(ADDRESSES, &addresses)
                .envs(devices[rank].iter().cloned())
                .spawn()
                .expect("starts")
        })
        .collect();
    let mut succeeded = true;
    for (rank, mut child) in children.into_iter().enumerate() {
        let status = child.wait().expect("ends");
        if !status.success() {
            println!("rank {rank}: {status}");
            succeeded = false;
        }
    }
    succeeded
}

fn main() {
    let first = std::env::args().nth(1);
    if let (Ok(rank), Ok(addresses)) = (std::env::var(RANK), std::env::var(ADDRESSES)) {
        let rank = rank.parse().expect("a number");
        return one_rank(rank, &addresses, first.as_deref() == Some("dies"));
    }
    let devices = alone();
    let size = first.map_or(Ok(devices.len()), |text| text.parse());
    let size = size.ok().filter(|size| (2..=devices.len()).contains(size));
    let Some(size) = size else {
        eprintln!(
            "expected 2 ranks or more, and a device for each: there are {} devices, which `mlxcel doctor` tells more of",
            devices.len()
        );
        std::process::exit(2);
    };
    let checked = run(size, &devices, "checks");
    // MLX waits for ever for a rank that is gone.
    let is_mlx = std::env::var("MLXCEL_CUDA_RANKS").as_deref() == Ok("mlx");
    let told = is_mlx || run(size, &devices, "dies");
    if !(checked && told) {
        std::process::exit(1);
    }
}
