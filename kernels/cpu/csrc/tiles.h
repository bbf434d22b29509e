// y = x W^T + bias by the tile unit, on the panels of pack<bf16, HALF>(). Sums of separate rows never mix, and go
// through the depth in K-blocks of BLOCK for any number of rows: batch-invariant.
#pragma once
#include "linear.h"
#include "tile_rows.h"
#include "tile_unit.h"

namespace ISA {

static_assert(W == unit::HEIGHT && STEP == PANEL && HAS_PAIRS, "a K-block of a panel is four right sides of the unit");

constexpr int64_t HALVES = 2, HALF = PANEL / HALVES;  // of a panel: the outputs of two tiles
constexpr int64_t PAIRS_OF_HALF = BLOCK / 2 * HALF, HALF_STRIDE = HALF * sizeof(float);
constexpr int64_t CHUNK_BLOCKS = 10;  // half a panel of them and as many of two tiles of rows fit the first cache

// Rows of x, aligned to 64 bytes; zeros pad the depth to whole K-blocks.
class Rows {
 public:
  explicit Rows(const LinearArgs& a) : x_(static_cast<const bf16*>(a.x)), stride_(a.x_stride) {
    if (a.depth % BLOCK == 0 && stride_ % 32 == 0 && reinterpret_cast<uintptr_t>(x_) % 64 == 0) return;
    static thread_local std::vector<float> room;
    const int64_t width = (a.depth + BLOCK - 1) / BLOCK * BLOCK;
    bf16* copy = reinterpret_cast<bf16*>(aligned(room, a.rows * width / 2));
    for (int64_t r = 0; r < a.rows; ++r) {
      std::memcpy(copy + r * width, x_ + r * stride_, a.depth * sizeof(bf16));
      std::memset(copy + r * width + a.depth, 0, (width - a.depth) * sizeof(bf16));
    }
    x_ = copy;
    stride_ = width;
  }
  const bf16* at(int64_t row, int64_t block) const { return x_ + row * stride_ + block * BLOCK; }
  int64_t bytes() const { return stride_ * sizeof(bf16); }

 private:
  const bf16* x_;
  int64_t stride_;
};

// K-blocks of a panel of pack<bf16, HALF>().
class PanelBlocks {
 public:
  explicit PanelBlocks(const LinearArgs& a)
      : size_(HALF * a.depth * sizeof(bf16)), whole_(a.depth / BLOCK), packed_(static_cast<const uint8_t*>(a.packed)),
        end_(packed_ + a.panels * HALVES * size_) {}
  void go_to(int64_t panel) {
    panel_ = packed_ + panel * HALVES * size_;
    for (int64_t half = 0; half < HALVES; ++half)
      std::memcpy(last_[half], panel_ + half * size_ + whole_ * BYTES, size_ - whole_ * BYTES);
  }
  // The first rows reach K-block k.
  template <int64_t COUNT>
  void enter(int64_t k, int64_t half) const {
    for (int64_t h = half; h < half + COUNT; ++h) fetch(panel_ + h * size_ + k * BYTES + AHEAD, BYTES, end_);
  }
  const uint8_t* at(int64_t k, int64_t half) const {
    return k < whole_ ? panel_ + half * size_ + k * BYTES : last_[half];
  }

 private:
  static constexpr int64_t BYTES = PAIRS_OF_HALF * sizeof(float);
  const int64_t size_, whole_;  // size_: of half a panel
  const uint8_t *const packed_, *const end_, *panel_ = nullptr;
  alignas(64) uint8_t last_[HALVES][BYTES] = {};  // the remainder after blocks of 32, then zeros
};

template <int SUMS>
inline void begin_sums(const float* bias) {
  if (bias) unit::load<SUMS>(bias, 0);  // in every row
  else unit::zero<SUMS>();
}

// Common arguments of the tiles of some rows: tiles of `height` rows times the panel of outputs from `column` on.
struct PanelProduct {
  const LinearArgs& a;
  const Rows& x;
  const PanelBlocks& weights;
  int64_t height, column;

  const float* bias(int64_t c) const { return a.bias ? a.bias + column + c : nullptr; }
  int64_t blocks() const { return (a.depth + BLOCK - 1) / BLOCK; }

  // Rounds the sums of half a panel to bf16 for the rows of a tile.
  void finish(int64_t row, int64_t half, const float* sums) const {
    const int64_t c = column + half * HALF, width = std::min(HALF, a.outputs - c);
    bf16* out = static_cast<bf16*>(a.out) + row * a.out_stride + c;
    for (int64_t r = 0; r < height && width > 0; ++r, out += a.out_stride, sums += HALF) {
      bf16 edge[HALF], *to = width == HALF ? out : edge;
      store(to, load(sums));
      store(to + W, load(sums + W));
      if (width < HALF) std::memcpy(out, edge, width * sizeof(bf16));
    }
  }

