// Integer products of blocks for many rows by the tile unit, with the bits of int_blocks.h. Each stripe expands once
// for all rows: codes times the integer scales of sub-blocks become signed bytes. A unit of the depth, with one float
// scale, needs only an exact product of bytes from the tiles.
#pragma once
#include "int_blocks.h"
#include "tile_rows.h"
#include "tile_unit.h"

namespace ISA {

// A unit of a stripe: a block, or a whole superblock.
template <BlockKind KIND>
struct StripeUnit {
  using Kind = IntKind<KIND>;
  static constexpr int64_t DEPTH = Kind::WIDE ? 8 * BLOCK : BLOCK;
  static constexpr int64_t IN_SPAN = Kind::WIDE ? 1 : Kind::F.span;
  // Codes times scales have up to 14 bits: the lower seven bits are one byte, the upper bits a second one. Q2_K needs
  // one byte.
  static constexpr int PARTS = Kind::WIDE && KIND != Q2_K ? 2 : 1, LOW = 7;
  static constexpr int PAIRS = !Kind::WIDE || !Kind::MINIMA ? 0 : Kind::HALVES ? 8 : 4;  // of integer minima
  uint8_t codes[PARTS][DEPTH * W];  // [DEPTH / 4][W][4]
  Vec d, m;
  IntVec minima[PAIRS];

  void expand(const uint8_t* span, int64_t k) {
    if constexpr (Kind::WIDE) expand_superblock(span);
    else expand_block(span, k);
  }

 private:
  using Codes = int8_t __attribute__((vector_size(W * 4)));
  static constexpr int64_t SIZE = W * Kind::F.bits * BLOCK / 8;  // of a block's codes
  static void put(uint8_t* to, Shorts x) { store(reinterpret_cast<float*>(to), reinterpret_cast<Vec>(x)); }

  // Signed codes of group g of a block.
  static Codes signed_codes(const uint8_t* block, int g) {
    return reinterpret_cast<Codes>(codes_of_group<KIND>(block, g)) - int8_t(Kind::OFFSET);
  }

  void expand_block(const uint8_t* span, int64_t k) {
    Codes zeros{};
    if constexpr (GROUPED<KIND>) {
      const IntVec both = load_ints(span);
      d = reinterpret_cast<Vec>(both & ~31);
      zeros = reinterpret_cast<Codes>((both & 31) * 0x01010101);
    } else {
      d = KIND == MXFP4 ? from_exponents(span) : from_halves(span);
      if constexpr (Kind::MINIMA) m = from_halves(span + 2 * W);
    }
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g)
      put(codes[0] + g * W * 4, reinterpret_cast<Shorts>(signed_codes(span + Kind::CODES + k * SIZE, g) - zeros));
  }

  void expand_superblock(const uint8_t* span) {
    d = from_halves(span);
    if constexpr (Kind::MINIMA) m = from_halves(span + 2 * W);
    for (int i = 0; i < PAIRS; ++i) minima[i] = minima_of<KIND>(span, i);
    for (int k = 0; k < 8; ++k) {
      const IntVec both = scale_pairs<KIND>(span, k);
      uint8_t* const to = codes[0] + k * BLOCK * W;
#pragma GCC unroll 8
      for (int g = 0; g < 8; ++g) {
        const auto four = reinterpret_cast<Shorts>(signed_codes(span + Kind::CODES + k * SIZE, g));
        const auto scale = reinterpret_cast<Shorts>(twice(both, g / 4));
        const Shorts even = ((four << 8) >> 8) * scale, odd = (four >> 8) * scale;
        if constexpr (PARTS == 1) {
          put(to + g * W * 4, (even & 255) | odd << 8);
        } else {
          put(to + g * W * 4, (even & 127) | (odd & 127) << 8);
          put(to + DEPTH * W + g * W * 4, ((even >> LOW) & 255) | (odd >> LOW) << 8);
        }
      }
    }
  }
};

// The factors of a unit's sums of 16 rows.
template <BlockKind KIND>
struct RowUnit {
  using Unit = StripeUnit<KIND>;
  float scales[unit::HEIGHT];
  float sums[unit::HEIGHT];                  // of narrow blocks
  int32_t pairs[Unit::PAIRS][unit::HEIGHT];  // of wide blocks, in the form for add_pairs()

