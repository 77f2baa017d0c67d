//! The collectives over MLX's ring: this program starts itself as two and as three ranks, which compare their results
//! with sums and lists that each of them can make alone.
#![allow(clippy::expect_used, reason = "a test fails that way")]

#[macro_use]
mod harness;

use std::net::TcpListener;
use std::process::{Child, Command};
use std::ptr::null_mut;

use harness::Device;
use mlxcel_abi::collectives::{COLLECTIVES, Collectives, JoinArgs};
use mlxcel_abi::{AbiError, DType, Result, Str, Table, Tensor, status};
use mlxcel_backend_mlx::collectives::{Transport, query};
use mlxcel_backend_mlx::serde_json;

const RANK: &str = "MLXCEL_TEST_RANK";
const ADDRESSES: &str = "MLXCEL_TEST_ADDRESSES";

/// Calls a slot of the extension for a device.
macro_rules! call {
    ($table:expr, $device:expr, $slot:ident $(, $arg:expr)* $(,)?) => {{
        let mut err = null_mut();
        // SAFETY: the device is open, and every pointer of a test lives for the call.
        unsafe {
            let code = ($table.$slot)($table.ctx, $device.ops.ctx $(, $arg)*, &raw mut err);
            AbiError::check(code, err)
        }
    }};
}

fn table() -> Collectives {
    let address = query(COLLECTIVES, Transport::Ring);
    assert_ne!(address, 0, "this MLX has no ring");
    // SAFETY: the plugin's table lives as long as the process.
    unsafe { Collectives::import(address as *const Collectives) }
}

fn join(device: &Device, rank: u32, size: u32, addresses: &str) -> Result<()> {
    let args = JoinArgs {
        rank,
        size,
        addresses: Str::new(addresses),
        ..JoinArgs::default()
    };
    call!(table(), device, join, &raw const args)
}

fn all_sum(device: &Device, t: Tensor) -> Result<Tensor> {
    let mut out = Tensor::NONE;
    call!(table(), device, all_sum, t, &raw mut out).map(|()| out)
}

fn all_gather(device: &Device, t: Tensor) -> Result<Tensor> {
    let mut out = Tensor::NONE;
    call!(table(), device, all_gather, t, &raw mut out).map(|()| out)
}

fn start(rank: usize, addresses: &str) -> Child {
    Command::new(std::env::current_exe().expect("has a file"))
        .args(["one_rank", "--exact", "--nocapture"])
        .env(RANK, rank.to_string())
        .env(ADDRESSES, addresses)
        .spawn()
        .expect("starts")
}

fn run(size: usize) {
    let listeners: Vec<TcpListener> = (0..size)
        .map(|_| TcpListener::bind(("127.0.0.1", 0)).expect("binds"))
        .collect();
    let at = |listener: &TcpListener| listener.local_addr().expect("is bound").to_string();
    let addresses: Vec<String> = listeners.iter().map(at).collect();
    drop(listeners);
    let addresses = serde_json::to_string(&addresses).expect("is JSON");
    let children: Vec<Child> = (0..size).map(|rank| start(rank, &addresses)).collect();
    for (rank, mut child) in children.into_iter().enumerate() {
        assert!(child.wait().expect("ends").success(), "rank {rank} failed");
    }
}

#[test]
fn two_ranks_sum_and_gather() {
    run(2);
}

#[test]
fn three_ranks_sum_and_gather() {
    run(3);
}

