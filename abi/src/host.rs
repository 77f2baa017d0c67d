//! What the host lends to plugins: services and, while a model is loaded, its weights.

use crate::ops_args::QuantSpec;
use crate::types::{Str, Tensor, TensorInfo};

abi_table! {
    /// Host services, valid for the life of the process. Callable from any thread.
    pub struct HostApi {
        /// Writes a log record; `level` is one of [`crate::kinds::log`].
        fn log(level: u32, target: Str, message: Str);
        /// Extension table called `name` (`mlxcel.ext.<name>/<version>`), or 0 when the host does
        /// not have it.
        fn query(name: Str, out: *mut usize);
    }
}

abi_table! {
    /// The tensors of the checkpoint being loaded, by the names the checkpoint (or the family's
    /// GGUF adapter) gives them. Valid during `FamilyTable::load`, on the backend thread.
    pub struct WeightsApi {
        /// Number of tensors.
        fn count(out: *mut u64);
        /// Name of the `index`-th tensor, in sorted order; valid during `load`.
        fn name(index: u64, out: *mut Str);
        /// Shape and stored dtype, without touching the data.
        fn info(name: Str, out: *mut TensorInfo);
        /// The tensor on the backend, in its stored dtype. The bytes are mapped, not copied, where
        /// the file and the backend allow it. The caller releases the handle.
        fn load(name: Str, out: *mut Tensor);
        /// How the module at `path` (a tensor name without its last part) is quantised. `bits` is
        /// 0 when it is not.
        fn quant(path: Str, out: *mut QuantSpec);
    }
}
