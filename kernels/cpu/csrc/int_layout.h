// The operands of integer products of blocks: weights in the order in which products read them, rows as signed bytes.
#pragma once
#include "blocks.h"

namespace ISA {

#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
constexpr bool SHORT_SUMS = true;  // 16-bit sums add the products of bytes first
#else
constexpr bool SHORT_SUMS = false;
#endif
using Shorts = int16_t __attribute__((vector_size(W * 4)));

template <BlockKind KIND>
struct IntKind {
  static constexpr BlockFormat F = FORMATS[KIND];
  static constexpr bool WIDE = F.span == 8;  // rows have a scale per 256, blocks integer scales
  static constexpr bool HALVES = HALVED<KIND>, MINIMA = ISA::MINIMA<KIND>;
  // The size of the multiplied bytes is MOST at most. Signed bytes need SHORT_SUMS; all further codes are OFFSET too
  // large. If halves have scales, OFFSET is a multiple of 16, since sums of halves carry a factor of -16. MORE is added
  // to the stored codes.
  static constexpr bool SIGNED = F.bits == 8 || KIND == IQ4_NL || KIND == IQ4_XS;
  static constexpr int32_t MORE = KIND == Q3_K ? 12 : 0;
  static constexpr int32_t OFFSET = SIGNED ? (SHORT_SUMS ? 0 : 128) : KIND == MXFP4 ? 12 : EXCESS<KIND> + MORE;
  static constexpr int MOST = SIGNED ? 128 : KIND == MXFP4 ? 24 : (1 << F.bits) - 1 + MORE;
  // The number of groups of four in depth with a sum that fits 16 bits; else the groups that share one scale.
  static constexpr int FITTING = SHORT_SUMS ? 32767 / (2 * 127 * MOST) : 8;
  static constexpr int GROUPS = std::min<int>(HALVES ? 4 : 8, std::bit_floor(unsigned(FITTING)));
  // A stripe of W outputs has spans of [shared][own scales][blocks of codes].
  static constexpr int64_t OWN = W * F.shared, CODES = OWN + W * F.span * F.own, SPAN = W * F.bytes();
};

inline IntVec load_ints(const uint8_t* p) { return reinterpret_cast<IntVec>(load(reinterpret_cast<const float*>(p))); }
inline IntVec splat_four(const void* p) {  // four bytes, or two numbers of 16 bits
  int32_t four;
  std::memcpy(&four, p, 4);
  return four - IntVec{};
}

// Widens 2 * W bytes to pairs of 16-bit numbers.
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

// Moves `count` bits of every byte from bit `from` to bit `to`.
inline IntVec moved_bits(IntVec x, int from, int count, int to) {
  const int32_t mask = ((1 << count) - 1) << to;
  return (to < from ? x >> (from - to) : x << (to - from)) & (mask * 0x01010101);
}

// A block of BLOCK of the depth lies in planes: the upper bits of all groups of four neighbours, then the lower two or
// four, as many groups as fit a vector. 8-bit codes lie as bytes. Byte 4 * o + i belongs to output o and number i of a
// group.
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

// The largest of all lanes, and their sum.
inline int32_t highest(IntVec x) {
  return std::bit_cast<int32_t>(fold(reinterpret_cast<Vec>(x), [](Vec a, Vec b) {
    const IntVec left = reinterpret_cast<IntVec>(a), right = reinterpret_cast<IntVec>(b);
    return reinterpret_cast<Vec>(left > right ? left : right);
  }));
}
inline int32_t sum(IntVec x) {
  return std::bit_cast<int32_t>(fold(reinterpret_cast<Vec>(x), [](Vec a, Vec b) {
    return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(a) + reinterpret_cast<IntVec>(b));
  }));
}

// Rounds COUNT numbers to the nearest codes of -127 to 127, ties to even; returns their scale. A number that is not
// finite makes the scale NaN and all codes 0. total: the sum of the codes, by lanes.
template <int64_t COUNT, typename T>
inline float round_block(const T* x, int8_t* codes, IntVec& total) {
  IntVec largest{};
  for (int64_t i = 0; i < COUNT; i += W) {
    const IntVec size = reinterpret_cast<IntVec>(load(x + i)) & 0x7fffffff;
    largest = size > largest ? size : largest;
  }
  total = IntVec{};
  const int32_t most = highest(largest);
  const float scale = most < 0x7f800000 ? std::bit_cast<float>(most) / 127.f : NAN;
  if (!(scale > 0)) return std::memset(codes, 0, COUNT), scale;
  for (int64_t i = 0; i < COUNT; i += W) {
    const Vec within = min(max(load(x + i) / scale, splat(-127.f)), splat(127.f));  // may exceed with subnormal scales
    const IntVec rounded = __builtin_convertvector(within + 12582912.f - 12582912.f, IntVec);
    const auto bytes = __builtin_convertvector(rounded, Bytes);
    std::memcpy(codes + i, &bytes, W);
    total += rounded;
  }
  return scale;
}

// Rounds rows [begin, end) of [depth] to the blocks of int8_activations().
template <typename T, typename B>
void round_rows(const void* x, void* out, int64_t depth, int64_t begin, int64_t end) {
  constexpr int64_t COUNT = sizeof(B::codes);
  const T* from = static_cast<const T*>(x) + begin * depth;
  B* to = static_cast<B*>(out) + begin * (depth / COUNT);
  for (int64_t n = (end - begin) * (depth / COUNT); n > 0; --n, ++to, from += COUNT) {
    IntVec total;
    to->scale = round_block<COUNT>(from, to->codes, total);
    if constexpr (COUNT == BLOCK) {
      to->sum = sum(total);
    } else {
      for (int i = 0; i < COUNT / 16; ++i) {
        int32_t half = 0;
        for (int k = 0; k < 16; ++k) half += to->codes[16 * i + k];
        to->halves[i] = int16_t(-16 * half);
      }
      for (int i = 0; i < COUNT / BLOCK; ++i) to->sums[i] = int16_t((to->halves[2 * i] + to->halves[2 * i + 1]) / -16);
    }
  }
}

// Integer scales of the halves of block k of a superblock, by output, as pairs.
template <BlockKind KIND>
inline IntVec scale_pairs(const uint8_t* span, int k) {
  using Kind = IntKind<KIND>;
  if constexpr (Kind::HALVES) {
    const uint8_t* own = span + Kind::OWN + k * 2 * W;
    return Kind::MINIMA ? widened_pairs<false>(own) & 0x000f000f : widened_pairs<true>(own);
  }
  return widened(span + Kind::OWN + k * W) * 0x00010001;
}
// Repeats a 16-bit number in every lane: the lower or the upper one of a pair.
inline IntVec twice(IntVec pairs, int upper) {
  return upper ? (pairs & int32_t(0xffff0000)) | (pairs >> 16 & 0xffff) : (pairs & 0xffff) | pairs << 16;
}

// Integer minima of the halves of block i, or of blocks 2 * i and 2 * i + 1, as pairs.
template <BlockKind KIND>
inline IntVec minima_of(const uint8_t* span, int i) {
  using Kind = IntKind<KIND>;
  if constexpr (Kind::HALVES) return widened_pairs<false>(span + Kind::OWN + i * 2 * W) >> 4 & 0x000f000f;
  else return widened_pairs<false>(span + Kind::OWN + 8 * W + i * 2 * W);
}

}  // namespace ISA
