// Blocks as a checkpoint stores them: the places of codes and scales in each type, and the number of each code.
#pragma once
#include <bit>

#include "kernels.h"
#include "simd.h"

namespace ISA {

template <BlockKind KIND>
constexpr bool GROUPED = KIND >= GROUPS_32;
// True if a minimum follows the scale.
template <BlockKind KIND>
constexpr bool MINIMA = FORMATS[KIND].shared == 4 && !GROUPED<KIND>;
// True if codes are indices into a table of 16 numbers.
template <BlockKind KIND>
constexpr bool TABLED = KIND == IQ4_NL || KIND == IQ4_XS || KIND == MXFP4;
// True if the halves of a block have scales of their own, one byte each. In Q2_K half of the byte is the minimum.
// IQ4_XS repeats one scale.
template <BlockKind KIND>
constexpr bool HALVED = KIND == Q2_K || KIND == Q3_K || KIND == Q6_K || KIND == IQ4_XS;

constexpr int8_t NONLINEAR[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t FLOATS_OF_FOUR_BITS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // doubled

// The excess of stored codes over their numbers.
template <BlockKind KIND>
constexpr int32_t EXCESS = KIND == Q3_K ? 4 : KIND == Q4_0 ? 8 : KIND == Q5_0 ? 16 : KIND == Q6_K ? 32 : 0;
template <BlockKind KIND>
constexpr int32_t number_of(int32_t code) {
  if constexpr (TABLED<KIND>) return KIND == MXFP4 ? FLOATS_OF_FOUR_BITS[code] : NONLINEAR[code];
  return KIND == Q8_0 ? int8_t(code) : code - EXCESS<KIND>;
}

inline float from_half(const uint8_t* p) {  // finite
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  const float size = std::bit_cast<float>(uint32_t(bits & 0x7fff) << 13) * 0x1p112f;
  return bits & 0x8000 ? -size : size;
}
// 2^(e - 128): the numbers of MXFP4 are doubled. Below 2^-125 it is 0, since some processors turn subnormals into 0.
inline float from_exponent(uint8_t e) { return e < 3 ? 0.f : std::bit_cast<float>(uint32_t(e - 1) << 23); }

// A span as the checkpoint stores it.
template <BlockKind KIND>
struct Span {
  const uint8_t* from;

  // Code i of block k. The nibbles of a byte are 16 apart, in superblocks of K types 32 or 64.
  int code(int64_t k, int64_t i) const {
    if constexpr (KIND == Q2_K) return from[16 + k / 4 * 32 + i] >> k % 4 * 2 & 3;
    if constexpr (KIND == Q3_K) return (from[32 + k / 4 * 32 + i] >> k % 4 * 2 & 3) | (from[i] >> k & 1) << 2;
    if constexpr (KIND == Q4_K) return from[16 + k / 2 * 32 + i] >> k % 2 * 4 & 15;
    if constexpr (KIND == Q5_K) return (from[48 + k / 2 * 32 + i] >> k % 2 * 4 & 15) | (from[16 + i] >> k & 1) << 4;
    if constexpr (KIND == Q6_K) {
      const int high = from[128 + k / 4 * 32 + i] >> k % 4 * 2 & 3;
      return (from[k / 4 * 64 + k % 2 * 32 + i] >> k / 2 % 2 * 4 & 15) | high << 4;
    }
    if constexpr (KIND == Q8_0) return from[2 + i];
    const uint8_t* codes = from + (KIND == IQ4_XS ? 8 : FORMATS[KIND].shared);
    if constexpr (KIND == Q5_0 || KIND == Q5_1)
      return (codes[4 + i % 16] >> i / 16 * 4 & 15) | (codes[i / 8] >> i % 8 & 1) << 4;
    return codes[k * 16 + i % 16] >> i / 16 * 4 & 15;
  }
  const uint8_t* shared() const {
    return from + (KIND == Q2_K ? 80 : KIND == Q3_K ? 108 : KIND == Q6_K ? 208 : 0);
  }
  // Byte n of block k's own scales: scale and minimum, or the scales of its halves.
  int own(int64_t k, int64_t n) const {
    const int64_t half = k * 2 + n;
    if constexpr (KIND == Q2_K) return from[half];
    if constexpr (KIND == Q3_K)
      return ((from[96 + half % 8] >> half / 8 * 4 & 15) | (from[104 + half % 4] >> half / 4 * 2 & 3) << 4) - 32;
    if constexpr (KIND == Q6_K) return from[192 + half];
    if constexpr (KIND == IQ4_XS)
      return ((from[4 + k / 2] >> k % 2 * 4 & 15) | (from[2 + k / 4] >> k % 4 * 2 & 3) << 4) - 32;
    const uint8_t* bits = from + 4;  // six each; the upper two bits of the last four are above the first ones
    if (k < 4) return bits[k + n * 4] & 63;
    return (bits[k + 4] >> n * 4 & 15) | (bits[k - 4 + n * 4] >> 6) << 4;
  }
};

// Expands some rows of a stored weight into bf16 numbers: an embedding's lookup.
template <BlockKind KIND>
void expand_rows(const uint8_t* raw, const int64_t* rows, void* out, int64_t depth, int64_t begin, int64_t end) {
  constexpr BlockFormat F = FORMATS[KIND];
  const int64_t spans = depth / (F.span * BLOCK);
  bf16* to = static_cast<bf16*>(out) + begin * depth;
  for (int64_t n = begin; n < end; ++n)
    for (int64_t i = 0; i < spans * F.span; ++i, to += BLOCK) {
      const Span<KIND> span{raw + (rows[n] * spans + i / F.span) * F.file};
      const int64_t k = i % F.span;
      float d[2], m[2]{};  // of the first and of the second half
      if constexpr (GROUPED<KIND>) {
        uint32_t both;
        std::memcpy(&both, span.shared(), 4);
        d[0] = std::bit_cast<float>(both & ~uint32_t(31));
        m[0] = -float(both & 31) * d[0];
      } else {
        d[0] = KIND == MXFP4 ? from_exponent(*span.shared()) : from_half(span.shared());
        if constexpr (MINIMA<KIND>) m[0] = from_half(span.shared() + 2) * (F.own ? -1 : 1);
      }
      d[1] = d[0], m[1] = m[0];
      for (int64_t h = 0; h < 2 && F.own; ++h) {
        const int own = span.own(k, HALVED<KIND> ? h : 0);
        d[h] *= float(KIND == Q2_K ? own & 15 : HALVED<KIND> ? int8_t(own) : own);
        if constexpr (MINIMA<KIND>) m[h] *= float(KIND == Q2_K ? own >> 4 : span.own(k, 1));
      }
      float numbers[BLOCK];
      for (int64_t c = 0; c < BLOCK; ++c) {
        const float scaled = float(number_of<KIND>(span.code(k, c))) * d[c / (BLOCK / 2)];
        numbers[c] = F.shared == 4 ? scaled + m[c / (BLOCK / 2)] : scaled;  // without a sum -0 stays
      }
      for (int64_t c = 0; c < BLOCK; c += W) store(to + c, load(numbers + c));
    }
}

}  // namespace ISA
