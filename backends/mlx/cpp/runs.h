// Sequences of a packed step, grouped so that equal ones are computed together.
#pragma once

#include "internal.h"

namespace mlxcel {

// Consecutive sequences with the same number of rows.
struct Run {
  int first_sequence;
  int sequences;
  int first_row;
  int rows_each;
};

// Sequences without rows are in no run. `sequences` is how many there must be, `rows` how many rows
// there are.
std::vector<Run> runs_of(rust::Slice<const uint32_t> starts, int sequences, int rows);

// Rows of a run: [c, n, ..] of a [T, ..] array.
mx::array rows_of_run(const mx::array& a, const Run& run);

// Entries of a run's sequences: [c, ..] of a [S, ..] array.
mx::array sequences_of_run(const mx::array& a, const Run& run);

} // namespace mlxcel
