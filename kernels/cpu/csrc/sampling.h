// From logits to the distribution after a request's sampling rules, and drawing from a distribution; one row at a time.
#pragma once
#include <algorithm>

#include "kernels.h"
#include "simd.h"

namespace ISA {

constexpr int64_t SUM_BLOCK = 256;

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
    if (i < end) {  // the same arithmetic for the last ones: equal logits must get equal weights
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

// Keeps what the rules keep of `weights` (largest 1, sum `total`), normalised; among equals the lower token comes first.
inline void filter(float* weights, int64_t n, double total, int64_t top_k, float top_p, float min_p) {
  static thread_local std::vector<uint64_t> ranking;  // weight's bits, then the complement of the token: sorts as wanted
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
  int64_t kept = 0, bound = count;  // the first `kept` stay, the end lies at or before `bound`
  double before = 0;
  while (bound - kept > 32) {  // halve the doubtful part without sorting it
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
}

template <typename T>
void target_probs(const ProbsArgs& a, std::atomic<int64_t>& next) {
  for (int64_t row; (row = next++) < a.rows;) {
    const T* logits = static_cast<const T*>(a.logits) + row * a.stride;
    float* out = a.out + row * a.vocab;
    const float top = largest(logits, a.vocab), temperature = a.temperatures[row];
    if (temperature <= 0) {
      std::memset(out, 0, a.vocab * sizeof(float));
      const auto best = std::find_if(logits, logits + a.vocab, [&](T x) { return scalar(x) == top; });
      if (best != logits + a.vocab) out[best - logits] = 1;
      continue;
    }
    const double total = exponentials(logits, temperature, top, out, a.vocab);
    const int64_t top_k = a.top_ks ? a.top_ks[row] : a.vocab;
    const float top_p = a.top_ps ? a.top_ps[row] : 1.f, min_p = a.min_ps ? a.min_ps[row] : 0.f;
    if (top_k < a.vocab || top_p < 1 || min_p > 0) {
      filter(out, a.vocab, total, top_k, top_p, min_p);
      continue;
    }
    const float share = float(1 / total);
    int64_t i = 0;
    for (; i + W <= a.vocab; i += W) store(out + i, load(out + i) * share);
    for (; i < a.vocab; ++i) out[i] *= share;
  }
}

template <typename T>
void argmax(const void* x, int64_t* out, int64_t n, int64_t stride, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* from = static_cast<const T*>(x) + row * stride;
    const float top = largest(from, n);
    const auto best = std::find_if(from, from + n, [&](T y) { return scalar(y) == top; });
    out[row] = best == from + n ? 0 : best - from;
  }
}

// The first token whose cumulative weight exceeds uniform * total; never one of weight 0. -1 if all weights are 0.
inline int64_t draw(const float* weights, float uniform, int64_t n) {
  static thread_local std::vector<double> ends;
  const int64_t blocks = (n + SUM_BLOCK - 1) / SUM_BLOCK;
  ends.resize(blocks);
  double total = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t start = block * SUM_BLOCK, stop = std::min(n, start + SUM_BLOCK);
    double part[4] = {};
    for (int64_t i = start; i < stop; ++i) part[i % 4] += weights[i];
    ends[block] = total += (part[0] + part[1]) + (part[2] + part[3]);
  }
  if (!(total > 0)) return -1;
  const double goal = double(uniform) * total;
  const int64_t block = std::min<int64_t>(std::upper_bound(ends.begin(), ends.end(), goal) - ends.begin(), blocks - 1);
  double reached = block ? ends[block - 1] : 0;
  int64_t token = block * SUM_BLOCK;
  for (int64_t i = token; i < std::min(n, (block + 1) * SUM_BLOCK); ++i) {
    if (weights[i] <= 0) continue;
    token = i;  // where rounding leaves the goal beyond the block, its last token of some weight
    if ((reached += weights[i]) > goal) break;
  }
  return token;
}

// One token per request from row `rows` of p; after a rejection (`rejected` >= 0) from max(0, p - q), or from p where
// that vanishes. q null: a point mass on the rejected token.
inline void draw_final(const FinalArgs& a, std::atomic<int64_t>& next) {
  static thread_local std::vector<float> rest;
  rest.resize(a.vocab);
  for (int64_t r; (r = next++) < a.requests;) {
    const float* p = a.probs + a.rows[r] * a.vocab;
    int64_t token = -1;
    if (a.rejected[r] >= 0) {
      std::memcpy(rest.data(), p, a.vocab * sizeof(float));
      const float* q = a.q ? a.q + a.q_rows[r] * a.columns : nullptr;
      if (!q) rest[a.rejected[r]] = 0;
      for (int64_t c = 0; q && !a.tokens && c < a.columns; ++c) rest[c] = std::max(0.f, p[c] - q[c]);
      for (int64_t c = 0; q && a.tokens && c < a.columns; ++c)
        rest[a.tokens[c]] = std::max(0.f, p[a.tokens[c]] - q[c]);
      token = draw(rest.data(), a.uniforms[r], a.vocab);
    }
    a.out[r] = token >= 0 ? token : std::max<int64_t>(0, draw(p, a.uniforms[r], a.vocab));
  }
}

}  // namespace ISA