  void take(const char* x, int64_t row, int64_t n) {
    if constexpr (IntKind<KIND>::WIDE) {
      const WideBlock& block = reinterpret_cast<const WideBlock*>(x)[n];
      scales[row] = block.scale;
      const int16_t* const from = IntKind<KIND>::HALVES ? block.halves : block.sums;
      for (int i = 0; i < Unit::PAIRS; ++i) std::memcpy(&pairs[i][row], from + 2 * i, 4);
    } else {
      const NarrowBlock& block = reinterpret_cast<const NarrowBlock*>(x)[n];
      scales[row] = block.scale;
      sums[row] = float(block.sum);
    }
  }
};

// Rows of round_rows() in the order of reading: codes [chunk][tile][depth of a chunk / 64][HEIGHT][64], scales
// [chunk][tile][units of a chunk]. Rows missing in the last tile are 0.
template <BlockKind KIND>
class TiledRows {
 public:
  using Unit = StripeUnit<KIND>;
  // Units of a stripe expanded at once; they fit the first cache with two tiles of rows.
  static constexpr int64_t CHUNK_UNITS = (IntKind<KIND>::WIDE ? 512 : 1024) / Unit::DEPTH;
  explicit TiledRows(const LinearArgs& a) : a_(a), units_(a.depth / Unit::DEPTH) {}

  // Takes rows [row, row + rows).
  void take(int64_t row, int64_t rows) {
    if (row == row_ && rows == rows_) return;
    row_ = row, rows_ = rows;
    static thread_local std::vector<float> room;
    static thread_local std::vector<RowUnit<KIND>> scales;
    const int64_t bytes = tiles() * chunks() * TILE_BYTES;
    codes_ = reinterpret_cast<int8_t*>(aligned(room, bytes / 4));
    if (rows % unit::HEIGHT) std::memset(codes_, 0, bytes);
    scales.assign(tiles() * chunks() * CHUNK_UNITS, {});
    scales_ = scales.data();
    for (int64_t r = 0; r < rows; ++r) {
      const char* const from = static_cast<const char*>(a_.x) + (row + r) * a_.x_stride;
      for (int64_t n = 0; n < units_; ++n) {
        const int64_t place = n / CHUNK_UNITS * tiles() + r / unit::HEIGHT;  // of a tile in a chunk
        scales_[place * CHUNK_UNITS + n % CHUNK_UNITS].take(from, r % unit::HEIGHT, n);
        copy_codes(from, n, codes_ + place * TILE_BYTES + r % unit::HEIGHT * unit::ROW_BYTES);
      }
    }
  }
  int64_t rows() const { return rows_; }
  int64_t tiles() const { return (rows_ + unit::HEIGHT - 1) / unit::HEIGHT; }
  int64_t chunks() const { return (units_ + CHUNK_UNITS - 1) / CHUNK_UNITS; }
  int64_t units_of(int64_t chunk) const { return std::min(CHUNK_UNITS, units_ - chunk * CHUNK_UNITS); }
  const int8_t* codes(int64_t chunk, int64_t tile) const {
    return codes_ + (chunk * tiles() + tile) * TILE_BYTES;
  }
  const RowUnit<KIND>* scales(int64_t chunk, int64_t tile) const {
    return scales_ + (chunk * tiles() + tile) * CHUNK_UNITS;
  }
  static constexpr int64_t STEP_BYTES = unit::HEIGHT * unit::ROW_BYTES;  // of 64 of the depth
  static constexpr int64_t TILE_BYTES = CHUNK_UNITS * Unit::DEPTH / unit::ROW_BYTES * STEP_BYTES;  // of a chunk

 private:
  static void copy_codes(const char* from, int64_t n, int8_t* to) {
    const int64_t own = n % CHUNK_UNITS;
    if constexpr (IntKind<KIND>::WIDE) {
      const WideBlock& block = reinterpret_cast<const WideBlock*>(from)[n];
      for (int64_t i = 0; i < 4; ++i)
        std::memcpy(to + (4 * own + i) * STEP_BYTES, block.codes + i * unit::ROW_BYTES, unit::ROW_BYTES);
    } else {
      const NarrowBlock& block = reinterpret_cast<const NarrowBlock*>(from)[n];
      std::memcpy(to + own / 2 * STEP_BYTES + own % 2 * BLOCK, block.codes, BLOCK);
    }
  }
  const LinearArgs& a_;
  const int64_t units_;
  int64_t row_ = 0, rows_ = 0;
  int8_t* codes_ = nullptr;
  RowUnit<KIND>* scales_ = nullptr;
};

