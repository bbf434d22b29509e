// y = x W^T + bias by the tile unit for weights in blocks. The expanded weights are the left side, with a row of the
// depth for each output: a few codes of one output, looked up in that output's numbers, make a row. Rows of x are the
// columns of the right side. Sums have the bits of tile_linear().
#pragma once
#include "blocks.h"
#include "tile_rows.h"
#include "tile_unit.h"

namespace ISA {

static_assert(W == unit::HEIGHT && STEP == PANEL && BLOCK * sizeof(bf16) == unit::ROW_BYTES);

#if defined(__AVX512BF16__)
constexpr bool FAST_TILES = true;
#else
constexpr bool FAST_TILES = false;
#endif

// Codes of a strip lie in planes of 8, 4, 2 and 1 bits. A byte has codes of neighbouring outputs; 32 bytes are the
// depth of a block.
template <BlockKind KIND>
struct CodePlanes {
  static constexpr int64_t BITS = FORMATS[KIND].bits;
  static constexpr bool BY_TABLE = BITS == 4;
  static constexpr int64_t at(int64_t plane) { return (BITS & -2 * plane) * W * BLOCK / 8; }  // first byte
  // Place of number i of the depth: if each half is extracted by itself, words of both halves alternate.
  static constexpr int64_t place(int64_t i) { return BY_TABLE || BITS == 8 ? i : i % 16 * 2 + i / 16; }

  // Calls f(plane, bits of a code below it, place of the output's codes, first bit in a byte) for each plane.
  template <typename F>
  static void each_plane(int64_t output, const F& f) {
    int64_t below = 0;
    for (int64_t plane : {8, 4, 2, 1}) {
      if (!(BITS & plane)) continue;
      f(plane, below, at(plane) + output * plane / 8 * BLOCK, output * plane % 8);
      below += plane;
    }
  }
  static void put(uint8_t* strip, int64_t output, int64_t i, uint32_t code) {
    each_plane(output, [&](int64_t plane, int64_t below, int64_t from, int64_t bit) {
      strip[from + place(i)] |= (code >> below & ((1 << plane) - 1)) << bit;
    });
  }
  static uint32_t get(const uint8_t* strip, int64_t output, int64_t i) {
    uint32_t code = 0;
    each_plane(output, [&](int64_t plane, int64_t below, int64_t from, int64_t bit) {
      code |= (strip[from + place(i)] >> bit & ((1 << plane) - 1)) << below;
    });
    return code;
  }
};

// Strip `strip` of block `k` as bf16 [W, BLOCK].
template <BlockKind KIND>
__attribute__((noinline)) void expand_outputs(const uint8_t* span, int64_t k, int64_t strip, bf16* to) {
  using Planes = CodePlanes<KIND>;
  constexpr BlockFormat F = FORMATS[KIND];
  const uint8_t* codes = span + strips_of(F, k) + strip * W * F.block();
  const Scales<KIND> of_lanes(span + strip * W * F.shared, codes + W * F.bits * BLOCK / 8);
  constexpr bool ADDS = MINIMA<KIND> && F.own == 0, TAKES = F.shared == 4 && !ADDS;
  // A code with an excess becomes 1 + code / 128 by its bits: 128 * d and the offset are exact, the sum is fused.
  constexpr bool BY_BITS = FAST_TILES && EXCESS<KIND> && !Planes::BY_TABLE;
  constexpr bool HAS_OFFSET = ADDS || TAKES || BY_BITS;
  alignas(64) float scales[2][W], offsets[2][W];
  for (int h = 0; h < 2; ++h) {
    const Vec d = of_lanes.d[h], m = of_lanes.m[h];
    store(scales[h], BY_BITS ? 128.f * d : d);
    store(offsets[h], BY_BITS ? -(128.f + EXCESS<KIND>) * d : ADDS ? m : -m);
  }
  asm volatile("" ::: "memory");  // forces a new read: extracting registers lane by lane costs more
  const auto weights = [&](Vec numbers, int64_t output, int64_t half) {
    const Vec scale = splat(scales[half][output]);
    return HAS_OFFSET ? add_product(splat(offsets[half][output]), numbers, scale) : numbers * scale;
  };
#if defined(__AVX512BF16__)
  const auto words_at = [codes](int64_t byte) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + byte)));
  };
  const auto pairs_of = [](Vec first, Vec second) {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
  };
  if constexpr (Planes::BY_TABLE) {  // of the numbers of both outputs, 16 each
    Vec numbers;
    for (int i = 0; i < W; ++i) numbers[i] = float(number_of<KIND>(i));
#pragma GCC unroll 8
    for (int c = 0; c < W; c += 2) {
      const __m512i both = words_at(c / 2 * BLOCK);
      const __m512i table = pairs_of(weights(numbers, c + 1, 0), weights(numbers, c, 0));
      const __m512i first = (both & _mm512_set1_epi16(15)) | _mm512_set1_epi16(16);  // the lookup uses five bits
      _mm512_storeu_si512(to + c * BLOCK, _mm512_permutexvar_epi16(first, table));
      _mm512_storeu_si512(to + (c + 1) * BLOCK, _mm512_permutexvar_epi16(_mm512_srli_epi16(both, 4), table));
    }
  } else {
#pragma GCC unroll 16
    for (int c = 0; c < W; ++c) {
      __m512i halves[2];
      if constexpr (Planes::BITS == 8) {
        const auto* from = reinterpret_cast<const __m128i*>(codes + c * BLOCK);
        for (int h = 0; h < 2; ++h) halves[h] = _mm512_cvtepi8_epi32(_mm_loadu_si128(from + h));
      } else {
        __m512i words{};
        Planes::each_plane(c, [&](int plane, int below, int64_t from, int bit) {
          const __m512i found = words_at(from), mask = _mm512_set1_epi16(((1 << plane) - 1) << below);
          const int shift = bit - below;
          words |= (shift < 0 ? _mm512_slli_epi16(found, -shift) : _mm512_srli_epi16(found, shift)) & mask;
        });
        halves[0] = BY_BITS ? _mm512_slli_epi32(words, 16) : words & _mm512_set1_epi32(0xffff);
        halves[1] = BY_BITS ? words : _mm512_srli_epi32(words, 16);
      }
      Vec out[2];
      for (int h = 0; h < 2; ++h) {
        constexpr int CODE = 63 << 16;
        if (BY_BITS) halves[h] = (halves[h] & _mm512_set1_epi32(CODE)) | _mm512_set1_epi32(0x3f800000);
        out[h] = weights(BY_BITS ? reinterpret_cast<Vec>(halves[h]) : _mm512_cvtepi32_ps(halves[h]), c, h);
      }
      _mm512_storeu_si512(to + c * BLOCK, pairs_of(out[0], out[1]));
    }
  }
