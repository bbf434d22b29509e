// Attention of so few rows that each key and value is used once, as it lies in the cache: a decode step. Positions are
// gone through in order, the KV heads of a position together: memory gives neighbouring lines faster than the same
// lines head by head. A row's sums have the order of product(): the bits are those of the path for many rows.
#pragma once
#include <algorithm>

#include "kernels.h"
#include "product.h"

namespace ISA {

constexpr int64_t ROWS_AHEAD = 32;  // positions between one that is read and one that memory is asked for

// Where the rows of a pool lie, of the positions of a chunk, and then those of another that is read after it.
template <typename T>
class PoolRows {
 public:
  // Of `count` slots, from number `first` of a row on.
  void read(const void* pool, int64_t stride, int64_t first, const int32_t* slots, int64_t count) {
    for (int64_t i = 0; i < count; ++i) rows_[i] = static_cast<const T*>(pool) + slots[i] * stride + first;
    size_ = (count + W - 1) / W * W;
    for (int64_t i = count; i < size_; ++i) rows_[i] = rows_[count - 1];  // masked later
  }
  void then(const void* pool, int64_t stride, int64_t first, const int32_t* slots, int64_t count) {
    for (int64_t i = 0; i < ROWS_AHEAD; ++i)
      rows_[size_ + i] = i < count ? static_cast<const T*>(pool) + slots[i] * stride + first : rows_[0];
  }
  const T* const* at(int64_t i) const { return rows_ + i; }

 private:
  const T* rows_[CHUNK + ROWS_AHEAD];
  int64_t size_ = 0;
};

template <typename T>
inline void ask_for(const T* row, int64_t numbers) {
  for (int64_t i = 0; i < numbers; i += 64 / sizeof(T)) __builtin_prefetch(row + i);
}

// Numbers [d, d + W) of W keys, pairs of them where PAIRS, from number `from` of a key on: block[i] has the i-th of each.
template <bool PAIRS, typename T>
inline void transposed_keys(const T* const* keys, int64_t from, int64_t d, Vec (&block)[W]) {
  using Lane = std::conditional_t<PAIRS, float, T>;
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) {
    block[i] = load(reinterpret_cast<const Lane*>(keys[i] + from) + d);
    ask_for(keys[i + ROWS_AHEAD] + from + d * (1 + PAIRS), W * (1 + PAIRS));
  }
  transpose(block);
}

// out[r][j] = queries[r] . keys[j] from number `from` of a key on, for W keys.
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

// What add_values() does, for `count` positions and B vectors of columns.
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
    ask_for(values[i + ROWS_AHEAD] + from, B * W);
    if (PAIRS) ask_for(values[i + 1 + ROWS_AHEAD] + from, B * W);
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

// out[r][c] += sum_i weights[r][i] * values[i][from + c], of the next ROWS_AHEAD of `keys` positions. Weights are bf16 where
// PAIRS.
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

// f(number) with rows, 1 .. ROWS, as a constant.
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
