// y = x W^T + bias by the tile unit, on the panels of pack() and pack_blocks() for pairs of bf16. A row's sums never
// mix with another's, and go through the depth in K-blocks of BLOCK whatever the number of rows: batch-invariant.
#pragma once
#include "blocks.h"
#include "tile_unit.h"

namespace ISA {

static_assert(W == unit::HEIGHT && STEP == PANEL && HAS_PAIRS, "a K-block of a panel is four right sides of the unit");

constexpr int64_t PAIRS_OF_BLOCK = BLOCK / 2 * PANEL, BLOCK_STRIDE = PANEL * sizeof(float);
constexpr int64_t BLOCKS_AHEAD = 10;  // between expanding codes and asking for them

inline float* aligned(std::vector<float>& room, int64_t numbers) {
  room.resize(numbers + 16);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(room.data()) + 63) & ~uintptr_t(63));
}

// All of it or nothing: what lies past the end is not asked for, which would be slow.
inline void fetch(const uint8_t* from, int64_t bytes, const uint8_t* end) {
  if (end - from < bytes) return;
  for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(from + byte);
}

// Rows of x on 64 bytes, the depth filled up with zeros to whole K-blocks.
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

// Where the K-blocks of a panel of pack() are. The first rows at a panel ask for the weights ahead.
class PanelBlocks {
 public:
  explicit PanelBlocks(const LinearArgs& a)
      : size_(PANEL * a.depth * sizeof(bf16)),
        whole_(a.depth / BLOCK),
        packed_(static_cast<const uint8_t*>(a.packed)),
        end_(packed_ + a.panels * size_) {}
  void go_to(int64_t panel) {
    panel_ = packed_ + panel * size_;
    std::memcpy(last_, panel_ + whole_ * BYTES, size_ - whole_ * BYTES);
  }
  const uint8_t* first(int64_t k) const {
    fetch(panel_ + k * BYTES + AHEAD, BYTES, end_);
    return again(k);
  }
  const uint8_t* again(int64_t k) const { return k < whole_ ? panel_ + k * BYTES : last_; }

 private:
  static constexpr int64_t BYTES = PAIRS_OF_BLOCK * sizeof(float);
  const int64_t size_, whole_;
  const uint8_t *const packed_, *const end_, *panel_ = nullptr;
  alignas(64) uint8_t last_[BYTES] = {};  // what 32 does not divide, then zeros
};

// The same of pack_blocks(), expanded one K-block ahead: the vectors work on it while the unit has the one before.
// Where one pass of rows is not all, everything is kept for the others.
template <BlockKind KIND>
class ExpandedBlocks {
 public:
  explicit ExpandedBlocks(const LinearArgs& a)
      : blocks_(a.depth / BLOCK),
        size_(PANEL * (blocks_ / F.span) * F.bytes()),
        packed_(static_cast<const uint8_t*>(a.packed)),
        end_(packed_ + a.panels * size_),
        mask_(a.rows > unit::HEIGHT ? -1 : 1) {
    static thread_local std::vector<float> room;
    buffer_ = aligned(room, (mask_ < 0 ? blocks_ : 2) * PAIRS_OF_BLOCK);
  }
  void go_to(int64_t panel) {
    panel_ = packed_ + panel * size_;
    expand_block(0);
  }
  const float* first(int64_t k) const {
    constexpr int64_t BYTES = PANEL * F.bytes() / F.span;  // of a K-block
    fetch(span(k) + strips_of(F, k) + BLOCKS_AHEAD * BYTES, BYTES, end_);
    if (k + 1 < blocks_) expand_block(k + 1);
    return again(k);
  }
  const float* again(int64_t k) const { return buffer_ + (k & mask_) * PAIRS_OF_BLOCK; }

 private:
  static constexpr BlockFormat F = FORMATS[KIND];
  // Strips of a K-block lie together.
  const uint8_t* span(int64_t k) const { return panel_ + span_of(F, 0, k, blocks_); }
  void expand_block(int64_t k) const { expand<KIND, true>(span(k), k, buffer_ + (k & mask_) * PAIRS_OF_BLOCK); }
  const int64_t blocks_, size_;
  const uint8_t *const packed_, *const end_, *panel_ = nullptr;
  const int64_t mask_;  // which K-blocks are kept apart
  float* buffer_;
};

template <int SUMS>
inline void begin_sums(const float* bias) {
  if (bias) unit::load<SUMS>(bias, 0);  // in every row
  else unit::zero<SUMS>();
}

// Sums of 16 columns, of which `width` are wanted, rounded to bf16.
inline void finish(const float* sums, bf16* out, int64_t stride, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows && width > 0; ++r) {
    bf16 row[W];
    store(row, load(sums + r * W));
    std::memcpy(out + r * stride, row, std::min<int64_t>(width, W) * sizeof(bf16));
  }
}

