// Attention of few rows, as in a decode step: it uses each key and value once, in the cache. It reads positions in
// order, and the KV heads of a position together: neighbouring lines come faster than head by head. Sums have the order
// of product(), so the bits equal the path for many rows.
#pragma once
#include <algorithm>

#include "kernels.h"
#include "product.h"

namespace ISA {

constexpr bool NARROW = W < 16;
constexpr int64_t ROWS_AHEAD = 32;  // positions from a read to its prefetch

// Prefetches rows line by line in memory order, which is faster than head by head.
template <typename T>
class LinePrefetcher {
 public:
  LinePrefetcher(const T* const* rows, const T* const* end, int64_t numbers)
      : row_(rows), end_(end), bytes_(numbers * sizeof(T)) {}

  void prefetch() {
    if (left_ <= 0) {
      if (row_ == end_) return;
      line_ = reinterpret_cast<const char*>(*row_++);
      left_ = bytes_;
    }
    __builtin_prefetch(line_);
    line_ += 64;
    left_ -= 64;
  }

 private:
  const T *const *row_, *const *const end_;
  const int64_t bytes_;
  const char* line_ = nullptr;
  int64_t left_ = 0;
};

// Addresses of a pool's rows: the positions of a chunk, then rows of the pool that is read next.
template <typename T>
class PoolRows {
 public:
  // Sets the rows of `count` slots, from number `first` of a row on.
  void set(const void* pool, int64_t stride, int64_t first, const int32_t* slots, int64_t count) {
    for (int64_t i = 0; i < count; ++i) rows_[i] = static_cast<const T*>(pool) + slots[i] * stride + first;
    size_ = (count + W - 1) / W * W;
    for (int64_t i = count; i < size_; ++i) rows_[i] = rows_[count - 1];  // masked later
  }
  void set_next(const void* pool, int64_t stride, int64_t first, const int32_t* slots, int64_t count) {
    for (int64_t i = 0; i < ROWS_AHEAD; ++i)
      rows_[size_ + i] = i < count ? static_cast<const T*>(pool) + slots[i] * stride + first : rows_[0];
  }
  const T* const* at(int64_t i) const { return rows_ + i; }
  // Prefetches the first `numbers` of every row, ROWS_AHEAD rows before the read.
  LinePrefetcher<T> prefetcher(int64_t numbers) const {
    return {rows_ + ROWS_AHEAD, rows_ + size_ + ROWS_AHEAD, numbers};
  }

 private:
  const T* rows_[CHUNK + ROWS_AHEAD];
  int64_t size_ = 0;
};

template <typename T>
inline void prefetch_row(const T* row, int64_t numbers) {
  for (int64_t i = 0; i < numbers; i += 64 / sizeof(T)) __builtin_prefetch(row + i);
}

// Numbers [d, d + W) of W keys (pairs if PAIRS), counted from `from`: block[i] has number i of each key.
template <bool PAIRS, typename T>
inline void transposed_keys(const T* const* keys, int64_t from, int64_t d, Vec (&block)[W]) {
  using Lane = std::conditional_t<PAIRS, float, T>;
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) {
    block[i] = load(reinterpret_cast<const Lane*>(keys[i] + from) + d);
    prefetch_row(keys[i + ROWS_AHEAD] + from + d * (1 + PAIRS), W * (1 + PAIRS));
  }
  transpose(block);
}

// out[r][j] = queries[r] . keys[j], for W keys from their number `from` on.
template <int R, bool PAIRS, typename T>
inline void scores(const float* queries, int64_t depth, const T* const* keys, int64_t from, float* out,
                   int64_t stride) {
  Vec sums[R];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) sums[r] = Vec{};
  for (int64_t d = 0; d < depth; d += W) {
    Vec block[W];
    transposed_keys<PAIRS>(keys, from, d, block);
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i)
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) sums[r] = dot<PAIRS>(sums[r], splat_bits(queries[r * depth + d + i]), block[i]);
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) store(out + r * stride, sums[r]);
}

// add_values() for `count` positions and B vectors of columns.
template <int R, int B, bool PAIRS, typename T>
inline void add_columns(const float* weights, int64_t stride, const T* const* values, int64_t from, int64_t count,
                        int64_t keys, float* out, int64_t out_stride) {
  Vec sums[R][B];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) sums[r][b] = load(out + r * out_stride + b * W);
  for (int64_t i = 0; i < count; i += 1 + PAIRS) {
    const T *const first = values[i] + from, *const second = values[std::min(i + PAIRS, keys - 1)] + from;
    Vec right[B];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) right[b] = PAIRS ? interleave(first + b * W, second + b * W) : load(first + b * W);
    prefetch_row(values[i + ROWS_AHEAD] + from, B * W);
    if (PAIRS) prefetch_row(values[i + 1 + ROWS_AHEAD] + from, B * W);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const Vec left = splat_bits(weights[r * stride + i / (1 + PAIRS)]);
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) sums[r][b] = dot<PAIRS>(sums[r][b], left, right[b]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) store(out + r * out_stride + b * W, sums[r][b]);
}