// Products of four tiles wait here for the vectors while the unit makes the next ones. These are stored after the
// buffer is read: a load waits for an earlier store with the same lowest 12 bits of address.
struct alignas(64) TileSums {
  int32_t of[4][unit::HEIGHT * W];
  IntVec row(int64_t tile, int64_t r) const { return load_ints(reinterpret_cast<const uint8_t*>(of[tile] + r * W)); }
};

// No lambdas around the unit's instructions below: each instruction would make captured values be read again from
// memory.
#define INLINE __attribute__((always_inline)) inline

// Turns sums J of the unit into a tile of rows times codes of a stripe.
template <int J>
INLINE void multiply_block(const int8_t* rows, const uint8_t* codes) {
  unit::zero<J>();
  unit::load<4 + J % 2>(rows, unit::ROW_BYTES);
  unit::load<6 + J % 2>(codes, unit::ROW_BYTES);
  unit::add_integers<J, 4 + J % 2, 6 + J % 2>();
}

// SKIP: leaves out the second and the last.
template <bool SKIP = false>
INLINE void store_sums(TileSums& sums) {
  unit::store<0>(sums.of[0], unit::ROW_BYTES);
  if constexpr (!SKIP) unit::store<1>(sums.of[1], unit::ROW_BYTES);
  unit::store<2>(sums.of[2], unit::ROW_BYTES);
  if constexpr (!SKIP) unit::store<3>(sums.of[3], unit::ROW_BYTES);
}

// Turns sums J of the unit into block `next`, while the vectors add block n to `own`.
template <BlockKind KIND, int R, int J>
INLINE void next_block(const StripeUnit<KIND>* stripe, int64_t next, int64_t n, int64_t count, const int8_t* rows,
                       const RowUnit<KIND>* scales, const TileSums& sums, Vec (&own)[R]) {
  next = std::min(next, count - 1);  // the last one replaces missing ones
  multiply_block<J>(rows + next / 2 * TiledRows<KIND>::STEP_BYTES + next % 2 * BLOCK, stripe[next].codes[0]);
  if (n >= count) return;
  const Vec d = stripe[n].d, m = stripe[n].m;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const Vec sum = __builtin_convertvector(sums.row(J, r), Vec);
    const Vec scaled = IntKind<KIND>::MINIMA ? fused(d, sum, m * splat(scales[n].sums[r])) : d * sum;
    own[r] = fused(splat(scales[n].scales[r]), scaled, own[r]);
  }
}

// totals[r] += `count` blocks of a stripe times R rows of a tile.
template <BlockKind KIND, int R>
__attribute__((noinline)) void add_blocks(const StripeUnit<KIND>* stripe, int64_t count, const int8_t* rows,
                                          const RowUnit<KIND>* scales, Vec* totals) {
  TileSums sums;
  Vec own[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) own[r] = totals[r];
  for (int64_t n = -4; n < count; n += 4) {
    const int64_t now = n < 0 ? count : n;
    next_block<KIND, R, 0>(stripe, n + 4, now, count, rows, scales, sums, own);
    next_block<KIND, R, 1>(stripe, n + 5, now + 1, count, rows, scales, sums, own);
    next_block<KIND, R, 2>(stripe, n + 6, now + 2, count, rows, scales, sums, own);
    next_block<KIND, R, 3>(stripe, n + 7, now + 3, count, rows, scales, sums, own);
    store_sums(sums);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) totals[r] = own[r];
}

