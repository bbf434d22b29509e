// Vectors of one instruction set. The code is written once, on the compiler's vector types. Every file here except
// ops.cpp is compiled once per instruction set into its own namespace (ISA).
#pragma once
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)
#define ONLY_AVX2
#endif

namespace ISA {

#if defined(__AVX512F__) || defined(EMULATE_TILES)  // has the panels of AVX-512
constexpr int W = 16, BLOCKS = 4, ROWS = 6;  // lanes of a vector; vectors and rows of a register tile
#elif defined(__AVX2__)
constexpr int W = 8, BLOCKS = 2, ROWS = 6;
#else
constexpr int W = 4, BLOCKS = 2, ROWS = 4;
#endif

using Vec = float __attribute__((vector_size(W * 4)));
using IntVec = int32_t __attribute__((vector_size(W * 4)));
using Unaligned = float __attribute__((vector_size(W * 4), aligned(4), may_alias));
using Half = uint16_t __attribute__((vector_size(W * 2), aligned(2), may_alias));
using Bytes = int8_t __attribute__((vector_size(W)));
struct bf16 {
  uint16_t bits;
};

inline Vec splat(float x) { return x - Vec{}; }
// Copies the bits to all lanes; they may be a pair of bf16 and must not pass through arithmetic.
inline Vec splat_bits(const float& x) {
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return reinterpret_cast<Vec>(bits - IntVec{});
}
inline Vec load(const float* p) { return *reinterpret_cast<const Unaligned*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<Unaligned*>(p) = x; }
inline Vec load(const bf16* p) {
#if defined(__AVX512F__)
  const auto wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  const auto wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  const auto wide = __builtin_convertvector(*reinterpret_cast<const Half*>(p), IntVec);
#endif
  return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(wide) << 16);
}
inline void store(bf16* p, Vec x) {
#if defined(__AVX512BF16__)
  *reinterpret_cast<Half*>(p) = reinterpret_cast<Half>(_mm512_cvtneps_pbh(x));
#elif defined(ONLY_AVX2)
  const IntVec bits = reinterpret_cast<IntVec>(x);
  const IntVec rounded = bits + 0x7fff + ((bits >> 16) & 1), quiet = bits | 0x400000;
  const auto chosen = _mm256_srli_epi32(reinterpret_cast<__m256i>(x == x ? rounded : quiet), 16);
  const auto packed = _mm_packus_epi32(_mm256_castsi256_si128(chosen), _mm256_extracti128_si256(chosen, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
#else
  const IntVec bits = reinterpret_cast<IntVec>(x);
  const IntVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest even
  const IntVec quiet = (bits >> 16) | 0x40;
  *reinterpret_cast<Half*>(p) = __builtin_convertvector(x == x ? rounded : quiet, Half);
#endif
}
inline float scalar(float x) { return x; }
inline float scalar(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

// If a or b is NaN, the result is b.
inline Vec max(Vec a, Vec b) {
#if defined(ONLY_AVX2)
  return _mm256_max_ps(a, b);
#endif
  return a > b ? a : b;
}
inline Vec min(Vec a, Vec b) {
#if defined(ONLY_AVX2)
  return _mm256_min_ps(a, b);
#endif
  return a < b ? a : b;
}
// Lane i of the result is lane i + H of x, cyclically.
template <std::size_t H, std::size_t... I>
inline Vec rotated_lanes(Vec x, std::index_sequence<I...>) {
  return __builtin_shufflevector(x, x, int((I + H) % W)...);
}
// Combines all lanes by `f`, first lanes half a vector apart: the same order everywhere.
template <std::size_t H = W / 2, typename F>
inline float fold(Vec x, const F& f) {
  if constexpr (H == 0) return x[0];
  else return fold<H / 2>(f(x, rotated_lanes<H>(x, std::make_index_sequence<W>())), f);
}
inline float sum(Vec x) {
  return fold(x, [](Vec a, Vec b) { return a + b; });
}
inline float highest(Vec x) {
  return fold(x, [](Vec a, Vec b) { return max(a, b); });
}
inline IntVec iota() {
  IntVec x;
  for (int i = 0; i < W; ++i) x[i] = i;
  return x;
}

// e^x to 1e-7 relative for x in [-87, 88.3]; 0 below, infinite above. Cephes' polynomial.
inline Vec exp(Vec x) {
  const Vec clipped = min(max(x, splat(-87.f)), splat(88.3f));
  const Vec shifted = clipped * 1.44269504f + 12582912.f;  // rounds to the nearest integer
  const Vec n = shifted - 12582912.f;
  const Vec r = clipped - n * 0.693359375f + n * 2.12194440e-4f;
  Vec y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.f;
  const IntVec power = (__builtin_convertvector(n, IntVec) + 127) << 23;
  y *= reinterpret_cast<Vec>(power);
  y = x < -87.f ? Vec{} : y;
  return x > 88.3f ? splat(INFINITY) : y;
}

// 2^x to 1e-7 relative for x in [-126, 1], and 0 below (from -150 on with AVX-512). Minimax polynomial on [-1/2, 1/2].
inline Vec exp2(Vec x) {
#if defined(__AVX512F__)
  const Vec clipped = x, n = _mm512_roundscale_ps(x, 0);
#else
  const Vec clipped = max(x, splat(-126.f)), n = clipped + 12582912.f - 12582912.f;  // rounds to the nearest integer
#endif
  const Vec r = clipped - n;
  Vec y = splat(1.326472640e-3f);
  y = y * r + 9.671512697e-3f;
  y = y * r + 5.550733746e-2f;
  y = y * r + 2.402224208e-1f;
  y = y * r + 6.931469776e-1f;
  y = y * r + 1.f;
#if defined(__AVX512F__)
  return _mm512_scalef_ps(y, n);
#else
  y *= reinterpret_cast<Vec>((__builtin_convertvector(n, IntVec) + 127) << 23);
  return x < -126.f ? Vec{} : y;
#endif
}

inline Vec tanh(Vec x) { return 1.f - 2.f / (exp(x + x) + 1.f); }

// c + a * b, rounded once where the processor can; elsewhere the compiler decides which operations it fuses.
inline Vec add_product(Vec c, Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(ONLY_AVX2)
  return _mm256_fmadd_ps(a, b, c);
#else
  return c + a * b;
#endif
}

// c + a * b, over pairs of bf16 (one pair per lane) or over floats.
template <bool PAIRS>
inline Vec dot(Vec c, Vec a, Vec b) {
#if defined(__AVX512BF16__)
  if constexpr (PAIRS) return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#endif
  return c + a * b;
}
#if defined(__AVX512BF16__) || defined(EMULATE_TILES)
constexpr bool HAS_PAIRS = true;
#else
constexpr bool HAS_PAIRS = false;
#endif

// Lane i: a[i] in the lower half, b[i] in the upper half.
inline Vec interleave(const bf16* a, const bf16* b) {
#if defined(__AVX512BW__)
  static constexpr auto order = [] {
    std::array<int16_t, 32> places{};
    for (int i = 0; i < 32; ++i) places[i] = int16_t(i / 2 + i % 2 * 16);
    return places;
  }();
  const auto low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
  const auto high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
  const auto both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  return reinterpret_cast<Vec>(_mm512_permutexvar_epi16(_mm512_loadu_si512(order.data()), both));
#endif
  return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(load(b)) |
                               (reinterpret_cast<IntVec>(load(a)) >> 16 & 0xffff));
}
inline Vec interleave(const float*, const float*) { return Vec{}; }  // floats have no pairs

template <int H, std::size_t... I>
inline void swap_blocks(Vec& a, Vec& b, std::index_sequence<I...>) {
  const Vec upper = __builtin_shufflevector(a, b, (I & H ? int(W + I - H) : int(I))...);
  b = __builtin_shufflevector(a, b, (I & H ? int(W + I) : int(I + H))...);
  a = upper;
}
template <int H>
inline void transpose_by(Vec (&rows)[W]) {
  if constexpr (H > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i)
      if (!(i & H)) swap_blocks<H>(rows[i], rows[i + H], std::make_index_sequence<W>());
    transpose_by<H / 2>(rows);
  }
}
inline void transpose(Vec (&rows)[W]) {
#if defined(__AVX512F__)
  __m512 fours[W];  // of a group of four rows: their columns k, k + 4, k + 8 and k + 12
#pragma GCC unroll 4
  for (int i = 0; i < W; i += 4) {
    const auto halves = [&rows, i](int from, bool upper) {
      const __m512 a = rows[i + from], b = rows[i + from + 1];
      return _mm512_castps_pd(upper ? _mm512_unpackhi_ps(a, b) : _mm512_unpacklo_ps(a, b));
    };
#pragma GCC unroll 2
    for (int upper = 0; upper < 2; ++upper) {
      const __m512d first = halves(0, upper), second = halves(2, upper);
      fours[i + 2 * upper] = _mm512_castpd_ps(_mm512_unpacklo_pd(first, second));
      fours[i + 2 * upper + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(first, second));
    }
  }
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    const __m512 even = _mm512_shuffle_f32x4(fours[k], fours[4 + k], 0x88);
    const __m512 odd = _mm512_shuffle_f32x4(fours[k], fours[4 + k], 0xdd);
    const __m512 more = _mm512_shuffle_f32x4(fours[8 + k], fours[12 + k], 0x88);
    const __m512 last = _mm512_shuffle_f32x4(fours[8 + k], fours[12 + k], 0xdd);
    rows[k] = _mm512_shuffle_f32x4(even, more, 0x88);
    rows[4 + k] = _mm512_shuffle_f32x4(odd, last, 0x88);
    rows[8 + k] = _mm512_shuffle_f32x4(even, more, 0xdd);
    rows[12 + k] = _mm512_shuffle_f32x4(odd, last, 0xdd);
  }
#else
  transpose_by<W / 2>(rows);
#endif
}