  // Multiplies one tile of rows by the panel.
  void one_by_four(int64_t row) const {
    begin_sums<0>(bias(0));
    begin_sums<1>(bias(W));
    begin_sums<2>(bias(HALF));
    begin_sums<3>(bias(HALF + W));
    for (int64_t k = 0; k < blocks(); ++k) {
      weights.enter<HALVES>(k, 0);
      const char *left = right_of(k, 0), *right = right_of(k, 1);
      unit::load<4>(x.at(row, k), x.bytes());
      unit::load<6>(left, HALF_STRIDE);
      unit::add_products<0, 4, 6>();
      unit::load<7>(left + 64, HALF_STRIDE);
      unit::add_products<1, 4, 7>();
      unit::load<6>(right, HALF_STRIDE);
      unit::add_products<2, 4, 6>();
      unit::load<7>(right + 64, HALF_STRIDE);
      unit::add_products<3, 4, 7>();
    }
    alignas(64) float sums[2][unit::HEIGHT * HALF];
    unit::store<0>(sums[0], HALF_STRIDE);
    unit::store<1>(sums[0] + W, HALF_STRIDE);
    unit::store<2>(sums[1], HALF_STRIDE);
    unit::store<3>(sums[1] + W, HALF_STRIDE);
    finish(row, 0, sums[0]);
    finish(row, 1, sums[1]);
  }

  // Multiplies K-blocks [from, until) of two tiles of rows by half the panel; later parts of the depth continue from
  // `sums`.
  template <bool FIRST>
  void two_by_two(int64_t row, int64_t other, int64_t half, int64_t from, int64_t until, float* sums) const {
    float* others = sums + unit::HEIGHT * HALF;
    if (from == 0) {
      begin_sums<0>(bias(half * HALF));
      begin_sums<1>(bias(half * HALF + W));
      begin_sums<2>(bias(half * HALF));
      begin_sums<3>(bias(half * HALF + W));
    } else {
      unit::load<0>(sums, HALF_STRIDE);
      unit::load<1>(sums + W, HALF_STRIDE);
      unit::load<2>(others, HALF_STRIDE);
      unit::load<3>(others + W, HALF_STRIDE);
    }
    for (int64_t k = from; k < until; ++k) {
      if (FIRST) weights.enter<1>(k, half);
      const char* right = right_of(k, half);
      unit::load<4>(x.at(row, k), x.bytes());
      unit::load<6>(right, HALF_STRIDE);
      unit::add_products<0, 4, 6>();
      unit::load<7>(right + 64, HALF_STRIDE);
      unit::add_products<1, 4, 7>();
      unit::load<5>(x.at(other, k), x.bytes());
      unit::add_products<2, 5, 6>();
      unit::add_products<3, 5, 7>();
    }
    unit::store<0>(sums, HALF_STRIDE);
    unit::store<1>(sums + W, HALF_STRIDE);
    unit::store<2>(others, HALF_STRIDE);
    unit::store<3>(others + W, HALF_STRIDE);
    if (until < blocks()) return;
    finish(row, half, sums);
    finish(other, half, others);
  }

  // Multiplies rows [row, row + rows), more than one tile. It takes half a panel in parts of the depth, each for all
  // rows: a part stays in the first cache.
  void many_rows(int64_t row, int64_t rows) const {
    static thread_local std::vector<float> room;
    const int64_t pairs = (rows + 2 * unit::HEIGHT - 1) / (2 * unit::HEIGHT);
    constexpr int64_t OF_PAIR = 2 * unit::HEIGHT * HALF;
    float* const sums = aligned(room, HALVES * pairs * OF_PAIR);
    const auto place = [&](int64_t tile) { return row + std::min(tile * height, rows - height); };
    for (int64_t from = 0; from < blocks(); from += CHUNK_BLOCKS) {
      const int64_t until = std::min(from + CHUNK_BLOCKS, blocks());
      for (int64_t half = 0; half < HALVES && column + half * HALF < a.outputs; ++half) {
        float* const of_half = sums + half * pairs * OF_PAIR;
        two_by_two<true>(place(0), place(1), half, from, until, of_half);
        for (int64_t pair = 1; pair < pairs; ++pair)
          two_by_two<false>(place(2 * pair), place(2 * pair + 1), half, from, until, of_half + pair * OF_PAIR);
      }
    }
  }

 private:
  const char* right_of(int64_t k, int64_t half) const { return reinterpret_cast<const char*>(weights.at(k, half)); }
};

inline void tile_linear(const LinearArgs& a, int64_t begin, int64_t end) {
  const Rows x(a);
  PanelBlocks weights(a);
  unit::Session session;
  each_panel(a, begin, end, x.bytes(), [&](int64_t panel, int64_t row, int64_t rows) {
    const int64_t tiles = rows <= unit::HEIGHT ? 1 : (rows + 2 * unit::HEIGHT - 1) / (2 * unit::HEIGHT) * 2;
    const int64_t height = (rows + tiles - 1) / tiles;
    session.shape(int(height));
    weights.go_to(panel);
    const PanelProduct product{a, x, weights, height, panel * PANEL};
    if (tiles == 1) product.one_by_four(row);
    else product.many_rows(row, rows);
  });
}

}  // namespace ISA