// out[r][c] += sum_i weights[r][i] * values[i][from + c], for the next ROWS_AHEAD of `keys` positions. Weights are bf16
// if PAIRS.
template <int R, bool PAIRS, typename T>
inline void add_values(const float* weights, int64_t stride, const T* const* values, int64_t from, int64_t keys,
                       int64_t width, float* out, int64_t out_stride) {
  const int64_t count = std::min(ROWS_AHEAD, keys);
  int64_t c = 0;
  for (; c + STEP <= width; c += STEP)
    add_columns<R, BLOCKS, PAIRS>(weights, stride, values, from + c, count, keys, out + c, out_stride);
  for (; c < width; c += W)
    add_columns<R, 1, PAIRS>(weights, stride, values, from + c, count, keys, out + c, out_stride);
}

// The same for short vectors without pairs (AVX2). It transposes bf16 numbers two at a time and then widens them; sums
// use every register.

// Calls f(number, its W keys) for all numbers of W keys, from `from` on, and `step` once for every 4 * W bytes of a
// key.
template <typename T, typename S, typename F>
inline void for_numbers(const T* const* keys, int64_t from, int64_t depth, const S& step, const F& f) {
  constexpr bool HALVES = sizeof(T) == 2;
  for (int64_t d = 0; d < depth; d += W * (1 + HALVES)) {
    Vec block[W];
    load_transposed(keys, from + d, block);
    step();
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) {
      f(d + i * (1 + HALVES), HALVES ? lower_halves(block[i]) : block[i]);
      if (HALVES) f(d + 2 * i + 1, upper_halves(block[i]));
    }
  }
}

template <int R, typename T>
inline void narrow_scores(const float* queries, int64_t depth, const T* const* keys, int64_t from,
                          LinePrefetcher<T>& ahead, float* out, int64_t stride) {
  Vec sums[R] = {};
  const auto prefetch_lines = [&] {
#pragma GCC unroll 4
    for (int i = 0; i < W * W / 16; ++i) ahead.prefetch();
  };
  for_numbers(keys, from, depth, prefetch_lines, [&](int64_t d, Vec numbers) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) sums[r] += splat_bits(queries[r * depth + d]) * numbers;
  });
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) store(out + r * stride, sums[r]);
}

// narrow_values() for B vectors of columns.
template <int R, int B, typename T>
inline void narrow_columns(const float* weights, int64_t stride, const T* const* values, int64_t from, int64_t count,
                           LinePrefetcher<T>& ahead, float* out, int64_t out_stride) {
  Vec sums[R][B];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) sums[r][b] = load(out + r * out_stride + b * W);
  const auto value = [=](int64_t i, int64_t column) { return load(values[i] + from + column); };
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t n = 0; n < B * W; n += 64 / sizeof(T)) ahead.prefetch();
    add_step<false>(sums, weights, stride, value, i, 0);
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) store(out + r * out_stride + b * W, sums[r][b]);
}

template <int R, typename T>
inline void narrow_values(const float* weights, int64_t stride, const T* const* values, int64_t from, int64_t keys,
                          int64_t width, LinePrefetcher<T>& ahead, float* out, int64_t out_stride) {
  constexpr int B = R <= 3 ? 4 : 2;
  const int64_t count = std::min(ROWS_AHEAD, keys);
  int64_t c = 0;
  for (; c + B * W <= width; c += B * W)
    narrow_columns<R, B>(weights, stride, values, from + c, count, ahead, out + c, out_stride);
  for (; c < width; c += W)
    narrow_columns<R, 1>(weights, stride, values, from + c, count, ahead, out + c, out_stride);
}

// Calls f with rows, 1 .. ROWS, as a constant.
template <typename F>
inline void with_rows(int64_t rows, const F& f) {
  switch (rows) {
    case 1: return f(std::integral_constant<int, 1>());
    case 2: return f(std::integral_constant<int, 2>());
    case 3: return f(std::integral_constant<int, 3>());
    case 4: return f(std::integral_constant<int, 4>());
    case 5: return f(std::integral_constant<int, 5>());
    default: return f(std::integral_constant<int, ROWS>());
  }
}

}  // namespace ISA
