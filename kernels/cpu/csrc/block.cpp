// A block drafter (DSpark, DFlash) in two calls: what it remembers of the target's tokens, and a whole draft.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <tuple>

#include "ops.h"

namespace outrider {
namespace {

// Weights beside their kinds: blocks of block_linear or, where a kind is negative, panels of packed_linear.
struct Weights {
  at::TensorList packed;
  at::IntArrayRef kinds, outputs;

  Weights(at::TensorList packed, at::IntArrayRef kinds, at::IntArrayRef outputs, int64_t count)
      : packed(packed), kinds(kinds), outputs(outputs) {
    TORCH_CHECK(int64_t(packed.size()) == count && kinds.size() == packed.size() && outputs.size() == packed.size(),
                "expected ", count, " weights, kinds and outputs, got ", packed.size(), ", ", kinds.size(), ", ",
                outputs.size());
  }

  Tensor multiply(const Tensor& x, int64_t which) const {
    if (kinds[which] >= 0) return block_linear(x, packed[which], kinds[which], std::nullopt, outputs[which]);
    return packed_linear(x, packed[which], std::nullopt, outputs[which]);
  }
};

// Heads [N, H, D] of a wider row, which begin at a number of it.
Tensor heads_at(const Tensor& rows, int64_t begin, int64_t heads, int64_t width) {
  return rows.as_strided({rows.size(0), heads, width}, {rows.size(1), width, 1}, begin);
}

// Each head divided by its root mean square, times the weight; in place.
void norm_heads(const Tensor& x, const Tensor& weight, double eps) {
  const Timed timed(SMALL);
  const int type = type_of(x, "heads");
  TORCH_CHECK(weight.scalar_type() == x.scalar_type() && weight.is_contiguous() && weight.numel() == x.size(2),
              "a norm of heads must be dense, of their type and width");
  char* first = static_cast<char*>(x.data_ptr());
  const int64_t row = x.stride(0) * x.element_size();
  at::parallel_for(0, x.size(0), grain(x.size(1) * x.size(2)), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      kernels().norm[type](first + n * row, nullptr, weight.data_ptr(), first + n * row, x.size(2), float(eps), 0,
                           x.size(1));
  });
}

// Writes keys and values of target features [N, m * d] at `slots` of every layer's pools; these skip the input norm.
// weights: fc and, stacked over the layers, the projections of keys and values. norms: hidden, each layer's keys.
void observe_block(const Tensor& features, const Tensor& positions, const Tensor& slots, const Tensor& cos_sin,
                   at::TensorList keys, at::TensorList values, at::TensorList packed, at::IntArrayRef kinds,
                   at::IntArrayRef outputs, at::TensorList norms, double eps) {
  const Weights weights(packed, kinds, outputs, 2);
  const int64_t layers = keys.size();
  TORCH_CHECK(values.size() == keys.size() && int64_t(norms.size()) == layers + 1, "each layer has pools and a norm");
  const Tensor context = rms_norm(weights.multiply(features, 0), {}, norms[0], eps);
  const Tensor kv = weights.multiply(context, 1);
  for (int64_t layer = 0; layer < layers; ++layer) {
    const int64_t heads = keys[layer].size(1), width = keys[layer].size(2), begin = 2 * layer * heads * width;
    TORCH_CHECK(kv.size(1) == 2 * layers * heads * width, "the pools' heads do not fit the projections");
    const Tensor k = heads_at(kv, begin, heads, width), v = heads_at(kv, begin + heads * width, heads, width);
    norm_heads(k, norms[1 + layer], eps);
    rope(heads_at(kv, begin, 0, width), k, v, positions, cos_sin, keys[layer], values[layer], slots);
  }
}

// Which queries belong to which request, and where in the cache they stand.
struct Places {
  Tensor positions, slots, indptr, kv_lens;

