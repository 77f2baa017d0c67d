// Functions applied element by element. Codes are those of mlxcel_abi::kinds.
#include <cmath>

#include "internal.h"

namespace mlxcel {

namespace {

mx::array scaled(const mx::array& a, double factor) {
  return mx::multiply(a, mx::array(factor, a.dtype()));
}

mx::array plus(const mx::array& a, double term) {
  return mx::add(a, mx::array(term, a.dtype()));
}

// Half types and integers where the formula itself is one of floats.
mx::array as_float(const mx::array& a) {
  return mx::issubdtype(a.dtype(), mx::inexact) ? a : mx::astype(a, mx::float32);
}

mx::array silu(const mx::array& a) {
  auto x = as_float(a);
  return mx::multiply(x, mx::sigmoid(x));
}

mx::array gelu(const mx::array& x) {
  return mx::multiply(scaled(x, 0.5), plus(mx::erf(scaled(x, M_SQRT1_2)), 1.0));
}

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), the approximation of Hendrycks and Gimpel.
mx::array gelu_tanh(const mx::array& x) {
  auto cubic = mx::multiply(x, plus(scaled(mx::square(x), 0.044715), 1.0));
  return mx::multiply(scaled(x, 0.5), plus(mx::tanh(scaled(cubic, std::sqrt(2.0 / M_PI))), 1.0));
}

mx::array gelu_quick(const mx::array& x) {
  return mx::multiply(x, mx::sigmoid(scaled(x, 1.702)));
}

mx::array relu(const mx::array& a) {
  return mx::maximum(a, mx::array(0, a.dtype()));
}

mx::array softplus(const mx::array& x) {
  return mx::logaddexp(x, mx::array(0, x.dtype()));
}

// The processor traps on integer division by zero and of the least number by -1; neither may reach
// it. A division by zero gives zero here.
struct SafeDivisor {
  mx::array zero;
  mx::array minus_one;
  mx::array divisor;
};

SafeDivisor safe_divisor(const mx::array& b) {
  auto zero = mx::equal(b, mx::array(0, b.dtype()));
  auto minus_one = is_signed(b.dtype()) ? mx::equal(b, mx::array(-1, b.dtype())) : mx::array(false);
  auto one = mx::array(1, b.dtype());
  return {zero, minus_one, mx::where(mx::logical_or(zero, minus_one), one, b)};
}

mx::array integer_remainder(const mx::array& a, const mx::array& b) {
  auto safe = safe_divisor(b);
  auto rest = mx::remainder(a, safe.divisor);
  // Anything is a multiple of one, so only the replaced divisors can be wrong, and there 0 is meant.
  return rest;
}

mx::array integer_floor_divide(const mx::array& a, const mx::array& b) {
  auto safe = safe_divisor(b);
  auto whole = mx::subtract(a, mx::remainder(a, safe.divisor));
  auto quotient = mx::floor_divide(whole, safe.divisor);
  if (is_signed(b.dtype())) {
    quotient = mx::where(safe.minus_one, mx::negative(a), quotient);
  }
  return mx::where(safe.zero, mx::array(0, quotient.dtype()), quotient);
}

// Raising to a negative integer power never ends in the library.
mx::array safe_power(const mx::array& a, const mx::array& b) {
  auto dtype = mx::result_type(a, b);
  if (is_signed(dtype) && is_signed(b.dtype())) {
    auto exponent = mx::maximum(b, mx::array(0, b.dtype()));
    auto value = mx::power(a, exponent);
    // 1 / a^n is 0 except for a = 1 and a = -1.
    auto one = mx::equal(a, mx::array(1, a.dtype()));
    auto minus_one = mx::equal(a, mx::array(-1, a.dtype()));
    auto odd = mx::not_equal(mx::bitwise_and(b, mx::array(1, b.dtype())), mx::array(0, b.dtype()));
    auto sign = mx::where(odd, mx::array(-1, value.dtype()), mx::array(1, value.dtype()));
    auto inverse = mx::where(
        one, mx::array(1, value.dtype()), mx::where(minus_one, sign, mx::array(0, value.dtype())));
    return mx::where(mx::less(b, mx::array(0, b.dtype())), inverse, value);
  }
  return mx::power(a, b);
}

// Tensors of two types meet in a third by the library's table: no half type decides over f32.
mx::array apply_binary(uint32_t kind, const mx::array& a, const mx::array& b) {
  auto common = mx::result_type(a, b);
  bool integers = is_integer(common);
  if (kind >= 20 && kind <= 24 && !integers && common != mx::bool_) {
    fail(kInvalidArgument, "bits of ", name_of(a.dtype()), " and ", name_of(b.dtype()), " cannot be combined");
  }
  switch (kind) {
    case 1:
      return mx::add(a, b);
    case 2:
      return mx::subtract(a, b);
    case 3:
      return mx::multiply(a, b);
    case 4:
      return mx::divide(a, b);
    case 5:
      if (integers) {
        return integer_floor_divide(mx::astype(a, common), mx::astype(b, common));
      }
      return mx::floor_divide(as_float(a), as_float(b));
    case 6:
      if (integers) {
        return integer_remainder(mx::astype(a, common), mx::astype(b, common));
      }
      return mx::remainder(as_float(a), as_float(b));
    case 7:
      return safe_power(a, b);
    case 8:
      return mx::minimum(a, b);
    case 9:
      return mx::maximum(a, b);
    case 10:
      return mx::arctan2(a, b);
    case 11:
      return mx::logaddexp(a, b);
    case 12:
      return mx::equal(a, b);
    case 13:
      return mx::not_equal(a, b);
    case 14:
      return mx::less(a, b);
    case 15:
      return mx::less_equal(a, b);
    case 16:
      return mx::greater(a, b);
    case 17:
      return mx::greater_equal(a, b);
    case 18:
      return mx::logical_and(a, b);
    case 19:
      return mx::logical_or(a, b);
    case 20:
      return mx::bitwise_and(a, b);
    case 21:
      return mx::bitwise_or(a, b);
    case 22:
      return mx::bitwise_xor(a, b);
    case 23:
      return mx::left_shift(a, b);
    case 24:
      return mx::right_shift(a, b);
    default:
      fail(kUnimplemented, "binary kind ", kind, " is not known");
  }
}

mx::array apply_unary(uint32_t kind, const mx::array& a) {
  bool is_bool = a.dtype() == mx::bool_;
  switch (kind) {
    case 1:
      return mx::negative(is_bool ? as_float(a) : a);
    case 2:
      return mx::abs(a);
    case 3:
      return mx::sign(is_bool ? as_float(a) : a);
    case 4:
      return mx::exp(a);
    case 5:
      return mx::expm1(a);
    case 6:
      return mx::log(a);
    case 7:
      return mx::log2(a);
    case 8:
      return mx::log10(a);
    case 9:
      return mx::log1p(a);
    case 10:
      return mx::sqrt(a);
    case 11:
      return mx::rsqrt(a);
    case 12:
      return mx::square(a);
    case 13:
      return mx::reciprocal(a);
    case 14:
      return mx::sin(a);
    case 15:
      return mx::cos(a);
    case 16:
      return mx::tan(a);
    case 17:
      return mx::arcsin(a);
    case 18:
      return mx::arccos(a);
    case 19:
      return mx::arctan(a);
    case 20:
      return mx::sinh(a);
    case 21:
      return mx::cosh(a);
    case 22:
      return mx::tanh(a);
    case 23:
      return mx::arcsinh(a);
    case 24:
      return mx::arccosh(a);
    case 25:
      return mx::arctanh(a);
    case 26:
      return mx::erf(a);
    case 27:
      return mx::erfinv(a);
    case 28:
      return mx::sigmoid(a);
    case 29:
      return is_integer(a.dtype()) || is_bool ? a : mx::floor(a);
    case 30:
      return is_integer(a.dtype()) || is_bool ? a : mx::ceil(a);
    case 31:
      return is_integer(a.dtype()) || is_bool ? a : mx::round(a);
    case 32:
      return mx::logical_not(a);
    case 33:
      if (!is_integer(a.dtype()) && !is_bool) {
        fail(kInvalidArgument, "bits of ", name_of(a.dtype()), " cannot be inverted");
      }
      return mx::bitwise_invert(a);
    case 34:
      return mx::isnan(a);
    case 35:
      return mx::isinf(a);
    case 36:
      return mx::isfinite(a);
    case 37:
      return mx::real(a);
    case 38:
      return mx::imag(a);
    case 39:
      return mx::conjugate(a);
    case 40:
      return silu(a);
    case 41:
      return in_f32(a, gelu);
    case 42:
      return in_f32(a, gelu_tanh);
    case 43:
      return in_f32(a, gelu_quick);
    case 44:
      return relu(a);
    case 45:
      return mx::square(relu(a));
    case 46:
      return in_f32(a, softplus);
    case 47:
      return in_f32(a, [](const mx::array& x) { return mx::negative(softplus(mx::negative(x))); });
    default:
      fail(kUnimplemented, "unary kind ", kind, " is not known");
  }
}

// A bound that a type cannot hold either excludes nothing or everything.
std::optional<mx::array> bound(double value, mx::Dtype dtype, bool is_low) {
  if (std::isnan(value)) {
    fail(kInvalidArgument, "a bound is not a number");
  }
  if (!is_integer(dtype)) {
    return constant(value, dtype);
  }
  auto whole = is_low ? std::ceil(value) : std::floor(value);
  int bits = 8 * dtype.size();
  double least = is_signed(dtype) ? -std::ldexp(1.0, bits - 1) : 0.0;
  double above = std::ldexp(1.0, is_signed(dtype) ? bits - 1 : bits);
  bool open = is_low ? whole <= least : whole >= above - 1.0;
  if (open) {
    return std::nullopt;
  }
  return constant(whole, dtype);
}

} // namespace

