// Draft tokens from logits, and each one's chance of acceptance, which is known before it is drawn; one row at a time.
#pragma once
#include "sampling.h"

namespace ISA {

// out = x + bias, either of which may end within a vector.
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

template <typename T>
void draw_drafts(const DraftDrawArgs& a, std::atomic<int64_t>& next) {
  static thread_local std::vector<float> sums, weights;
  sums.resize(a.columns);
  weights.resize(a.columns);
  for (int64_t i; (i = next++) < a.rows;) {
    const int64_t row = i * a.stride, request = i / a.rows_per_request;
    const bool greedy = !(a.rules.temperatures[request] > 0);
    const T* bias = a.bias ? static_cast<const T*>(a.bias) + i * a.columns : nullptr;
    widen(static_cast<const T*>(a.logits) + row * a.columns, bias, sums.data(), a.columns);
    const float top = largest(sums.data(), a.columns);
    int64_t column;
    float chance;
    if (greedy) {
      column = first_of(sums.data(), top, a.columns);
      chance = float(1 / exponentials(sums.data(), 1.f, top, weights.data(), a.columns));
    } else {
      float* probs = a.probs ? a.probs + row * a.columns : weights.data();
      chance = probabilities(sums.data(), top, a.rules, request, probs, a.columns);
      column = std::max<int64_t>(0, gumbel_argmax(probs, a.keys[row], a.vocab, a.columns));
    }
    if (a.state_weight) {
      const T* state = static_cast<const T*>(a.states) + row * a.width;
      const float head = weighted(state, a.state_weight, a.width) + a.token_weight[a.previous[i * a.previous_stride]];
      const float bounded = std::min(std::max(chance, 1e-6f), 1 - 1e-6f);
      const float* mix = a.mix + 3 * greedy;
      const float logit = mix[0] * head + mix[1] * std::log(bounded / (1 - bounded)) + mix[2];
      chance = 1.f / (1.f + std::exp(-logit));
    }
    a.confidence[row] = chance;
    a.tokens[row] = a.vocab ? a.vocab[column] : column;
  }
}

}  // namespace ISA
