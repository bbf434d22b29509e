// A block drafter (DSpark, DFlash) in two calls, each by one team of threads: storing the target's tokens, and a whole
// draft.
#include <torch/custom_class.h>
#include <torch/library.h>

#include <tuple>

#include "draft_layers.h"

namespace outrider {
namespace {

struct Buffers {
  LayerBuffers layers;
  Tensor states, logits, latents, bias;
};

// Weights and caches, checked once at construction.
class BlockDrafter : public torch::CustomClassHolder {
 public:
  // own weights: the head, fc, the keys|values of all layers, and W2 with a Markov head. own norms: the last one, the
  // context's. mask: [1, d], embedded. w1: [V, r], none without a Markov head. confidence_head: empty without one, else
  // float32: its weight of a hidden state [d], its addend for the previous token [V], and DraftDrawArgs' mix [2, 3].
  // vocab: [V'], none for the identity. convolutions: as in DrafterTensors.
  BlockDrafter(Tensors weights, std::vector<int64_t> kinds, std::vector<int64_t> outputs,
               std::vector<int64_t> depths, Tensors norms, Tensors k_pools, Tensors v_pools, Tensor cos_sin,
               Tensor mask, std::optional<Tensor> w1, Tensors confidence_head, std::optional<Tensor> vocab,
               Tensors convolutions, int64_t first_row, double eps)
      : layers_({weights, kinds, outputs, depths, norms, k_pools, v_pools, cos_sin, convolutions}, mask,
                w1 ? 4 : 3, 2, eps),
        mask_(mask), w1_(w1), confidence_head_(confidence_head), vocab_(vocab), first_row_(first_row) {
    read_heads(layers_.own_weights);
  }

  // Writes keys and values of target features [N, m * d] at `slots` of every layer's pools; they skip the input norm.
  // Returns the features in the drafter's width, [N, d].
  Tensor observe(Tensor features, Tensor positions, Tensor slots) const {
    const int64_t tokens = features.size(0), kv_width = layers_.kv_heads * layers_.width;
    check_dense(features, mask_.scalar_type(), {tokens, fc_.depth}, "features");
    check_dense(positions, at::kLong, {tokens}, "positions");
    check_dense(slots, at::kLong, {tokens}, "slots");
    layers_.check_places(positions, slots);
    const Tensor context = layers_.matrix(tokens, layers_.hidden), kv = layers_.matrix(tokens, keys_values_.outputs);
    RoundedInput rounded;
    for (const Weight* w : {&fc_, &keys_values_}) rounded.reserve(tokens, *w);
    run_team([&](TeamMember& member) {
      const Stages stages(member, layers_.type, tokens, rounded);
      stages.product(features.data_ptr(), fc_, context.data_ptr(), &keys_values_);
      stages.norm(context.data_ptr(), nullptr, layers_.own_norm(1), context.data_ptr(), layers_.hidden, layers_.eps);
      stages.product(context.data_ptr(), keys_values_, kv.data_ptr(), nullptr);
      for (size_t i = 0; i < layers_.layers.size(); ++i) {
        RopeArgs rope = layers_.rope_of(kv, positions, slots);
        char* const k = data(kv) + 2 * i * kv_width * layers_.size();
        rope.q = rope.k = k;
        rope.v = k + kv_width * layers_.size();
        layers_.rotate(stages, rope, layers_.layers[i]);
      }
    });
    return context;
  }

  // Normed states [R * gamma, d] and logits [R * gamma, V'] of a draft, for the caller to draw from.
  std::tuple<Tensor, Tensor> forward(Tensor embedded, Tensor seq_lens, Tensor rows, Tensor page_table,
                                     int64_t gamma) const {
    Pass pass = pass_of(embedded, seq_lens, rows, page_table, gamma);
    run_team([&](TeamMember& member) {
      run_layers(member, pass, rows.numel(), gamma);
      const Stages all(member, layers_.type, rows.numel() * gamma, pass.b.layers.rounded);
      all.product(pass.b.states.data_ptr(), head_, pass.b.logits.data_ptr(), nullptr);
    });
    return {pass.b.states, pass.b.logits};
  }

