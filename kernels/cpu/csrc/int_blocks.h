// Products of blocks in integers: round_rows() rounds a row once to signed bytes, which the codes multiply. Only whole
// blocks are added in float32, in order and by explicit fused multiply-adds. Integer sums are exact, so all instruction
// sets, numbers of rows and threads have the bits of the reference in int_blocks.py.
#pragma once
#include "int_layout.h"

namespace ISA {

constexpr int LINES_A_BLOCK = 2;  // cache lines to prefetch meanwhile
constexpr int MOST_ROWS = W == 16 || (W == 8 && !SHORT_SUMS) ? 8 : 4;  // of a register tile of W outputs

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

// c + the sum of the products of each lane's two 16-bit numbers.
inline IntVec add_pairs(IntVec c, IntVec a, IntVec b) {
#if defined(__AVX512VNNI__)
  return reinterpret_cast<IntVec>(_mm512_dpwssd_epi32(reinterpret_cast<__m512i>(c), reinterpret_cast<__m512i>(a),
                                                      reinterpret_cast<__m512i>(b)));
#elif defined(__AVXVNNI__)
  return reinterpret_cast<IntVec>(_mm256_dpwssd_avx_epi32(reinterpret_cast<__m256i>(c), reinterpret_cast<__m256i>(a),
                                                          reinterpret_cast<__m256i>(b)));
#elif defined(__AVX512BW__)
  return c + reinterpret_cast<IntVec>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return c + reinterpret_cast<IntVec>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  return c + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// sums + the products of codes and four bytes of a row: 32 bits a lane or, with SHORT_SUMS, two of 16 bits. SIGNED
// codes exist only with SHORT_SUMS.
template <bool SIGNED>
inline IntVec add_codes(IntVec sums, IntVec codes, IntVec row) {
#if defined(__AVX512VNNI__)
  return reinterpret_cast<IntVec>(_mm512_dpbusd_epi32(
      reinterpret_cast<__m512i>(sums), reinterpret_cast<__m512i>(codes), reinterpret_cast<__m512i>(row)));
#elif defined(__AVXVNNI__)
  return reinterpret_cast<IntVec>(_mm256_dpbusd_avx_epi32(
      reinterpret_cast<__m256i>(sums), reinterpret_cast<__m256i>(codes), reinterpret_cast<__m256i>(row)));
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

// A scale of 16 bits in the form for add_scaled().
inline IntVec as_scale(IntVec scale) { return SHORT_SUMS ? (scale & 0xffff) | scale << 16 : scale; }
// total + the sums of add_codes(), times a scale.
inline IntVec add_scaled(IntVec total, IntVec sums, IntVec scale) {
  return SHORT_SUMS ? add_pairs(total, sums, scale) : total + sums * scale;
}

// sums[r] += the products of a block of codes and rows r of bytes, times the block's integer scales, if any.
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

// The sum of the minima times a row's sums; the sums of halves carry a factor of -16.
template <BlockKind KIND>
inline Vec scaled_minima(IntVec lower) {
  return __builtin_convertvector(IntKind<KIND>::HALVES ? -lower >> 4 : lower, Vec);
}

// Spans of superblocks: rows have one scale for each span.
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
    const IntVec both = scale_pairs<KIND>(span, k);
    if constexpr (Kind::HALVES && Kind::OFFSET > 0) {
      const auto times = reinterpret_cast<IntVec>(reinterpret_cast<Shorts>(both) * int16_t(Kind::OFFSET / 16));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[r] = add_pairs(sums[r], times, splat_four(row(r)->halves + 2 * k));
    }
    const IntVec scales[2] = {as_scale((both << 16) >> 16), as_scale(both >> 16)};
    add_block<KIND>(sums, span + Kind::CODES + k * SIZE, x->codes + k * BLOCK, x_stride, scales);
  }
  const Vec d = from_halves(span);
  if constexpr (Kind::MINIMA) {
    const Vec m = from_halves(span + 2 * W);
    constexpr int PAIRS = Kind::HALVES ? 8 : 4;
    IntVec minima[PAIRS];
#pragma GCC unroll 8
    for (int i = 0; i < PAIRS; ++i) minima[i] = minima_of<KIND>(span, i);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      IntVec lower{};
#pragma GCC unroll 8
      for (int i = 0; i < PAIRS; ++i)
        lower = add_pairs(lower, minima[i], splat_four((Kind::HALVES ? row(r)->halves : row(r)->sums) + 2 * i));
      const Vec less = m * scaled_minima<KIND>(lower);
      totals[r] = fused(splat(row(r)->scale), fused(d, __builtin_convertvector(sums[r], Vec), -less), totals[r]);
    }
  } else {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      totals[r] = fused(splat(row(r)->scale), d * __builtin_convertvector(sums[r], Vec), totals[r]);
  }
}

// Spans with float scales only: rows have a scale for each block.
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

// totals[r]: R rows times a stripe of W outputs. end: of all weights, to prefetch them, or null. cache: lines to
// prefetch, or null.
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

// store() of bfloat16 turns subnormals into 0 on some processors; this function has the same bits on all.
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

// Stores sums of W outputs from `column` on, of `count` rows from `row` on, plus the bias.
template <typename T>
inline void write_outputs(const LinearArgs& a, int64_t row, int64_t column, const Vec* totals, int64_t count) {
  const int64_t width = std::min<int64_t>(W, a.outputs - column);
  T* to = static_cast<T*>(a.out) + row * a.out_stride + column;
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

// x: rows of round_rows(), x_stride bytes apart. Items are as in multiply_items().
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
        const int64_t count = std::min<int64_t>(MOST_ROWS, rows - r);
        Vec totals[MOST_ROWS];
        const bool fresh = r == 0 && (row == 0 || item == begin);
        multiply_rows<KIND>(count, packed + column / W * size, fresh ? last : nullptr,
                            static_cast<const char*>(a.x) + (row + r) * a.x_stride, a.x_stride, spans, a.prefetch, totals,
                            std::make_integer_sequence<int, MOST_ROWS>());
        write_outputs<T>(a, row + r, column, totals, count);
      }
  }
}

}  // namespace ISA