Out unary(uint32_t kind, const Array& a) {
  return keep(apply_unary(kind, a.value));
}

Out binary(uint32_t kind, const Array& a, const Array& b) {
  return keep(apply_binary(kind, a.value, b.value));
}

Out binary_scalar(uint32_t kind, const Array& a, double scalar, bool scalar_first) {
  auto other = constant(scalar, a.value.dtype());
  if (scalar_first) {
    return keep(apply_binary(kind, other, a.value));
  }
  return keep(apply_binary(kind, a.value, other));
}

Out select(const Array& cond, const Array& a, const Array& b) {
  return keep(mx::where(cond.value, a.value, b.value));
}

Out clip(const Array& a, double low, double high) {
  auto dtype = a.value.dtype();
  auto lower = bound(low, dtype, true);
  auto upper = bound(high, dtype, false);
  if (!lower && !upper) {
    return keep_view(a.value);
  }
  return keep(mx::clip(a.value, lower, upper));
}

Out glu(uint32_t kind, const Array& gate, const Array& up) {
  auto& g = gate.value;
  auto& u = up.value;
  if (g.shape() != u.shape() || !is_float(g.dtype()) || !is_float(u.dtype())) {
    fail(
        kInvalidArgument,
        "gate ",
        name_of(g.dtype()),
        " ",
        text_of(g.shape()),
        " and input ",
        name_of(u.dtype()),
        " ",
        text_of(u.shape()),
        " are not floats of one shape");
  }
  auto dtype = mx::result_type(g, u);
  auto in_wide = [&](auto f) {
    auto wide = is_half(dtype) ? mx::float32 : dtype;
    return keep(mx::astype(mx::multiply(f(mx::astype(g, wide)), mx::astype(u, wide)), dtype));
  };
  switch (kind) {
    case 1:
      return keep(mx::multiply(silu(g), u));
    case 2:
      return in_wide(gelu);
    case 3:
      return in_wide(gelu_tanh);
    case 4:
      return keep(mx::multiply(relu(g), u));
    case 5:
      return keep(mx::multiply(mx::sigmoid(g), u));
    default:
      fail(kUnimplemented, "glu kind ", kind, " is not known");
  }
}

} // namespace mlxcel
