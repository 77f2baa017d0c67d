//! The host's side of attention for tests: keys and values of every sequence in plain tensors,
//! attended densely. It shares no code with paged attention.

use core::cell::RefCell;
use core::ffi::c_void;
use std::collections::BTreeMap;

use mlxcel_abi::family::{AttendArgs, KvApi};
use mlxcel_abi::fused_args::RotateArgs;
use mlxcel_abi::guard::guard;
use mlxcel_abi::status::Status;
use mlxcel_abi::{AbiError, DType, ErrorObj, Table, Tensor as Handle};

use crate::{Backend, CacheDesc, DenseAttention, Result, RopeSpec, Tensor};

/// Keys `[N, Hkv, D]` and values `[N, Hkv, Dv]` of one layer.
#[derive(Debug, Clone)]
pub(super) struct Pair {
    pub keys: Tensor,
    pub values: Tensor,
}

/// What is kept of one sequence.
#[derive(Debug, Clone, Default)]
pub(super) struct Sequence {
    length: usize,
    pub layers: BTreeMap<usize, Pair>,
    /// Index keys `[N, D]` by layer.
    pub index_keys: BTreeMap<usize, Tensor>,
    /// States `[1, shape..]` by layer and number.
    pub states: BTreeMap<(usize, usize), Tensor>,
}

impl Sequence {
    /// Tokens in the cache before this step.
    pub(super) fn length(&self) -> usize {
        self.length
    }
}

/// Caches of a model's sequences, by number. Cloning is cheap, and a clone goes its own way.
#[derive(Debug, Clone, Default)]
pub struct Caches {
    pub(super) sequences: BTreeMap<usize, Sequence>,
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
    /// `[T]` i32.
    pub positions: Tensor,
    pub caches: RefCell<Caches>,
    /// How often each layer's own caches were appended to, and its states written.
    pub attended: RefCell<Vec<usize>>,
    /// States written in this step, by layer and number: `[S, shape..]`.
    pub written: RefCell<BTreeMap<(usize, usize), Tensor>>,
}

/// What one attention call is, by the layer's description.
struct Call {
    window: u32,
    /// Values are this many elements of the keys.
    latent_dim: Option<usize>,
    /// Whether every row sees all keys, which an encoder set.
    is_cross: bool,
}

