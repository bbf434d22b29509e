// Weights as the blocks of a checkpoint: codes q of 2 to 8 bits, and scales that a few neighbours in depth share. A
// weight is d * q, d * q + m, d * q - m or (q - z) * d. The product expands codes into the bf16 numbers of the unpacked
// model: it reads less memory and has the bits of linear(). Products are exact in float32 (d times a sub-block's scale
// has at most 18 bits): the sum rounds once, fused or not, then bf16 rounds.
#pragma once
#include <array>
#include <bit>

#include "linear.h"
#include "stored_blocks.h"

namespace ISA {

// A lane's share of a strip (W outputs, BLOCK of the depth) is a stream of codes. Where the processor multiplies pairs,
// an output has two neighbouring lanes, each with every other number of its depth: rounding 2 * W numbers to bf16
// leaves them in the order of the product.
constexpr int64_t STREAMS = HAS_PAIRS ? 2 : 1, STREAM = BLOCK / STREAMS;
constexpr int64_t stream_of(int64_t column) { return HAS_PAIRS ? column % W * 2 / W : 0; }
constexpr int64_t lane_of(int64_t column, int64_t i) { return HAS_PAIRS ? column % (W / 2) * 2 + i % 2 : column % W; }

// Bit `bit` of a stream is at 32 * word + its bit there. A strip has words [..][W]. Bits that do not fill a word share
// one with the other stream.
template <BlockKind KIND>
constexpr int64_t place_of(int64_t stream, int64_t bit) {
  constexpr int64_t BITS = STREAM * FORMATS[KIND].bits, REST = BITS % 32, WHOLE = BITS - REST;
  return bit < WHOLE ? stream * WHOLE + bit : STREAMS * WHOLE + stream * REST + bit - WHOLE;
}
struct Place {
  int64_t word, shift, rest, rest_shift;  // of a code; of its bits in another word
  int64_t taken;                          // how many bits are not in another word
};
template <BlockKind KIND>
constexpr Place place_of_code(int64_t stream, int64_t n) {
  constexpr int64_t BITS = FORMATS[KIND].bits;
  const int64_t first = place_of<KIND>(stream, n * BITS), taken = std::min(BITS, 32 - first % 32);
  const int64_t rest = place_of<KIND>(stream, n * BITS + std::min(taken, BITS - 1));
  return {first / 32, first % 32, rest / 32, rest % 32, taken};
}

// STEP outputs of a span lie together: the shared numbers [BLOCKS][shared bytes][W], then for each block [BLOCKS]
// strips of codes and own scales. A panel has the spans of its first STEP outputs, then of the next STEP.
inline int64_t span_of(const BlockFormat& f, int64_t column, int64_t block, int64_t blocks) {
  return (column / STEP * f.spans(blocks) + f.spans(block)) * STEP * f.bytes();
}
constexpr int64_t strips_of(const BlockFormat& f, int64_t block) {  // in its span
  return STEP * (f.shared + (block & (f.span - 1)) * f.block());
}

constexpr int64_t unit_of(BlockKind kind) { return kind >= GROUPS_32 ? 4 : std::min<int64_t>(FORMATS[kind].shared, 2); }

// Codes of a strip as streams.
template <BlockKind KIND>
struct CodeStreams {
  static void put(uint8_t* strip, int64_t output, int64_t i, uint32_t code) {
    const int64_t n = i / STREAMS, stream = stream_of(output), lane = lane_of(output, i);
    if (KIND == Q8_0) {
      strip[(n * STREAMS + stream) * W + lane] = code;
      return;
    }
    const Place place = place_of_code<KIND>(stream, n);
    uint32_t* words = reinterpret_cast<uint32_t*>(strip);
    words[place.word * W + lane] |= code << place.shift;
    if (place.taken < FORMATS[KIND].bits) words[place.rest * W + lane] |= code >> place.taken << place.rest_shift;
  }
};

template <BlockKind KIND, typename Codes = CodeStreams<KIND>>
void pack_blocks(const uint8_t* raw, uint8_t* panels, int64_t outputs, int64_t depth, int64_t begin, int64_t end) {
  constexpr BlockFormat F = FORMATS[KIND];
  const int64_t blocks = depth / BLOCK, size = PANEL * F.spans(blocks) * F.bytes();
  std::memset(panels + begin * size, 0, (end - begin) * size);
  for (int64_t c = begin * PANEL; c < std::min(end * PANEL, outputs); ++c)
    for (int64_t block = 0; block < blocks; ++block) {
      const Span<KIND> span{raw + (c * F.spans(blocks) + F.spans(block)) * F.file};
      const int64_t k = block % F.span, strip = c % STEP / W, lane = c % W;
      uint8_t* to = panels + c / PANEL * size + span_of(F, c % PANEL, block, blocks);
      constexpr int64_t UNIT = unit_of(KIND);
      for (int64_t i = 0; i < F.shared; ++i)
        to[strip * W * F.shared + i / UNIT * UNIT * W + lane * UNIT + i % UNIT] = span.shared()[i];
      to += strips_of(F, k) + strip * W * F.block();
      for (int64_t i = 0; i < F.own; ++i) to[(F.bits * BLOCK / 8 + i) * W + lane] = span.own(k, i);
      for (int64_t i = 0; i < BLOCK; ++i) Codes::put(to, lane, i, uint32_t(span.code(k, i)) & 255);
    }
}

inline Vec from_halves(const uint8_t* p) {  // finite
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  const IntVec bits = reinterpret_cast<IntVec>(load(reinterpret_cast<const bf16*>(p)));  // in the upper half of a lane
  const Vec size = reinterpret_cast<Vec>((bits & 0x7fff0000) >> 3) * 0x1p112f;
  return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(size) | (bits & int32_t(0x80000000)));
#endif
}
inline Vec from_bytes(const uint8_t* p) {  // signed
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  Bytes bytes;
  std::memcpy(&bytes, p, W);
  return __builtin_convertvector(bytes, Vec);
#endif
}

