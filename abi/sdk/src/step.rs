//! One packed step as a family sees it.

use core::marker::PhantomData;

use mlxcel_abi::family::{AttendArgs, GatedDeltaArgs, IndexArgs, KvApi, ShortConvArgs, StepArgs};
use mlxcel_abi::fused_args::RotateArgs;
use mlxcel_abi::{Table, Tensor as Handle};

use crate::compose::{self, GatedDelta, Index, RowMap, ShortConv};
use crate::{Backend, Error, Result, Tensor};

/// Options of one attention call over the host's cache.
#[derive(Debug, Clone, Copy, Default)]
pub struct AttendOptions<'a> {
    /// Multiplies the scores.
    pub scale: f32,
    /// Soft cap of the scores; 0 is none.
    pub softcap: f32,
    /// Sink logit per head.
    pub sinks: Option<&'a Tensor>,
    /// Positions that each row may see, from [`Step::index`].
    pub selection: Option<&'a Tensor>,
}

/// T rows of S sequences, one after another. Everything that varies from step to step is in the
/// tensors; a family takes no decision on their values.
#[derive(Debug)]
pub struct Step<'a> {
    backend: Backend,
    kv: KvApiBox,
    /// `[T]` token ids.
    pub tokens: Tensor,
    /// `[T]` position of every row in its sequence.
    pub positions: Tensor,
    logit_rows: Tensor,
    /// Rows.
    pub n_rows: usize,
    /// Sequences.
    pub n_sequences: usize,
    life: PhantomData<&'a ()>,
}

struct KvApiBox(KvApi);

impl core::fmt::Debug for KvApiBox {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("KvApi")
    }
}

