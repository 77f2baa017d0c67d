//! Codes of operations that share one slot: elementwise functions, reductions, orders and so on.
//!
//! A backend that does not know a code answers `UNIMPLEMENTED`, exactly as for a missing slot, so
//! new codes can be added without a new slot. Codes are never renumbered.

macro_rules! kinds {
    ($($(#[$meta:meta])* pub mod $group:ident { $($name:ident = $value:literal, $text:literal;)* })*) => {
        $($(#[$meta])*
        #[allow(missing_docs)]
        pub mod $group {
            $(pub const $name: u32 = $value;)*

            /// Every code of this build with its name.
            pub const ALL: &[(u32, &str)] = &[$(($value, $text),)*];

            /// The code's name, or `unknown`.
            pub fn name(code: u32) -> &'static str {
                match code { $($value => $text,)* _ => "unknown" }
            }
        })*

        /// Every group for the surface dump.
        pub const GROUPS: &[(&str, &[(u32, &str)])] = &[$((stringify!($group), $group::ALL),)*];
    };
}

kinds! {
    /// Elementwise functions of one tensor. Floating functions keep f16/bf16/f32; integers and
    /// bool become f32 where the function is not defined on them.
    pub mod unary {
        NEG = 1, "neg"; ABS = 2, "abs"; SIGN = 3, "sign"; EXP = 4, "exp"; EXPM1 = 5, "expm1";
        LOG = 6, "log"; LOG2 = 7, "log2"; LOG10 = 8, "log10"; LOG1P = 9, "log1p";
        SQRT = 10, "sqrt"; RSQRT = 11, "rsqrt"; SQUARE = 12, "square"; RECIPROCAL = 13, "reciprocal";
        SIN = 14, "sin"; COS = 15, "cos"; TAN = 16, "tan"; ASIN = 17, "asin"; ACOS = 18, "acos";
        ATAN = 19, "atan"; SINH = 20, "sinh"; COSH = 21, "cosh"; TANH = 22, "tanh";
        ASINH = 23, "asinh"; ACOSH = 24, "acosh"; ATANH = 25, "atanh"; ERF = 26, "erf";
        ERFINV = 27, "erfinv"; SIGMOID = 28, "sigmoid"; FLOOR = 29, "floor"; CEIL = 30, "ceil";
        ROUND = 31, "round"; LOGICAL_NOT = 32, "logical_not"; BIT_NOT = 33, "bit_not";
        IS_NAN = 34, "is_nan"; IS_INF = 35, "is_inf"; IS_FINITE = 36, "is_finite";
        REAL = 37, "real"; IMAG = 38, "imag"; CONJ = 39, "conj";
        SILU = 40, "silu"; GELU = 41, "gelu"; GELU_TANH = 42, "gelu_tanh";
        GELU_QUICK = 43, "gelu_quick"; RELU = 44, "relu"; RELU_SQUARED = 45, "relu_squared";
        SOFTPLUS = 46, "softplus"; LOG_SIGMOID = 47, "log_sigmoid";
    }
    /// Elementwise functions of two broadcast tensors. Comparisons and logical ones give bool.
    /// Operands of different types meet in the type that holds both, as in MLX: f16 with f32 is f32,
    /// f16 with bf16 is f32, an integer with a float is the float.
    pub mod binary {
        ADD = 1, "add"; SUB = 2, "sub"; MUL = 3, "mul"; DIV = 4, "div"; FLOOR_DIV = 5, "floor_div";
        REM = 6, "rem"; POW = 7, "pow"; MIN = 8, "min"; MAX = 9, "max"; ATAN2 = 10, "atan2";
        LOGADDEXP = 11, "logaddexp"; EQ = 12, "eq"; NE = 13, "ne"; LT = 14, "lt"; LE = 15, "le";
        GT = 16, "gt"; GE = 17, "ge"; LOGICAL_AND = 18, "logical_and"; LOGICAL_OR = 19, "logical_or";
        BIT_AND = 20, "bit_and"; BIT_OR = 21, "bit_or"; BIT_XOR = 22, "bit_xor";
        SHL = 23, "shl"; SHR = 24, "shr";
    }
    /// Reductions. They accumulate half types in f32 and return the input's float type. Sums and
    /// products of integers narrower than 32 bits are i32 (u32 for unsigned ones), mean and variance
    /// of integers f32.
    pub mod reduce {
        SUM = 1, "sum"; MEAN = 2, "mean"; PROD = 3, "prod"; MAX = 4, "max"; MIN = 5, "min";
        ALL_OF = 6, "all_of"; ANY_OF = 7, "any_of"; VAR = 8, "var"; LOGSUMEXP = 9, "logsumexp";
    }
    /// Index of an extreme element; ties go to the lowest index. Result u32.
    pub mod arg_reduce { ARGMAX = 1, "argmax"; ARGMIN = 2, "argmin"; }
    /// Running reductions along one axis.
    pub mod cumulative {
        CUMSUM = 1, "cumsum"; CUMPROD = 2, "cumprod"; CUMMAX = 3, "cummax"; CUMMIN = 4, "cummin";
        LOGCUMSUMEXP = 5, "logcumsumexp";
    }
    /// Sorting along one axis, ascending. `k`: position for partitions, count for the largest `k`
    /// (whose order among themselves is not defined). Index results are u32.
    pub mod order {
        SORT = 1, "sort"; ARGSORT = 2, "argsort"; PARTITION = 3, "partition";
        ARGPARTITION = 4, "argpartition"; TOPK = 5, "topk";
    }
    /// What a scatter does where it writes.
    pub mod scatter { SET = 1, "set"; ADD = 2, "add"; MUL = 3, "mul"; MAX = 4, "max"; MIN = 5, "min"; }
    /// Gated activations: `f(gate) * up`.
    pub mod glu { SILU = 1, "silu"; GELU = 2, "gelu"; GELU_TANH = 3, "gelu_tanh"; RELU = 4, "relu"; SIGMOID = 5, "sigmoid"; }
    /// Fourier transforms over the given axes, unnormalised forward and 1/n backward.
    pub mod fft { FFT = 1, "fft"; IFFT = 2, "ifft"; RFFT = 3, "rfft"; IRFFT = 4, "irfft"; }
    /// Random draws. Parameters `a`, `b`: uniform low and high, normal mean and deviation,
    /// bernoulli probability. Categorical draws along the last axis of the logits given.
    pub mod random {
        BITS = 1, "bits"; UNIFORM = 2, "uniform"; NORMAL = 3, "normal"; GUMBEL = 4, "gumbel";
        BERNOULLI = 5, "bernoulli"; CATEGORICAL = 6, "categorical";
    }
    /// Quantisation modes. Affine: w = scale * q + bias. The others are block floating formats of
    /// the OCP microscaling specification and NVIDIA's nvfp4, without biases.
    pub mod quant { AFFINE = 1, "affine"; MXFP4 = 2, "mxfp4"; MXFP8 = 3, "mxfp8"; NVFP4 = 4, "nvfp4"; CENTRED = 5, "centred"; }
    /// Masks of dense attention.
    pub mod mask { NONE = 0, "none"; CAUSAL = 1, "causal"; TENSOR = 2, "tensor"; }
    /// Log levels.
    pub mod log { ERROR = 1, "error"; WARN = 2, "warn"; INFO = 3, "info"; DEBUG = 4, "debug"; TRACE = 5, "trace"; }
    /// Kinds of plugin.
    pub mod plugin { FAMILY = 1, "family"; BACKEND = 2, "backend"; }
}

/// The code of `text` in one of the groups' `ALL` lists.
pub fn code_of(group: &[(u32, &str)], text: &str) -> Option<u32> {
    group
        .iter()
        .find(|(_, name)| *name == text)
        .map(|(code, _)| *code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_are_unique_within_a_group() {
        for (group, all) in GROUPS {
            for (i, (code, name)) in all.iter().enumerate() {
                let clash = all[i + 1..].iter().any(|(c, n)| c == code || n == name);
                assert!(!clash, "{group}: {name} = {code} is not unique");
            }
        }
    }

    #[test]
    fn names_find_their_codes() {
        assert_eq!(code_of(unary::ALL, "silu"), Some(unary::SILU));
        assert_eq!(unary::name(9999), "unknown");
    }
}