// What the tiles of an item have in common: `rows` rows each, times the panel of outputs from `column` on.
template <typename Weights>
struct PanelProduct {
  const LinearArgs& a;
  const Rows& x;
  const Weights& weights;
  int64_t rows, column;

  const float* bias(int64_t c) const { return a.bias ? a.bias + column + c : nullptr; }
  bf16* out(int64_t row, int64_t c) const { return static_cast<bf16*>(a.out) + row * a.outputs + column + c; }
  const char* block(int64_t k, bool first) const {
    return reinterpret_cast<const char*>(first ? weights.first(k) : weights.again(k));
  }
  void finish_all(int64_t row, int64_t c, const float* sums) const {
    finish(sums, out(row, c), a.outputs, rows, a.outputs - column - c);
  }

  // One tile of rows by the panel.
  void one_by_four(int64_t row, bool first) const {
    begin_sums<0>(bias(0));
    begin_sums<1>(bias(W));
    begin_sums<2>(bias(2 * W));
    begin_sums<3>(bias(3 * W));
    for (int64_t k = 0; k * BLOCK < a.depth; ++k) {
      const char* right = block(k, first);
      unit::load<4>(x.at(row, k), x.bytes());
      unit::load<6>(right, BLOCK_STRIDE);
      unit::add_products<0, 4, 6>();
      unit::load<7>(right + 64, BLOCK_STRIDE);
      unit::add_products<1, 4, 7>();
      unit::load<6>(right + 128, BLOCK_STRIDE);
      unit::add_products<2, 4, 6>();
      unit::load<7>(right + 192, BLOCK_STRIDE);
      unit::add_products<3, 4, 7>();
    }
    alignas(64) float sums[4][unit::HEIGHT * W];
    store_sums(sums);
    for (int64_t t = 0; t < 4; ++t) finish_all(row, t * W, sums[t]);
  }

  // Two tiles of rows by one half of the panel, then the other.
  void two_by_two(int64_t row, int64_t other, bool first) const {
    for (int64_t c = 0; c < PANEL; c += 2 * W) {
      begin_sums<0>(bias(c));
      begin_sums<1>(bias(c + W));
      begin_sums<2>(bias(c));
      begin_sums<3>(bias(c + W));
      for (int64_t k = 0; k * BLOCK < a.depth; ++k) {
        const char* right = block(k, first && c == 0) + c * sizeof(float);
        unit::load<4>(x.at(row, k), x.bytes());
        unit::load<6>(right, BLOCK_STRIDE);
        unit::add_products<0, 4, 6>();
        unit::load<7>(right + 64, BLOCK_STRIDE);
        unit::add_products<1, 4, 7>();
        unit::load<5>(x.at(other, k), x.bytes());
        unit::add_products<2, 5, 6>();
        unit::add_products<3, 5, 7>();
      }
      alignas(64) float sums[4][unit::HEIGHT * W];
      store_sums(sums);
      for (int64_t t = 0; t < 4; ++t) finish_all(t < 2 ? row : other, c + t % 2 * W, sums[t]);
    }
  }

  static void store_sums(float (*sums)[unit::HEIGHT * W]) {
    unit::store<0>(sums[0], ROW_STRIDE);
    unit::store<1>(sums[1], ROW_STRIDE);
    unit::store<2>(sums[2], ROW_STRIDE);
    unit::store<3>(sums[3], ROW_STRIDE);
  }
  static constexpr int64_t ROW_STRIDE = W * sizeof(float);
};

// Items as in multiply_items(). Time follows the rows of a tile, so rows are spread evenly over the tiles of an item;
// the last tile overlaps the one before it.
template <typename Weights>
void multiply_tiles(const LinearArgs& a, Weights weights, int64_t begin, int64_t end) {
  const Rows x(a);
  const int64_t groups = (a.rows + a.row_group - 1) / a.row_group;
  unit::Session session;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item % groups * a.row_group, rows = std::min(a.row_group, a.rows - row);
    const int64_t tiles = (rows + unit::HEIGHT - 1) / unit::HEIGHT, height = (rows + tiles - 1) / tiles;
    const bool fresh = item == begin || row == 0;
    if (fresh) weights.go_to(item / groups);
    session.shape(int(height));
    const PanelProduct<Weights> product{a, x, weights, height, item / groups * PANEL};
    const auto place = [&](int64_t tile) { return row + std::min(tile * height, rows - height); };
    for (int64_t tile = 0; tile < tiles; tile += 2) {
      const bool first = fresh && tile == 0;
      if (tile + 1 < tiles) product.two_by_two(place(tile), place(tile + 1), first);
      else product.one_by_four(place(tile), first);
    }
  }
}

inline void tile_linear(const LinearArgs& a, int64_t begin, int64_t end) {
  multiply_tiles(a, PanelBlocks(a), begin, end);
}

template <BlockKind KIND>
void tile_block_linear(const LinearArgs& a, int64_t begin, int64_t end) {
  multiply_tiles(a, ExpandedBlocks<KIND>(a), begin, end);
}

}  // namespace ISA