impl Server<'_> {
    /// The table; valid as long as the value stays where it is.
    pub(super) fn table(&self) -> KvApi {
        let mut table = KvApi {
            ctx: core::ptr::from_ref(self).cast_mut().cast(),
            attend: attend_slot,
            attend_rotated: attend_rotated_slot,
            ..KvApi::stubs()
        };
        super::states::install(&mut table);
        table
    }

    /// A handle of the family's.
    pub(super) fn share(&self, handle: Handle) -> Result<Tensor> {
        Tensor::borrow_handle(self.backend, handle)
    }

    /// Notes that a layer's own cache moved on.
    pub(super) fn count(&self, layer: usize) {
        if let Some(times) = self.attended.borrow_mut().get_mut(layer) {
            *times += 1;
        }
    }

    /// Rows that belong to sequences.
    pub(super) fn real_rows(&self) -> usize {
        self.parts.iter().map(|rows| rows.count).sum()
    }

    fn attend(&self, layer: usize, args: &AttendArgs) -> mlxcel_abi::Result<Tensor> {
        let call = self.check(layer, args)?;
        let optional = |handle: Handle| (!handle.is_none()).then(|| self.share(handle)).transpose();
        let q = self.share(args.q)?;
        let (k, v) = (optional(args.k)?, optional(args.v)?);
        let (sinks, selection) = (optional(args.sinks)?, optional(args.selection)?);
        let mut out = Vec::new();
        let mut caches = self.caches.borrow_mut();
        for rows in self.parts {
            let part = |t: &Tensor| t.narrow(0, rows.first as i64, rows.count as i64);
            let sequence = caches.sequences.entry(rows.sequence).or_default();
            if let Some(k) = &k {
                let new_k = part(k)?.contiguous()?;
                let new_v = match (&v, call.latent_dim) {
                    (Some(v), _) => part(v)?.contiguous()?,
                    (None, width) => new_k
                        .narrow(2, 0, width.unwrap_or_default() as i64)?
                        .contiguous()?,
                };
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
                sequence.layers.insert(layer, pair);
            }
            let pair = sequence.layers.get(&layer).ok_or_else(|| {
                AbiError::invalid(format!(
                    "layer {layer} is attended over before its own layer, or the encoder, ran"
                ))
            })?;
            let (held, wanted) = (pair.keys.dim(0)?, (sequence.length + rows.count) as i64);
            if k.is_none() && held != wanted && !call.is_cross {
                return Err(AbiError::invalid(format!(
                    "layer {layer} is attended over with {held} keys, {wanted} are due: its own layer runs first"
                )));
            }
            let mask = match (&selection, args.chunk) {
                (None, 0) => None,
                (Some(selection), 0) => Some(selected(&part(selection)?, held, call.window)?),
                (None, chunk) => {
                    let visible = chunk_mask(rows.count, held as usize, call.window, chunk);
                    let dims = [rows.count as i64, held];
                    Some(Tensor::from_bools(self.backend, &visible, &dims)?)
                }
                (Some(_), chunk) => {
                    return Err(AbiError::unimplemented(format!(
                        "layer {layer}: a selection in chunks of {chunk}"
                    )));
                }
            };
            let options = DenseAttention {
                scale: args.scale,
                softcap: args.softcap,
                causal: mask.is_none() && !call.is_cross,
                window: if mask.is_none() { call.window } else { 0 },
                mask: mask.as_ref(),
                sinks: sinks.as_ref(),
            };
            out.push(attend_densely(&part(&q)?, pair, &options)?);
        }
        let real = self.real_rows();
        if real < self.n_rows {
            // What padding rows get is nobody's business; something large is easily noticed.
            let like = out
                .first()
                .ok_or_else(|| AbiError::internal("a step has no sequences"))?;
            let dims = [(self.n_rows - real) as i64, like.dim(1)?, like.dim(2)?];
            out.push(Tensor::full(self.backend, 1000.0, self.dtype, &dims)?);
        }
        Ok(Tensor::concat(
            self.backend,
            &out.iter().collect::<Vec<_>>(),
            0,
        )?)
    }

    /// As `attend`, of flat rows and after norm and rotation, made of simple operations.
    fn attend_rotated(
        &self,
        layer: usize,
        args: &AttendArgs,
        rotate: &RotateArgs,
    ) -> mlxcel_abi::Result<Tensor> {
        let (kv_heads, k_dim, v_dim) = match self.layers.get(layer) {
            Some(
                &(CacheDesc::Dense {
                    kv_heads,
                    k_dim,
                    v_dim,
                }
                | CacheDesc::Window {
                    kv_heads,
                    k_dim,
                    v_dim,
                    ..
                }),
            ) => (kv_heads as i64, k_dim as i64, v_dim as i64),
            _ => {
                return Err(AbiError::unimplemented(format!(
                    "layer {layer} has no plain keys and values"
                )));
            }
        };
        let flat = |handle: Handle, heads: i64, width: i64| {
            let rows = self.share(handle)?;
            if rows.shape()?.len() != 2 {
                return Ok(rows);
            }
            rows.reshape(&[self.n_rows as i64, heads, width])
        };
        let turned = |rows: Tensor, weight: Handle| -> Result<Tensor> {
            let optional = |t: Handle| (!t.is_none()).then(|| self.share(t)).transpose();
            let rows = match rotate.normed {
                0 => rows,
                _ => rows.rms_norm(optional(weight)?.as_ref(), rotate.eps)?,
            };
            if rotate.dims == 0 {
                return Ok(rows);
            }
            let spec = RopeSpec {
                dims: rotate.dims,
                interleaved: rotate.interleaved != 0,
                base: rotate.base,
                scale: rotate.scale,
                freqs: optional(rotate.freqs)?,
            };
            rows.rope(&self.positions, &spec)
        };
        let q = turned(flat(args.q, -1, k_dim)?, rotate.q_norm)?;
        let k = turned(flat(args.k, kv_heads, k_dim)?, rotate.k_norm)?;
        let v = flat(args.v, kv_heads, v_dim)?;
        let args = AttendArgs {
            q: q.handle(),
            k: k.handle(),
            v: v.handle(),
            ..*args
        };
        let mixed = self.attend(layer, &args)?;
        Ok(mixed.reshape(&[self.n_rows as i64, -1])?)
    }

    /// Checks the call against the model's description.
    fn check(&self, layer: usize, args: &AttendArgs) -> mlxcel_abi::Result<Call> {
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
            CacheDesc::Latent { k_dim, v_dim, .. } => (1, k_dim, v_dim, 0),
            CacheDesc::Cross {
                kv_heads,
                k_dim,
                v_dim,
            } => (kv_heads, k_dim, v_dim, 0),
            CacheDesc::Recurrent { .. } | CacheDesc::None => {
                return Err(AbiError::invalid(format!(
                    "layer {layer} attends, its description says it has no keys"
                )));
            }
        };
        let is_cross = matches!(desc, CacheDesc::Cross { .. });
        let is_plain = args.k.is_none() && args.window == 0 && args.chunk == 0;
        if is_cross && !(is_plain && args.selection.is_none()) {
            return Err(AbiError::invalid(format!(
                "layer {layer} attends to an encoder: it takes queries alone, without keys, values, window, chunk or selection"
            )));
        }
        let latent_dim = matches!(desc, CacheDesc::Latent { .. }).then_some(v_dim);
        let is_read_only = args.k.is_none();
        let given = [
            (!is_read_only).then_some(("k", args.k, [kv_heads, k_dim])),
            (!args.v.is_none()).then_some(("v", args.v, [kv_heads, v_dim])),
        ];
        if args.v.is_none() != (is_read_only || latent_dim.is_some()) {
            return Err(AbiError::invalid(format!(
                "layer {layer}: values come with keys unless the cache is latent"
            )));
        }
        let rows = self.n_rows as i64;
        for (what, handle, dims) in given.into_iter().flatten() {
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
        if !is_read_only || is_cross {
            self.count(layer);
        }
        Ok(Call {
            window: if args.window == 0 {
                window
            } else {
                args.window
            },
            latent_dim,
            is_cross,
        })
    }
}