// Step STEP of a superblock, for one or two tiles of rows. The unit works on four sums at a time; a product waits for
// the previous one of its sum, so one tile has separate sums for even and odd steps.
template <BlockKind KIND, int TILES, int STEP>
INLINE void multiply_step(const int8_t* rows, const StripeUnit<KIND>& stripe) {
  constexpr int64_t STEP_BYTES = TiledRows<KIND>::STEP_BYTES, TILE = TiledRows<KIND>::TILE_BYTES;
  constexpr int OWN = TILES == 2 ? 0 : STEP % 2 * 2;
  constexpr bool UPPER = StripeUnit<KIND>::PARTS == 2;
  rows += STEP * STEP_BYTES;
  unit::load<4>(rows, unit::ROW_BYTES);
  unit::load<6>(stripe.codes[0] + STEP * unit::ROW_BYTES * W, unit::ROW_BYTES);
  unit::add_integers<OWN, 4, 6>();
  if constexpr (UPPER) {
    unit::load<7>(stripe.codes[1] + STEP * unit::ROW_BYTES * W, unit::ROW_BYTES);
    unit::add_integers<OWN + 1, 4, 7>();
  }
  if constexpr (TILES == 2) {
    unit::load<5>(rows + TILE, unit::ROW_BYTES);
    unit::add_integers<2, 5, 6>();
    if constexpr (UPPER) unit::add_integers<3, 5, 7>();
  }
}

// Adds rows [begin, end) of a tile.
template <BlockKind KIND, int TILES>
INLINE void add_rows(const StripeUnit<KIND>& u, const TileSums& sums, int64_t tile, const RowUnit<KIND>& scales,
                     int64_t begin, int64_t end, Vec* totals) {
  using Unit = StripeUnit<KIND>;
  for (int64_t r = begin; r < end; ++r) {
    IntVec sum = sums.row(2 * tile, r);
    if constexpr (TILES == 1) sum += sums.row(2, r);
    if constexpr (Unit::PARTS == 2) {
      IntVec upper = sums.row(2 * tile + 1, r);
      if constexpr (TILES == 1) upper += sums.row(3, r);
      sum += upper << Unit::LOW;
    }
    Vec scaled = __builtin_convertvector(sum, Vec);
    if constexpr (Unit::PAIRS > 0) {
      IntVec lower{};
#pragma GCC unroll 8
      for (int i = 0; i < Unit::PAIRS; ++i) lower = add_pairs(lower, u.minima[i], scales.pairs[i][r] - IntVec{});
      scaled = fused(u.d, scaled, -(u.m * scaled_minima<KIND>(lower)));
    } else {
      scaled = u.d * scaled;
    }
    totals[r] = fused(splat(scales.scales[r]), scaled, totals[r]);
  }
}

// Step STEP of the next superblock, while the vectors add a quarter of this one's rows.
template <BlockKind KIND, int TILES, int STEP>
INLINE void next_step(const int8_t* rows, const StripeUnit<KIND>& next, const StripeUnit<KIND>& u, const TileSums& sums,
                      const RowUnit<KIND>* scales, int64_t count, Vec* totals) {
  multiply_step<KIND, TILES, STEP>(rows, next);
  constexpr int64_t EACH = TILES * unit::HEIGHT / 4, FIRST = STEP * EACH, TILE = FIRST / unit::HEIGHT;
  const int64_t from = FIRST % unit::HEIGHT, until = std::min(from + EACH, count - TILE * unit::HEIGHT);
  add_rows<KIND, TILES>(u, sums, TILE, scales[TILE * TiledRows<KIND>::CHUNK_UNITS], from, until,
                        totals + TILE * unit::HEIGHT);
}

// Like add_blocks(), for superblocks and TILES (one or two) tiles of rows; count: their rows.
template <BlockKind KIND, int TILES>
__attribute__((noinline)) void add_superblocks(const StripeUnit<KIND>* stripe, int64_t units, const int8_t* rows,
                                               const RowUnit<KIND>* scales, int64_t count, Vec* totals) {
  using Unit = StripeUnit<KIND>;
  constexpr int64_t BYTES = Unit::DEPTH / unit::ROW_BYTES * TiledRows<KIND>::STEP_BYTES;
  TileSums sums;
  for (int64_t n = -1; n < units; ++n) {
    const int64_t next = std::min(n + 1, units - 1), now = std::max<int64_t>(n, 0), wanted = n < 0 ? 0 : count;
    const int8_t* const of_next = rows + next * BYTES;
    unit::zero<0>();
    unit::zero<1>();
    unit::zero<2>();
    unit::zero<3>();
    next_step<KIND, TILES, 0>(of_next, stripe[next], stripe[now], sums, scales + now, wanted, totals);
    next_step<KIND, TILES, 1>(of_next, stripe[next], stripe[now], sums, scales + now, wanted, totals);
    next_step<KIND, TILES, 2>(of_next, stripe[next], stripe[now], sums, scales + now, wanted, totals);
    next_step<KIND, TILES, 3>(of_next, stripe[next], stripe[now], sums, scales + now, wanted, totals);
    store_sums<Unit::PARTS == 1>(sums);
  }
}

