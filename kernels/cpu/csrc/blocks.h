// Weights as the blocks of a GGUF file: BLOCK neighbours in depth share a scale d (and a minimum m), a weight is d * q
// or d * q + m. They are expanded on the way to the product into the bf16 numbers of the unpacked model: less is read
// from memory, and the bits are those of linear(). d * q is exact in float32: one rounding there, then the one to bf16.
#pragma once
#include <array>

#include "linear.h"

namespace ISA {

// A strip: one block of W columns. Codes, either [BLOCK][W] bytes or [BLOCK / 8][W] words of eight nibbles, then d [W]
// and m [W] as fp16. A panel holds its strips in the order in which the product goes through them.
inline int64_t strip_of(int64_t column, int64_t block, int64_t blocks) {
  return (column / STEP * blocks + block) * BLOCKS + column % STEP / W;
}

// raw: [outputs][depth / BLOCK] blocks as in the file: d, m, codes; the nibbles of a byte are BLOCK / 2 apart.
template <BlockKind KIND>
void pack_blocks(const uint8_t* raw, uint8_t* panels, int64_t outputs, int64_t depth, int64_t begin, int64_t end) {
  constexpr int64_t BYTES = block_bytes(KIND), CODES = code_bytes(KIND), SCALES = BYTES - CODES;
  const int64_t blocks = depth / BLOCK;
  std::memset(panels + begin * PANEL * blocks * BYTES, 0, (end - begin) * PANEL * blocks * BYTES);
  for (int64_t c = begin * PANEL; c < std::min(end * PANEL, outputs); ++c)
    for (int64_t k = 0; k < blocks; ++k) {
      const uint8_t* from = raw + (c * blocks + k) * BYTES;
      uint8_t* to = panels + (c / PANEL * PANEL * blocks + strip_of(c % PANEL, k, blocks) * W) * BYTES;
      const int64_t lane = c % W;
      for (int64_t i = 0; i < SCALES; ++i) to[(CODES + i / 2 * 2) * W + lane * 2 + i % 2] = from[i];
      for (int64_t i = 0; i < BLOCK; ++i) {
        if (KIND == Q8_0) to[i * W + lane] = from[SCALES + i];
        else to[(i / 8 * W + lane) * 4 + i % 8 / 2] |= (from[SCALES + i % 16] >> i / 16 * 4 & 15) << i % 2 * 4;
      }
    }
}

inline Vec from_half(const uint8_t* p) {  // finite
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
  const IntVec bits = reinterpret_cast<IntVec>(load(reinterpret_cast<const bf16*>(p)));  // in the upper half of a lane
  const Vec size = reinterpret_cast<Vec>((bits & 0x7fff0000) >> 3) * 0x1p112f;
  return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(size) | (bits & int32_t(0x80000000)));
#endif
}

// The codes at place i of a strip's blocks.
template <BlockKind KIND>
inline Vec codes_at(const uint8_t* strip, int64_t i) {
  if constexpr (KIND == Q8_0) {
    const uint8_t* p = strip + i * W;
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
    Bytes bytes;
    std::memcpy(&bytes, p, W);
    return __builtin_convertvector(bytes, Vec);
#endif
  } else {
    const auto words = reinterpret_cast<IntVec>(load(reinterpret_cast<const float*>(strip + i / 8 * W * 4)));
    const IntVec shifted = words >> int32_t(i % 8 * 4);
    constexpr int32_t OFFSET = KIND == Q4_0 ? 8 : 0;
#if defined(__AVX512F__)
    const __m512 table = __builtin_convertvector(iota() - OFFSET, Vec);  // the lookup uses the lowest four bits alone
    return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(shifted), table);
#else
    return __builtin_convertvector((shifted & 15) - OFFSET, Vec);
#endif
  }
}

inline Vec rounded_to_bf16(Vec x) {  // finite
  const IntVec bits = reinterpret_cast<IntVec>(x);
  return reinterpret_cast<Vec>((bits + 0x7fff + ((bits >> 16) & 1)) & int32_t(0xffff0000));  // to nearest even
}

