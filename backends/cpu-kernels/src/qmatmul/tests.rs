use super::*;
use crate::quantized::testing::*;

/// `(rows, columns, bits, group)`.
const FORMS: [(usize, usize, usize, usize); 34] = [
    (9, 32, 4, 32),
    (6, 576, 4, 32),
    (5, 192, 4, 64),
    (4, 384, 4, 128),
    (7, 96, 8, 32),
    (3, 256, 8, 128),
    (5, 160, 2, 32),
    (6, 192, 3, 64),
    (4, 96, 5, 32),
    (9, 640, 5, 32),
    (5, 128, 6, 128),
    (8, 64, 6, 64),
    (11, 2048, 4, 64),
    (9, 288, 6, 16),
    (5, 96, 3, 16),
    (6, 64, 8, 16),
    (7, 1056, 2, 16),
    (4, 160, 4, 16),
    // Ragged tails of blocks of 128, in every width and group.
    (9, 224, 8, 32),
    (7, 352, 5, 32),
    (10, 288, 6, 32),
    (6, 192, 2, 64),
    (8, 320, 3, 64),
    (5, 896, 8, 64),
    (9, 384, 8, 128),
    (7, 640, 5, 128),
    (6, 224, 6, 16),
    (11, 416, 5, 16),
    // Whole blocks of 256 with one and two halves behind them, and wide ones.
    (9, 416, 8, 32),
    (6, 544, 6, 16),
    (5, 480, 5, 32),
    (7, 768, 3, 64),
    (6, 2720, 5, 32),
    (5, 2688, 8, 16),
];

fn run_all(
    precision: Precision,
    check: impl Fn(&Parts, &[f32], &[f32], (usize, usize, usize, usize), usize, &str),
) {
    let mut numbers = Numbers(9);
    let mut pool = Pool::new(2).unwrap();
    let mut prepared = Prepared::default();
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        for m in [1, 2, 3, 4, 5, 7, 8, 16] {
            for form in FORMS {
                let (rows, columns, bits, group) = form;
                let parts = parts(&mut numbers, rows, columns, bits, group);
                let x = numbers.floats(m * columns);
                let mut y = vec![f32::NAN; m * rows];
                let w = parts.matrix(rows, columns, bits, group);
                let mut targets = [Target { w, y: &mut y }];
                assert!(matmul(
                    isa,
                    precision,
                    &mut pool,
                    &x,
                    &mut targets,
                    &mut prepared
                ));
                check(&parts, &x, &y, form, m, isa.name());
            }
        }
    }
}

#[test]
fn exact_products_match_f64_for_every_row_count_form_and_instruction_set() {
    run_all(
        Precision::Exact,
        |parts, x, y, (rows, columns, bits, group), m, isa| {
            for i in 0..m {
                let x = &x[i * columns..(i + 1) * columns];
                // Scale and bias are split apart, so the error is relative to their sums.
                let size: f64 =
                    x.iter().map(|x| f64::from(x.abs())).sum::<f64>() * f64::from(1u32 << bits);
                for j in 0..rows {
                    let terms = x
                        .iter()
                        .enumerate()
                        .map(|(k, x)| f64::from(*x) * parts.element(j, k, columns, bits, group));
                    let (want, got) = (terms.sum::<f64>(), f64::from(y[i * rows + j]));
                    assert!(
                        (got - want).abs() <= 2e-6 * size,
                        "{isa} {m} {rows}x{columns} {bits}/{group}: {got} {want}"
                    );
                }
            }
        },
    );
}

/// Against f64 with the activations rounded as they should be; `error` is relative to the sum of the
/// sizes. A tie of the rounding may fall either way.
fn rounded_products_match(precision: Precision, limit: f32, error: f64) {
    run_all(
        precision,
        |parts, x, y, (rows, columns, bits, group), m, isa| {
            for i in 0..m {
                let x: Vec<f64> = x[i * columns..(i + 1) * columns]
                    .chunks_exact(QUANT_GROUP)
                    .flat_map(|g| {
                        let largest = g.iter().fold(0.0f32, |a, x| a.max(x.abs()));
                        let scale = f64::from(largest / limit);
                        g.iter()
                            .map(move |x| {
                                f64::from((x * (limit / largest)).round_ties_even()) * scale
                            })
                            .collect::<Vec<_>>()
                    })
                    .collect();
                let size: f64 = x.iter().map(|x| x.abs()).sum::<f64>() * f64::from(1u32 << bits);
                for j in 0..rows {
                    let terms = x
                        .iter()
                        .enumerate()
                        .map(|(k, x)| x * parts.element(j, k, columns, bits, group));
                    let (want, got) = (terms.sum::<f64>(), f64::from(y[i * rows + j]));
                    assert!(
                        (got - want).abs() <= error * size,
                        "{isa} {m} {rows}x{columns} {bits}/{group}: {got} {want}"
                    );
                }
            }
        },
    );
}

#[test]
fn products_in_8_bits_are_those_of_the_rounded_activations() {
    rounded_products_match(Precision::Int8, 127.0, 1e-4);
}

#[test]
fn products_in_16_bits_are_those_of_the_rounded_activations() {
    rounded_products_match(Precision::Int16, 32767.0, 2e-6);
}

