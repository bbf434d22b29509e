// The distribution of logits after a request's sampling rules, and draws from a distribution; one row at a time.
#pragma once
#include <algorithm>
#include <numeric>

#include "kernels.h"
#include "simd.h"

namespace ISA {

constexpr int64_t SUM_BLOCK = 256;

inline bool any(IntVec mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(mask), reinterpret_cast<__m512i>(mask)) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(reinterpret_cast<__m256>(mask)) != 0;
#else
  int32_t all = 0;
  for (int i = 0; i < W; ++i) all |= mask[i];
  return all != 0;
#endif
}

template <typename T>
inline float largest(const T* x, int64_t n) {
  Vec top = splat(-INFINITY);
  int64_t i = 0;
  for (; i + W <= n; i += W) top = max(top, load(x + i));
  float best = highest(top);
  for (; i < n; ++i) best = std::max(best, scalar(x[i]));
  return best;
}

// out = e^((x - top) / temperature); returns its sum.
template <typename T>
inline double exponentials(const T* x, float temperature, float top, float* out, int64_t n) {
  double total = 0;
  const float shift = top / temperature;
  for (int64_t start = 0; start < n; start += SUM_BLOCK) {
    const int64_t end = std::min(n, start + SUM_BLOCK);
    Vec part{};
    int64_t i = start;
    for (; i + W <= end; i += W) {
      const Vec weight = exp(load(x + i) / temperature - shift);
      store(out + i, weight);
      part += weight;
    }
    if (i < end) {  // the same arithmetic to the end: equal logits must get equal weights
      float rest[W];
      for (int64_t j = 0; j < W; ++j) rest[j] = i + j < end ? scalar(x[i + j]) : -INFINITY;
      const Vec weight = exp(load(rest) / temperature - shift);
      std::memcpy(out + i, &weight, (end - i) * sizeof(float));
      part += weight;
    }
    total += sum(part);
  }
  return total;
}

// Keeps the weights that the rules keep (largest 1, sum `total`), normalised; of equal weights the lower token comes
// first. Returns the largest kept weight.
inline float filter(float* weights, int64_t n, double total, int64_t top_k, float top_p, float min_p) {
  static thread_local std::vector<uint64_t>
      ranking;  // bits of the weight, then the complement of the token: sorts as wanted
  ranking.resize(n + 1);
  int64_t count = 0;
  for (float floor = 1e-3f;; floor = floor > 1e-30f ? floor * 1e-3f : 0.f) {
    const float least = std::max(floor, min_p);
    double mass = 0;
    count = 0;
    for (int64_t i = 0; i < n; ++i) {
      uint32_t bits;
      std::memcpy(&bits, weights + i, 4);
      const bool in = weights[i] >= least && bits != 0;
      ranking[count] = uint64_t(bits) << 32 | uint32_t(~uint32_t(i));
      count += in;
      mass += in ? weights[i] : 0.f;
    }
    if (least == min_p || least == 0.f || count >= top_k || (top_p < 1 && mass > top_p * total)) break;
  }
  const auto weight_of = [](uint64_t entry) {
    const uint32_t bits = entry >> 32;
    float weight;
    std::memcpy(&weight, &bits, 4);
    return weight;
  };
  const auto begin = ranking.begin();
  const double limit = top_p < 1 ? top_p * total : INFINITY;
  int64_t kept = 0, bound = count;  // the first `kept` stay; the end is at or before `bound`
  double before = 0;
  while (bound - kept > 32) {  // halves the undecided part without sorting it
    const int64_t middle = (kept + bound) / 2;
    std::nth_element(begin + kept, begin + middle, begin + bound, std::greater<>());
    double mass = before;
    for (int64_t j = kept; j < middle; ++j) mass += weight_of(ranking[j]);
    if (middle < top_k && mass <= limit) {
      before = mass;
      kept = middle;
    } else {
      bound = middle;
    }
  }
  std::sort(begin + kept, begin + bound, std::greater<>());
  for (; kept < std::min(bound, top_k) && before <= limit; ++kept) before += weight_of(ranking[kept]);
  std::memset(weights, 0, n * sizeof(float));
  for (int64_t j = 0; j < kept; ++j) weights[uint32_t(~uint32_t(ranking[j]))] = weight_of(ranking[j]) / before;
  return float(1 / before);
}