// Lane i: a[i] and, above it, b[i], both rounded to bf16.
inline Vec pairs_of(Vec a, Vec b) {
#if defined(__AVX512BF16__)
  constexpr auto order = [] {
    std::array<int16_t, 32> places{};
    for (int i = 0; i < 32; ++i) places[i] = int16_t(i / 2 + i % 2 * 16);
    return places;
  }();
  const auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a));
  return reinterpret_cast<Vec>(_mm512_permutexvar_epi16(_mm512_loadu_si512(order.data()), both));
#else
  return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(rounded_to_bf16(b)) |
                               (reinterpret_cast<IntVec>(rounded_to_bf16(a)) >> 16 & 0xffff));
#endif
}

// BLOCKS neighbouring strips, into rows of PANEL numbers or pairs.
template <BlockKind KIND, bool PAIRS>
__attribute__((noinline)) void expand(const uint8_t* strip, float* to) {
  constexpr int GROUP = PAIRS ? 2 : 1;
  for (int b = 0; b < BLOCKS; ++b, strip += W * block_bytes(KIND), to += W) {
    const uint8_t* scales = strip + W * code_bytes(KIND);
    const Vec d = from_half(scales), m = KIND == Q4_1 ? from_half(scales + W * 2) : Vec{};
    const auto weight = [&](int64_t i) {
      const Vec scaled = codes_at<KIND>(strip, i) * d;  // without m nothing is added: -0 stays
      return KIND == Q4_1 ? scaled + m : scaled;
    };
#pragma GCC unroll 32
    for (int i = 0; i < int(BLOCK); i += GROUP)
      store(to + i / GROUP * PANEL, PAIRS ? pairs_of(weight(i), weight(i + 1)) : rounded_to_bf16(weight(i)));
  }
}

// A panel of pack_blocks(). Its first rows expand block after block; where others follow, everything is kept for them.
template <typename T, BlockKind KIND>
class BlockPanels {
 public:
  static constexpr bool WHOLE = true;  // expands STEP columns at once, which the last outputs must have, too
  BlockPanels(const LinearArgs& a, int64_t rows)
      : blocks_(a.depth / BLOCK),
        packed_(static_cast<const uint8_t*>(a.packed)),
        last_(packed_ + a.panels * PANEL * blocks_ * BYTES - 1),
        mask_(rows > ROWS ? -1 : EACH - 1) {
    static thread_local std::vector<float> room;
    room.resize((rows > ROWS ? blocks_ * EACH : EACH) * PANEL + 16);
    buffer_ = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(room.data()) + 63) & ~uintptr_t(63));
  }
  void go_to(int64_t panel) { panel_ = packed_ + panel * PANEL * blocks_ * BYTES; }
  Vec first(int64_t i, int64_t c) const {
    float* at = buffer_ + (i & mask_) * PANEL + c;
    if (i % EACH == 0 && c % STEP == 0) {
      const uint8_t* strip = panel_ + strip_of(c, i / EACH, blocks_) * W * BYTES;
      for (int64_t byte = 0; byte < STEP * BYTES; byte += 64)
        __builtin_prefetch(std::min(strip + AHEAD + byte, last_));
      expand<KIND, PAIRS<T>>(strip, at);
    }
    return load(at);
  }
  Vec again(int64_t i, int64_t c) const { return load(buffer_ + i * PANEL + c); }

 private:
  static constexpr int64_t EACH = PAIRS<T> ? BLOCK / 2 : BLOCK, BYTES = block_bytes(KIND);
  const int64_t blocks_;
  const uint8_t *const packed_, *const last_, *panel_ = nullptr;
  const int64_t mask_;  // which of the depth are kept apart
  float* buffer_;
};

template <typename T, BlockKind KIND>
void block_linear(const LinearArgs& a, int64_t begin, int64_t end) {
  multiply_items<T>(a, BlockPanels<T, KIND>(a, a.rows), begin, end);
}

}  // namespace ISA
