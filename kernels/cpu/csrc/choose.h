// Draws draft tokens from logits and says how likely each is to be accepted, before it is drawn; one row at a time.
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
void choose(const ChooseArgs& a, std::atomic<int64_t>& next) {
  static thread_local std::vector<float> sums, weights;
  sums.resize(a.columns);
  weights.resize(a.columns);
  for (int64_t i; (i = next++) < a.rows;) {
    const int64_t row = i * a.stride;
    const float temperature = a.temperatures[i / a.rows_per_request];
    const T* bias = a.bias ? static_cast<const T*>(a.bias) + i * a.columns : nullptr;
    widen(static_cast<const T*>(a.logits) + row * a.columns, bias, sums.data(), a.columns);
    const float top = largest(sums.data(), a.columns);
    if (a.state_weight) {
      const T* state = static_cast<const T*>(a.states) + row * a.width;
      const float logit = weighted(state, a.state_weight, a.width) + a.token_weight[a.previous[i * a.previous_stride]];
      a.confidence[row] = 1.f / (1.f + std::exp(-logit));
    }
    int64_t column = std::find(sums.begin(), sums.end(), top) - sums.begin();
    if (temperature > 0 || !a.state_weight) {
      float* probs = temperature > 0 ? a.probs + row * a.columns : weights.data();
      const float heat = temperature > 0 ? temperature : 1.f;
      const float share = float(1 / exponentials(sums.data(), heat, top, probs, a.columns));
      if (!a.state_weight) a.confidence[row] = share;  // the largest weight is 1
      if (temperature > 0) {
        for (int64_t c = 0; c < a.columns; ++c) probs[c] *= share;
        column = draw(probs, a.uniforms[row], a.columns);
      }
    }
    if (column < 0 || column == a.columns) column = 0;  // nothing compares with NaN
    a.tokens[row] = a.vocab ? a.vocab[column] : column;
  }
}

}  // namespace ISA
