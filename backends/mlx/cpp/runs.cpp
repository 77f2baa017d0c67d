// Sequences of a packed step, grouped so that equal ones are computed together.
#include "runs.h"

namespace mlxcel {

std::vector<Run> runs_of(rust::Slice<const uint32_t> starts, int sequences, int rows) {
  if (static_cast<int64_t>(starts.size()) != int64_t{sequences} + 1) {
    fail(kInvalidArgument, "there are ", starts.size(), " row boundaries for ", sequences, " sequences");
  }
  std::vector<Run> runs;
  for (size_t s = 0; s + 1 < starts.size(); ++s) {
    if (starts[s] > starts[s + 1] || starts[s + 1] > static_cast<uint32_t>(rows)) {
      fail(kInvalidArgument, "rows ", starts[s], " to ", starts[s + 1], " of sequence ", s, " are not among ", rows);
    }
    int count = static_cast<int>(starts[s + 1] - starts[s]);
    if (count == 0) {
      continue;
    }
    int sequence = static_cast<int>(s);
    bool joins = !runs.empty() && runs.back().rows_each == count &&
        runs.back().first_sequence + runs.back().sequences == sequence;
    if (joins) {
      ++runs.back().sequences;
    } else {
      runs.push_back({sequence, 1, static_cast<int>(starts[s]), count});
    }
  }
  return runs;
}

namespace {

// Entries [first, first + count) of the first axis.
mx::array part_of(const mx::array& a, int first, int count) {
  if (first == 0 && count == a.shape(0)) {
    return a;
  }
  mx::Shape starts(a.ndim(), 0);
  auto stops = a.shape();
  starts[0] = first;
  stops[0] = first + count;
  return mx::slice(a, std::move(starts), std::move(stops));
}

} // namespace

mx::array rows_of_run(const mx::array& a, const Run& run) {
  auto own = part_of(a, run.first_row, run.sequences * run.rows_each);
  mx::Shape shape{run.sequences, run.rows_each};
  shape.insert(shape.end(), a.shape().begin() + 1, a.shape().end());
  return mx::reshape(own, std::move(shape));
}

mx::array sequences_of_run(const mx::array& a, const Run& run) {
  return part_of(a, run.first_sequence, run.sequences);
}

} // namespace mlxcel