// totals: of all tiles of rows, [tiles][HEIGHT].
template <BlockKind KIND>
void add_chunk(const StripeUnit<KIND>* stripe, const TiledRows<KIND>& x, int64_t chunk, Vec* totals) {
  const int64_t units = x.units_of(chunk);
  for (int64_t tile = 0; tile < x.tiles();) {
    const int8_t* const rows = x.codes(chunk, tile);
    const RowUnit<KIND>* const scales = x.scales(chunk, tile);
    const int64_t count = x.rows() - tile * unit::HEIGHT;
    Vec* const to = totals + tile * unit::HEIGHT;
    if constexpr (IntKind<KIND>::WIDE) {
      if (count > unit::HEIGHT) add_superblocks<KIND, 2>(stripe, units, rows, scales, count, to);
      else add_superblocks<KIND, 1>(stripe, units, rows, scales, count, to);
      tile += 2;
    } else {
      switch ((std::min<int64_t>(unit::HEIGHT, count) + 3) / 4) {
        case 1: add_blocks<KIND, 4>(stripe, units, rows, scales, to); break;
        case 2: add_blocks<KIND, 8>(stripe, units, rows, scales, to); break;
        case 3: add_blocks<KIND, 12>(stripe, units, rows, scales, to); break;
        default: add_blocks<KIND, 16>(stripe, units, rows, scales, to);
      }
      ++tile;
    }
  }
}

template <typename T, BlockKind KIND>
void int_tile_linear(const LinearArgs& a, int64_t begin, int64_t end) {
  using Unit = StripeUnit<KIND>;
  using Kind = IntKind<KIND>;
  static thread_local std::vector<float> room, sums;
  const int64_t size = Kind::F.spans(a.depth / BLOCK) * Kind::SPAN;
  const auto* const packed = static_cast<const uint8_t*>(a.packed);
  const uint8_t* const last = packed + a.panels * (PANEL / W) * size;
  auto* const stripe = reinterpret_cast<Unit*>(aligned(room, TiledRows<KIND>::CHUNK_UNITS * sizeof(Unit) / 4));
  TiledRows<KIND> x(a);
  unit::Session session;
  each_panel(a, begin, end, a.depth, [&](int64_t panel, int64_t row, int64_t rows) {
    x.take(row, rows);
    session.shape(int(x.tiles() > 1 ? unit::HEIGHT : rows), unit::HEIGHT, Kind::WIDE ? unit::ROW_BYTES : BLOCK);
    const int64_t of_stripe = x.tiles() * unit::HEIGHT, first = panel * PANEL;
    const int64_t stripes = (std::min(PANEL, a.outputs - first) + W - 1) / W;
    Vec* const totals = reinterpret_cast<Vec*>(aligned(sums, stripes * of_stripe * W));
    std::fill_n(totals, stripes * of_stripe, Vec{});
    for (int64_t chunk = 0; chunk < x.chunks(); ++chunk)
      for (int64_t s = 0; s < stripes; ++s) {
        for (int64_t n = 0; n < x.units_of(chunk); ++n) {
          const int64_t at = chunk * TiledRows<KIND>::CHUNK_UNITS + n;
          const uint8_t* const span = packed + (first / W + s) * size + at / Unit::IN_SPAN * Kind::SPAN;
          if (at % Unit::IN_SPAN == 0) fetch(span + AHEAD, Kind::SPAN, last);
          if (a.prefetch) prefetch_lines<LINES_A_BLOCK * Unit::DEPTH / BLOCK>(*a.prefetch);
          stripe[n].expand(span, at % Unit::IN_SPAN);
        }
        add_chunk(stripe, x, chunk, totals + s * of_stripe);
      }
    for (int64_t r = 0; r < rows; ++r)  // line after line
      for (int64_t s = 0; s < stripes; ++s) write_outputs<T>(a, row + r, first + s * W, totals + s * of_stripe + r, 1);
  });
}

}  // namespace ISA
