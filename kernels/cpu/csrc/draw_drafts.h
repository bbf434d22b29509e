// Draft tokens from logits, each with its chance of acceptance, known before the draw; one row at a time.
#pragma once
#include "sampling.h"

namespace ISA {

// out = x + bias; both may end within a vector.
template <typename T>
inline void widen(const T* x, const T* bias, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, bias ? load(x + i) + load(bias + i) : load(x + i));
  for (; i < n; ++i) out[i] = scalar(x[i]) + (bias ? scalar(bias[i]) : 0.f);
}

template <typename T>
inline float weighted(const T* x, const float* weight, int64_t n) {
  Vec total{};
  int64_t i = 0;
  for (; i + W <= n; i += W) total += load(x + i) * load(weight + i);
  float rest = sum(total);
  for (; i < n; ++i) rest += scalar(x[i]) * weight[i];
  return rest;
}

// Entropy in nats of the probabilities scale * weights; the largest is `chance`. A weight is 0, or e^((x - top) /
// temperature) times one factor for all.
inline float entropy(const float* x, float top, float temperature, const float* weights, float scale, float chance,
                     int64_t n) {
  const Vec least = splat(-1e30f);  // times weight 0 gives 0
  double total = 0;
  for (int64_t start = 0; start < n; start += SUM_BLOCK) {
    const int64_t end = std::min(n, start + SUM_BLOCK);
    Vec part{};
    int64_t i = start;
    for (; i + W <= end; i += W) part += load(weights + i) * max(load(x + i) - top, least);
    total += sum(part);
    for (; i < end; ++i) total += weights[i] * std::max(x[i] - top, -1e30f);
  }
  return float(-std::log(chance) - scale * total / temperature);
}

template <typename T>
void draw_drafts(const DraftDrawArgs& a, std::atomic<int64_t>& next) {
  static thread_local std::vector<float> sums, weights;
  sums.resize(a.columns);
  weights.resize(a.columns);
  for (int64_t i; (i = next++) < a.rows;) {
    const int64_t row = i * a.stride, from = i * a.logit_stride, request = i / a.rows_per_request;
    const int64_t* vocab = a.vocab ? a.vocab + i * a.vocab_stride : nullptr;
    const bool greedy = !(a.rules.temperatures[request] > 0);
    const T* bias = a.bias ? static_cast<const T*>(a.bias) + i * a.columns : nullptr;
    widen(static_cast<const T*>(a.logits) + from * a.columns, bias, sums.data(), a.columns);
    const float top = largest(sums.data(), a.columns);
    int64_t column;
    float chance, uncertainty = 0;
    const bool own = a.mix && !a.state_weight;
    if (greedy) {
      column = first_of(sums.data(), top, a.columns);
      chance = float(1 / exponentials(sums.data(), 1.f, top, weights.data(), a.columns));
      if (own) uncertainty = entropy(sums.data(), top, 1.f, weights.data(), chance, chance, a.columns);
    } else {
      float* probs = a.probs ? a.probs + row * a.columns : weights.data();
      chance = probabilities(sums.data(), top, a.rules, request, probs, a.columns);
      if (own) uncertainty = entropy(sums.data(), top, a.rules.temperatures[request], probs, 1.f, chance, a.columns);
      column = std::max<int64_t>(0, gumbel_argmax(probs, a.keys[row], vocab, a.columns));
    }
    if (a.mix) {
      float first = uncertainty;
      if (a.state_weight) {
        const T* state = static_cast<const T*>(a.states) + from * a.width;
        first = weighted(state, a.state_weight, a.width) + a.token_weight[a.previous[i * a.previous_stride]];
      }
      const float bounded = std::min(std::max(chance, 1e-6f), 1 - 1e-6f);
      const float* mix = a.mix + 3 * greedy;
      const float logit = mix[0] * first + mix[1] * std::log(bounded / (1 - bounded)) + mix[2];
      chance = 1.f / (1.f + std::exp(-logit));
    }
    a.confidence[row] = chance;
    a.tokens[row] = vocab ? vocab[column] : column;
  }
}

}  // namespace ISA
