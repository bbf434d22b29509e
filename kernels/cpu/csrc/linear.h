// y = x W^T + bias with W packed once into panels of PANEL output columns: a step reads every weight once, in order.
// Few rows are memory-bound. The sum over the depth has one order for any number of rows: batch-invariant.
#pragma once
#include "kernels.h"
#include "product.h"

namespace ISA {

template <typename T>
constexpr bool PAIRS = HAS_PAIRS && sizeof(T) == 2;
template <typename T>
using Number = std::conditional_t<PAIRS<T>, float, T>;  // of a panel: a pair has the size of a float

// Index of number c of row i in a panel: a tile's columns lie together, so it reads line after line.
inline int64_t in_panel(int64_t i, int64_t c, int64_t depth) {
  if constexpr (STEP == PANEL) return i * PANEL + c;
  else return i * STEP + (c / STEP * depth * STEP + c % STEP);
}

// Panel p holds outputs p * PANEL ...; [PANEL / COLUMNS][depth][COLUMNS] numbers, or pairs of bf16 where the processor
// multiplies pairs.
template <typename T, int64_t COLUMNS = STEP>
void pack(const void* weight, void* panels, int64_t outputs, int64_t depth, int64_t begin, int64_t end) {
  const T* from = static_cast<const T*>(weight);
  T* to = static_cast<T*>(panels) + begin * PANEL * depth;
  constexpr int64_t GROUP = PAIRS<T> ? 2 : 1;
  for (int64_t panel = begin; panel < end; ++panel)
    for (int64_t column = panel * PANEL; column < (panel + 1) * PANEL; column += COLUMNS)
      for (int64_t i = 0; i < depth; i += GROUP)
        for (int64_t c = column; c < column + COLUMNS; ++c)
          for (int64_t g = 0; g < GROUP; ++g) *to++ = c < outputs ? from[c * depth + i + g] : T{};
}

constexpr int64_t AHEAD = 8192;  // bytes from a read weight to its prefetch

// A panel of pack(). Its first rows wait for memory; later ones find it cached.
template <typename T>
class Panels {
 public:
  static constexpr bool WHOLE = false;
  explicit Panels(const LinearArgs& a)
      : size_(PANEL * a.depth * sizeof(T)), packed_(static_cast<const char*>(a.packed)),
        last_(packed_ + a.panels * size_ - 1), depth_(PAIRS<T> ? a.depth / 2 : a.depth) {}
  void go_to(int64_t panel) { panel_ = reinterpret_cast<const Number<T>*>(packed_ + panel * size_); }
  Vec first(int64_t i, int64_t c) const {
    const Number<T>* from = panel_ + in_panel(i, c, depth_);
    if (STEP == PANEL ? c * sizeof(*from) % 64 == 0 : c % STEP == 0)
      __builtin_prefetch(std::min(reinterpret_cast<const char*>(from) + AHEAD, last_));
    return load(from);
  }
  Vec later(int64_t i, int64_t c) const { return load(panel_ + in_panel(i, c, depth_)); }

