//! Logits and greedy tokens of the reference implementations on the reference backend, which is
//! another computation than the one of `tests/tests/goldens/deepseek.rs`: no MLX, no host, dense caches.

#![expect(
    clippy::unwrap_used,
    reason = "a helper of tests that fails is a failed test"
)]

use std::path::Path;

use mlxcel_family_deepseek as _;
use mlxcel_sdk::testkit::{FamilyUnderTest, Golden, ReferenceOptions, reference_backend};

/// Logits of the tiny checkpoints range over 6 to 20.
const TOLERANCE: f32 = 2e-4;

fn check(variant: &str) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/deepseek");
    let golden = Golden::read(&root.join(variant)).unwrap();
    let family = FamilyUnderTest::of_golden(&golden).unwrap();
    let reference = reference_backend(ReferenceOptions::default());
    family
        .check_golden(&golden, &reference.backend(), TOLERANCE)
        .unwrap();
}

macro_rules! goldens {
    ($($test:ident: $variant:literal;)*) => {$(
        #[test]
        fn $test() {
            check($variant);
        }
    )*};
}

goldens! {
    deepseek: "deepseek";
    v2: "v2";
    v2_lite: "v2-lite";
    v2_yarn_bias: "v2-yarn-bias";
    v3: "v3";
    v3_plain: "v3-plain";
    v3_fused: "v3-fused";
    v32: "v32";
    v32_yarn: "v32-yarn";
    v4: "v4";
    v4_long: "v4-long";
    v4_4bit: "v4-4bit";
    v4_mxfp4: "v4-mxfp4";
    mlx_deepseek_4bit: "mlx-deepseek-4bit";
    mlx_v2_4bit: "mlx-v2-4bit";
    mlx_v3_4bit: "mlx-v3-4bit";
    mlx_v3_mxfp4: "mlx-v3-mxfp4";
    mlx_v3_bf16: "mlx-v3-bf16";
    mlx_v32_4bit: "mlx-v32-4bit";
}
