//! Fourier transforms.

use mlxcel_abi::kinds::fft as kind;
use mlxcel_abi::{DType, status};

use super::array::{Array, Layout};
use super::suite::Suite;
use super::tolerance::Tolerance;

pub(super) fn run(suite: &mut Suite<'_>) {
    full(suite);
    real(suite);
    there_and_back(suite);
    refusals(suite);
}

/// Sums of `n` terms of magnitude 2.
fn near(n: i64) -> Tolerance {
    Tolerance::units(16.0, 16.0).floor(2.0 * (n as f64).sqrt())
}

/// Shapes, sizes (0 keeps an axis) and axes; lengths are powers of two, mixed, and prime.
const PLANS: [(&[i64], &[i64], &[i32]); 9] = [
    (&[8], &[0], &[0]),
    (&[3, 12], &[0], &[-1]),
    (&[7, 2], &[0], &[0]),
    (&[2, 13], &[0], &[1]),
    (&[2, 9], &[6], &[1]),
    (&[2, 6], &[10], &[1]),
    (&[4, 6], &[0, 0], &[0, 1]),
    (&[2, 4, 6], &[0, 5], &[2, 1]),
    (&[1, 400], &[0], &[1]),
];

fn full(suite: &mut Suite<'_>) {
    for (dims, n, axes) in PLANS {
        let count: i64 = axes
            .iter()
            .map(|&axis| dims[(axis + if axis < 0 { dims.len() as i32 } else { 0 }) as usize])
            .product();
        for code in [kind::FFT, kind::IFFT] {
            let array = Array::complex(dims, 1);
            let case = format!("{} c64 {dims:?} to {n:?} over {axes:?}", kind::name(code));
            suite.check("fft", case, near(count), |b| {
                array.on(b)?.fft(code, n, axes)
            });
        }
        let array = Array::usual(DType::F32, dims, 2);
        suite.check(
            "fft",
            format!("fft f32 {dims:?} to {n:?} over {axes:?}"),
            near(count),
            |b| array.on(b)?.fft(kind::FFT, n, axes),
        );
    }
    let array = Array::complex(&[4, 6], 3);
    for layout in [Layout::Transposed, Layout::Strided] {
        suite.check("fft", format!("fft c64 {layout:?}"), near(6), |b| {
            array.laid_out(b, layout)?.fft(kind::FFT, &[0], &[1])
        });
    }
}

fn real(suite: &mut Suite<'_>) {
    for (dims, n, axes) in PLANS {
        let array = Array::usual(DType::F32, dims, 4);
        let case = format!("rfft {dims:?} to {n:?} over {axes:?}");
        suite.check("fft", case, near(400), |b| {
            array.on(b)?.fft(kind::RFFT, n, axes)
        });
    }
    for dtype in [DType::F16, DType::BF16] {
        let array = Array::usual(dtype, &[2, 16], 5);
        suite.check("fft", format!("rfft {}", dtype.name()), near(16), |b| {
            array.on(b)?.fft(kind::RFFT, &[0], &[1])
        });
    }
    // A spectrum whose first and middle values are real, as every real signal's is.
    for size in [6i64, 7, 16] {
        let signal = Array::usual(DType::F32, &[3, size], 6);
        suite.check("fft", format!("irfft to {size}"), near(16), |b| {
            signal
                .on(b)?
                .fft(kind::RFFT, &[0], &[1])?
                .fft(kind::IRFFT, &[size], &[1])
        });
    }
    let signal = Array::usual(DType::F32, &[4, 8], 7);
    suite.check("fft", "irfft over two axes", near(32), |b| {
        signal
            .on(b)?
            .fft(kind::RFFT, &[0, 0], &[0, 1])?
            .fft(kind::IRFFT, &[0, 0], &[0, 1])
    });
}

fn there_and_back(suite: &mut Suite<'_>) {
    for size in [8i64, 12, 7, 31] {
        let array = Array::complex(&[2, size], 8);
        suite.holds("fft", format!("ifft undoes fft of {size}"), |b| {
            let back = array
                .on(b)
                .and_then(|a| a.fft(kind::FFT, &[0], &[1])?.fft(kind::IFFT, &[0], &[1]));
            let back = back
                .and_then(|back| Array::read(&back))
                .map_err(|e| e.to_string())?;
            let pairs = back
                .0
                .complexes()
                .into_owned()
                .into_iter()
                .zip(array.0.complexes().into_owned());
            let worst = pairs
                .map(|(a, b)| (a[0] - b[0]).abs().max((a[1] - b[1]).abs()))
                .fold(0.0, f64::max);
            if worst < 1e-5 {
                Ok(())
            } else {
                Err(format!("off by {worst}"))
            }
        });
    }
}

fn refusals(suite: &mut Suite<'_>) {
    let bad = status::INVALID_ARGUMENT;
    let array = Array::usual(DType::F32, &[2, 4], 9);
    suite.refuses("fft", "axis 2 of [2, 4]", bad, |b| {
        array.on(b)?.fft(kind::FFT, &[0], &[2])
    });
    suite.refuses("fft", "an axis given twice", bad, |b| {
        array.on(b)?.fft(kind::FFT, &[0, 0], &[1, 1])
    });
    suite.refuses("fft", "an unknown transform", status::UNIMPLEMENTED, |b| {
        array.on(b)?.fft(9999, &[0], &[1])
    });
}