// W bytes as integers.
inline IntVec widened(const uint8_t* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<IntVec>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return reinterpret_cast<IntVec>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  IntVec out;
  for (int i = 0; i < W; ++i) out[i] = p[i];
  return out;
#endif
}
inline Vec from_exponents(const uint8_t* p) {
  const IntVec e = widened(p);
  return reinterpret_cast<Vec>(((e - 1) << 23) & (e >= 3));
}
// Looks up each byte (below 16) in the table, and adds MORE.
template <BlockKind KIND, int MORE>
inline IntVec looked_up(IntVec codes) {
  static constexpr auto TABLE = [] {
    std::array<int8_t, 16> table{};
    for (int i = 0; i < 16; ++i) table[i] = int8_t(number_of<KIND>(i) + MORE);
    return table;
  }();
#if defined(__AVX2__)
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(TABLE.data()));
#endif
#if defined(__AVX512BW__)
  return reinterpret_cast<IntVec>(
      _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), reinterpret_cast<__m512i>(codes)));
#elif defined(__AVX2__)
  return reinterpret_cast<IntVec>(
      _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), reinterpret_cast<__m256i>(codes)));
#else
  auto bytes = std::bit_cast<std::array<uint8_t, sizeof codes>>(codes);
  for (uint8_t& byte : bytes) byte = uint8_t(TABLE[byte]);
  return std::bit_cast<IntVec>(bytes);
#endif
}

// The number of code n of a stream.
template <BlockKind KIND>
inline Vec codes_at(const uint8_t* strip, int64_t stream, int64_t n) {
  if constexpr (KIND == Q8_0) return from_bytes(strip + (n * STREAMS + stream) * W);
  constexpr int32_t BITS = FORMATS[KIND].bits, MASK = (1 << BITS) - 1;
  const Place place = place_of_code<KIND>(stream, n);
  const auto word = [strip](int64_t i) {
    return reinterpret_cast<IntVec>(load(reinterpret_cast<const float*>(strip + i * W * 4)));
  };
  IntVec code = word(place.word) >> int32_t(place.shift);  // other bits above it
  if (place.taken < BITS)
    code = (code & ((1 << place.taken) - 1)) | (word(place.rest) >> int32_t(place.rest_shift)) << int32_t(place.taken);
#if defined(__AVX512F__)
  const auto index = reinterpret_cast<__m512i>(code);  // lookups use only the lowest bits
  if constexpr (BITS <= 5) {
    Vec low;
    for (int i = 0; i < W; ++i) low[i] = float(number_of<KIND>(i & MASK));
    return BITS == 5 ? _mm512_permutex2var_ps(low, index, low + 16.f) : _mm512_permutexvar_ps(index, low);
  }
#elif defined(__AVX2__)
  if constexpr (TABLED<KIND>) {
    const IntVec found = looked_up<KIND, 0>(code & MASK);
    return __builtin_convertvector((found << 24) >> 24, Vec);
  }
#endif
  if constexpr (TABLED<KIND>) {
    Vec out;
    for (int i = 0; i < W; ++i) out[i] = float(number_of<KIND>(code[i] & MASK));
    return out;
  }
  return __builtin_convertvector((code & MASK) - EXCESS<KIND>, Vec);
}