  Places(const Tensor& seq_lens, const Tensor& rows, const Tensor& page_table, int64_t queries) {
    const int64_t requests = rows.numel();
    TORCH_CHECK(seq_lens.scalar_type() == at::kLong && seq_lens.is_contiguous() && seq_lens.numel() == requests &&
                    rows.scalar_type() == at::kLong && rows.is_contiguous(),
                "seq_lens and rows must be dense int64, one per request");
    positions = at::empty({requests * queries}, seq_lens.options());
    slots = at::empty({requests * queries}, seq_lens.options());
    indptr = at::empty({requests + 1}, page_table.options());
    kv_lens = at::empty({requests}, page_table.options());
    indptr.data_ptr<int32_t>()[0] = 0;
    for (int64_t r = 0; r < requests; ++r) {
      const int64_t length = seq_lens.data_ptr<int64_t>()[r];
      const int32_t* from = slots_of(page_table, r, rows.data_ptr<int64_t>()[r], length, length + queries);
      for (int64_t i = 0; i < queries; ++i) {
        positions.data_ptr<int64_t>()[r * queries + i] = length + i;
        slots.data_ptr<int64_t>()[r * queries + i] = from[i];
      }
      indptr.data_ptr<int32_t>()[r + 1] = int32_t((r + 1) * queries);
      kv_lens.data_ptr<int32_t>()[r] = int32_t(length + queries);
    }
  }
};

// rows of a table [V, width] into out [count, width]; rows[i * stride].
void gather(const Tensor& table, const int64_t* rows, int64_t stride, const Tensor& out) {
  const int64_t bytes = table.size(1) * table.element_size();
  for (int64_t i = 0; i < out.size(0); ++i) {
    const int64_t row = rows[i * stride];
    TORCH_CHECK(0 <= row && row < table.size(0), "token ", row, " is outside the vocabulary of ", table.size(0));
    const char* from = static_cast<const char*>(table.data_ptr()) + row * bytes;
    std::memcpy(static_cast<char*>(out.data_ptr()) + i * bytes, from, bytes);
  }
}

// Normed hidden states [R, queries, d] of each request's anchor and the masks behind it.
// embedded: [R + 1, d], of the anchors and of the mask. weights of a layer: q|k|v, out, gate|up, down. Its norms: before
// attention, of queries, of keys, before the MLP.
Tensor block_states(const Tensor& embedded, const Places& places, const Tensor& rows, const Tensor& page_table,
                    const Tensor& cos_sin, at::TensorList keys, at::TensorList values, const Weights& weights,
                    at::TensorList norms, double eps) {
  const int64_t requests = rows.numel(), tokens = places.slots.numel(), queries = tokens / std::max<int64_t>(1, requests);
  std::vector<int64_t> each(tokens, requests);
  for (int64_t r = 0; r < requests; ++r) each[r * queries] = r;
  const Tensor residual = at::empty({tokens, embedded.size(1)}, embedded.options());
  gather(embedded, each.data(), 1, residual);
  Tensor x;
  for (int64_t layer = 0; layer < int64_t(keys.size()); ++layer) {
    const int64_t heads = keys[layer].size(1), width = keys[layer].size(2), first = 4 * layer;
    const int64_t query_heads = weights.outputs[first] / width - 2 * heads;
    TORCH_CHECK(query_heads > 0 && weights.outputs[first] == (query_heads + 2 * heads) * width,
                "outputs of q|k|v are ", weights.outputs[first], ", which the pool's heads do not fit");
    const Tensor input = layer ? rms_norm(x, residual, norms[first], eps) : rms_norm(residual, {}, norms[first], eps);
    const Tensor qkv = weights.multiply(input, first);
    const Tensor q = heads_at(qkv, 0, query_heads, width), k = heads_at(qkv, query_heads * width, heads, width);
    norm_heads(q, norms[first + 1], eps);
    norm_heads(k, norms[first + 2], eps);
    rope(q, k, heads_at(qkv, (query_heads + heads) * width, heads, width), places.positions, cos_sin, keys[layer],
         values[layer], places.slots);
    const Tensor seen = flat_attention(q, keys[layer], values[layer], places.indptr, places.kv_lens, rows, page_table,
                                       1 / std::sqrt(double(width)), false, -1, 0);
    const Tensor attended = weights.multiply(seen.view({tokens, query_heads * width}), first + 1);
    const Tensor normed = rms_norm(attended, residual, norms[first + 3], eps);
    x = weights.multiply(silu_mul(weights.multiply(normed, first + 2)), first + 3);
  }
  return rms_norm(x, residual, norms[4 * keys.size()], eps).view({requests, queries, embedded.size(1)});
}

void check_dense(const Tensor& x, at::ScalarType type, at::IntArrayRef sizes, const char* name) {
  TORCH_CHECK(x.scalar_type() == type && x.is_contiguous() && x.sizes() == sizes, name, " must be dense ", type, " ",
              sizes, ", got ", x.scalar_type(), " ", x.sizes());
}

// Draws the tokens of a draft from its logits, [R * gamma, V'] of hidden states [R, gamma, d].
class Drawing {
 public:
  Drawing(const Tensor& states, const Tensor& logits, const Rules& rules, const Tensor& keys,
          at::TensorList sure, const std::optional<Tensor>& vocab, bool wants_probs)
      : logits_(logits), states_(states), type_(type_of(logits, "logits")) {
    const int64_t requests = states.size(0), gamma = states.size(1);
    a_.columns = logits.size(-1);
    a_.width = states.size(2);
    check_dense(keys, at::kLong, {requests, gamma}, "keys");
    if (vocab) check_dense(*vocab, at::kLong, {a_.columns}, "vocab");
    a_.rules = rules;
    a_.keys = keys.data_ptr<int64_t>();
    a_.vocab = vocab ? vocab->data_ptr<int64_t>() : nullptr;
    if (!sure.empty()) {
      check_dense(sure[0], at::kFloat, {a_.width}, "the confidence's weight");
      a_.state_weight = sure[0].data_ptr<float>();
      a_.token_weight = sure[1].data_ptr<float>();
    }
    const auto* heat = rules.temperatures;
    sampled_ = std::any_of(heat, heat + requests, [](float t) { return t > 0; });
    const auto floats = keys.options().dtype(at::kFloat);
    if (sampled_ && wants_probs) probs = at::empty({requests, gamma, a_.columns}, floats);
    tokens = at::empty({requests, gamma}, keys.options());
    confidence = at::empty({requests, gamma}, floats);
  }

