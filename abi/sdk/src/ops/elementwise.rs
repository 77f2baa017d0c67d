//! Elementwise operations.

use mlxcel_abi::DType;
use mlxcel_abi::kinds::{binary, glu, unary};

use crate::backend::Fused;
use crate::{Result, Tensor};

macro_rules! unary_methods {
    ($($(#[$meta:meta])* $name:ident = $kind:ident;)*) => {
        impl Tensor {
            $($(#[$meta])*
            pub fn $name(&self) -> Result<Tensor> { self.unary(unary::$kind) })*
        }
    };
}

macro_rules! binary_methods {
    ($($(#[$meta:meta])* $name:ident, $scalar:ident = $kind:ident;)*) => {
        impl Tensor {
            $($(#[$meta])*
            pub fn $name(&self, other: &Tensor) -> Result<Tensor> { self.binary(binary::$kind, other) }
            $(#[$meta])*
            pub fn $scalar(&self, scalar: f64) -> Result<Tensor> {
                self.binary_scalar(binary::$kind, scalar)
            })*
        }
    };
}

unary_methods! {
    /// `-x`.
    neg = NEG;
    /// `|x|`.
    abs = ABS;
    /// `e^x`.
    exp = EXP;
    /// Natural logarithm.
    log = LOG;
    /// `log(1 + x)`.
    log1p = LOG1P;
    /// Square root.
    sqrt = SQRT;
    /// `1 / sqrt(x)`.
    rsqrt = RSQRT;
    /// `x^2`.
    square = SQUARE;
    /// `1 / x`.
    reciprocal = RECIPROCAL;
    /// Sine.
    sin = SIN;
    /// Cosine.
    cos = COS;
    /// Hyperbolic tangent.
    tanh = TANH;
    /// Error function.
    erf = ERF;
    /// Logistic function.
    sigmoid = SIGMOID;
    /// `x * sigmoid(x)`.
    silu = SILU;
    /// Exact GELU.
    gelu = GELU;
    /// GELU, tanh approximation.
    gelu_tanh = GELU_TANH;
    /// `x * sigmoid(1.702 x)`.
    gelu_quick = GELU_QUICK;
    /// `max(x, 0)`.
    relu = RELU;
    /// `max(x, 0)^2`.
    relu_squared = RELU_SQUARED;
    /// `log(1 + e^x)`.
    softplus = SOFTPLUS;
    /// Largest integer not above x.
    floor = FLOOR;
    /// Smallest integer not below x.
    ceil = CEIL;
    /// Nearest integer, ties to even.
    round = ROUND;
    /// Logical not.
    logical_not = LOGICAL_NOT;
}

binary_methods! {
    /// Sum.
    add, add_scalar = ADD;
    /// Difference.
    sub, sub_scalar = SUB;
    /// Product.
    mul, mul_scalar = MUL;
    /// Quotient.
    div, div_scalar = DIV;
    /// Floored quotient.
    floor_div, floor_div_scalar = FLOOR_DIV;
    /// Remainder with the sign of the divisor.
    rem, rem_scalar = REM;
    /// Power.
    pow, pow_scalar = POW;
    /// Smaller of two.
    minimum, minimum_scalar = MIN;
    /// Larger of two.
    maximum, maximum_scalar = MAX;
    /// Equal.
    eq, eq_scalar = EQ;
    /// Not equal.
    ne, ne_scalar = NE;
    /// Less.
    lt, lt_scalar = LT;
    /// Less or equal.
    le, le_scalar = LE;
    /// Greater.
    gt, gt_scalar = GT;
    /// Greater or equal.
    ge, ge_scalar = GE;
    /// Logical and.
    logical_and, logical_and_scalar = LOGICAL_AND;
    /// Logical or.
    logical_or, logical_or_scalar = LOGICAL_OR;
}

impl Tensor {
    /// One of [`mlxcel_abi::kinds::unary`].
    pub fn unary(&self, kind: u32) -> Result<Tensor> {
        op!(self.backend(), unary, kind, self.handle())
    }

    /// One of [`mlxcel_abi::kinds::binary`].
    pub fn binary(&self, kind: u32, other: &Tensor) -> Result<Tensor> {
        op!(self.backend(), binary, kind, self.handle(), other.handle())
    }

    /// `self ? scalar`, the scalar in this tensor's dtype.
    pub fn binary_scalar(&self, kind: u32, scalar: f64) -> Result<Tensor> {
        op!(
            self.backend(),
            binary_scalar,
            kind,
            self.handle(),
            scalar,
            0
        )
    }

    /// `scalar ? self`.
    pub fn scalar_binary(&self, kind: u32, scalar: f64) -> Result<Tensor> {
        op!(
            self.backend(),
            binary_scalar,
            kind,
            self.handle(),
            scalar,
            1
        )
    }

    /// Converts the elements.
    pub fn cast(&self, dtype: DType) -> Result<Tensor> {
        if self.dtype()? == dtype {
            return Ok(self.clone());
        }
        op!(self.backend(), cast, self.handle(), dtype)
    }

    /// Reinterprets the bytes.
    pub fn view(&self, dtype: DType) -> Result<Tensor> {
        op!(self.backend(), view, self.handle(), dtype)
    }

    /// `self ? a : b`.
    pub fn select(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        op!(
            self.backend(),
            select,
            self.handle(),
            a.handle(),
            b.handle()
        )
    }

    /// Limits to `[low, high]`.
    pub fn clip(&self, low: f64, high: f64) -> Result<Tensor> {
        op!(self.backend(), clip, self.handle(), low, high)
    }

    /// `f(self) * up`; `kind` is one of [`mlxcel_abi::kinds::glu`].
    pub fn glu(&self, kind: u32, up: &Tensor) -> Result<Tensor> {
        self.backend().fused_or(
            Fused::Glu,
            self,
            || op!(self.backend(), glu, kind, self.handle(), up.handle()),
            || {
                let gate = match kind {
                    glu::SILU => self.silu(),
                    glu::GELU => self.gelu(),
                    glu::GELU_TANH => self.gelu_tanh(),
                    glu::RELU => self.relu(),
                    glu::SIGMOID => self.sigmoid(),
                    // Lets the backend name the unknown code.
                    other => op!(self.backend(), glu, other, self.handle(), up.handle()),
                }?;
                gate.mul(up)
            },
        )
    }
}
