//! Wrong calls give a status and nothing worse: stale handles, other threads, null pointers, sizes
//! that no memory has, exceptions inside MLX.

#[macro_use]
mod harness;

use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};

use harness::Device;
use mlxcel_abi::kinds::{binary, unary};
use mlxcel_abi::ops_args::FromHostArgs;
use mlxcel_abi::{AbiError, DType, Tensor, TensorInfo, status};

#[test]
fn stale_and_foreign_handles_are_told() {
    let d = Device::open();
    let a = d.f32s(&[1.0], &[1]);
    run!(d, retain, a).unwrap();
    d.release(a);
    d.release(a);
    let error = op!(d, unary, unary::NEG, a).unwrap_err();
    assert_eq!(error.code, status::INVALID_ARGUMENT);
    assert!(
        error.message.starts_with("unary: tensor handle") && error.message.contains("stale"),
        "{error}"
    );
    let again = run!(d, release, a).unwrap_err();
    assert!(
        again.message.starts_with("release: tensor handle"),
        "{again}"
    );
    let none = op!(d, binary, binary::ADD, Tensor::NONE, Tensor(u64::MAX)).unwrap_err();
    assert_eq!(
        none.message,
        "binary: no tensor was given where one is needed"
    );
    assert_eq!(d.memory().live_tensors, 0);
}

#[test]
fn nothing_is_written_on_error() {
    let d = Device::open();
    let mut out = Tensor(77);
    let failed = run!(d, unary, unary::NEG, Tensor(5), &raw mut out);
    assert!(failed.is_err());
    assert_eq!(out, Tensor(77));
    let a = d.f32s(&[1.0], &[1]);
    // SAFETY: no error text is asked for.
    let code = unsafe { (d.ops.unary)(d.ops.ctx, 9999, a, &raw mut out, null_mut()) };
    assert_eq!(code, status::UNIMPLEMENTED);
}

#[test]
fn null_pointers_are_arguments_too() {
    let d = Device::open();
    let a = d.f32s(&[1.0], &[1]);
    let errors: Vec<AbiError> = [
        run!(d, unary, unary::NEG, a, null_mut()),
        run!(d, info, a, null_mut()),
        run!(d, read, a, null_mut(), 4),
        run!(d, eval, null(), 1),
        run!(d, quantize, a, null(), null_mut()),
        run!(d, memory, null_mut()),
        run!(d, set_memory_limits, null()),
        op!(d, from_host, null()).map(|_| ()),
        op!(d, rope, null()).map(|_| ()),
        op!(d, full, 0.0, DType::F32, null(), 2).map(|_| ()),
        op!(d, concat, null(), usize::MAX, 0).map(|_| ()),
        op!(d, reduce, 1, a, null(), 1, 0).map(|_| ()),
    ]
    .into_iter()
    .map(Result::unwrap_err)
    .collect();
    for error in errors {
        assert_eq!(error.code, status::INVALID_ARGUMENT, "{error}");
    }
    run!(d, eval, null(), 0).unwrap();
}

#[test]
fn sizes_that_cannot_be_are_refused_before_mlx_sees_them() {
    let d = Device::open();
    let full =
        |dims: &[i64]| op!(d, full, 0.0, DType::F32, dims.as_ptr(), dims.len() as u32).unwrap_err();
    assert_eq!(full(&[-1]).code, status::INVALID_ARGUMENT);
    assert_eq!(full(&[1 << 31]).code, status::INVALID_ARGUMENT);
    assert_eq!(full(&[1; 9]).code, status::INVALID_ARGUMENT);
    assert_eq!(
        full(&[1 << 30, 1 << 30, 1 << 30]).code,
        status::RESOURCE_EXHAUSTED
    );
    let vast = full(&[1 << 20, 1 << 20]);
    assert_eq!(vast.code, status::RESOURCE_EXHAUSTED);
    assert!(
        vast.message.starts_with(
            "full: a tensor of shape [1048576, 1048576] needs 4398046511104 bytes, the limit is "
        ),
        "{vast}"
    );
    let a = d.f32s(&[1.0, 2.0], &[2]);
    assert!(op!(d, repeat, a, i64::MAX, 0).is_err());
    assert!(op!(d, repeat, a, -1, 0).is_err());
    assert!(op!(d, tile, a, [i64::from(i32::MAX)].as_ptr(), 1).is_err());
    assert!(
        op!(
            d,
            pad,
            a,
            [i64::from(i32::MAX)].as_ptr(),
            [1_i64].as_ptr(),
            1,
            0.0
        )
        .is_err()
    );
    assert!(op!(d, pad, a, [-1_i64].as_ptr(), [0_i64].as_ptr(), 1, 0.0).is_err());
    let wide = [1_i64 << 20, 1 << 20];
    let view = op!(d, broadcast_to, d.f32s(&[1.0], &[1]), wide.as_ptr(), 2).unwrap();
    assert_eq!(
        op!(d, unary, unary::EXP, view).unwrap_err().code,
        status::RESOURCE_EXHAUSTED
    );
    assert!(op!(d, reshape, a, [-1_i64, -1].as_ptr(), 2).is_err());
    assert!(op!(d, reshape, a, [0_i64, -1].as_ptr(), 2).is_err());
    assert!(op!(d, reshape, a, [3_i64].as_ptr(), 1).is_err());
    let too_many = op!(d, take, d.f32s(&[0.0], &[1; 8]), d.i32s(&[0], &[1, 1]), 0).unwrap_err();
    assert_eq!(
        too_many.message,
        "take: the result has 9 dimensions, at most 8 are possible"
    );
}