  // Of every request's positions step, step + apart, ... bias: [R, V'], added to one position's logits.
  // previous: the token before it, previous_stride apart.
  void draw(int64_t step, int64_t apart, const Tensor& bias, const int64_t* previous, int64_t previous_stride) {
    const Timed timed(SAMPLING);
    const int64_t size = logits_.element_size();
    ChooseArgs a = a_;
    a.logits = static_cast<const char*>(logits_.data_ptr()) + step * a.columns * size;
    a.states = static_cast<const char*>(states_.data_ptr()) + step * a.width * size;
    a.bias = bias.defined() ? bias.data_ptr() : nullptr;
    a.keys += step;
    a.probs = probs ? probs->data_ptr<float>() + step * a.columns : nullptr;
    a.tokens = tokens.data_ptr<int64_t>() + step;
    a.confidence = confidence.data_ptr<float>() + step;
    a.previous = previous;
    a.previous_stride = previous_stride;
    a.stride = apart;
    a.rows = tokens.numel() / apart;
    a.rows_per_request = tokens.size(1) / apart;
    std::atomic<int64_t> next{0};
    on_every_thread(a.rows, [&] { kernels().choose[type_](a, next); }, a.rows * a.columns * (sampled_ ? 32 : 4));
  }

  std::optional<Tensor> probs;
  Tensor tokens, confidence;