#else
  for (int64_t c = 0; c < W; ++c)
    for (int64_t h = 0; h < 2; ++h) {
      Vec numbers;
      for (int64_t i = 0; i < W; ++i) numbers[i] = float(number_of<KIND>(Planes::get(codes, c, h * W + i)));
      store(to + c * BLOCK + h * W, weights(numbers, c, h));
    }
#endif
}

// The same for all strips, for products of float32, into rows of STEP numbers.
template <BlockKind KIND>
void expand_floats(const uint8_t* span, int64_t k, float* to) {
  for (int64_t strip = 0; strip < BLOCKS; ++strip, to += W) {
    alignas(64) float pairs[W * W];
    expand_outputs<KIND>(span, k, strip, reinterpret_cast<bf16*>(pairs));
    Vec block[W];
    for (int i = 0; i < W; ++i) block[i] = load(pairs + i * W);
    transpose(block);
    for (int i = 0; i < W; ++i) {
      store(to + 2 * i * STEP, lower_halves(block[i]));
      store(to + (2 * i + 1) * STEP, upper_halves(block[i]));
    }
  }
}

// Rows of x as right sides of the unit: each K-block has pairs of neighbours in depth, one pair below the next.
class RightRows {
 public:
  explicit RightRows(const LinearArgs& a) : a_(a), blocks_(a.depth / BLOCK) {}
  // Sets `tiles` tiles of `height` rows each from `row` on; the last tile ends at row + rows.
  void set(int64_t row, int64_t rows, int64_t tiles, int64_t height) {
    if (row == row_ && rows == rows_) return;
    row_ = row, rows_ = rows;
    stride_ = int64_t(std::bit_ceil(uint64_t(height))) * 4;
    const bf16* x = static_cast<const bf16*>(a_.x) + row * a_.x_stride;
    if (rows == 1 && reinterpret_cast<uintptr_t>(x) % 4 == 0) {  // as it lies in memory
      from_ = reinterpret_cast<const char*>(x);
      return;
    }
    static thread_local std::vector<float> room;
    float* to = aligned(room, (tiles * blocks_ + 1) * (block_bytes() / 4));
    from_ = reinterpret_cast<const char*>(to);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const bf16* first = x + std::min(tile * height, rows - height) * a_.x_stride;
      for (int64_t k = 0; k < blocks_; ++k) {
        Vec block[W]{};
        for (int64_t r = 0; r < height; ++r)
          block[r] = load(reinterpret_cast<const float*>(first + r * a_.x_stride + k * BLOCK));
        transpose(block);
        for (int i = 0; i < W; ++i, to += stride_ / 4) store(to, block[i]);  // a narrower row's rest is overwritten
      }
    }
  }
  const char* at(int64_t tile, int64_t k) const { return from_ + (tile * blocks_ + k) * block_bytes(); }
  int64_t stride() const { return stride_; }

 private:
  int64_t block_bytes() const { return BLOCK / 2 * stride_; }
  const LinearArgs& a_;
  const int64_t blocks_;
  int64_t row_ = -1, rows_ = 0, stride_ = 4;
  const char* from_ = nullptr;
};