// Probabilities of one row after rule `r`, with a temperature above 0; `top` is the largest logit. Returns the largest
// probability.
template <typename T>
inline float probabilities(const T* logits, float top, const Rules& rules, int64_t r, float* out, int64_t n) {
  const double total = exponentials(logits, rules.temperatures[r], top, out, n);
  const int64_t top_k = rules.top_ks ? rules.top_ks[r] : n;
  const float top_p = rules.top_ps ? rules.top_ps[r] : 1.f, min_p = rules.min_ps ? rules.min_ps[r] : 0.f;
  if (top_k < n || top_p < 1 || min_p > 0) return filter(out, n, total, top_k, top_p, min_p);
  const float share = float(1 / total);
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, load(out + i) * share);
  for (; i < n; ++i) out[i] *= share;
  return share;
}

template <typename T>
inline int64_t first_of(const T* x, float top, int64_t n) {
  int64_t i = 0;
  while (i + W <= n && !any(load(x + i) == top)) i += W;
  const T* found = std::find_if(x + i, x + n, [&](T y) { return scalar(y) == top; });
  return found == x + n ? 0 : found - x;  // NaN equals no number
}

template <typename T>
void target_probs(const ProbsArgs& a, std::atomic<int64_t>& next) {
  for (int64_t row; (row = next++) < a.rows;) {
    const T* logits = static_cast<const T*>(a.logits) + row * a.stride;
    float* out = a.out + row * a.vocab;
    const float top = largest(logits, a.vocab);
    if (a.rules.temperatures[row] > 0) {
      probabilities(logits, top, a.rules, row, out, a.vocab);
    } else {
      std::memset(out, 0, a.vocab * sizeof(float));
      out[first_of(logits, top, a.vocab)] = 1;
    }
  }
}

template <typename T>
void argmax(const void* x, int64_t* out, int64_t n, int64_t stride, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* from = static_cast<const T*>(x) + row * stride;
    out[row] = first_of(from, largest(from, n), n);
  }
}

// The `count` largest numbers of each row of n, falling, and their columns; the first of equals comes first; NaN is the
// least.
template <typename T>
void likeliest(const void* x, float* values, int64_t* columns, int64_t n, int64_t count, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* from = static_cast<const T*>(x) + row * n;
    float* best = values + row * count;
    int64_t *at = columns + row * count, found = 0;
    const auto insert = [&](int64_t column) {
      const float value = std::max(-INFINITY, scalar(from[column]));
      int64_t place = std::min(found, count - 1);
      for (; place > 0 && best[place - 1] < value; --place) best[place] = best[place - 1], at[place] = at[place - 1];
      best[place] = value;
      at[place] = column;
      found = std::min(found + 1, count);
    };
    int64_t i = 0;
    while (i < count) insert(i++);
    const float* limit = best + count - 1;
    for (; i + W <= n; i += W) {
      if (!any(load(from + i) > *limit)) continue;
      for (int64_t j = i; j < i + W; ++j)
        if (scalar(from[j]) > *limit) insert(j);
    }
    for (; i < n; ++i)
      if (scalar(from[i]) > *limit) insert(i);
  }
}

using Wide = uint64_t __attribute__((vector_size(W * 4)));  // half as many lanes
using UnalignedWide = int64_t __attribute__((vector_size(W * 4), aligned(8), may_alias));

