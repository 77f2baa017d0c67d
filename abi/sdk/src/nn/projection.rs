//! Linear layers over one input: one operation where the backend has it, else one after another.

use mlxcel_abi::Tensor as Handle;
use mlxcel_abi::fused_args::{LinearWeight, ProjectArgs};

use crate::backend::Fused;
use crate::nn::{Linear, RmsNorm};
use crate::{Error, Result, Tensor};

/// Results of `layers` for one input `[T, inputs]`, which is normed first where there is a norm.
pub fn project<const N: usize>(
    x: &Tensor,
    norm: Option<&RmsNorm>,
    layers: [&Linear; N],
) -> Result<[Tensor; N]> {
    let mut made = here(x, norm, layers)?;
    for (y, layer) in made.iter_mut().zip(layers) {
        if let Some(ranks) = layer.summed() {
            *y = ranks.all_sum(y)?;
        }
    }
    Ok(made)
}

/// As [`project`], without the sums over ranks of layers that have a part of their inputs.
pub(crate) fn here<const N: usize>(
    x: &Tensor,
    norm: Option<&RmsNorm>,
    layers: [&Linear; N],
) -> Result<[Tensor; N]> {
    let Some(first) = layers.first() else {
        return Err(Error::Other(
            "a projection has no layers, expected one or more".to_owned(),
        ));
    };
    x.backend().fused_at(
        Fused::Project,
        x,
        first.site(),
        || fused(x, norm, layers, None),
        || {
            let x = RmsNorm::apply(norm, x)?;
            let made = layers.iter().map(|layer| layer.forward_here(&x));
            let made = made.collect::<Result<Vec<_>>>()?;
            made.try_into()
                .map_err(|_| Error::Other("a projection lost a result".to_owned()))
        },
    )
}

/// `residual` plus the result of one layer.
pub(crate) fn onto(x: &Tensor, layer: &Linear, residual: &Tensor) -> Result<Tensor> {
    x.backend().fused_at(
        Fused::Project,
        x,
        layer.site(),
        || {
            let [y] = fused(x, None, [layer], Some(residual))?;
            Ok(y)
        },
        || residual.add(&layer.forward(x)?),
    )
}

fn fused<const N: usize>(
    x: &Tensor,
    norm: Option<&RmsNorm>,
    layers: [&Linear; N],
    residual: Option<&Tensor>,
) -> Result<[Tensor; N]> {
    let backend = x.backend();
    let layers: [LinearWeight; N] = layers.map(Linear::raw);
    let args = ProjectArgs {
        x: x.handle(),
        norm: RmsNorm::raw(norm),
        layers: layers.as_ptr(),
        n_layers: N as u32,
        residual: Tensor::handle_of(residual),
        ..ProjectArgs::default()
    };
    let mut out = [Handle::NONE; N];
    command!(backend.table(), project, &args, out.as_mut_ptr())?;
    Ok(out.map(|handle| Tensor::from_handle(backend, handle)))
}
