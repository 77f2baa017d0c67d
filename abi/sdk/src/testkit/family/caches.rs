//! The host's side of attention for tests: keys and values of every sequence in plain tensors,
//! attended densely. It shares no code with paged attention.

use core::cell::RefCell;
use core::ffi::c_void;
use std::collections::BTreeMap;

use mlxcel_abi::family::{AttendArgs, KvApi};
use mlxcel_abi::guard::guard;
use mlxcel_abi::status::Status;
use mlxcel_abi::{AbiError, DType, ErrorObj, Table, Tensor as Handle};

use crate::{Backend, CacheDesc, DenseAttention, Result, Tensor};

/// Keys `[N, Hkv, D]` and values `[N, Hkv, Dv]` of one layer.
#[derive(Debug, Clone)]
struct Pair {
    keys: Tensor,
    values: Tensor,
}

/// What is kept of one sequence.
#[derive(Debug, Clone, Default)]
struct Sequence {
    length: usize,
    layers: BTreeMap<usize, Pair>,
}

/// Caches of a model's sequences, by number. Cloning is cheap, and a clone goes its own way.
#[derive(Debug, Clone, Default)]
pub struct Caches {
    sequences: BTreeMap<usize, Sequence>,
}

impl Caches {
    /// No sequences.
    pub fn new() -> Self {
        Self::default()
    }

    /// Tokens of a sequence that are in the cache.
    pub fn length(&self, sequence: usize) -> usize {
        self.sequences.get(&sequence).map_or(0, |s| s.length)
    }

    /// Forgets a sequence.
    pub fn remove(&mut self, sequence: usize) {
        self.sequences.remove(&sequence);
    }

    pub(super) fn advance(&mut self, sequence: usize, rows: usize) {
        self.sequences.entry(sequence).or_default().length += rows;
    }
}

/// Rows of one sequence in a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
    pub sequence: usize,
    pub first: usize,
    pub count: usize,
}

/// Serves the caches during one step, and watches what the family asks of them.
pub(super) struct Server<'a> {
    pub backend: &'a Backend,
    pub layers: &'a [CacheDesc],
    pub dtype: DType,
    pub parts: &'a [Rows],
    /// Rows of the step, padding included.
    pub n_rows: usize,
    pub caches: RefCell<Caches>,
    /// How often each layer attended.
    pub attended: RefCell<Vec<usize>>,
}

