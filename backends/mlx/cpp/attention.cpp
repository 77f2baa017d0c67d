// Attention over given keys and values.
#include <cmath>
#include <limits>

#include "internal.h"
#include "mlx/fast.h"

namespace mlxcel {

namespace {

// [Tq, Tk], true where a query sees a key: the last query stands at the last key, and sees `window`
// keys back from its own.
mx::array causal_mask(int queries, int keys, uint32_t window) {
  auto own = mx::reshape(mx::arange(keys - queries, keys, mx::int32), {queries, 1});
  auto key = mx::reshape(mx::arange(0, keys, mx::int32), {1, keys});
  auto seen = mx::less_equal(key, own);
  if (window > 0 && window < static_cast<uint32_t>(keys)) {
    auto first = mx::subtract(own, mx::array(static_cast<int>(window)));
    seen = mx::logical_and(seen, mx::greater(key, first));
  }
  return seen;
}

// All of it in f32: a soft cap between the product and the softmax is no part of the library's.
mx::array composed(const AttentionInputs& in) {
  auto dtype = mx::float32;
  int batch = in.q.shape(0), heads = in.q.shape(1), queries = in.q.shape(2), width = in.q.shape(3);
  int kv_heads = in.k.shape(1), keys = in.k.shape(2);
  int repeats = heads / kv_heads;
  auto q = mx::multiply(mx::astype(in.q, dtype), mx::array(in.scale));
  q = mx::reshape(q, {batch, kv_heads, repeats, queries, width});
  auto k = mx::expand_dims(mx::astype(in.k, dtype), 2);
  auto v = mx::expand_dims(mx::astype(in.v, dtype), 2);
  auto scores = mx::matmul(q, mx::swapaxes(k, -1, -2));
  auto cap = mx::array(in.softcap);
  scores = mx::multiply(mx::tanh(mx::divide(scores, cap)), cap);
  auto mask = in.mask;
  if (in.causal) {
    mask = causal_mask(queries, keys, 0);
  }
  if (mask) {
    auto full = mx::broadcast_to(*mask, {batch, heads, queries, keys});
    full = mx::reshape(full, {batch, kv_heads, repeats, queries, keys});
    if (full.dtype() == mx::bool_) {
      scores = mx::where(full, scores, mx::array(std::numeric_limits<float>::lowest()));
    } else {
      scores = mx::add(scores, mx::astype(full, dtype));
    }
  }
  if (in.sinks) {
    auto sinks = mx::reshape(mx::astype(*in.sinks, dtype), {1, kv_heads, repeats, 1, 1});
    sinks = mx::broadcast_to(sinks, {batch, kv_heads, repeats, queries, 1});
    scores = mx::softmax(mx::concatenate({sinks, scores}, -1), -1, true);
    scores = mx::slice(scores, {0, 0, 0, 0, 1}, {batch, kv_heads, repeats, queries, keys + 1});
  } else {
    scores = mx::softmax(scores, -1, true);
  }
  return mx::reshape(mx::matmul(scores, v), {batch, heads, queries, in.v.shape(3)});
}

void check_inputs(const AttentionInputs& in) {
  auto& q = in.q;
  auto& k = in.k;
  auto& v = in.v;
  bool fits = q.ndim() == 4 && k.ndim() == 4 && v.ndim() == 4 && q.shape(0) == k.shape(0) &&
      q.shape(0) == v.shape(0) && q.shape(3) == k.shape(3) && k.shape(1) == v.shape(1) &&
      k.shape(2) == v.shape(2) && k.shape(1) > 0 && q.shape(1) % k.shape(1) == 0;
  if (!fits) {
    fail(
        kInvalidArgument,
        "queries, keys and values do not fit together: ",
        text_of(q.shape()),
        ", ",
        text_of(k.shape()),
        ", ",
        text_of(v.shape()));
  }
  if (!is_float(q.dtype()) || !is_float(k.dtype()) || !is_float(v.dtype())) {
    fail(kInvalidArgument, "attention needs floats");
  }
  if (k.shape(2) == 0) {
    fail(kInvalidArgument, "attention over no keys");
  }
  if (!(in.softcap >= 0.0f)) {
    fail(kInvalidArgument, "a soft cap cannot be ", in.softcap);
  }
  if (in.mask && in.mask->dtype() != mx::bool_ && !is_float(in.mask->dtype())) {
    fail(kInvalidArgument, "a mask is bool or float, found ", name_of(in.mask->dtype()));
  }
  if (in.sinks && (in.sinks->ndim() != 1 || in.sinks->shape(0) != q.shape(1))) {
    fail(kInvalidArgument, "sinks ", text_of(in.sinks->shape()), " do not fit ", q.shape(1), " heads");
  }
}

} // namespace

mx::array attend(const AttentionInputs& in) {
  check_inputs(in);
  auto dtype = in.q.dtype();
  mx::Shape shape{in.q.shape(0), in.q.shape(1), in.q.shape(2), in.v.shape(3)};
  if (in.q.size() == 0) {
    return mx::zeros(shape, dtype);
  }
  check_bytes({in.q.shape(0), in.q.shape(1), in.q.shape(2), in.k.shape(2)}, sizeof(float));
  if (in.softcap > 0.0f) {
    return mx::astype(composed(in), dtype);
  }
  // Half types are slow on the CPU, and products of scores lose digits in them.
  auto inner = on_cpu() && is_half(dtype) ? mx::float32 : dtype;
  auto mask = in.mask;
  if (mask && mask->dtype() != mx::bool_) {
    mask = mx::astype(*mask, inner);
  }
  auto sinks = in.sinks ? std::optional(mx::astype(*in.sinks, inner)) : std::nullopt;
  auto out = mx::fast::scaled_dot_product_attention(
      mx::astype(in.q, inner),
      mx::astype(in.k, inner),
      mx::astype(in.v, inner),
      in.scale,
      in.causal ? "causal" : (mask ? "array" : ""),
      mask,
      sinks);
  return mx::astype(out, dtype);
}

Out attention(const AttentionSpec& spec) {
  AttentionInputs in{
      spec.q.value,
      spec.k.value,
      spec.v.value,
      spec.scale,
      spec.softcap,
      spec.causal,
      optional_of(spec.mask),
      optional_of(spec.sinks)};
  if (spec.causal && spec.window > 0) {
    check_inputs(in);
    in.causal = false;
    in.mask = causal_mask(in.q.shape(2), in.k.shape(2), spec.window);
  }
  return keep(attend(in));
}

} // namespace mlxcel