#[test]
fn exceptions_of_mlx_become_statuses_with_the_operations_name() {
    let d = Device::open();
    let (a, b) = (d.f32s(&[1.0; 6], &[2, 3]), d.f32s(&[1.0; 6], &[2, 3]));
    let error = op!(d, matmul, a, b).unwrap_err();
    assert_eq!(error.code, status::INVALID_ARGUMENT);
    assert!(
        error.message.starts_with("matmul: ") && error.message.contains("(2,3)"),
        "{error}"
    );
    assert!(
        !error.message.ends_with('.') && !error.message.contains("[matmul]"),
        "{error}"
    );
    assert!(op!(d, unary, unary::BIT_NOT, a).is_err());
    assert!(op!(d, binary, binary::BIT_AND, a, b).is_err());
    assert!(
        op!(d, cast, a, DType(99))
            .unwrap_err()
            .message
            .contains("dtype code 99")
    );
    d.expect(
        op!(d, unary, unary::NEG, a),
        DType::F32,
        &[2, 3],
        &[-1.0; 6],
    );
}

#[test]
fn reading_needs_the_exact_length() {
    let d = Device::open();
    let a = d.f32s(&[1.0, 2.0], &[2]);
    let mut bytes = [0_u8; 8];
    let error = run!(d, read, a, bytes.as_mut_ptr(), 7).unwrap_err();
    assert_eq!(
        error.message,
        "read: the tensor has 8 bytes, the destination 7"
    );
    run!(d, read, a, bytes.as_mut_ptr(), 8).unwrap();
    run!(d, read, d.f32s(&[], &[0]), null_mut(), 0).unwrap();
}

#[test]
fn other_threads_may_only_release() {
    let d = Device::open();
    let a = d.f32s(&[1.0], &[1]);
    let b = d.f32s(&[2.0], &[1]);
    let other = d.elsewhere();
    std::thread::scope(|scope| {
        let elsewhere = std::thread::Builder::new()
            .name("elsewhere".into())
            .spawn_scoped(scope, move || {
                let mut out = Tensor::NONE;
                let mut err = null_mut();
                let ops = other.ops();
                // SAFETY: the backend is open, which is all that the slots ask for before they refuse.
                unsafe {
                    let code = (ops.unary)(ops.ctx, unary::NEG, a, &raw mut out, &raw mut err);
                    let refused = AbiError::check(code, err).unwrap_err();
                    let code = (ops.release)(ops.ctx, a, null_mut());
                    (refused, code)
                }
            });
        let (refused, released) = elsewhere.unwrap().join().unwrap();
        assert_eq!(refused.code, status::FAILED_PRECONDITION);
        assert!(
            refused.message.contains("thread 'elsewhere'")
                && refused.message.contains("opened on thread"),
            "{refused}"
        );
        assert_eq!(released, status::OK);
    });
    // The next call on the backend thread carries the release out.
    let mut info = TensorInfo::ZERO;
    run!(d, info, b, &raw mut info).unwrap();
    assert_eq!(d.memory().live_tensors, 1);
    assert!(run!(d, info, a, &raw mut info).is_err());
}

static RELEASED: [AtomicU32; 8] = [const { AtomicU32::new(0) }; 8];

