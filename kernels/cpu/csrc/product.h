// The inner loop of attention and matrix products: a few rows times a packed panel, summed over the depth in one order,
// so a row's result does not depend on the number of rows.
#pragma once
#include <algorithm>

#include "simd.h"

namespace ISA {

constexpr int64_t STEP = W * BLOCKS;  // columns of a register tile
constexpr bool SIXTEEN = W == 8;      // vector registers, not 32
constexpr int64_t ENTER_STEPS = SIXTEEN ? 16 : 1;  // steps of the depth that one enter() covers

// Vectors side by side in a tile of `rows` rows. A sum waits four cycles for its last number: few rows take more
// columns, so that eight sums or more are in progress.
constexpr int vectors_of(int64_t rows) { return !SIXTEEN || rows > 3 ? BLOCKS : rows > 1 ? 4 : 8; }

// Adds one step of the depth to the sums of a tile. The smaller of rows and columns stays in registers.
template <bool PAIRS, int R, int B, typename F>
inline void add_step(Vec (&sums)[R][B], const float* x, int64_t x_stride, const F& right, int64_t i, int64_t column) {
  if constexpr (SIXTEEN && R < B) {
    Vec left[R];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) left[r] = splat_bits(x[r * x_stride + i]);
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) {
      const Vec packed = right(i, column + b * W);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) sums[r][b] = dot<PAIRS>(sums[r][b], left[r], packed);
    }
  } else {
    Vec packed[B];
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) packed[b] = right(i, column + b * W);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const Vec left = splat_bits(x[r * x_stride + i]);
#pragma GCC unroll 8
      for (int b = 0; b < B; ++b) sums[r][b] = dot<PAIRS>(sums[r][b], left, packed[b]);
    }
  }
}

// out[r][c] = bias[c] + sum_i x[r][i] * right(i, c) for R rows and `width` columns, a multiple of W. PAIRS: x and right
// hold two bf16 per lane, neighbours in depth. If right has enter(i, c), it is called before every ENTER_STEPS steps of
// the depth (or the rest) of STEP columns.
template <int R, int B, bool PAIRS, typename F, typename O>
inline void tile(const float* x, int64_t x_stride, const F& right, int64_t column, int64_t depth, const float* bias,
                 O* out, int64_t out_stride) {
  Vec sums[R][B];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) sums[r][b] = bias ? load(bias + column + b * W) : Vec{};
  constexpr bool HAS_ENTER = requires { right.enter(0, column); };
  if constexpr (SIXTEEN) {
    // A call inside the innermost loop would keep the sums in memory.
    for (int64_t i = 0, end; i < depth; i = end) {
      end = HAS_ENTER ? std::min(depth, i + ENTER_STEPS) : depth;
      if constexpr (HAS_ENTER)
        for (int64_t c = 0; c < B * W; c += STEP) right.enter(i, column + c);
      for (int64_t k = i; k < end; ++k) add_step<PAIRS>(sums, x, x_stride, right, k, column);
    }
  }
  for (int64_t i = 0; !SIXTEEN && i < depth; ++i) {
    if constexpr (HAS_ENTER) right.enter(i, column);
    add_step<PAIRS>(sums, x, x_stride, right, i, column);
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) store(out + r * out_stride + column + b * W, sums[r][b]);
}

template <int R, bool PAIRS, typename F, typename O>
inline void strip(const float* x, int64_t x_stride, const F& right, int64_t depth, int64_t width, const float* bias,
                  O* out, int64_t out_stride) {
  constexpr int WIDE = vectors_of(R);
  int64_t c = 0;
  if constexpr (WIDE > BLOCKS)
    for (; c + WIDE * W <= width; c += WIDE * W)
      tile<R, WIDE, PAIRS>(x, x_stride, right, c, depth, bias, out, out_stride);
  for (; c + STEP <= width; c += STEP) tile<R, BLOCKS, PAIRS>(x, x_stride, right, c, depth, bias, out, out_stride);
  for (; c < width; c += W) tile<R, 1, PAIRS>(x, x_stride, right, c, depth, bias, out, out_stride);
}

// right(i, c): the W numbers of the right side from row i, column c on.
template <bool PAIRS, typename F, typename O>
inline void product(int64_t rows, const float* x, int64_t x_stride, const F& right, int64_t depth, int64_t width,
                    const float* bias, O* out, int64_t out_stride) {
  for (int64_t r = 0; r < rows; r += ROWS) {
    const float* from = x + r * x_stride;
    O* to = out + r * out_stride;
    switch (std::min<int64_t>(ROWS, rows - r)) {
      case 1: strip<1, PAIRS>(from, x_stride, right, depth, width, bias, to, out_stride); break;
      case 2: strip<2, PAIRS>(from, x_stride, right, depth, width, bias, to, out_stride); break;
      case 3: strip<3, PAIRS>(from, x_stride, right, depth, width, bias, to, out_stride); break;
      case 4: strip<4, PAIRS>(from, x_stride, right, depth, width, bias, to, out_stride); break;
      case 5: strip<5, PAIRS>(from, x_stride, right, depth, width, bias, to, out_stride); break;
      default: strip<ROWS, PAIRS>(from, x_stride, right, depth, width, bias, to, out_stride);
    }
  }
}

}  // namespace ISA
