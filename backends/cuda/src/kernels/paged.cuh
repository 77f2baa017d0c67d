// Keys and values in a pool of pages, and the rows of a step that attend to them.
//
// Page tables are walked on the device. Which rows are whose is seen from `row_sequences`: a row whose neighbours are of other
// sequences is alone and belongs to `decode_rows`, the others to `prefill_rows` or `prefill_tiles`.

struct Step {
  const u16* q;
  const u16* keys;
  const u16* values;
  const int* row_sequences;
  const int* positions;
  const int* page_table;
  const u16* sinks;
  int rows;
  int heads;
  int kv_heads;
  int page_shift;
  int table_width;
  int pages;
  int window;
  float scale;
  float softcap;
};

#define STEP_ARGS                                                                                                        \
  const u16 *q, const u16 *keys, const u16 *values, const int *row_sequences, const int *positions,                      \
      const int *page_table, const u16 *sinks, u16 *out, float *parts, u32 *counters, int rows, int heads, int kv_heads, \
      int page_shift, int table_width, int pages, int window, float scale, float softcap, int alone_only
#define STEP                                                                                                             \
  Step{q, keys, values, row_sequences, positions, page_table, sinks, rows, heads, kv_heads, page_shift, table_width,     \
       pages, window, scale, softcap}

__device__ __forceinline__ bool is_alone(const Step& step, int row) {
  int own = step.row_sequences[row];
  return (row == 0 || step.row_sequences[row - 1] != own) && (row + 1 == step.rows || step.row_sequences[row + 1] != own);
}

// Row of the pool that holds key `at` of a sequence.
__device__ __forceinline__ size_t pool_row(const Step& step, int sequence, int at) {
  int entry = min(at >> step.page_shift, step.table_width - 1);
  int page = step.page_table[static_cast<size_t>(sequence) * step.table_width + entry];
  page = min(max(page, 0), step.pages - 1);
  return (static_cast<size_t>(page) << step.page_shift) + (at & ((1 << step.page_shift) - 1));
}

__device__ __forceinline__ float capped(const Step& step, float score) {
  return step.softcap > 0.0f ? step.softcap * tanhf(score / step.softcap) : score;
}

// The tokens from `first` on, up to `last`, that are of one sequence. Sequences are in order; most tiles have one.
struct Run {
  int sequence;
  bool is_alone;
  int after;
  int highest;
  int lowest;
};
__device__ __forceinline__ Run run_of(const Step& step, int first, int last) {
  Run run{step.row_sequences[first], is_alone(step, first), first, 0, 0x7FFFFFFF};
  while (run.after <= last && step.row_sequences[run.after] == run.sequence) {
    run.highest = max(run.highest, step.positions[run.after]);
    run.lowest = min(run.lowest, step.positions[run.after]);
    ++run.after;
  }
  return run;
}