/// What a child of the tests above does; nothing when it is run as one of them.
#[test]
fn one_rank() {
    let (Ok(rank), Ok(addresses)) = (std::env::var(RANK), std::env::var(ADDRESSES)) else {
        return;
    };
    let rank: u32 = rank.parse().expect("is a number");
    let size = serde_json::from_str::<Vec<String>>(&addresses)
        .expect("is a list")
        .len() as u32;
    let d = Device::open();
    join(&d, rank, size, &addresses).expect("joins");
    join(&d, rank, size, &addresses).expect("joins the same again");
    let other = join(&d, 0, size + 1, &addresses).unwrap_err();
    assert_eq!(other.code, status::INVALID_ARGUMENT);
    let elsewhere = addresses.replace("127.0.0.1", "127.0.0.2");
    let other = join(&d, rank, size, &elsewhere).unwrap_err();
    assert_eq!(other.code, status::FAILED_PRECONDITION);

    let table = table();
    let (mut found_rank, mut found_size) = (99, 99);
    call!(table, d, rank, &raw mut found_rank).expect("has a rank");
    call!(table, d, size, &raw mut found_size).expect("has a size");
    assert_eq!((found_rank, found_size), (rank, size));

    // Sizes around the number of ranks, and one of many packets.
    for n in [1_usize, 2, 3, 4, 5, 1000, 300_000] {
        let element = |rank: u32, i: usize| (rank + 1) as f32 * (i % 97) as f32;
        let own: Vec<f32> = (0..n).map(|i| element(rank, i)).collect();
        let t = d.f32s(&own, &[n as i64]);
        let sum = all_sum(&d, t).expect("sums");
        let expected: Vec<f32> = (0..n)
            .map(|i| (0..size).map(|rank| element(rank, i)).sum())
            .collect();
        assert_eq!(d.read(sum), expected, "{n} elements");

        let rows = d.f32s(&own, &[1, n as i64]);
        let all = all_gather(&d, rows).expect("gathers");
        assert_eq!(d.shape(all), [i64::from(size), n as i64]);
        let expected: Vec<f32> = (0..size)
            .flat_map(|rank| (0..n).map(move |i| element(rank, i)))
            .collect();
        assert_eq!(d.read(all), expected, "{n} elements");
    }

    // Half types stay half, what was computed lazily or is strided is summed as it is, and nothing is nothing.
    let ones = op!(
        d,
        full,
        f64::from(rank + 1),
        DType::BF16,
        [4_i64, 2].as_ptr(),
        2
    )
    .unwrap();
    let turned = op!(d, transpose, ones, [1_i32, 0].as_ptr(), 2).unwrap();
    let sum = all_sum(&d, turned).expect("sums");
    assert_eq!(d.info(sum).dtype, DType::BF16);
    let wide = op!(d, cast, sum, DType::F32).unwrap();
    assert_eq!(d.read(wide), vec![(size * (size + 1) / 2) as f32; 8]);
    let empty = d.f32s(&[], &[0, 3]);
    let (none, all) = (all_sum(&d, empty).unwrap(), all_gather(&d, empty).unwrap());
    assert_eq!((d.shape(none), d.shape(all)), (vec![0, 3], vec![0, 3]));
    let scalar = d.f32s(&[1.0], &[]);
    assert!(all_gather(&d, scalar).is_err());
    assert_eq!(d.read(all_sum(&d, scalar).unwrap()), [size as f32]);
    assert!(all_sum(&d, Tensor(12345)).is_err());
}

#[test]
fn without_a_group_calls_say_so_and_bad_groups_are_refused() {
    if std::env::var_os(RANK).is_some() {
        return;
    }
    assert_eq!(query("mlxcel.ext.collectives/2", Transport::Ring), 0);
    let d = Device::open();
    let t = d.f32s(&[1.0], &[1]);
    let error = all_sum(&d, t).unwrap_err();
    assert_eq!(error.code, status::FAILED_PRECONDITION);
    assert_eq!(error.message, "all_sum: this process has joined no group");
    let mut out = 0;
    assert!(call!(table(), d, rank, &raw mut out).is_err());
    for (rank, size, addresses) in [
        (0, 0, "[]"),
        (1, 1, r#"["127.0.0.1:1"]"#),
        (0, 2, r#"["127.0.0.1:1"]"#),
        (0, 1, "nonsense"),
    ] {
        let error = join(&d, rank, size, addresses).unwrap_err();
        assert_eq!(error.code, status::INVALID_ARGUMENT, "{}", error.message);
    }
}
