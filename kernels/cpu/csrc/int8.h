// y = x W^T in 8 bits: groups of GROUP neighbours in depth share a scale, per output for weights, per row for
// activations. Sums inside a group are exact integers; groups are added in order.
#pragma once
#include "linear.h"

namespace ISA {

#if defined(ONLY_AVX2) && !defined(__AVXVNNI__)
constexpr int32_t OFFSET = 0;
#else
constexpr int32_t OFFSET = 128;  // of a weight's codes: VNNI multiplies unsigned bytes by signed ones
#endif

// c + the four products of a lane's weight codes, with the offset, and row codes, without it.
inline IntVec dot4(IntVec c, IntVec weights, IntVec row) {
#if defined(__AVX512VNNI__)
  return reinterpret_cast<IntVec>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(c), reinterpret_cast<__m512i>(weights),
                                                      reinterpret_cast<__m512i>(row)));
#elif defined(__AVXVNNI__)
  return reinterpret_cast<IntVec>(_mm256_dpbusd_avx_epi32(
      reinterpret_cast<__m256i>(c), reinterpret_cast<__m256i>(weights), reinterpret_cast<__m256i>(row)));
#elif defined(ONLY_AVX2)
  const auto w = reinterpret_cast<__m256i>(weights), x = reinterpret_cast<__m256i>(row);
  // Codes are -127 .. 127: two products fit 16 bits.
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
  return c + reinterpret_cast<IntVec>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#else
  for (int shift = 0; shift < 32; shift += 8) c += ((weights >> shift) & 255) * ((row << (24 - shift)) >> 24);
  return c;
#endif
}

// The codes of up to GROUP numbers, with 0 for missing ones; returns their scale.
template <typename T>
inline float round_group(const T* x, int64_t count, IntVec (&codes)[GROUP / W]) {
  T padded[GROUP] = {};
  if (count < GROUP) x = static_cast<const T*>(std::memcpy(padded, x, count * sizeof(T)));
  Vec largest{};
  for (int64_t i = 0; i < GROUP; i += W) largest = max(largest, max(load(x + i), -load(x + i)));
  const float scale = highest(largest) / 127.f, inverse = scale > 0 ? 1.f / scale : 0.f;
  for (int64_t i = 0; i < GROUP; i += W)
    codes[i / W] = __builtin_convertvector(load(x + i) * inverse + 12582912.f - 12582912.f, IntVec);
  return scale;
}

// Codes [panel][group][GROUP / 4][PANEL][4], with OFFSET; scales [panel][group][PANEL].
template <typename T>
void pack_int8(const void* weight, uint8_t* codes, float* scales, int64_t outputs, int64_t depth, int64_t begin,
               int64_t end) {
  const int64_t groups = (depth + GROUP - 1) / GROUP;
  for (int64_t c = begin * PANEL; c < end * PANEL; ++c)
    for (int64_t g = 0; g < groups; ++g) {
      const T* from = static_cast<const T*>(weight) + c * depth + g * GROUP;
      const int64_t block = c / PANEL * groups + g;
      IntVec rounded[GROUP / W];
      scales[block * PANEL + c % PANEL] =
          round_group(from, c < outputs ? std::min(GROUP, depth - g * GROUP) : 0, rounded);
      for (int64_t i = 0; i < GROUP; ++i)
        codes[((block * (GROUP / 4) + i / 4) * PANEL + c % PANEL) * 4 + i % 4] =
            uint8_t(OFFSET + rounded[i / W][i % W]);
    }
}

// Rounds rows to signed bytes [rows][groups * GROUP], with scales and sums of the codes [rows][groups].
template <typename T>
void quantize(const void* x, int8_t* codes, float* scales, int32_t* sums, int64_t depth, int64_t begin, int64_t end) {
  const int64_t groups = (depth + GROUP - 1) / GROUP;
  for (int64_t row = begin; row < end; ++row)
    for (int64_t g = 0; g < groups; ++g) {
      const T* from = static_cast<const T*>(x) + row * depth + g * GROUP;
      const int64_t at = row * groups + g;
      IntVec rounded[GROUP / W], sum{};
      scales[at] = round_group(from, std::min(GROUP, depth - g * GROUP), rounded);
      for (int64_t i = 0; i < GROUP / W; ++i) {
        const auto bytes = __builtin_convertvector(rounded[i], Bytes);
        std::memcpy(codes + at * GROUP + i * W, &bytes, W);
        sum += rounded[i];
      }
      int32_t total = 0;
      for (int i = 0; i < W; ++i) total += sum[i];
      sums[at] = total;
    }
}