inline Wide mix(Wide x) {  // SplitMix64's finaliser
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

// The upper 31 bits of W hashes as numbers in [0, 1]: a lower bound of the noise, up to rounding.
template <std::size_t... I>
inline Vec least_noise(Wide low, Wide high, std::index_sequence<I...>) {
  const IntVec upper = __builtin_shufflevector(reinterpret_cast<IntVec>(mix(low)), reinterpret_cast<IntVec>(mix(high)),
                                               int(2 * I + 1)...);
  return __builtin_convertvector(upper >> 1 & 0x7fffffff, Vec) * 0x1p-31f;
}

// The column of the largest log weight + Gumbel noise, which has the smallest exponential noise / weight; never a
// column of weight 0. tokens: of the columns; null: their numbers. Returns -1 if all weights are 0. Noise is at least
// its uniform number, so a few bits of a hash rule out nearly every token.
inline int64_t gumbel_argmax(const float* weights, uint64_t key, const int64_t* tokens, int64_t n) {
  constexpr auto lanes = std::make_index_sequence<W>();
  Wide low, high;  // counters of the tokens of W columns
  for (int j = 0; j < W / 2; ++j) {
    low[j] = key + GOLDEN * uint64_t(j + 1);
    high[j] = key + GOLDEN * uint64_t(j + 1 + W / 2);
  }
  double best = INFINITY;
  float limit = INFINITY;  // of noise / weight, above `best` by more than rounding
  int64_t found = -1;
  for (int64_t i = 0; i < n; i += W, low += GOLDEN * W, high += GOLDEN * W) {
    float rest[W] = {};
    if (i + W > n) std::memcpy(rest, weights + i, (n - i) * sizeof(float));
    const Vec weight = load(i + W > n ? rest : weights + i);
    if (!any(weight > Vec{})) continue;
    if (tokens) {
      int64_t here[W] = {};
      std::memcpy(here, tokens + i, std::min<int64_t>(W, n - i) * sizeof(int64_t));
      low = (reinterpret_cast<Wide>(*reinterpret_cast<UnalignedWide*>(here)) + 1) * GOLDEN + key;
      high = (reinterpret_cast<Wide>(*reinterpret_cast<UnalignedWide*>(here + W / 2)) + 1) * GOLDEN + key;
    }
    const IntVec may_win = least_noise(low, high, lanes) <= weight * limit;
    if (!any(may_win)) continue;
    for (int j = 0; j < W; ++j) {
      if (!may_win[j] || !(weight[j] > 0)) continue;
      const double time = exponential_noise(key, tokens ? tokens[i + j] : i + j) / double(weight[j]);
      if (!(time < best)) continue;
      best = time;
      limit = float(best) * 1.000001f;
      found = i + j;
    }
  }
  return found;
}

// Rows [begin, end).
inline void gumbel_argmax(const float* weights, const int64_t* keys, const int64_t* tokens, int64_t* out, int64_t n,
                          int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row)
    out[row] = std::max<int64_t>(0, gumbel_argmax(weights + row * n, keys[row], tokens, n));
}

template <typename T>
void draw_tokens(const DrawArgs& a, std::atomic<int64_t>& next) {
  static thread_local std::vector<float> probs;
  probs.resize(a.vocab);
  for (int64_t i; (i = next++) < a.count;) {
    const T* logits = static_cast<const T*>(a.logits) + a.rows[i] * a.stride;
    const float top = largest(logits, a.vocab);
    if (a.rules.temperatures[i] > 0) {
      probabilities(logits, top, a.rules, i, probs.data(), a.vocab);
      a.tokens[i] = std::max<int64_t>(0, gumbel_argmax(probs.data(), a.keys[i], nullptr, a.vocab));
    } else {
      a.tokens[i] = first_of(logits, top, a.vocab);
    }
  }
}

// q of a drafted token; 0 outside the drafter's vocabulary.
inline float drafted_chance(const AcceptArgs& a, int64_t r, int64_t k) {
  const int64_t token = a.tokens[r * a.gamma + k];
  if (!a.q) return 1;
  const float* q = a.q + (r * a.gamma + k) * a.columns;
  if (!a.vocab) return q[token];
  const int64_t *end = a.vocab + a.columns, *found = std::lower_bound(a.vocab, end, token);
  return found != end && *found == token ? q[found - a.vocab] : 0;
}