// The numbers of W outputs, spread over the lanes of a stream.
inline Vec spread(Vec x, [[maybe_unused]] int64_t stream) {
#if defined(__AVX512BF16__)
  return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(iota() / 2 + int32_t(stream * W / 2)), x);
#else
  return x;
#endif
}

// Scale and offset that turn the codes of a strip into weights.
template <BlockKind KIND>
struct Scales {
  Vec d[2], m[2]{};  // of the first and of the second half of the block

  Scales(const uint8_t* shared, const uint8_t* own) {
    if constexpr (GROUPED<KIND>) {
      const IntVec both = reinterpret_cast<IntVec>(load(reinterpret_cast<const float*>(shared)));
      d[0] = reinterpret_cast<Vec>(both & ~31);
      m[0] = __builtin_convertvector(both & 31, Vec) * d[0];
    } else {
      d[0] = KIND == MXFP4 ? from_exponents(shared) : from_halves(shared);
      if constexpr (MINIMA<KIND>) m[0] = from_halves(shared + 2 * W);
    }
    if constexpr (FORMATS[KIND].own && !HALVED<KIND>) d[0] *= from_bytes(own), m[0] *= from_bytes(own + W);
    d[1] = d[0], m[1] = m[0];
    for (int h = 0; h < 2 && HALVED<KIND>; ++h, own += W) {
      const IntVec both = widened(own);
      d[h] *= KIND == Q2_K ? __builtin_convertvector(both & 15, Vec) : from_bytes(own);
      m[h] *= __builtin_convertvector(both >> 4, Vec);  // Q2_K alone has minima
    }
  }
  Vec weight(Vec code, int64_t n, int64_t stream) const {
    const int64_t half = n * 2 / STREAM;
    const Vec scaled = code * spread(d[half], stream);
    if constexpr (MINIMA<KIND> && !FORMATS[KIND].own) return scaled + spread(m[half], stream);
    if constexpr (FORMATS[KIND].shared == 4) return scaled - spread(m[half], stream);
    return scaled;  // no sum: -0 stays
  }
};

// x is finite. Where the function uses no integers, |x| is below 2^111 and -0 becomes 0.
inline Vec rounded_to_bf16(Vec x) {
#if defined(ONLY_AVX2)
  // In units of its last place, 2^23 <= x < 2^24. The first product rounds x - x / 2^16 to a whole number, ties to even
  // (to a half near 2^23, which makes no difference): x minus the result is x / 2^16 rounded to even.
  return _mm256_fmadd_ps(x, splat(65536.f), _mm256_mul_ps(x, splat(-65535.f)));
#endif
  const IntVec bits = reinterpret_cast<IntVec>(x);
  return reinterpret_cast<Vec>((bits + 0x7fff + ((bits >> 16) & 1)) & int32_t(0xffff0000));  // to nearest even
}

#if defined(__AVX512BF16__)
// The numbers of both streams as bf16 pairs of the product.
inline Vec rounded_pairs(Vec first, Vec second) { return reinterpret_cast<Vec>(_mm512_cvtne2ps_pbh(second, first)); }

// Stores numbers 2 * n (even) and 2 * n + 1 (odd) of all W outputs, from the two streams.
inline void store_halves(float* even, float* odd, Vec first, Vec second) {
  const auto from = reinterpret_cast<__m512i>(iota() * 2);
  store(even, _mm512_permutex2var_ps(first, from, second));
  store(odd, _mm512_permutex2var_ps(first, reinterpret_cast<__m512i>(iota() * 2 + 1), second));
}
#endif

