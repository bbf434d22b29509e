// Products of blocks in integers: a row is rounded to signed bytes once (round_rows), codes are multiplied by those,
// and only whole blocks are added in float32, in order and by explicit fused multiply-adds. Integer sums are exact, so
// the bits are the same for every instruction set, number of rows and thread: those of int_blocks.py's reference.
#pragma once
#include "blocks.h"

namespace ISA {

#if defined(__AVX512VNNI__)
constexpr bool SHORT_SUMS = false;
#else
constexpr bool SHORT_SUMS = W >= 8;  // products of bytes are added in 16 bits first
#endif
constexpr int LINES_A_BLOCK = 2;  // of the cache, that are prefetched meanwhile
constexpr int MOST_ROWS = W == 16 ? 8 : 4;  // of a register tile of W outputs
using Shorts = int16_t __attribute__((vector_size(W * 4)));

template <BlockKind KIND>
struct IntKind {
  static constexpr BlockFormat F = FORMATS[KIND];
  static constexpr bool WIDE = F.span == 8;  // rows have a scale per 256, and the span's blocks integer scales
  static constexpr bool HALVES = HALVED<KIND>, MINIMA = ISA::MINIMA<KIND>;
  // Bytes that are multiplied have a size of MOST at most. Signed ones need SHORT_SUMS, all others count OFFSET too
  // much; halves' sums are times -16, so a multiple of that. MORE: added to the stored codes.
  static constexpr bool SIGNED = F.bits == 8 || KIND == IQ4_NL || KIND == IQ4_XS;
  static constexpr int32_t MORE = KIND == Q3_K ? 12 : 0;
  static constexpr int32_t OFFSET = SIGNED ? (SHORT_SUMS ? 0 : 128) : KIND == MXFP4 ? 12 : EXCESS<KIND> + MORE;
  static constexpr int MOST = SIGNED ? 128 : KIND == MXFP4 ? 24 : (1 << F.bits) - 1 + MORE;
  // Groups of four of the depth whose sums fit: 16 bits, or those that have one scale.
  static constexpr int FITTING = SHORT_SUMS ? 32767 / (2 * 127 * MOST) : 8;
  static constexpr int GROUPS = std::min<int>(HALVES ? 4 : 8, std::bit_floor(unsigned(FITTING)));
  // A stripe of W outputs has spans of [shared][own scales][blocks of codes].
  static constexpr int64_t OWN = W * F.shared, CODES = OWN + W * F.span * F.own, SPAN = W * F.bytes();
};

// a * b + c, rounded once.
inline Vec fused(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  for (int i = 0; i < W; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

inline IntVec load_ints(const uint8_t* p) { return reinterpret_cast<IntVec>(load(reinterpret_cast<const float*>(p))); }
inline IntVec splat_four(const void* p) {  // four bytes, or two numbers of 16 bits
  int32_t four;
  std::memcpy(&four, p, 4);
  return four - IntVec{};
}

// 2 * W bytes as pairs of 16-bit numbers.
template <bool SIGNED>
inline IntVec widened_pairs(const uint8_t* p) {
#if defined(__AVX512BW__)
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return reinterpret_cast<IntVec>(SIGNED ? _mm512_cvtepi8_epi16(bytes) : _mm512_cvtepu8_epi16(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return reinterpret_cast<IntVec>(SIGNED ? _mm256_cvtepi8_epi16(bytes) : _mm256_cvtepu8_epi16(bytes));
#else
  Shorts out;
  for (int i = 0; i < 2 * W; ++i) out[i] = SIGNED ? int8_t(p[i]) : p[i];
  return reinterpret_cast<IntVec>(out);
#endif
}

// c + the sum of the products of each lane's two 16-bit numbers.
inline IntVec add_pairs(IntVec c, IntVec a, IntVec b) {
#if defined(__AVX512VNNI__)
  return reinterpret_cast<IntVec>(_mm512_dpwssd_epi32(reinterpret_cast<__m512i>(c), reinterpret_cast<__m512i>(a),
                                                      reinterpret_cast<__m512i>(b)));
#elif defined(__AVX512BW__)
  return c + reinterpret_cast<IntVec>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return c + reinterpret_cast<IntVec>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  return c + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// sums + the products of codes and a row's four bytes: 32 bits a lane or, with SHORT_SUMS, two of 16 bits. SIGNED: the
// codes are, which only SHORT_SUMS have.
template <bool SIGNED>
inline IntVec add_codes(IntVec sums, IntVec codes, IntVec row) {
#if defined(__AVX512VNNI__)
  return reinterpret_cast<IntVec>(_mm512_dpbusd_epi32(
      reinterpret_cast<__m512i>(sums), reinterpret_cast<__m512i>(codes), reinterpret_cast<__m512i>(row)));
#elif defined(__AVX512BW__)
  auto w = reinterpret_cast<__m512i>(codes), x = reinterpret_cast<__m512i>(row);
  if constexpr (SIGNED) {
    x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
    w = _mm512_abs_epi8(w);
  }
  return reinterpret_cast<IntVec>(reinterpret_cast<Shorts>(sums) +
                                  reinterpret_cast<Shorts>(_mm512_maddubs_epi16(w, x)));
#elif defined(__AVX2__)
  auto w = reinterpret_cast<__m256i>(codes), x = reinterpret_cast<__m256i>(row);
  if constexpr (SIGNED) {
    x = _mm256_sign_epi8(x, w);
    w = _mm256_abs_epi8(w);
  }
  return reinterpret_cast<IntVec>(reinterpret_cast<Shorts>(sums) +
                                  reinterpret_cast<Shorts>(_mm256_maddubs_epi16(w, x)));
#else
  for (int shift = 0; shift < 32; shift += 8) sums += ((codes >> shift) & 255) * ((row << (24 - shift)) >> 24);
  return sums;
#endif
}

// A scale of 16 bits as add_scaled() takes it.
inline IntVec as_scale(IntVec scale) { return SHORT_SUMS ? (scale & 0xffff) | scale << 16 : scale; }
// total + the sums of add_codes(), times a scale.
inline IntVec add_scaled(IntVec total, IntVec sums, IntVec scale) {
  return SHORT_SUMS ? add_pairs(total, sums, scale) : total + sums * scale;
}

// The bits of every byte that begin at FROM, `count` of them, moved to `to`.
inline IntVec moved_bits(IntVec x, int from, int count, int to) {
  const int32_t mask = ((1 << count) - 1) << to;
  return (to < from ? x >> (from - to) : x << (to - from)) & (mask * 0x01010101);
}

// Vectors of a block of BLOCK of the depth lie plane after plane: the upper bits of all groups of four neighbours, then
// the lower two or four, as many groups as fit a vector; bytes as they are. Byte 4 * o + i belongs to output o and number i of a group.
constexpr int low_bits(int64_t bits) { return bits < 4 ? 2 : 4; }
template <BlockKind KIND>
inline IntVec codes_of_group(const uint8_t* block, int g) {
  using Kind = IntKind<KIND>;
  constexpr int BITS = FORMATS[KIND].bits, LOW = low_bits(BITS), HIGH = BITS - LOW;
  const auto vector = [block](int64_t i) { return load_ints(block + i * W * 4); };
  if constexpr (BITS == 8) return vector(g);
  IntVec codes = moved_bits(vector(HIGH + g * LOW / 8), g * LOW % 8, LOW, 0);
  if constexpr (HIGH > 0) codes |= moved_bits(vector(g * HIGH / 8), g * HIGH % 8, HIGH, LOW);
  if constexpr (TABLED<KIND>) return looked_up<KIND, Kind::OFFSET>(codes);
  else return codes + Kind::MORE * 0x01010101;  // no byte overflows
}

template <BlockKind KIND>
void pack_int_blocks(const uint8_t* raw, uint8_t* panels, int64_t outputs, int64_t depth, int64_t begin, int64_t end) {
  using Kind = IntKind<KIND>;
  constexpr BlockFormat F = Kind::F;
  const int64_t spans = F.spans(depth / BLOCK);
  std::memset(panels + begin * PANEL / W * spans * Kind::SPAN, 0, (end - begin) * PANEL / W * spans * Kind::SPAN);
  for (int64_t c = begin * PANEL; c < std::min(end * PANEL, outputs); ++c)
    for (int64_t n = 0; n < spans; ++n) {
      const Span<KIND> span{raw + (c * spans + n) * F.file};
      uint8_t* const to = panels + (c / W * spans + n) * Kind::SPAN;
      const int64_t lane = c % W;
      constexpr int64_t UNIT = unit_of(KIND);
      for (int64_t i = 0; i < F.shared; ++i) to[i / UNIT * UNIT * W + lane * UNIT + i % UNIT] = span.shared()[i];
      for (int64_t k = 0; k < F.span; ++k) {
        uint8_t* const own = to + Kind::OWN;
        if constexpr (Kind::HALVES) {
          for (int i = 0; i < 2; ++i) own[(k * W + lane) * 2 + i] = span.own(k, i);
        } else if constexpr (F.own > 0) {
          own[k * W + lane] = span.own(k, 0);
          own[F.span * W + (k / 2 * W + lane) * 2 + k % 2] = span.own(k, 1);
        }
        uint8_t* const codes = to + Kind::CODES + k * W * F.bits * BLOCK / 8 + lane * 4;
        for (int64_t i = 0; i < BLOCK; ++i) {
          const int64_t g = i / 4, at = i % 4;
          const int code = span.code(k, i);
          if constexpr (F.bits == 8) {
            codes[g * W * 4 + at] = uint8_t(code + Kind::OFFSET);
            continue;
          }
          constexpr int LOW = low_bits(F.bits), HIGH = F.bits - LOW;
          codes[(HIGH + g * LOW / 8) * W * 4 + at] |= (code & ((1 << LOW) - 1)) << g * LOW % 8;
          if constexpr (HIGH > 0) codes[g * HIGH / 8 * W * 4 + at] |= (code >> LOW) << g * HIGH % 8;
        }
      }
    }
}

// `count` numbers to the nearest codes of -127 to 127, ties to even; returns their scale: NaN, and codes of 0, if one
// is not finite.
template <typename T>
inline float round_block(const T* x, int64_t count, int8_t* codes) {
  IntVec largest{};
  for (int64_t i = 0; i < count; i += W) {
    const IntVec size = reinterpret_cast<IntVec>(load(x + i)) & 0x7fffffff;
    largest = size > largest ? size : largest;
  }
  int32_t most = 0;
  for (int i = 0; i < W; ++i) most = std::max(most, int32_t(largest[i]));
  const float scale = most < 0x7f800000 ? std::bit_cast<float>(most) / 127.f : NAN;
  if (!(scale > 0)) return std::memset(codes, 0, count), scale;
  for (int64_t i = 0; i < count; i += W) {
    const Vec within = min(max(load(x + i) / scale, splat(-127.f)), splat(127.f));  // beyond where scales are subnormal
    const IntVec rounded = __builtin_convertvector(within + 12582912.f - 12582912.f, IntVec);
    const auto bytes = __builtin_convertvector(rounded, Bytes);
    std::memcpy(codes + i, &bytes, W);
  }
  return scale;
}

// Rows [begin, end) of [depth] to blocks of int8_activations().
template <typename T, typename B>
void round_rows(const void* x, void* out, int64_t depth, int64_t begin, int64_t end) {
  constexpr int64_t COUNT = sizeof(B::codes);
  const auto sum_of = [](const int8_t* codes, int count) {
    int32_t sum = 0;
    for (int i = 0; i < count; ++i) sum += codes[i];
    return sum;
  };
  const T* from = static_cast<const T*>(x) + begin * depth;
  B* to = static_cast<B*>(out) + begin * (depth / COUNT);
  for (int64_t n = (end - begin) * (depth / COUNT); n > 0; --n, ++to, from += COUNT) {
    to->scale = round_block(from, COUNT, to->codes);
    if constexpr (COUNT == BLOCK) {
      to->sum = sum_of(to->codes, BLOCK);
    } else {
      for (int i = 0; i < COUNT / 16; ++i) to->halves[i] = int16_t(-16 * sum_of(to->codes + 16 * i, 16));
      for (int i = 0; i < COUNT / BLOCK; ++i) to->sums[i] = int16_t((to->halves[2 * i] + to->halves[2 * i + 1]) / -16);
    }
  }
}

// sums[r] += the products of a block of codes with rows r of bytes, times the block's integer scales, if it has any.
template <BlockKind KIND, int R>
__attribute__((always_inline)) inline void add_block(IntVec (&sums)[R], const uint8_t* block, const int8_t* x,
                                                     int64_t x_stride, const IntVec (&scales)[2]) {
  using Kind = IntKind<KIND>;
  constexpr bool DIRECT = !SHORT_SUMS && !Kind::WIDE;
  IntVec part[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) part[r] = DIRECT ? sums[r] : IntVec{};
#pragma GCC unroll 8
  for (int g = 0; g < 8; ++g) {
    const IntVec codes = codes_of_group<KIND>(block, g);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      part[r] = add_codes<Kind::SIGNED>(part[r], codes, splat_four(x + r * x_stride + 4 * g));
    if ((g + 1) % Kind::GROUPS || DIRECT) continue;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      sums[r] = add_scaled(sums[r], part[r], scales[g / 4]);
      part[r] = IntVec{};
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R && DIRECT; ++r) sums[r] = part[r];
}

template <typename B>
const B* block_of_row(const B* x, int r, int64_t x_stride) {
  return reinterpret_cast<const B*>(reinterpret_cast<const char*>(x) + r * x_stride);
}

// Spans of superblocks: rows have one scale for each.
template <BlockKind KIND, int R>
__attribute__((always_inline)) inline void add_wide_span(Vec (&totals)[R], const uint8_t* span, const WideBlock* x,
                                                         int64_t x_stride, int64_t ahead, CachePrefetch* cache) {
  using Kind = IntKind<KIND>;
  constexpr int64_t SIZE = W * Kind::F.bits * BLOCK / 8, LINES = Kind::SPAN / 64 / 8 + 1;
  const auto row = [&](int r) { return block_of_row(x, r, x_stride); };
  IntVec sums[R]{};
  for (int k = 0; k < 8; ++k) {
    if (cache) prefetch_lines<LINES_A_BLOCK>(*cache);
    if (ahead)
      for (int64_t i = 0; i < LINES; ++i) __builtin_prefetch(span + ahead + (k * LINES + i) * 64);
    IntVec scales[2];
    if constexpr (Kind::HALVES) {
      const uint8_t* own = span + Kind::OWN + k * 2 * W;
      const IntVec both = Kind::MINIMA ? widened_pairs<false>(own) & 0x000f000f : widened_pairs<true>(own);
      scales[0] = as_scale((both << 16) >> 16);
      scales[1] = as_scale(both >> 16);
      if constexpr (Kind::OFFSET > 0) {
        const auto times = reinterpret_cast<IntVec>(reinterpret_cast<Shorts>(both) * int16_t(Kind::OFFSET / 16));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sums[r] = add_pairs(sums[r], times, splat_four(row(r)->halves + 2 * k));
      }
    } else {
      scales[0] = scales[1] = as_scale(widened(span + Kind::OWN + k * W));
    }
    add_block<KIND>(sums, span + Kind::CODES + k * SIZE, x->codes + k * BLOCK, x_stride, scales);
  }
  const Vec d = from_halves(span);
  if constexpr (Kind::MINIMA) {
    const Vec m = from_halves(span + 2 * W);
    constexpr int PAIRS = Kind::HALVES ? 8 : 4;
    IntVec minima[PAIRS];
#pragma GCC unroll 8
    for (int i = 0; i < PAIRS; ++i)
      minima[i] = Kind::HALVES ? widened_pairs<false>(span + Kind::OWN + i * 2 * W) >> 4 & 0x000f000f
                               : widened_pairs<false>(span + Kind::OWN + 8 * W + i * 2 * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      IntVec lower{};
#pragma GCC unroll 8
      for (int i = 0; i < PAIRS; ++i)
        lower = add_pairs(lower, minima[i], splat_four((Kind::HALVES ? row(r)->halves : row(r)->sums) + 2 * i));
      if constexpr (Kind::HALVES) lower = -lower >> 4;  // halves are sums times -16
      const Vec less = m * __builtin_convertvector(lower, Vec);
      totals[r] = fused(splat(row(r)->scale), fused(d, __builtin_convertvector(sums[r], Vec), -less), totals[r]);
    }
  } else {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      totals[r] = fused(splat(row(r)->scale), d * __builtin_convertvector(sums[r], Vec), totals[r]);
  }
}

// Spans whose blocks share float scales at most: rows have a scale for each block.
template <BlockKind KIND, int R>
__attribute__((always_inline)) inline void add_narrow_span(Vec (&totals)[R], const uint8_t* span, const NarrowBlock* x,
                                                           int64_t x_stride, int64_t ahead, CachePrefetch* cache) {
  using Kind = IntKind<KIND>;
  constexpr int64_t SIZE = W * Kind::F.bits * BLOCK / 8, LINES = (Kind::SPAN + 63) / 64;
  if (ahead)
    for (int64_t i = 0; i < LINES; ++i) __builtin_prefetch(span + ahead + i * 64);
  Vec d, m{};
  IntVec zeros{};
  if constexpr (GROUPED<KIND>) {
    const IntVec both = load_ints(span);
    d = reinterpret_cast<Vec>(both & ~31);
    zeros = both & 31;
  } else {
    d = KIND == MXFP4 ? from_exponents(span) : from_halves(span);
    if constexpr (Kind::MINIMA) m = from_halves(span + 2 * W);
  }
  const IntVec ones[2] = {as_scale(1 - IntVec{}), as_scale(1 - IntVec{})};
#pragma GCC unroll 1
  for (int k = 0; k < Kind::F.span; ++k) {
    if (cache) prefetch_lines<LINES_A_BLOCK>(*cache);
    const auto row = [&](int r) { return block_of_row(x + k, r, x_stride); };
    IntVec sums[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      sums[r] = -Kind::OFFSET * row(r)->sum - IntVec{};
      if constexpr (GROUPED<KIND>) sums[r] -= zeros * row(r)->sum;
    }
    add_block<KIND>(sums, span + Kind::CODES + k * SIZE, x[k].codes, x_stride, ones);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec scaled = Kind::MINIMA ? fused(d, __builtin_convertvector(sums[r], Vec), m * float(row(r)->sum))
                                      : d * __builtin_convertvector(sums[r], Vec);
      totals[r] = fused(splat(row(r)->scale), scaled, totals[r]);
    }
  }
}

// totals[r]: R rows times a stripe of W outputs. end: of all weights where they are to be prefetched, else null.
// cache: prefetched meanwhile; null: nothing.
template <BlockKind KIND, int R>
__attribute__((noinline)) void multiply_stripe(const uint8_t* stripe, const uint8_t* end, const char* x,
                                               int64_t x_stride, int64_t spans, CachePrefetch* cache, Vec* out) {
  using Kind = IntKind<KIND>;
  Vec totals[R]{};
  for (int64_t n = 0; n < spans; ++n, stripe += Kind::SPAN) {
    const int64_t ahead = stripe + AHEAD + 2 * Kind::SPAN <= end ? AHEAD : 0;
    if constexpr (Kind::WIDE)
      add_wide_span<KIND>(totals, stripe, reinterpret_cast<const WideBlock*>(x) + n, x_stride, ahead, cache);
    else
      add_narrow_span<KIND>(totals, stripe, reinterpret_cast<const NarrowBlock*>(x) + n * Kind::F.span, x_stride,
                            ahead, cache);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) out[r] = totals[r];
}

// store() of bfloat16 by some processors makes 0 of subnormal numbers; here all have the same bits.
inline void store_rounded(float* p, Vec x) { store(p, x); }
inline void store_rounded(bf16* p, Vec x) {
  const IntVec bits = reinterpret_cast<IntVec>(x);
  const IntVec rounded = x == x ? bits + 0x7fff + ((bits >> 16) & 1) : bits | 0x400000;
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(rounded >> 16)));
#elif defined(__AVX2__)
  const auto upper = _mm256_srli_epi32(reinterpret_cast<__m256i>(rounded), 16);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1)));
#else
  for (int i = 0; i < W; ++i) p[i].bits = uint16_t(uint32_t(rounded[i]) >> 16);
#endif
}