// A panel of outputs times some rows of x.
template <BlockKind KIND>
class BlockPanel {
 public:
  explicit BlockPanel(const LinearArgs& a)
      : a_(a), right_(a), blocks_(a.depth / BLOCK), size_(PANEL * F.spans(blocks_) * F.bytes()),
        packed_(static_cast<const uint8_t*>(a.packed)), end_(packed_ + a.panels * size_) {
    static thread_local std::vector<float> room;
    expanded_ = reinterpret_cast<bf16*>(aligned(room, 2 * CHUNK_BLOCKS * STRIP / 2));
  }

  void multiply(unit::Session& session, int64_t panel, int64_t row, int64_t rows) {
    const int64_t tiles = rows <= W ? 1 : (rows + 2 * W - 1) / (2 * W) * 2;
    height_ = (rows + tiles - 1) / tiles;
    session.shape(unit::HEIGHT, int(height_));
    right_.set(row, rows, tiles, height_);
    panel_ = packed_ + panel * size_;
    column_ = panel * PANEL;
    if (tiles == 1) few_rows(row);
    else many_rows(row, rows, tiles);
  }

 private:
  static constexpr BlockFormat F = FORMATS[KIND];
  static constexpr int64_t STRIP = W * BLOCK, TILE = W * W;  // numbers of each, expanded and as sums
  static constexpr int64_t SPANS_AHEAD = 16 / F.span;  // from a prefetch of codes to their use
  static constexpr int64_t CHUNK_BLOCKS = 10;  // of two strips and of two tiles of rows, fit the first cache

  const uint8_t* span(int64_t k) const { return panel_ + span_of(F, 0, k, blocks_); }
  void expand(int64_t k, int64_t strip, bf16* to) const { expand_outputs<KIND>(span(k), k, strip, to); }
  // Prefetches the lines of a block in parts: all lines at once would delay the loads between them.
  __attribute__((always_inline)) void ask_ahead(int64_t k, int64_t strip) const {
    const uint8_t* ahead = span(k) + SPANS_AHEAD * PANEL * F.bytes();
    if (k % F.span == 0) fetch(ahead + strip * W * F.shared, W * F.shared, end_);
    fetch(ahead + strips_of(F, k) + strip * W * F.block(), W * F.block(), end_);
  }

  template <int SUMS>
  void begin_sums(int64_t strip) const {
    if (!a_.bias) return unit::zero<SUMS>();
    alignas(64) float rows[TILE];
    for (int64_t c = 0; c < W; ++c) store(rows + c * W, splat(a_.bias[column_ + strip * W + c]));
    unit::load<SUMS>(rows, W * sizeof(float));
  }

  // Rounds the sums of a strip [W, height], `stride` bytes apart, to bf16 for the rows from `row` on.
  void finish(int64_t row, int64_t strip, const float* sums) const {
    const int64_t c = column_ + strip * W, width = std::min<int64_t>(W, a_.outputs - c);
    if (width <= 0) return;
    bf16* out = static_cast<bf16*>(a_.out) + row * a_.out_stride + c;
    Vec block[W];
    for (int i = 0; i < W; ++i) block[i] = load(sums + i * W);
    transpose(block);
    for (int64_t r = 0; r < height_; ++r, out += a_.out_stride) {
      bf16 edge[W], *to = width == W ? out : edge;
      store(to, block[r]);
      if (width < W) std::memcpy(out, edge, width * sizeof(bf16));
    }
  }

