//! Probing, opening and closing, and the record in the file.

#[macro_use]
mod harness;

use harness::{Device, entry, probe};
use mlxcel_abi::{Table, ops::BackendOps, status};
use mlxcel_backend_mlx::serde_json::{Value, from_str};

#[test]
fn the_probe_describes_the_processor() {
    let probe: Value = from_str(&probe()).unwrap();
    assert!(probe["score"].as_u64().unwrap() > 0);
    let device = &probe["devices"][0];
    assert_eq!(device["name"], "cpu");
    assert!(!device["description"].as_str().unwrap().is_empty());
    assert!(device["total_bytes"].as_u64().unwrap() > device["free_bytes"].as_u64().unwrap());
    assert_eq!(probe["details"]["mlx_version"], "0.32.4");
    assert!(probe["details"]["physical_cores"].as_u64().unwrap() >= 1);
}

#[test]
fn the_record_names_the_plugin_and_its_mlx() {
    let record: Value = from_str(mlxcel_backend_cpu::RECORD).unwrap();
    let plugin = &record["plugin"];
    assert_eq!(
        (plugin["kind"].as_str(), plugin["name"].as_str()),
        (Some("backend"), Some("cpu"))
    );
    assert_eq!(plugin["mlx_version"], mlxcel_backend_mlx::mlx_version());
}

#[test]
fn every_slot_is_implemented() {
    let d = Device::open();
    assert_eq!(d.ops.struct_size, size_of::<BackendOps>());
    let stubs = BackendOps::stubs();
    for slot in BackendOps::SLOTS {
        // SAFETY: every slot is a function pointer at its offset within the table.
        let address = |table: &BackendOps| unsafe {
            (std::ptr::from_ref(table).cast::<u8>().add(slot.offset))
                .cast::<usize>()
                .read()
        };
        assert_ne!(address(&d.ops), address(&stubs), "{}", slot.name);
    }
}

#[test]
fn devices_and_options_are_honoured_or_refused() {
    assert!(Device::open_with("cpu", r#"{"threads":0,"cache_limit_bytes":33554432}"#).is_ok());
    let refused =
        |device: &str, options: &str| Device::open_with(device, options).map(|_| ()).unwrap_err();
    let missing = refused("gpu", "");
    assert_eq!(missing.code, status::NOT_FOUND);
    assert_eq!(missing.message, "device gpu is not there, there are: cpu");
    assert!(
        refused("", r#"{"treads":1}"#)
            .message
            .contains("option treads")
    );
    assert_eq!(
        refused("", r#"{"threads":2000}"#).code,
        status::UNIMPLEMENTED
    );
}

#[test]
fn a_backend_closes_once_and_only_on_its_thread() {
    let d = Device::open();
    let table = d.table;
    let address = table as usize;
    let elsewhere = std::thread::spawn(move || Device::close_table(address as *const _))
        .join()
        .unwrap();
    assert_eq!(elsewhere.unwrap_err().code, status::FAILED_PRECONDITION);
    drop(d);
    let again = Device::close_table(table).unwrap_err();
    assert_eq!(again.message, "close: this backend is not open");
    assert!(Device::close_table(std::ptr::null()).is_err());
}

#[test]
fn backends_of_several_threads_do_not_meet() {
    let d = Device::open();
    let a = d.f32s(&[1.0], &[1]);
    std::thread::spawn(|| {
        let other = Device::open();
        assert_eq!(other.memory().live_tensors, 0);
        other.expect(
            Ok(other.f32s(&[2.0], &[1])),
            mlxcel_abi::DType::F32,
            &[1],
            &[2.0],
        );
    })
    .join()
    .unwrap();
    assert_eq!(d.read(a), [1.0]);
    assert_eq!(entry().struct_size, size_of_val(&entry()));
}
