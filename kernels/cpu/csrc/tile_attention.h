// The products of attention by the tile unit: the sums of a row are the same for any number of rows. A K-block has 32
// numbers of a key, or 32 positions. Positions that a row does not see have weight 0, which changes no sum.
#pragma once
#include "attention.h"
#include "tile_rows.h"
#include "tile_unit.h"

namespace ISA {

constexpr int64_t PAIRS_OF_UNIT = unit::ROW_BYTES / sizeof(float);  // of a K-block

// Strides are in floats; every row is aligned to 64 bytes, and the depth is whole K-blocks.
class TileProducts {
 public:
  static constexpr int64_t STRIP = 2 * unit::HEIGHT;
  static constexpr int64_t TOGETHER = 2 * PAIRS_OF_UNIT, PAIRS_TOGETHER = PAIRS_OF_UNIT;
  static constexpr int SOFTMAX_ROWS = 4;
  static constexpr int64_t WEIGHTS = CHUNK + W;  // rows a power of 2 apart would share few places of the first cache
  static_assert(ROWS_AHEAD == TOGETHER && CHUNK % TOGETHER == 0);

  template <int R, bool PAIRS, typename T>
  void scores(const float* queries, int64_t depth, const T* const* keys, int64_t from, LinePrefetcher<T>&, float* out,
              int64_t stride) {
    if constexpr (PAIRS) {
      float* panel = panel_.at_least(depth * W);
      for (int64_t d = 0; d < depth; d += W) {
        Vec block[W];
        transposed_keys<true>(keys, from, d, block);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) store(panel + (d + i) * W, block[i]);
      }
      rows_by_panel<1, false>(R, queries, depth, panel, W, depth, W, out, stride);
    } else ISA::scores<R, false>(queries, depth, keys, from, out, stride);
  }

  template <int R, bool PAIRS, typename T>
  void add_values(const float* weights, int64_t stride, const T* const* values, int64_t from, int64_t keys,
                  int64_t width, LinePrefetcher<T>&, float* out, int64_t out_stride) {
    if constexpr (PAIRS) {
      float* panel = panel_.at_least(PAIRS_OF_UNIT * width);
      for (int64_t i = 0; i < PAIRS_OF_UNIT; ++i) {
        const int64_t first = std::min(2 * i, keys - 1), second = std::min(2 * i + 1, keys - 1);
        for (int64_t c = 0; c < width; c += W)
          store(panel + i * width + c, interleave(values[first] + from + c, values[second] + from + c));
        prefetch_row(values[first + ROWS_AHEAD] + from, width);
        prefetch_row(values[second + ROWS_AHEAD] + from, width);
      }
      rows_by_panel<1, true>(R, weights, stride, panel, width, PAIRS_OF_UNIT, width, out, out_stride);
    } else ISA::add_values<R, false>(weights, stride, values, from, keys, width, out, out_stride);
  }

  template <bool PAIRS>
  void multiply(int64_t rows, const float* x, int64_t x_stride, const float* right, int64_t right_stride, int64_t depth,
                int64_t width, float* out, int64_t out_stride) {
    if constexpr (!PAIRS)
      vectors_.multiply<false>(rows, x, x_stride, right, right_stride, depth, width, out, out_stride);
    else if (rows > unit::HEIGHT)
      rows_by_panel<2, false>(rows, x, x_stride, right, right_stride, depth, width, out, out_stride);
    else rows_by_panel<1, false>(rows, x, x_stride, right, right_stride, depth, width, out, out_stride);
  }

 private:
  // out = x times right, or adds to out (MORE), for rows of TALL tiles of one height; the second tile overlaps the
  // first.
  template <int TALL, bool MORE>
  void rows_by_panel(int64_t rows, const float* x, int64_t x_stride, const float* right, int64_t right_stride,
                     int64_t depth, int64_t width, float* out, int64_t out_stride) {
    constexpr int WIDE = 4 / TALL;
    const int64_t height = (rows + TALL - 1) / TALL, other = rows - height;
    session_.shape(int(height));
    const int64_t blocks = (depth + PAIRS_OF_UNIT - 1) / PAIRS_OF_UNIT;
    const Sides sides{x, x + other * x_stride, right, x_stride, right_stride, blocks};
    int64_t c = 0;
    for (; c + WIDE * W <= width; c += WIDE * W)
      sides.template multiply<TALL, WIDE, MORE>(c, out + c, out + other * out_stride + c, out_stride);
    for (; c < width; c += W)
      sides.template multiply<TALL, 1, MORE>(c, out + c, out + other * out_stride + c, out_stride);
  }

  struct Sides {
    const float *x, *other, *right;
    int64_t x_stride, right_stride, blocks;

    // Registers 0 .. 3: sums; 4 and 5: tiles of rows; 6 and 7: columns, alternating.
    template <int TALL, int WIDE, bool MORE>
    void multiply(int64_t column, float* out, float* out_of_other, int64_t out_stride) const {
      const auto place = [&](int sum) { return (sum < WIDE ? out : out_of_other) + sum % WIDE * W; };
      each<TALL * WIDE>([&](auto sum) {
        if constexpr (MORE) unit::load<sum>(place(sum), out_stride * sizeof(float));
        else unit::zero<sum>();
      });
      for (int64_t k = 0; k < blocks; ++k) {
        unit::load<4>(x + k * PAIRS_OF_UNIT, x_stride * sizeof(float));
        if constexpr (TALL == 2) unit::load<5>(other + k * PAIRS_OF_UNIT, x_stride * sizeof(float));
        each<WIDE>([&](auto c) {
          constexpr int COLUMNS = 6 + c % 2;
          const float* from = right + k * PAIRS_OF_UNIT * right_stride + column + c * W;
          unit::load<COLUMNS>(from, right_stride * sizeof(float));
          unit::add_products<c, 4, COLUMNS>();
          if constexpr (TALL == 2) unit::add_products<WIDE + c, 5, COLUMNS>();
        });
      }
      each<TALL * WIDE>([&](auto sum) { unit::store<sum>(place(sum), out_stride * sizeof(float)); });
    }
  };

  unit::Session session_;
  AlignedBuffer panel_;
  VectorProducts vectors_;
};

}  // namespace ISA