impl Server<'_> {
    /// The table; valid as long as the value stays where it is.
    pub(super) fn table(&self) -> KvApi {
        KvApi {
            ctx: core::ptr::from_ref(self).cast_mut().cast(),
            attend: attend_slot,
            ..KvApi::stubs()
        }
    }

    fn attend(&self, layer: usize, args: &AttendArgs) -> mlxcel_abi::Result<Tensor> {
        let window = self.check(layer, args)?;
        let share = |handle: Handle| Tensor::borrow_handle(self.backend, handle);
        let (q, k, v) = (share(args.q)?, share(args.k)?, share(args.v)?);
        let sinks = if args.sinks.is_none() {
            None
        } else {
            Some(share(args.sinks)?)
        };
        let options = DenseAttention {
            scale: args.scale,
            softcap: args.softcap,
            causal: true,
            window,
            mask: None,
            sinks: sinks.as_ref(),
        };
        let mut out = Vec::new();
        let mut caches = self.caches.borrow_mut();
        for rows in self.parts {
            let part = |t: &Tensor| t.narrow(0, rows.first as i64, rows.count as i64);
            let (new_k, new_v) = (part(&k)?.contiguous()?, part(&v)?.contiguous()?);
            let sequence = caches.sequences.entry(rows.sequence).or_default();
            let pair = match sequence.layers.get(&layer) {
                None => Pair {
                    keys: new_k,
                    values: new_v,
                },
                Some(old) => Pair {
                    keys: Tensor::concat(self.backend, &[&old.keys, &new_k], 0)?,
                    values: Tensor::concat(self.backend, &[&old.values, &new_v], 0)?,
                },
            };
            out.push(attend_densely(&part(&q)?, &pair, &options)?);
            sequence.layers.insert(layer, pair);
        }
        let real: usize = self.parts.iter().map(|rows| rows.count).sum();
        if real < self.n_rows {
            // What padding rows get is nobody's business; something large is easily noticed.
            let (heads, width) = (q.dim(1)?, v.dim(2)?);
            let dims = [(self.n_rows - real) as i64, heads, width];
            out.push(Tensor::full(self.backend, 1000.0, self.dtype, &dims)?);
        }
        Ok(Tensor::concat(
            self.backend,
            &out.iter().collect::<Vec<_>>(),
            0,
        )?)
    }

    /// Checks the call against the model's description; gives the window.
    fn check(&self, layer: usize, args: &AttendArgs) -> mlxcel_abi::Result<u32> {
        let desc = self.layers.get(layer).ok_or_else(|| {
            AbiError::invalid(format!(
                "layer {layer} attends, the description has {} layers",
                self.layers.len()
            ))
        })?;
        let (kv_heads, k_dim, v_dim, window) = match *desc {
            CacheDesc::Dense {
                kv_heads,
                k_dim,
                v_dim,
            } => (kv_heads, k_dim, v_dim, 0),
            CacheDesc::Window {
                kv_heads,
                k_dim,
                v_dim,
                window,
            } => (kv_heads, k_dim, v_dim, window as u32),
            CacheDesc::Latent { .. } | CacheDesc::Recurrent { .. } | CacheDesc::None => {
                return Err(AbiError::invalid(format!(
                    "layer {layer} attends, its description says it has no cache"
                )));
            }
        };
        let rows = self.n_rows as i64;
        for (what, handle, dims) in [
            ("k", args.k, [kv_heads, k_dim]),
            ("v", args.v, [kv_heads, v_dim]),
        ] {
            let info = Tensor::borrow_handle(self.backend, handle)?.info()?;
            let wanted = [rows, dims[0] as i64, dims[1] as i64];
            if info.shape() != wanted || info.dtype != self.dtype {
                return Err(AbiError::invalid(format!(
                    "layer {layer}: {what} is {} {:?}, its description and the step imply {} {wanted:?}",
                    info.dtype.name(),
                    info.shape(),
                    self.dtype.name()
                )));
            }
        }
        let q = Tensor::borrow_handle(self.backend, args.q)?.info()?;
        let fits = matches!(q.shape(), &[n, _, d] if n == rows && d == k_dim as i64);
        if !fits || q.dtype != self.dtype {
            return Err(AbiError::invalid(format!(
                "layer {layer}: q is {} {:?}, expected {} [{rows}, heads, {k_dim}]",
                q.dtype.name(),
                q.shape(),
                self.dtype.name()
            )));
        }
        if let Some(times) = self.attended.borrow_mut().get_mut(layer) {
            *times += 1;
        }
        Ok(if args.window == 0 {
            window
        } else {
            args.window
        })
    }
}

/// Rows `[n, H, D]` over everything in `pair`, the last row on the last key: `[n, H, Dv]`.
fn attend_densely(q: &Tensor, pair: &Pair, options: &DenseAttention<'_>) -> Result<Tensor> {
    let heads_first = |t: &Tensor| t.transpose(&[1, 0, 2])?.unsqueeze(0);
    let out = heads_first(q)?.attention(
        &heads_first(&pair.keys)?,
        &heads_first(&pair.values)?,
        options,
    )?;
    let (heads, rows, width) = (out.dim(1)?, out.dim(2)?, out.dim(3)?);
    out.reshape(&[heads, rows, width])?.transpose(&[1, 0, 2])
}

unsafe extern "C" fn attend_slot(
    ctx: *mut c_void,
    layer: u32,
    args: *const AttendArgs,
    out: *mut Handle,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: `ctx` is a live `Server`, arguments and places are the family's (contract of the table).
    unsafe {
        guard(err, || {
            let server = &*ctx.cast::<Server<'_>>();
            let mixed = server.attend(layer as usize, &AttendArgs::read(args)?)?;
            out.write(mixed.into_handle()?);
            Ok(())
        })
    }
}
