// Values that several calls of one step share: cosines of positions, masks, pool rows. They depend on the step's own tensors
// alone, so they are equal for every layer, and building them once saves most of the nodes of a layer.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "mlx/array.h"

namespace mlxcel {

class Memo {
 public:
  // The values made from `keys` and `numbers`, made now unless they are there.
  template <typename F>
  std::vector<mlx::core::array>
  get(std::vector<mlx::core::array> keys, std::vector<uint64_t> numbers, F make) {
    for (auto& entry : entries_) {
      if (matches(entry, keys, numbers)) {
        return entry.values;
      }
    }
    std::vector<mlx::core::array> values = make();
    if (entries_.size() >= kCapacity) {
      entries_.erase(entries_.begin());
    }
    entries_.push_back({std::move(keys), std::move(numbers), values});
    return values;
  }

  void clear() {
    entries_.clear();
  }

 private:
  // The keys are kept alive, so that the address of one is never that of another.
  struct Entry {
    std::vector<mlx::core::array> keys;
    std::vector<uint64_t> numbers;
    std::vector<mlx::core::array> values;
  };

  // A step needs one entry per rotary embedding and per attention window of the model.
  static constexpr size_t kCapacity = 8;

  static bool matches(
      const Entry& entry,
      const std::vector<mlx::core::array>& keys,
      const std::vector<uint64_t>& numbers) {
    if (entry.numbers != numbers || entry.keys.size() != keys.size()) {
      return false;
    }
    for (size_t i = 0; i < keys.size(); ++i) {
      if (entry.keys[i].id() != keys[i].id()) {
        return false;
      }
    }
    return true;
  }

  std::vector<Entry> entries_;
};

} // namespace mlxcel