  // Multiplies one tile of rows by all strips. The vectors expand one K-block ahead, while the unit multiplies the
  // previous one.
  void few_rows(int64_t row) const {
    const auto place = [this](int64_t k, int64_t strip) { return expanded_ + (k % 2 * BLOCKS + strip) * STRIP; };
    each<BLOCKS>([&](auto strip) {
      begin_sums<strip>(strip);
      expand(0, strip, place(0, strip));
    });
    for (int64_t k = 0; k < blocks_; ++k) {
      unit::load<6>(right_.at(0, k), right_.stride());
      each<BLOCKS>([&](auto strip) {
        constexpr int S = strip, LEFT = 4 + S % 2;
        ask_ahead(k, S);
        if (k + 1 < blocks_) expand(k + 1, S, place(k + 1, S));
        unit::load<LEFT>(place(k, S), unit::ROW_BYTES);
        unit::add_products<S, LEFT, 6>();
      });
    }
    each<BLOCKS>([&](auto strip) {
      alignas(64) float sums[TILE]{};
      unit::store<strip>(sums, W * sizeof(float));
      finish(row, strip, sums);
    });
  }

  // Multiplies K-blocks [from, until) of two strips by two tiles of rows; later parts of the depth continue from
  // `sums`. FIRST: the first rows, which expand the strips and keep them for later rows.
  template <bool FIRST>
  void two_by_two(int64_t tile, int64_t strip, int64_t from, int64_t until, float* sums) const {
    constexpr int64_t ROW = W * sizeof(float);
    const auto place = [&](int64_t k, int64_t s) { return expanded_ + (s * CHUNK_BLOCKS + k - from) * STRIP; };
    if (from == 0) {
      begin_sums<0>(strip);
      begin_sums<1>(strip);
      begin_sums<2>(strip + 1);
      begin_sums<3>(strip + 1);
    } else {
      each<4>([&](auto i) { unit::load<i>(sums + i * TILE, ROW); });
    }
    if (FIRST)
      for (int64_t s = 0; s < 2; ++s) expand(from, strip + s, place(from, s));
    for (int64_t k = from; k < until; ++k) {
      for (int64_t s = 0; FIRST && s < 2; ++s) {
        ask_ahead(k, strip + s);
        if (k + 1 < until) expand(k + 1, strip + s, place(k + 1, s));
      }
      unit::load<4>(place(k, 0), unit::ROW_BYTES);
      unit::load<6>(right_.at(tile, k), right_.stride());
      unit::add_products<0, 4, 6>();
      unit::load<7>(right_.at(tile + 1, k), right_.stride());
      unit::add_products<1, 4, 7>();
      unit::load<5>(place(k, 1), unit::ROW_BYTES);
      unit::add_products<2, 5, 6>();
      unit::add_products<3, 5, 7>();
    }
    each<4>([&](auto i) { unit::store<i>(sums + i * TILE, ROW); });
  }

  // Multiplies rows [row, row + rows), more than one tile. It takes half a panel in parts of the depth, each for all
  // rows: the expanded codes of a part stay in the first cache.
  void many_rows(int64_t row, int64_t rows, int64_t tiles) const {
    static thread_local std::vector<float> room;
    float* const sums = aligned(room, BLOCKS * tiles * TILE);
    for (int64_t from = 0; from < blocks_; from += CHUNK_BLOCKS) {
      const int64_t until = std::min(from + CHUNK_BLOCKS, blocks_);
      for (int64_t strip = 0; strip < BLOCKS && column_ + strip * W < a_.outputs; strip += 2) {
        float* const of_half = sums + strip * tiles * TILE;
        two_by_two<true>(0, strip, from, until, of_half);
        for (int64_t tile = 2; tile < tiles; tile += 2)
          two_by_two<false>(tile, strip, from, until, of_half + 2 * tile * TILE);
        for (int64_t tile = 0; until == blocks_ && tile < tiles; ++tile)
          for (int64_t s = 0; s < 2; ++s)
            finish(row + std::min(tile * height_, rows - height_), strip + s,
                   of_half + (tile / 2 * 4 + s * 2 + tile % 2) * TILE);
      }
    }
  }

  const LinearArgs& a_;
  RightRows right_;
  const int64_t blocks_, size_;
  const uint8_t *const packed_, *const end_, *panel_ = nullptr;
  bf16* expanded_;
  int64_t height_ = 0, column_ = 0;
};

template <BlockKind KIND>
void tile_block_linear(const LinearArgs& a, int64_t begin, int64_t end) {
  unit::Session session;
  BlockPanel<KIND> product(a);
  each_panel(a, begin, end, a.depth * sizeof(bf16), [&](int64_t panel, int64_t row, int64_t rows) {
    product.multiply(session, panel, row, rows);
  });
}

template <BlockKind KIND>
void float_block_linear(const LinearArgs& a, int64_t begin, int64_t end) {
  multiply_blocks<float>(a, FORMATS[KIND], expand_floats<KIND>, begin, end);
}

}  // namespace ISA