// Expands BLOCKS neighbouring strips of block `k` into rows of STEP numbers or pairs.
template <BlockKind KIND, bool PAIRS>
__attribute__((noinline)) void expand(const uint8_t* span, int64_t k, float* to) {
  constexpr BlockFormat F = FORMATS[KIND];
  const uint8_t* strip = span + strips_of(F, k);
  for (int b = 0; b < BLOCKS; ++b, strip += W * F.block(), to += W) {
    const Scales<KIND> scales(span + b * W * F.shared, strip + W * F.bits * BLOCK / 8);
    const auto weights = [&](int64_t stream, int64_t n) {
      return scales.weight(codes_at<KIND>(strip, stream, n), n, stream);
    };
#pragma GCC unroll 32
    for (int n = 0; n < int(STREAM); ++n) {
      if constexpr (PAIRS) store(to + n * STEP, rounded_pairs(weights(0, n), weights(1, n)));
      else if constexpr (HAS_PAIRS)
        store_halves(to + 2 * n * STEP, to + (2 * n + 1) * STEP, rounded_to_bf16(weights(0, n)),
                     rounded_to_bf16(weights(1, n)));
      else store(to + n * STEP, rounded_to_bf16(weights(0, n)));
    }
  }
}

// A panel of pack_blocks(). Its first rows expand block after block; if more rows follow, all expanded blocks are kept.
template <typename T>
class BlockPanels {
 public:
  static constexpr bool WHOLE = true;  // expands STEP columns at once, even for the last outputs
  BlockPanels(const LinearArgs& a, const BlockFormat& format, Function<const uint8_t*, int64_t, float*> expand)
      : format_(format), expand_(expand), blocks_(a.depth / BLOCK), each_(format.spans(STEP * format.bytes())),
        size_(PANEL * format.spans(blocks_) * format.bytes()), packed_(static_cast<const uint8_t*>(a.packed)),
        end_(packed_ + a.panels * size_), mask_(a.rows > ROWS ? -1 : EACH - 1),
        kept_(a.rows > ROWS ? blocks_ * EACH : EACH) {
    static thread_local std::vector<float> room;
    room.resize(kept_ * PANEL + 16);
    buffer_ = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(room.data()) + 63) & ~uintptr_t(63));
  }
  void go_to(int64_t panel) { panel_ = packed_ + panel * size_; }
  void enter(int64_t i, int64_t c) const {
    if (i % EACH) return;
    const int64_t k = i / EACH;
    const uint8_t* span = panel_ + span_of(format_, c, k, blocks_);
    const uint8_t* next = span + strips_of(format_, k) + AHEAD;
    if (next + each_ <= end_)  // whole or not at all: prefetches past the end are slow
      for (int64_t byte = 0; byte < each_; byte += 64) __builtin_prefetch(next + byte);
    expand_(span, k, buffer_ + in_panel(i & mask_, c, kept_));
  }
  Vec first(int64_t i, int64_t c) const { return load(buffer_ + in_panel(i & mask_, c, kept_)); }
  Vec later(int64_t i, int64_t c) const { return load(buffer_ + in_panel(i, c, kept_)); }

 private:
  static constexpr int64_t EACH = PAIRS<T> ? BLOCK / 2 : BLOCK;
  const BlockFormat format_;
  const Function<const uint8_t*, int64_t, float*> expand_;
  const int64_t blocks_, each_, size_;  // each_: about the bytes of a block of STEP columns
  const uint8_t *const packed_, *const end_, *panel_ = nullptr;
  const int64_t mask_;  // maps i to its row in the buffer
  float* buffer_;
  const int64_t kept_;  // rows of the depth in the buffer
};

template <typename T>
void multiply_blocks(const LinearArgs& a, const BlockFormat& format, Function<const uint8_t*, int64_t, float*> expand,
                     int64_t begin, int64_t end) {
  multiply_items<T>(a, BlockPanels<T>(a, format, expand), begin, end);
}
template <typename T, BlockKind KIND>
void block_linear(const LinearArgs& a, int64_t begin, int64_t end) {
  multiply_blocks<T>(a, FORMATS[KIND], expand<KIND, PAIRS<T>>, begin, end);
}

}  // namespace ISA