/// The largest integers that there are: every code and every activation at its limit.
#[test]
fn sums_of_the_largest_codes_do_not_overflow() {
    let mut pool = Pool::new(1).unwrap();
    let mut prepared = Prepared::default();
    let columns = 128;
    for (bits, group) in [(8, 128), (8, 16), (4, 128), (6, 32)] {
        let words = vec![u32::MAX; 5 * columns * bits / 32];
        let (scales, biases) = (
            vec![1.0; 5 * columns / group],
            vec![0.0; 5 * columns / group],
        );
        let (s, b) = (Scales::F32(&scales), Scales::F32(&biases));
        let w = QuantizedMatrix::new(&words, s, b, 5, columns, bits, group).unwrap();
        let want = f64::from((1u32 << bits) - 1) * columns as f64;
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for (precision, sign) in [Precision::Int8, Precision::Int16]
                .into_iter()
                .flat_map(|p| [(p, 1.0f32), (p, -1.0)])
            {
                let mut y = vec![0.0; 5];
                let mut targets = [Target { w, y: &mut y }];
                let x = vec![sign * 1e20; columns];
                assert!(matmul(
                    isa,
                    precision,
                    &mut pool,
                    &x,
                    &mut targets,
                    &mut prepared
                ));
                for got in y {
                    let want = want * f64::from(sign * 1e20);
                    assert!((f64::from(got) / want - 1.0).abs() < 1e-5, "{}", isa.name());
                }
            }
        }
    }
}

#[test]
fn several_weights_share_their_activations() {
    let mut numbers = Numbers(12);
    let mut pool = Pool::new(2).unwrap();
    let mut prepared = Prepared::default();
    let forms = [(150, 4, 32), (70, 8, 64), (33, 5, 128), (2, 4, 128)];
    let parts: Vec<Parts> = forms
        .iter()
        .map(|&(rows, bits, group)| parts(&mut numbers, rows, 256, bits, group))
        .collect();
    let x = numbers.floats(3 * 256);
    for precision in [Precision::Exact, Precision::Int16, Precision::Int8] {
        let mut together: Vec<Vec<f32>> = forms.iter().map(|f| vec![f32::NAN; 3 * f.0]).collect();
        let mut targets: Vec<Target<'_>> = parts
            .iter()
            .zip(forms)
            .zip(&mut together)
            .map(|((parts, (rows, bits, group)), y)| Target {
                w: parts.matrix(rows, 256, bits, group),
                y,
            })
            .collect();
        assert!(matmul(
            Isa::best(),
            precision,
            &mut pool,
            &x,
            &mut targets,
            &mut prepared
        ));
        for ((parts, (rows, bits, group)), together) in parts.iter().zip(forms).zip(&together) {
            let mut y = vec![f32::NAN; 3 * rows];
            let mut alone = [Target {
                w: parts.matrix(rows, 256, bits, group),
                y: &mut y,
            }];
            assert!(matmul(
                Isa::best(),
                precision,
                &mut pool,
                &x,
                &mut alone,
                &mut prepared
            ));
            assert_eq!(&y, together);
        }
    }
}

#[test]
fn not_a_number_never_becomes_a_plausible_product() {
    let mut numbers = Numbers(13);
    let mut pool = Pool::new(1).unwrap();
    let mut prepared = Prepared::default();
    let parts = parts(&mut numbers, 8, 128, 4, 32);
    for precision in [Precision::Exact, Precision::Int16, Precision::Int8] {
        let mut x = numbers.floats(2 * 128);
        x[70] = f32::NAN;
        let mut y = vec![0.0; 16];
        let mut targets = [Target {
            w: parts.matrix(8, 128, 4, 32),
            y: &mut y,
        }];
        assert!(matmul(
            Isa::best(),
            precision,
            &mut pool,
            &x,
            &mut targets,
            &mut prepared
        ));
        assert!(y[..8].iter().all(|y| y.is_nan()) && y[8..].iter().all(|y| y.is_finite()));
    }
}

/// Widths on both sides of where rows are read in order, ragged tails, every form: the bits of a row do
/// not depend on the rows beside it.
#[test]
fn a_row_gives_the_same_bits_in_a_batch_as_alone() {
    let mut numbers = Numbers(14);
    let mut pool = Pool::new(2).unwrap();
    let mut prepared = Prepared::default();
    for (columns, bits, group) in [
        (896, 8, 32),
        (2080, 8, 32),
        (640, 5, 32),
        (5152, 5, 32),
        (96, 3, 32),
        (1056, 6, 16),
        (4864, 6, 16),
        (160, 2, 16),
        (576, 4, 32),
    ] {
        let rows = 11;
        let parts = parts(&mut numbers, rows, columns, bits, group);
        let x = numbers.floats(16 * columns);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for precision in [Precision::Int16, Precision::Int8] {
                let mut product = |x: &[f32]| {
                    let mut y = vec![f32::NAN; x.len() / columns * rows];
                    let w = parts.matrix(rows, columns, bits, group);
                    let mut targets = [Target { w, y: &mut y }];
                    let done = matmul(isa, precision, &mut pool, x, &mut targets, &mut prepared);
                    assert!(done);
                    y
                };
                let alone: Vec<f32> = x.chunks_exact(columns).flat_map(&mut product).collect();
                for m in [2, 3, 4, 7, 8, 16] {
                    let y = product(&x[..m * columns]);
                    let same = y
                        .iter()
                        .zip(&alone)
                        .all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{} {m} {columns} {bits}/{group}", isa.name());
                }
            }
        }
    }
}
