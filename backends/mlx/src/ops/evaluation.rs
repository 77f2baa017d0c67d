//! Evaluating graphs and reading results.

use mlxcel_abi::Tensor;

use crate::args;
use crate::bridge;
use crate::fault::Fault;
use crate::ops::memory::check_room;
use crate::slot::{list, plain_slots};

plain_slots! {
    fn read(context; t: Tensor, dst: *mut u8, byte_len: usize) {
        if dst.is_null() && byte_len > 0 {
            return Err(Fault::invalid("the destination is null"));
        }
        let tensors = context.tensors.borrow();
        let entry = tensors.get(t)?;
        if let Some(view) = entry.known().filter(|view| view.is_contiguous && view.byte_len() == byte_len) {
            // SAFETY: so many bytes of a computed tensor, which lives; the caller vouches for as many writable ones.
            unsafe { core::ptr::copy_nonoverlapping(view.data, dst, byte_len) };
            return Ok(());
        }
        // SAFETY: the caller vouches for `byte_len` writable bytes.
        unsafe { bridge::read(entry.array()?, dst, byte_len) }?;
        Ok(())
    }

    fn eval(context; ts: *const Tensor, n: usize) {
        // SAFETY: the slot's contract.
        let handles = unsafe { args::values(ts, n, "tensors") }?;
        let tensors = context.tensors.borrow();
        let arrays = list(&tensors, handles)?;
        check_room(context, 0)?;
        Ok(bridge::eval(&arrays, true)?)
    }

    fn async_eval(context; ts: *const Tensor, n: usize) {
        // SAFETY: the slot's contract.
        let handles = unsafe { args::values(ts, n, "tensors") }?;
        let tensors = context.tensors.borrow();
        let arrays = list(&tensors, handles)?;
        check_room(context, 0)?;
        Ok(bridge::eval(&arrays, false)?)
    }

    fn synchronize(_context;) {
        Ok(bridge::synchronize()?)
    }
}