template <BlockKind KIND, int... R>
void multiply_rows(int64_t rows, const uint8_t* stripe, const uint8_t* end, const char* x, int64_t x_stride,
                   int64_t spans, CachePrefetch* cache, Vec* out, std::integer_sequence<int, R...>) {
  (void)((rows == R + 1 && (multiply_stripe<KIND, R + 1>(stripe, end, x, x_stride, spans, cache, out), true)) || ...);
}

// x: rows of round_rows(), x_stride bytes from one to the next. Items as of multiply_items().
template <typename T, BlockKind KIND>
void int_block_linear(const LinearArgs& a, int64_t begin, int64_t end) {
  const int64_t spans = FORMATS[KIND].spans(a.depth / BLOCK), groups = (a.rows + a.row_group - 1) / a.row_group;
  const int64_t size = spans * IntKind<KIND>::SPAN;
  const auto* const packed = static_cast<const uint8_t*>(a.packed);
  const uint8_t* const last = packed + a.panels * (PANEL / W) * size;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t first = item / groups * PANEL, row = item % groups * a.row_group;
    const int64_t rows = std::min(a.row_group, a.rows - row);
    for (int64_t column = first; column < std::min(first + PANEL, a.outputs); column += W)
      for (int64_t r = 0; r < rows; r += MOST_ROWS) {
        const int64_t count = std::min<int64_t>(MOST_ROWS, rows - r), width = std::min<int64_t>(W, a.outputs - column);
        Vec totals[MOST_ROWS];
        const bool fresh = r == 0 && (row == 0 || item == begin);
        multiply_rows<KIND>(count, packed + column / W * size, fresh ? last : nullptr,
                            static_cast<const char*>(a.x) + (row + r) * a.x_stride, a.x_stride, spans, a.prefetch, totals,
                            std::make_integer_sequence<int, MOST_ROWS>());
        T* to = static_cast<T*>(a.out) + (row + r) * a.out_stride + column;
        for (int64_t i = 0; i < count; ++i, to += a.out_stride) {
          const Vec y = a.bias ? totals[i] + load(a.bias + column) : totals[i];
          if (width == W) {
            store_rounded(to, y);
          } else {
            T edge[W];
            store_rounded(edge, y);
            std::memcpy(to, edge, width * sizeof(T));
          }
        }
      }
  }
}

}  // namespace ISA