// block[i]: the i-th 32 bits of each of W rows, from number `from` of a row on.
template <typename T>
inline void load_transposed(const T* const* rows, int64_t from, Vec (&block)[W]) {
#if defined(ONLY_AVX2)
  const auto two = [=](int i, int half) {  // four numbers of row i and, above them, of row i + 4
    const auto at = [=](int row) { return _mm_loadu_ps(reinterpret_cast<const float*>(rows[row] + from) + 4 * half); };
    return _mm256_insertf128_ps(_mm256_castps128_ps256(at(i)), at(i + 4), 1);
  };
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const __m256 a = two(0, half), b = two(1, half), c = two(2, half), d = two(3, half);
    const __m256d low = _mm256_castps_pd(_mm256_unpacklo_ps(a, b)), high = _mm256_castps_pd(_mm256_unpackhi_ps(a, b));
    const __m256d lower = _mm256_castps_pd(_mm256_unpacklo_ps(c, d)),
                  higher = _mm256_castps_pd(_mm256_unpackhi_ps(c, d));
    block[4 * half] = _mm256_castpd_ps(_mm256_unpacklo_pd(low, lower));
    block[4 * half + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low, lower));
    block[4 * half + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(high, higher));
    block[4 * half + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(high, higher));
  }
#else
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) block[i] = load(reinterpret_cast<const float*>(rows[i] + from));
  transpose(block);
#endif
}
// The lower or the upper bf16 of each lane.
inline Vec lower_halves(Vec x) { return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(x) << 16); }
inline Vec upper_halves(Vec x) { return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(x) & int32_t(0xffff0000)); }

}  // namespace ISA