 private:
  const int64_t size_;
  const char *const packed_, *const last_;
  const Number<T>* panel_ = nullptr;
  const int64_t depth_;  // of rows of numbers or pairs
};

// The next LINES lines of the cache, all of one slot.
template <int LINES>
__attribute__((always_inline)) inline void prefetch_lines(CachePrefetch& cache) {
  if (cache.line >= cache.last) {
    if (cache.slot == cache.end) return;
    const CachePrefetch::Pool& pool = cache.pools[cache.next_pool];
    cache.line = pool.from + *cache.slot * pool.stride;
    cache.last = cache.line + pool.bytes;
    cache.slot += cache.next_pool;
    cache.next_pool ^= 1;
  }
  const char *line = cache.line, *const last = cache.last;
#pragma GCC unroll 8
  for (int n = 0; n < LINES && line < last; ++n, line += 64) __builtin_prefetch(line, 0, 2);
  cache.line = line;
}

// Prefetches during a product: no line, or a few at a time, since more would stall the thread. Inlined into the
// innermost loop, where a call would cost more than it gains.
struct NoPrefetch {};
struct PrefetchCache {
  static constexpr int64_t EVERY = 16, AT_ONCE = 8;  // steps of the depth; lines
  CachePrefetch& cache;
  __attribute__((always_inline)) void ask(int64_t i) const {
    if (i % EVERY == 0) prefetch_lines<AT_ONCE>(cache);
  }
};

template <typename Prefetch>
constexpr bool PREFETCHES = requires(const Prefetch& prefetch) { prefetch.ask(0); };

// A panel for the first rows, and for later rows.
template <typename Weights, typename Prefetch>
struct FirstRows {
  const Weights& weights;
  Prefetch prefetch;
  static constexpr bool EXPANDS = requires(const Weights& w) { w.enter(0, 0); };
  __attribute__((always_inline)) void enter(int64_t i, int64_t c) const requires(EXPANDS || PREFETCHES<Prefetch>) {
    if constexpr (EXPANDS) weights.enter(i, c);
    if constexpr (PREFETCHES<Prefetch>) prefetch.ask(i);
  }
  Vec operator()(int64_t i, int64_t c) const { return weights.first(i, c); }
};
template <typename Weights, typename Prefetch>
struct LaterRows {
  const Weights& weights;
  Prefetch prefetch;
  __attribute__((always_inline)) void enter(int64_t i, int64_t) const requires PREFETCHES<Prefetch> { prefetch.ask(i); }
  Vec operator()(int64_t i, int64_t c) const { return weights.later(i, c); }
};

// Items are pairs of a panel and a group of rows. A thread gets neighbouring items: it reads on where it stopped.
// weights.first(i, c) gives numbers to the first rows at a panel, later(i, c) to later rows.
template <typename T, typename Weights, typename Prefetch>
void multiply_items(const LinearArgs& a, Weights weights, Prefetch prefetch, int64_t begin, int64_t end) {
  static thread_local std::vector<float> widened;
  static thread_local std::vector<T> edge;
  const int64_t depth = PAIRS<T> ? a.depth / 2 : a.depth, groups = (a.rows + a.row_group - 1) / a.row_group;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t column = item / groups * PANEL, row = item % groups * a.row_group;
    const int64_t rows = std::min(a.row_group, a.rows - row), width = std::min(PANEL, a.outputs - column);
    const T* from = static_cast<const T*>(a.x) + row * a.x_stride;
    const float* x = reinterpret_cast<const float*>(from);
    int64_t x_stride = PAIRS<T> ? a.x_stride / 2 : a.x_stride;
    if (sizeof(T) == 2 && !PAIRS<T>) {
      if (item == begin || groups > 1) {  // else the last panel's rows
        widened.resize(rows * depth);
        float* to = widened.data();
        for (int64_t r = 0; r < rows; ++r, to += depth)
          for (int64_t i = 0; i < depth; ++i) to[i] = scalar(from[r * a.x_stride + i]);
      }
      x = widened.data();
      x_stride = depth;
    }
    T* out = static_cast<T*>(a.out) + row * a.out_stride + column;
    int64_t out_stride = a.out_stride;
    const int64_t least = Weights::WHOLE ? PANEL : W, padded = (width + least - 1) / least * least;
    const bool narrow = width < padded;  // the last outputs do not fill a vector
    if (narrow) {
      edge.resize(rows * PANEL);
      out = edge.data();
      out_stride = PANEL;
    }
    const float* bias = a.bias ? a.bias + column : nullptr;
    const FirstRows<Weights, Prefetch> first{weights, prefetch};
    const LaterRows<Weights, Prefetch> later{weights, prefetch};
    const bool fresh = item == begin || row == 0;
    if (fresh) weights.go_to(column / PANEL);
    const int64_t few = fresh ? std::min<int64_t>(ROWS, rows) : 0;
    product<PAIRS<T>>(few, x, x_stride, first, depth, padded, bias, out, out_stride);
    product<PAIRS<T>>(rows - few, x + few * x_stride, x_stride, later, depth, padded, bias, out + few * out_stride,
                      out_stride);
    for (int64_t r = 0; narrow && r < rows; ++r)
      std::memcpy(static_cast<T*>(a.out) + (row + r) * a.out_stride + column, out + r * PANEL, width * sizeof(T));
  }
}

template <typename T, typename Weights>
void multiply_items(const LinearArgs& a, Weights weights, int64_t begin, int64_t end) {
  if (a.prefetch) multiply_items<T>(a, weights, PrefetchCache{*a.prefetch}, begin, end);
  else multiply_items<T>(a, weights, NoPrefetch(), begin, end);
}

template <typename T>
void linear(const LinearArgs& a, int64_t begin, int64_t end) {
  multiply_items<T>(a, Panels<T>(a), begin, end);
}

}  // namespace ISA