 private:
  const Tensor logits_, states_;
  const int type_;
  bool sampled_;  // somebody is not greedy
  ChooseArgs a_{};
};

// A draft of gamma tokens for each of R requests: tokens [R, gamma], confidence [R, gamma] and, where that is wanted and a
// request is not greedy, the distribution each token was drawn from, [R, gamma, V']; rows of greedy requests are not
// written there. noise: [R, gamma], the key of each draw's.
// embedded: [R + 1, d], of the anchors and of the mask. weights: four a layer, the head and, with a Markov head, W2.
// norms: four a layer and the last one.
// w1: [V, r], none without a Markov head. sure: [d] and [V] float32, the confidence head's weight of a hidden state and
// what it adds for the token before; empty without one. vocab: [V'], none for the identity.
std::tuple<Tensor, std::optional<Tensor>, Tensor> propose_block(
    const Tensor& anchors, const Tensor& seq_lens, const Tensor& rows, const Tensor& page_table,
    const Tensor& temperatures, const std::optional<Tensor>& top_ks, const std::optional<Tensor>& top_ps,
    const std::optional<Tensor>& min_ps, const Tensor& noise, const Tensor& embedded, const Tensor& cos_sin,
    at::TensorList keys, at::TensorList values, at::TensorList packed, at::IntArrayRef kinds, at::IntArrayRef outputs,
    at::TensorList norms, const std::optional<Tensor>& w1, at::TensorList sure, const std::optional<Tensor>& vocab,
    int64_t gamma, int64_t first_row, double eps, bool wants_probs) {
  const int64_t requests = rows.numel(), layers = keys.size();
  const Weights weights(packed, kinds, outputs, 4 * layers + (w1 ? 2 : 1));
  check_dense(embedded, embedded.scalar_type(), {requests + 1, embedded.size(-1)}, "embedded");
  check_dense(anchors, at::kLong, {requests}, "anchors");
  TORCH_CHECK(sure.empty() || (w1 && sure.size() == 2), "a confidence head needs two weights and a Markov head");
  if (w1) check_dense(*w1, embedded.scalar_type(), {w1->size(0), w1->size(-1)}, "w1");
  if (!sure.empty()) check_dense(sure[1], at::kFloat, {w1->size(0)}, "the confidence of tokens");
  const Places places(seq_lens, rows, page_table, gamma + first_row);
  const Tensor states =
      block_states(embedded, places, rows, page_table, cos_sin, keys, values, weights, norms, eps)
          .narrow(1, first_row, gamma).contiguous();
  const Rules rules = rules_of(temperatures, top_ks, top_ps, min_ps, requests);
  Drawing drawing(states, weights.multiply(states, 4 * layers), rules, noise, sure, vocab, wants_probs);
  if (!w1) {
    drawing.draw(0, 1, {}, nullptr, 0);
  } else {
    const Tensor latents = at::empty({requests, w1->size(1)}, w1->options());
    for (int64_t step = 0; step < gamma; ++step) {
      const int64_t* previous = step ? drawing.tokens.data_ptr<int64_t>() + step - 1 : anchors.data_ptr<int64_t>();
      gather(*w1, previous, step ? gamma : 1, latents);
      drawing.draw(step, gamma, weights.multiply(latents, 4 * layers + 1), previous, step ? gamma : 1);
    }
  }
  return {drawing.tokens, drawing.probs, drawing.confidence};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(outrider, m) {
  m.def("observe_block(Tensor features, Tensor positions, Tensor slots, Tensor cos_sin, Tensor(a!)[] keys, "
        "Tensor(b!)[] values, Tensor[] packed, int[] kinds, int[] outputs, Tensor[] norms, float eps) -> ()");
  m.def("propose_block(Tensor anchors, Tensor seq_lens, Tensor rows, Tensor page_table, Tensor temperatures, "
        "Tensor? top_ks, Tensor? top_ps, Tensor? min_ps, Tensor noise, Tensor embedded, Tensor cos_sin, "
        "Tensor(a!)[] keys, Tensor(b!)[] values, Tensor[] packed, "
        "int[] kinds, int[] outputs, Tensor[] norms, Tensor? w1, Tensor[] sure, Tensor? vocab, int gamma, "
        "int first_row, float eps, bool wants_probs) -> (Tensor, Tensor?, Tensor)");
}

TORCH_LIBRARY_IMPL(outrider, CPU, m) {
  m.impl("observe_block", observe_block);
  m.impl("propose_block", propose_block);
}

}  // namespace outrider