impl Step<'_> {
    /// Reads the host's arguments.
    ///
    /// # Safety
    /// `args` and what it points to must be live for the value's lifetime, and its tensors must
    /// belong to `backend`.
    pub unsafe fn from_raw(args: *const StepArgs, backend: &Backend) -> Result<Self> {
        // SAFETY: forwarded to the caller.
        let args = unsafe { StepArgs::read(args) }.map_err(|source| Error::Backend {
            op: "step".to_owned(),
            source,
        })?;
        if args.kv.is_null() {
            return Err(Error::Other(
                "the host gave no caches with the step".to_owned(),
            ));
        }
        Ok(Self {
            backend: backend.clone(),
            // SAFETY: the host keeps the table valid during the step.
            kv: KvApiBox(unsafe { KvApi::import(args.kv) }),
            tokens: Tensor::borrow_handle(backend, args.tokens)?,
            positions: Tensor::borrow_handle(backend, args.positions)?,
            logit_rows: Tensor::borrow_handle(backend, args.logit_rows)?,
            n_rows: args.n_rows as usize,
            n_sequences: args.n_sequences as usize,
            life: PhantomData,
        })
    }

    /// The backend.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Appends `k` and `v` to the layer's cache and attends, each row over its own sequence.
    /// `q` is `[T, H, D]`, `k` `[T, Hkv, D]`, `v` `[T, Hkv, Dv]`; result `[T, H, Dv]`.
    pub fn attend(
        &self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        options: &AttendOptions<'_>,
    ) -> Result<Tensor> {
        self.attend_over(layer, q, k.handle(), v.handle(), options)
    }

    /// As [`Step::attend`], each row over keys of its own chunk: those at positions with the same
    /// quotient by `chunk`. A window descriptor of that size is what the layer's cache needs.
    pub fn attend_in_chunk(
        &self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        options: &AttendOptions<'_>,
        chunk: usize,
    ) -> Result<Tensor> {
        let args = AttendArgs {
            k: k.handle(),
            v: v.handle(),
            chunk: chunk as u32,
            ..Self::attend_args(q, options)
        };
        self.attend_with(layer, &args)
    }

    /// Attends over what the cache of `layer` holds, this step's rows included, and appends nothing:
    /// for layers that use another's keys and values. `layer` is the other, which attended already.
    pub fn attend_shared(
        &self,
        layer: usize,
        q: &Tensor,
        options: &AttendOptions<'_>,
    ) -> Result<Tensor> {
        self.attend_over(layer, q, Handle::NONE, Handle::NONE, options)
    }

    /// Appends to a latent cache and attends: `q` is `[T, H, k_dim]`, `k` `[T, 1, k_dim]`; values are
    /// the first `v_dim` elements of the keys, and the result is `[T, H, v_dim]`.
    pub fn attend_latent(
        &self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        options: &AttendOptions<'_>,
    ) -> Result<Tensor> {
        self.attend_over(layer, q, k.handle(), Handle::NONE, options)
    }

    /// Attends over the keys and values of an encoder that [`crate::Model::encode`] set for `layer`, a layer
    /// of cross-attention: every row over all of its sequence's. `q` is `[T, H, D]`; result `[T, H, Dv]`.
    pub fn attend_encoded(
        &self,
        layer: usize,
        q: &Tensor,
        options: &AttendOptions<'_>,
    ) -> Result<Tensor> {
        self.attend_over(layer, q, Handle::NONE, Handle::NONE, options)
    }

    fn attend_over(
        &self,
        layer: usize,
        q: &Tensor,
        k: Handle,
        v: Handle,
        options: &AttendOptions<'_>,
    ) -> Result<Tensor> {
        let args = AttendArgs {
            k,
            v,
            ..Self::attend_args(q, options)
        };
        self.attend_with(layer, &args)
    }

    fn attend_args(q: &Tensor, options: &AttendOptions<'_>) -> AttendArgs {
        AttendArgs {
            q: q.handle(),
            scale: options.scale,
            softcap: options.softcap,
            sinks: Tensor::handle_of(options.sinks),
            selection: Tensor::handle_of(options.selection),
            ..AttendArgs::default()
        }
    }

    fn attend_with(&self, layer: usize, args: &AttendArgs) -> Result<Tensor> {
        let mut out = Handle::NONE;
        command!(&self.kv.0, attend, layer as u32, args, &mut out)?;
        Ok(Tensor::from_handle(&self.backend, out))
    }

    /// As [`Step::attend`] over `q`, `k` and `v` `[T, heads * width]` that are normed and rotated first.
    /// Result `[T, H * Dv]`. An error that is unimplemented where the host or the backend cannot.
    pub(crate) fn attend_rotated(
        &self,
        layer: usize,
        [q, k, v]: [&Tensor; 3],
        options: &AttendOptions<'_>,
        rotate: &RotateArgs,
    ) -> Result<Tensor> {
        let args = AttendArgs {
            k: k.handle(),
            v: v.handle(),
            ..Self::attend_args(q, options)
        };
        let mut out = Handle::NONE;
        command!(
            &self.kv.0,
            attend_rotated,
            layer as u32,
            &args,
            rotate,
            &mut out
        )?;
        Ok(Tensor::from_handle(&self.backend, out))
    }

    /// Appends index keys and chooses the positions that each row attends to: `[T, top_k]` i32.
    pub fn index(&self, layer: usize, inputs: &Index<'_>) -> Result<Tensor> {
        let args = IndexArgs {
            q: inputs.q.handle(),
            k: inputs.k.handle(),
            weights: inputs.weights.handle(),
            top_k: inputs.top_k as u32,
            scale: inputs.scale,
            ..IndexArgs::default()
        };
        let mut out = Handle::NONE;
        match command!(&self.kv.0, index, layer as u32, &args, &mut out) {
            Ok(()) => Ok(Tensor::from_handle(&self.backend, out)),
            Err(error) if error.is_unimplemented() => {
                let keys = self.index_keys(layer, inputs.k)?;
                compose::index(inputs, &keys, &self.positions, &self.row_sequences()?)
            }
            Err(error) => Err(error),
        }
    }

    /// Appends index keys `[T, D]` and gives those of every sequence by position: `[S, L, D]`. What
    /// is beyond a sequence's end is not defined.
    pub fn index_keys(&self, layer: usize, k: &Tensor) -> Result<Tensor> {
        let mut out = Handle::NONE;
        command!(&self.kv.0, index_keys, layer as u32, k.handle(), &mut out)?;
        Ok(Tensor::from_handle(&self.backend, out))
    }

    /// Causal depthwise convolution of `x` `[T, C]` along every sequence. The layer's `state` is
    /// `[K - 1, C]`.
    pub fn short_conv(
        &self,
        layer: usize,
        state: usize,
        x: &Tensor,
        conv: &ShortConv<'_>,
    ) -> Result<Tensor> {
        let args = ShortConvArgs {
            x: x.handle(),
            weight: conv.weight.handle(),
            bias: Tensor::handle_of(conv.bias),
            activation: conv.activation,
            ..ShortConvArgs::default()
        };
        let mut out = Handle::NONE;
        match command!(
            &self.kv.0,
            short_conv,
            layer as u32,
            state as u32,
            &args,
            &mut out
        ) {
            Ok(()) => Ok(Tensor::from_handle(&self.backend, out)),
            Err(error) if error.is_unimplemented() => {
                let before = self.state_read(layer, state)?;
                let (y, after) = compose::short_conv(x, conv, &before, &self.row_map()?)?;
                self.state_write(layer, state, &after)?;
                Ok(y)
            }
            Err(error) => Err(error),
        }
    }

    /// The gated delta rule along every sequence: `[T, Hv, Dv]`. The layer's `state` is
    /// `[Hv, Dk, Dv]`.
    pub fn gated_delta(
        &self,
        layer: usize,
        state: usize,
        inputs: &GatedDelta<'_>,
    ) -> Result<Tensor> {
        let args = GatedDeltaArgs {
            q: inputs.q.handle(),
            k: inputs.k.handle(),
            v: inputs.v.handle(),
            g: inputs.g.handle(),
            beta: inputs.beta.handle(),
            ..GatedDeltaArgs::default()
        };
        let mut out = Handle::NONE;
        match command!(
            &self.kv.0,
            gated_delta,
            layer as u32,
            state as u32,
            &args,
            &mut out
        ) {
            Ok(()) => Ok(Tensor::from_handle(&self.backend, out)),
            Err(error) if error.is_unimplemented() => {
                let before = self.state_read(layer, state)?;
                let (y, after) = compose::gated_delta(inputs, &before, &self.row_map()?)?;
                self.state_write(layer, state, &after)?;
                Ok(y)
            }
            Err(error) => Err(error),
        }
    }

    /// State of every sequence before this step: `[S, shape..]`, zeros where a sequence begins.
    pub fn state_read(&self, layer: usize, state: usize) -> Result<Tensor> {
        let mut out = Handle::NONE;
        command!(&self.kv.0, state_read, layer as u32, state as u32, &mut out)?;
        Ok(Tensor::from_handle(&self.backend, out))
    }

    /// Sets the state of every sequence after this step: `[S, shape..]`.
    pub fn state_write(&self, layer: usize, state: usize, value: &Tensor) -> Result<()> {
        let handle = value.handle();
        command!(&self.kv.0, state_write, layer as u32, state as u32, handle)
    }

    /// `[S + 1]` i32: rows of sequence s are `[row_starts[s], row_starts[s + 1])`.
    pub fn row_starts(&self) -> Result<Tensor> {
        let mut out = Handle::NONE;
        command!(&self.kv.0, row_starts, &mut out)?;
        Ok(Tensor::from_handle(&self.backend, out))
    }

    /// `[T]` i32: sequence of every row.
    pub fn row_sequences(&self) -> Result<Tensor> {
        let mut out = Handle::NONE;
        command!(&self.kv.0, row_sequences, &mut out)?;
        Ok(Tensor::from_handle(&self.backend, out))
    }

    /// Which rows belong to which sequence.
    pub fn row_map(&self) -> Result<RowMap> {
        Ok(RowMap {
            row_starts: self.row_starts()?,
            row_sequences: self.row_sequences()?,
        })
    }

    /// Rows of `[T, ..]` whose logits are wanted: `[R, ..]`.
    pub fn logit_rows(&self, hidden: &Tensor) -> Result<Tensor> {
        hidden.take(&self.logit_rows, 0)
    }
}