// R rows times columns [column, column + B * W) of one panel. The first rows of a panel prefetch the codes ahead.
template <int R, int B, typename T>
inline void int8_tile(const Int8Args& a, int64_t panel, int64_t column, int64_t row, T* out, int64_t out_stride) {
  const uint8_t* const last = a.codes + (a.outputs + PANEL - 1) / PANEL * PANEL * a.groups * GROUP - 1;
  Vec totals[R][B];
  const float* bias = a.bias ? a.bias + panel * PANEL + column : nullptr;
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) totals[r][b] = bias ? load(bias + b * W) : Vec{};
  for (int64_t g = 0; g < a.groups; ++g) {
    const int64_t block = panel * a.groups + g;
    IntVec sums[R][B];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int b = 0; b < B; ++b) sums[r][b] = -OFFSET * a.sums[(row + r) * a.groups + g] - IntVec{};
    const uint8_t* weights = a.codes + (block * GROUP * PANEL) + column * 4;
    for (int64_t i = 0; i < GROUP / 4; ++i) {
      if (row == 0)
        for (int64_t byte = 0; byte < B * W * 4; byte += 64)
          __builtin_prefetch(std::min(weights + i * PANEL * 4 + byte + AHEAD, last));
      if constexpr (SIXTEEN) {
#pragma GCC unroll 8
        for (int b = 0; b < B; ++b) {
          const Vec packed = load(reinterpret_cast<const float*>(weights + i * PANEL * 4) + b * W);
#pragma GCC unroll 6
          for (int r = 0; r < R; ++r) {
            int32_t four;
            std::memcpy(&four, a.x + ((row + r) * a.groups + g) * GROUP + i * 4, 4);
            sums[r][b] = dot4(sums[r][b], reinterpret_cast<IntVec>(packed), four - IntVec{});
          }
        }
        continue;
      }
      IntVec packed[B];
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b)
        packed[b] = reinterpret_cast<IntVec>(load(reinterpret_cast<const float*>(weights + i * PANEL * 4) + b * W));
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        int32_t four;
        std::memcpy(&four, a.x + ((row + r) * a.groups + g) * GROUP + i * 4, 4);
#pragma GCC unroll 4
        for (int b = 0; b < B; ++b) sums[r][b] = dot4(sums[r][b], packed[b], four - IntVec{});
      }
    }
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) {
      const Vec scale = load(a.scales + block * PANEL + column + b * W);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r)
        totals[r][b] += __builtin_convertvector(sums[r][b], Vec) * (scale * a.x_scales[(row + r) * a.groups + g]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) store(out + r * out_stride + b * W, totals[r][b]);
}

// Panels [begin, end).
template <typename T>
void int8_linear(const Int8Args& a, int64_t begin, int64_t end) {
  static thread_local std::vector<T> edge;
  edge.resize(ROWS * PANEL);
  for (int64_t panel = begin; panel < end; ++panel) {
    const int64_t width = std::min(PANEL, a.outputs - panel * PANEL);
    for (int64_t row = 0; row < a.rows; row += ROWS) {
      const int64_t rows = std::min<int64_t>(ROWS, a.rows - row);
      T* to = static_cast<T*>(a.out) + row * a.outputs + panel * PANEL;
      T* out = width < PANEL ? edge.data() : to;
      const int64_t stride = width < PANEL ? PANEL : a.outputs;
      for (int64_t c = 0; c < PANEL; c += W * vectors_of(rows)) switch (rows) {
          case 1: int8_tile<1, vectors_of(1)>(a, panel, c, row, out + c, stride); break;
          case 2: int8_tile<2, vectors_of(2)>(a, panel, c, row, out + c, stride); break;
          case 3: int8_tile<3, vectors_of(3)>(a, panel, c, row, out + c, stride); break;
          case 4: int8_tile<4, BLOCKS>(a, panel, c, row, out + c, stride); break;
          case 5: int8_tile<5, BLOCKS>(a, panel, c, row, out + c, stride); break;
          default: int8_tile<ROWS, BLOCKS>(a, panel, c, row, out + c, stride);
        }
      for (int64_t r = 0; width < PANEL && r < rows; ++r)
        std::memcpy(to + r * a.outputs, out + r * PANEL, width * sizeof(T));
    }
  }
}

}  // namespace ISA