/// Bool mask `[1, 1, n, length]` of what causality, the window and a selection `[n, N]` leave to the
/// last n rows.
fn selected(selection: &Tensor, length: i64, window: u32) -> Result<Tensor> {
    let (n, b) = (selection.dim(0)?, selection.backend());
    let keys = Tensor::arange(b, 0.0, length as f64, 1.0, DType::I32)?;
    let chosen = selection.unsqueeze(2)?.eq(&keys)?.reduce(
        mlxcel_abi::kinds::reduce::ANY_OF,
        &[1],
        false,
    )?; // [n, length]
    let rows = Tensor::arange(b, (length - n) as f64, length as f64, 1.0, DType::I32)?;
    let behind = rows.reshape(&[n, 1])?.sub(&keys)?;
    let mut visible = chosen.logical_and(&behind.ge_scalar(0.0)?)?;
    if window > 0 {
        visible = visible.logical_and(&behind.lt_scalar(window.into())?)?;
    }
    visible.reshape(&[1, 1, n, length])
}

/// What the last rows of a sequence see of its keys in chunks, `[n, keys]`.
fn chunk_mask(rows: usize, keys: usize, window: u32, chunk: u32) -> Vec<bool> {
    let (window, chunk) = (window as usize, chunk as usize);
    let sees = move |position: usize, key: usize| {
        let in_window = window == 0 || key + window > position;
        key <= position && in_window && key / chunk == position / chunk
    };
    (keys - rows..keys)
        .flat_map(|position| (0..keys).map(move |key| sees(position, key)))
        .collect()
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

unsafe extern "C" fn attend_rotated_slot(
    ctx: *mut c_void,
    layer: u32,
    args: *const AttendArgs,
    rotate: *const RotateArgs,
    out: *mut Handle,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: as for `attend_slot`.
    unsafe {
        guard(err, || {
            let server = &*ctx.cast::<Server<'_>>();
            let (args, rotate) = (AttendArgs::read(args)?, RotateArgs::read(rotate)?);
            let mixed = server.attend_rotated(layer as usize, &args, &rotate)?;
            out.write(mixed.into_handle()?);
            Ok(())
        })
    }
}