  // Drafts gamma tokens for each of R requests: tokens [R, gamma], confidence [R, gamma] and, if wanted and a request
  // is sampled, the distribution of each draw, [R, gamma, V'], unwritten in rows of greedy requests. embedded: [R, d],
  // of the anchors [R]. noise: [R, gamma], the key of each draw.
  std::tuple<Tensor, std::optional<Tensor>, Tensor> propose(
      Tensor anchors, Tensor embedded, Tensor seq_lens, Tensor rows, Tensor page_table, Tensor temperatures,
      std::optional<Tensor> top_ks, std::optional<Tensor> top_ps, std::optional<Tensor> min_ps, Tensor noise,
      int64_t gamma, bool wants_probs) const {
    const int64_t requests = rows.numel();
    check_dense(anchors, at::kLong, {requests}, "anchors");
    check_dense(noise, at::kLong, {requests, gamma}, "noise");
    if (w1_) check_range(anchors, 0, w1_->size(0), "anchors");
    Pass pass = pass_of(embedded, seq_lens, rows, page_table, gamma);
    DraftDrawArgs draws{};
    draws.rules = rules_of(temperatures, top_ks, top_ps, min_ps, requests);
    const Drawn drawn(draws, noise, head_.outputs, wants_probs);
    run_team([&](TeamMember& member) {
      run_layers(member, pass, requests, gamma);
      draw(member, draws, anchors.data_ptr<int64_t>(), requests, gamma, drawn.sampled ? 32 : 4, pass.b);
    });
    return {drawn.tokens, drawn.probs, drawn.confidence};
  }

 private:
  // The single pass of a draft: places of its rows, positions they see, and their inputs in the buffers.
  struct Pass {
    QueryPlacement places;
    SharedAttention seen;
    Buffers b;
  };

  Pass pass_of(const Tensor& embedded, const Tensor& seq_lens, const Tensor& rows, const Tensor& page_table,
               int64_t gamma) const {
    const int64_t requests = rows.numel(), queries = gamma + first_row_, tokens = requests * queries;
    check_dense(embedded, mask_.scalar_type(), {requests, layers_.hidden}, "embedded");
    QueryPlacement places(seq_lens, rows, page_table, [&](int64_t) { return queries; });
    layers_.check_places(places.positions, places.slots);
    SharedAttention seen = layers_.plan(tokens, places.indptr, places.kv_lens, rows, page_table, false);
    Buffers b = buffers_for(requests, gamma, seen);
    const int64_t bytes = layers_.hidden * layers_.size();
    for (int64_t i = 0; i < tokens; ++i) {
      const char* from = i % queries ? data(mask_) : data(embedded) + i / queries * bytes;
      std::memcpy(data(b.layers.residual) + i * bytes, from, bytes);
    }
    return {std::move(places), std::move(seen), std::move(b)};
  }

  // The normed states of a pass.
  void run_layers(TeamMember& member, Pass& pass, int64_t requests, int64_t gamma) const {
    const QueryPlacement& places = pass.places;
    LayerBuffers& b = pass.b.layers;
    layers_.run(member, places.positions, places.slots, nullptr, 0, &pass.seen, b, &head_);
    layers_.finish(member, layers_.own_norm(0), 0, requests, gamma + first_row_, first_row_, gamma, b, pass.b.states);
  }

  // Draws a draft's tokens from its hidden states, one by one where each depends on the last.
  void draw(TeamMember& member, DraftDrawArgs a, const int64_t* anchors, int64_t requests, int64_t gamma, int64_t work,
            Buffers& b) const {
    const Stages all(member, layers_.type, requests * gamma, b.layers.rounded);
    const Stages each(member, layers_.type, requests, b.layers.rounded);
    all.product(b.states.data_ptr(), head_, b.logits.data_ptr(), w1_ ? &w2_ : nullptr);
    a.logits = b.logits.data_ptr();
    a.states = b.states.data_ptr();
    a.vocab = vocab_ ? vocab_->data_ptr<int64_t>() : nullptr;
    a.columns = head_.outputs;
    a.width = layers_.hidden;
    a.rows = requests * gamma;
    a.stride = a.logit_stride = 1;
    a.rows_per_request = gamma;
    if (!w1_) return all.draw_drafts(a, work);
    if (!confidence_head_.empty()) {
      a.state_weight = confidence_head_[0].data_ptr<float>();
      a.token_weight = confidence_head_[1].data_ptr<float>();
      a.mix = confidence_head_[2].data_ptr<float>();
    }
    a.bias = b.bias.data_ptr();
    a.rows = requests;
    a.rows_per_request = 1;
    a.stride = a.logit_stride = gamma;
    a.previous = anchors;
    a.previous_stride = 1;
    const int64_t bytes = w1_->size(1) * layers_.size();
    for (int64_t step = 0; step < gamma; ++step) {
      member.run_once([&] {
        for (int64_t r = 0; r < requests; ++r)
          std::memcpy(data(b.latents) + r * bytes, data(*w1_) + a.previous[r * a.previous_stride] * bytes, bytes);
      });
      each.product(b.latents.data_ptr(), w2_, b.bias.data_ptr(), nullptr);
      each.draw_drafts(a, work);
      a.previous = a.tokens;
      a.previous_stride = gamma;
      a.logits = static_cast<const char*>(a.logits) + a.columns * layers_.size();
      a.states = static_cast<const char*>(a.states) + a.width * layers_.size();
      if (a.probs) a.probs += a.columns;
      ++a.keys, ++a.tokens, ++a.confidence;
    }
  }