// Scale of p after a drafted token, from the scale before it.
inline float next_scale(float scale, float p, float q) {
  const double joint = double(scale) * p;
  return joint == 0 || !(joint < q) ? float(joint > 0) : float(joint / q);
}

// rest = max(0, scale * p - q): the weights for a replacement of draft token k of request r. The product of two floats
// is exact as a double, so fused operations give the same bits.
inline void residual(const AcceptArgs& a, int64_t r, int64_t k, const float* p, float scale, float* rest) {
  const float* q = a.q ? a.q + (r * a.gamma + k) * a.columns : nullptr;
  const double factor = scale;
  for (int64_t c = 0; q && !a.vocab && c < a.columns; ++c) rest[c] = std::max(0.f, float(factor * p[c] - q[c]));
  if (q && !a.vocab) return;
  for (int64_t c = 0; c < a.width; ++c) rest[c] = scale * p[c];
  if (!q) rest[a.tokens[r * a.gamma + k]] = 0;
  for (int64_t c = 0; q && c < a.columns; ++c)
    rest[a.vocab[c]] = std::max(0.f, float(factor * p[a.vocab[c]] - q[c]));
}

// The sum of weights up to 1, each rounded to a multiple of 2^-44: such sums are exact in any order.
inline double mass(const float* weights, int64_t n) {
  constexpr double GRID = 256;
  double lanes[16] = {};
  for (int64_t i = 0; i < n; i += 16)
    for (int64_t j = 0; j < std::min<int64_t>(16, n - i); ++j) lanes[j] += (weights[i + j] + GRID) - GRID;
  return std::accumulate(lanes, lanes + 16, 0.);
}

// Accepts drafts of sampled requests: how many drafts each request keeps, and the next token. See
// kernels/acceptance.py.
inline void accept_sampled(const AcceptArgs& a, std::atomic<int64_t>& next) {
  static thread_local std::vector<float> rest, scales;
  rest.resize(a.width);
  for (int64_t i; (i = next++) < a.count;) {
    const int64_t r = a.requests[i], length = a.lens[r];
    const float* p = a.probs + a.first_rows[r] * a.width;
    const int64_t* tokens = a.tokens + r * a.gamma;
    const double* uniforms = a.uniforms + r * a.gamma;
    scales.assign(length + 1, 1);
    int64_t kept = 0;
    bool made = false;  // rest belongs to the token after the kept ones
    if (a.by_block && a.q) {
      for (int64_t k = 0; k < length; ++k)
        scales[k + 1] = next_scale(scales[k], p[k * a.width + tokens[k]], drafted_chance(a, r, k));
      for (kept = length; kept > 0 && !made; kept -= !made) {  // from the last: avoids most tests
        const float scale = scales[kept];
        if (scale == 1 || (kept == length && uniforms[kept - 1] < scale)) break;
        if (scale == 0 || kept == length) continue;
        residual(a, r, kept, p + kept * a.width, scale, rest.data());
        const double left = mass(rest.data(), a.width);
        made = uniforms[kept - 1] * (left + (1 - double(scale))) < left;
      }
    } else {
      while (kept < length && uniforms[kept] * drafted_chance(a, r, kept) < p[kept * a.width + tokens[kept]]) ++kept;
    }
    p += kept * a.width;
    int64_t token = -1;
    if (kept < length) {
      if (!made) residual(a, r, kept, p, scales[kept], rest.data());
      token = gumbel_argmax(rest.data(), a.keys[r], nullptr, a.width);
    }
    a.kept[i] = kept;
    a.last[i] = token >= 0 ? token : std::max<int64_t>(0, gumbel_argmax(p, a.keys[r], nullptr, a.width));
  }
}

}  // namespace ISA
