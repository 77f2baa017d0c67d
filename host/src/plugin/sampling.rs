//! Safe wrapper over the choice of tokens on a device.

pub use mlxcel_abi::fused_args::{NO_TOKEN, SampleArgs};

use super::device::{Backend, DeviceTensor};
use super::error::CallError;

impl Backend {
    /// One token for every row of `args.logits`: `[R]` u32. [`NO_TOKEN`] for a row that has none.
    pub fn sample(&self, args: SampleArgs) -> Result<DeviceTensor, CallError> {
        let args = SampleArgs {
            struct_size: size_of::<SampleArgs>(),
            ..args
        };
        let ops = self.ops();
        // SAFETY: on the backend thread; `args` outlives the call, and handles are checked by the backend.
        self.tensor_op("sample", |out, err| unsafe {
            (ops.sample)(ops.ctx, &raw const args, out, err)
        })
    }
}