  Buffers buffers_for(int64_t requests, int64_t gamma, const SharedAttention& seen) const {
    const int64_t drafted = requests * gamma, tokens = requests * (gamma + first_row_);
    Buffers b{layers_.buffers(tokens, {&seen}), layers_.matrix(drafted, layers_.hidden),
              layers_.matrix(drafted, head_.outputs), {}, {}};
    b.layers.block_rows = gamma + first_row_;
    if (w1_) b.latents = layers_.matrix(requests, w2_.depth), b.bias = layers_.matrix(requests, w2_.outputs);
    b.layers.rounded.reserve(drafted, head_);
    if (w1_) b.layers.rounded.reserve(requests, w2_);
    return b;
  }

  // weights: the head, fc, the keys|values of all layers, and optionally W2.
  void read_heads(const std::vector<Weight>& weights) {
    head_ = weights[0];
    fc_ = weights[1];
    keys_values_ = weights[2];
    const int64_t hidden = layers_.hidden;
    TORCH_CHECK(head_.depth == hidden && fc_.outputs == hidden && keys_values_.depth == hidden &&
                    keys_values_.outputs == 2 * int64_t(layers_.layers.size()) * layers_.kv_heads * layers_.width,
                "the head, fc or the projections of keys and values do not fit the hidden size ", hidden);
    if (vocab_) check_dense(*vocab_, at::kLong, {head_.outputs}, "vocab");
    TORCH_CHECK(confidence_head_.empty() || (w1_ && confidence_head_.size() == 3),
                "a confidence head needs three tensors and a Markov head");
    if (!w1_) return;
    w2_ = weights[3];
    check_dense(*w1_, mask_.scalar_type(), {w1_->size(0), w2_.depth}, "w1");
    TORCH_CHECK(w2_.outputs == head_.outputs, "W2 has ", w2_.outputs, " outputs, the head ", head_.outputs);
    if (vocab_) check_range(*vocab_, 0, w1_->size(0), "vocab");
    else TORCH_CHECK(head_.outputs <= w1_->size(0), "the head has more outputs than w1 rows");
    if (confidence_head_.empty()) return;
    check_dense(confidence_head_[0], at::kFloat, {hidden}, "the confidence's weight");
    check_dense(confidence_head_[1], at::kFloat, {w1_->size(0)}, "the confidence of tokens");
    check_dense(confidence_head_[2], at::kFloat, {2, 3}, "the mix of confidences");
  }

  const DraftLayers layers_;
  const Tensor mask_;
  const std::optional<Tensor> w1_;
  const Tensors confidence_head_;
  const std::optional<Tensor> vocab_;
  const int64_t first_row_;
  Weight head_, fc_, keys_values_, w2_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(outrider, m) {
  m.class_<BlockDrafter>("BlockDrafter")
      .def(torch::init<Tensors, std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>, Tensors, Tensors,
                       Tensors, Tensor, Tensor, std::optional<Tensor>, Tensors, std::optional<Tensor>, Tensors, int64_t,
                       double>())
      .def("observe", &BlockDrafter::observe)
      .def("forward", &BlockDrafter::forward)
      .def("propose", &BlockDrafter::propose);
}

}  // namespace outrider
