// Random draws with explicit keys: nothing here has a state.
#include "internal.h"
#include "mlx/random.h"

namespace mlxcel {

namespace {

const mx::array& check_key(const Array& key) {
  if (key.value.dtype() != mx::uint32 || key.value.ndim() != 1 || key.value.shape(0) != 2) {
    fail(
        kInvalidArgument,
        "a random key is [2] u32, found ",
        name_of(key.value.dtype()),
        " ",
        text_of(key.value.shape()));
  }
  return key.value;
}

} // namespace

Out random_key(uint64_t seed) {
  return keep(mx::random::key(seed));
}

Out random_split(const Array& key, int64_t n) {
  if (n < 1) {
    fail(kInvalidArgument, "a key cannot be split into ", n);
  }
  return keep(mx::random::split(check_key(key), mx::safe_cast(n)));
}

Out random(const RandomSpec& spec) {
  auto& key = check_key(spec.key);
  auto shape = shape_of(spec.dims);
  // The draws of every kind begin as 32 random bits, of which a few forms are alive at a time.
  check_shape(shape, 4 * sizeof(uint32_t));
  switch (spec.kind) {
    case 1:
      return keep(mx::random::bits(shape, 4, key));
    case 2: {
      auto low = mx::array(static_cast<float>(spec.a));
      auto high = mx::array(static_cast<float>(spec.b));
      return keep(mx::random::uniform(low, high, shape, dtype_of(spec.dtype), key));
    }
    case 3:
      return keep(mx::random::normal(
          shape, dtype_of(spec.dtype), static_cast<float>(spec.a), static_cast<float>(spec.b), key));
    case 4:
      return keep(mx::random::gumbel(shape, dtype_of(spec.dtype), key));
    case 5:
      return keep(mx::random::bernoulli(mx::array(static_cast<float>(spec.a)), shape, key));
    case 6: {
      auto logits = optional_of(spec.logits);
      if (!logits || logits->ndim() == 0 || logits->shape(-1) == 0) {
        fail(kInvalidArgument, "a categorical draw needs logits of at least 1 dimension");
      }
      return keep(mx::random::categorical(*logits, -1, key));
    }
    default:
      fail(kUnimplemented, "random kind ", spec.kind, " is not known");
  }
}

} // namespace mlxcel