unsafe extern "C" fn count_release(owner: *mut core::ffi::c_void) {
    RELEASED[owner as usize].fetch_add(1, Ordering::SeqCst);
}

fn released(owner: usize) -> u32 {
    RELEASED[owner].load(Ordering::SeqCst)
}

fn borrowing(data: &[f32], dims: &[i64], owner: usize) -> FromHostArgs {
    FromHostArgs {
        data: data.as_ptr().cast(),
        byte_len: size_of_val(data),
        dtype: DType::F32,
        ndim: dims.len() as u32,
        dims: dims.as_ptr(),
        release: Some(count_release),
        owner: owner as *mut _,
        ..FromHostArgs::default()
    }
}

#[test]
fn borrowed_memory_is_released_once_when_the_last_user_is_done() {
    let d = Device::open();
    let data = vec![1.0_f32, 2.0, 3.0, 4.0];
    let args = borrowing(&data, &[2, 2], 0);
    let a = op!(d, from_host, &raw const args).unwrap();
    let axes = [1_i32, 0];
    let view = op!(d, transpose, a, axes.as_ptr(), 2).unwrap();
    d.eval(&[view]);
    let packed = op!(d, contiguous, a).unwrap();
    d.eval(&[packed]);
    d.release(packed);
    d.release(a);
    assert_eq!(released(0), 0, "a view still uses it");
    assert_eq!(d.read(view), [1.0, 3.0, 2.0, 4.0]);
    d.release(view);
    run!(d, synchronize).unwrap();
    assert_eq!(released(0), 1);
}

#[test]
fn borrowed_memory_stays_the_callers_when_the_call_fails() {
    let d = Device::open();
    let data = vec![0.0_f32; 4];
    let wrong_length = FromHostArgs {
        byte_len: 3,
        ..borrowing(&data, &[4], 1)
    };
    let error = op!(d, from_host, &raw const wrong_length).unwrap_err();
    assert_eq!(
        error.message,
        "from_host: shape [4] of f32 does not have 3 bytes"
    );
    let unknown = FromHostArgs {
        dtype: DType(99),
        ..borrowing(&data, &[4], 1)
    };
    assert!(op!(d, from_host, &raw const unknown).is_err());
    let right = borrowing(&data, &[4], 1);
    assert!(run!(d, from_host, &raw const right, null_mut()).is_err());
    let other = d.elsewhere();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let data = [0.0_f32; 4];
            let args = borrowing(&data, &[4], 1);
            let mut out = Tensor::NONE;
            let ops = other.ops();
            // SAFETY: the backend is open, the pointers live for the call.
            let code =
                unsafe { (ops.from_host)(ops.ctx, &raw const args, &raw mut out, null_mut()) };
            assert_eq!(code, status::FAILED_PRECONDITION);
        });
    });
    assert_eq!(released(1), 0);
}

#[test]
fn memory_that_has_to_be_copied_is_released_at_once() {
    let d = Device::open();
    let empty = borrowing(&[], &[0], 2);
    let t = op!(d, from_host, &raw const empty).unwrap();
    assert_eq!((released(2), d.shape(t)), (1, vec![0]));
    let bytes = [0_u8, 0, 0, 0x80, 0x3f, 0, 0, 0];
    let at = bytes.as_ptr().align_offset(4) + 1;
    let odd = FromHostArgs {
        data: bytes[at..].as_ptr(),
        byte_len: 4,
        ..borrowing(&[], &[1], 3)
    };
    let t = op!(d, from_host, &raw const odd).unwrap();
    assert_eq!((released(3), d.read(t).len()), (1, 1));
}

#[test]
fn closing_releases_what_is_left() {
    let d = Device::open();
    let data = vec![0.0_f32; 4];
    let args = borrowing(&data, &[4], 6);
    op!(d, from_host, &raw const args).unwrap();
    drop(d);
    assert_eq!(released(6), 1);
}

#[test]
fn what_has_no_kernel_of_our_own_is_refused_by_name_where_rows_are_kept_apart() {
    let d = Device::open_with("", r#"{"deterministic":true}"#).unwrap();
    let (c, a) = (d.f32s(&[1.0; 4], &[2, 2]), d.f32s(&[1.0; 4], &[2, 2]));
    let error = op!(d, addmm, c, a, a, 1.0, 1.0).unwrap_err();
    assert_eq!(error.code, status::UNIMPLEMENTED);
    assert!(
        error.message.contains("option deterministic: addmm") && error.message.contains("cpu"),
        "{error}"
    );
}
