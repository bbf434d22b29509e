// Checks, threads and timing for all torch operations.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "kernels.h"

namespace outrider {

using at::Tensor;

const Kernels& kernels();  // of the chosen instruction set
int type_of(const Tensor& x, const char* name);  // 0 float32, 1 bfloat16
void check_index(const Tensor& x, at::ScalarType type, int64_t dim, const char* name);
void check_range(const Tensor& x, int64_t least, int64_t limit, const char* name);
void check_dense(const Tensor& x, at::ScalarType type, at::IntArrayRef sizes, const char* name);
inline char* data(const Tensor& x) { return static_cast<char*>(x.data_ptr()); }
// The slots of positions [first, end) of a request, in `row` of a page table [rows, context].
int32_t* slots_of(const Tensor& page_table, int64_t request, int64_t row, int64_t first, int64_t end);

// The work of an attention; all layers of a step share it.
struct AttentionPlan {
  std::vector<Tile> tiles;
  std::vector<int64_t> offsets{0};  // of the tiles' (head, chunk) in the partials
  int64_t multiplications = 0;
  AttentionArgs args;  // without q, pools and out
  int64_t items() const { return tiles.size() * (args.kv_heads / args.heads_of_item); }
  // Says whether (tile, head) are too few to keep the threads busy: then they are split into chunks and merged.
  bool split(int64_t threads) const {
    return offsets.back() > items() && items() < 4 * threads && threads > 1 && multiplications >= 1 << 19;
  }
  // Floats of all partials.
  int64_t partials_size() const { return offsets.back() * args.tile_rows * args.state_stride(); }
};

// For queries [tokens, q_heads, head_dim] over pools [slots, kv_heads, head_dim] and [slots, kv_heads, value_dim].
AttentionPlan plan_attention(int64_t tokens, int64_t q_heads, int64_t kv_heads, int64_t head_dim, int64_t value_dim,
                             const Tensor& qo_indptr, const Tensor& kv_lens, const Tensor& rows,
                             const Tensor& page_table, bool causal);
Rules rules_of(const Tensor& temperatures, const std::optional<Tensor>& top_ks, const std::optional<Tensor>& top_ps,
               const std::optional<Tensor>& min_ps, int64_t rows);
Tensor packed_linear(const Tensor& x, const Tensor& packed, int64_t kind, const std::optional<Tensor>& bias,
                     int64_t outputs);

constexpr int64_t MIN_WORK_PER_THREAD = 1 << 18;  // multiplications

inline int64_t threads_for(int64_t items, int64_t multiplications) {
  const int64_t worth = std::max<int64_t>(1, multiplications / MIN_WORK_PER_THREAD);
  return std::min<int64_t>({items, at::get_num_threads(), worth});
}

// Runs `work`, which takes items from a shared counter, on as many threads as pay off.
template <typename F>
void on_every_thread(int64_t items, const F& work, int64_t multiplications = INT64_MAX) {
  at::parallel_for(0, threads_for(items, multiplications), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) work();
  });
}

// Runs work(begin, end) on as many threads as pay off, each with one range of neighbouring items.
template <typename F>
void in_ranges(int64_t items, const F& work, int64_t multiplications) {
  const int64_t threads = threads_for(items, multiplications);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    work(items * begin / threads, items * end / threads);
  });
}

// Rows that a product takes through a panel at once. If threads cannot share the panels evenly, they share parts of the
// rows, each large enough to pay for reading the panel again.
inline int64_t even_row_group(int64_t rows, int64_t panels, int64_t threads) {
  constexpr int64_t LEAST = 16;
  if (rows > ROW_GROUP) return ROW_GROUP;
  const auto most = [&](int64_t parts) { return double((panels * parts + threads - 1) / threads) / double(parts); };
  int64_t best = 1;
  for (int64_t parts = 2; parts * LEAST <= rows; ++parts)
    if (most(parts) < most(best)) best = parts;
  return std::max<int64_t>(1, (rows + best - 1) / best);
}

// The integer product for weights of this kind and this number of rows.
inline Function<const LinearArgs&, int64_t, int64_t> int_block_product(int type, int64_t kind, int64_t rows) {
  return (rows < kernels().many_rows ? kernels().int_block_linear : kernels().int_blocks_many_rows)[type][kind];
}

constexpr int64_t GRAIN = 65536;  // least numbers that are worth waking a thread

inline int64_t grain(int64_t width) { return std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, width)); }

}  // namespace outrider
