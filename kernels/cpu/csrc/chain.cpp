// The chain of an EAGLE-3 head in one call by one team of threads: each pass of its layer takes the token that the
// previous pass drew.
#include <torch/custom_class.h>
#include <torch/library.h>

#include <tuple>

#include "draft_layers.h"

namespace outrider {
namespace {

// Intermediate results of a pass. inputs: the input of q|k|v, [R, 2 * d].
struct Buffers {
  LayerBuffers layers;
  Tensor embedded, inputs, features, states, logits;
};

// One row for each request, and the positions it sees.
struct Pass {
  QueryPlacement places;
  SharedAttention seen;
};

// Weights and caches, checked once at construction.
class ChainDrafter : public torch::CustomClassHolder {
 public:
  // own weights: the head. own norms: the last one, and the norm of the embedding; the layer's first norm is for the
  // features. bias: of q|k|v. features: [slots, d]. embedding: [V, d], or rows in blocks of `embedding_kind`; -1 means
  // no blocks. vocab: [V'], none for the identity. mix: DraftDrawArgs' [2, 3]. norm_before_residual, norm_output: as in
  // EagleConfig.
  ChainDrafter(Tensors weights, std::vector<int64_t> kinds, std::vector<int64_t> outputs,
               std::vector<int64_t> depths, Tensors norms, Tensor k_pool, Tensor v_pool, Tensor cos_sin,
               std::optional<Tensor> bias, Tensor features, Tensor embedding, int64_t embedding_kind,
               std::optional<Tensor> vocab, Tensor mix, bool norm_before_residual, bool norm_output, double eps)
      : layers_({weights, kinds, outputs, depths, norms, {k_pool}, {v_pool}, cos_sin, {}, bias}, features, 1, 2,
                eps, 2 * features.size(-1)),
        head_(layers_.own_weights[0]), last_position_(cos_sin.size(0) - 1), features_(features),
        embedding_(embedding), embedding_kind_(embedding_kind), vocab_(vocab), mix_(mix),
        norm_before_residual_(norm_before_residual), norm_output_(norm_output) {
    const int64_t hidden = layers_.hidden;
    TORCH_CHECK(head_.depth == hidden, "the head is of depth ", head_.depth, ", expected ", hidden);
    check_dense(features, layers_.number(), {k_pool.size(0), hidden}, "features");
    check_dense(mix, at::kFloat, {2, 3}, "mix");
    TORCH_CHECK(embedding.dim() == 2, "embedding must be a matrix");
    if (embedding_kind < 0) {
      check_dense(embedding, layers_.number(), {embedding.size(0), hidden}, "embedding");
    } else {
      TORCH_CHECK(embedding_kind < BLOCK_KINDS && layers_.type == 1, "blocks of kind ", embedding_kind,
                  " give bfloat16 rows");
      const BlockFormat& format = FORMATS[embedding_kind];
      check_dense(embedding, at::kByte, {embedding.size(0), hidden / (format.span * BLOCK) * format.file}, "embedding");
    }
    if (vocab) {
      check_dense(*vocab, at::kLong, {head_.outputs}, "vocab");
      check_range(*vocab, 0, embedding.size(0), "vocab");
    } else {
      TORCH_CHECK(head_.outputs <= embedding.size(0), "the head has more outputs than the embedding rows");
    }
  }

  // Drafts like BlockDrafter's `propose`. The features of each request's last token are at its slot.
  std::tuple<Tensor, std::optional<Tensor>, Tensor> propose(
      Tensor anchors, Tensor seq_lens, Tensor rows, Tensor page_table, Tensor temperatures,
      std::optional<Tensor> top_ks, std::optional<Tensor> top_ps, std::optional<Tensor> min_ps, Tensor noise,
      int64_t gamma, bool wants_probs) const {
    const int64_t requests = rows.numel();
    TORCH_CHECK(gamma > 0, "gamma must be positive");
    check_dense(anchors, at::kLong, {requests}, "anchors");
    check_range(anchors, 0, embedding_.size(0), "anchors");
    check_dense(noise, at::kLong, {requests, gamma}, "noise");
    const std::vector<Pass> passes = passes_of(seq_lens, rows, page_table, gamma);
    Buffers b = buffers_for(requests, passes.back().seen);  // the last pass sees most
    read_features(seq_lens, rows, page_table, b.features);
    DraftDrawArgs draws{};
    draws.rules = rules_of(temperatures, top_ks, top_ps, min_ps, requests);
    const Drawn drawn(draws, noise, head_.outputs, wants_probs);
    draws.logits = b.logits.data_ptr();
    draws.vocab = vocab_ ? vocab_->data_ptr<int64_t>() : nullptr;
    draws.mix = mix_.data_ptr<float>();
    draws.columns = head_.outputs;
    draws.rows = requests;
    draws.rows_per_request = draws.logit_stride = 1;
    draws.stride = gamma;
    run_team([&](TeamMember& member) { run(member, passes, anchors.data_ptr<int64_t>(), draws, drawn.sampled, b); });
    return {drawn.tokens, drawn.probs, drawn.confidence};
  }

 private:
  void run(TeamMember& member, const std::vector<Pass>& passes, const int64_t* token, DraftDrawArgs a, bool sampled,
           Buffers& b) const {
    const Stages stages(member, layers_.type, a.rows, b.layers.rounded);
    const char* features = data(b.features);
    int64_t stride = 1;  // from one request's token to the next's
    for (const Pass& pass : passes) {
      read_inputs(member, token, stride, features, a.rows, b);
      layers_.run(member, pass.places.positions, pass.places.slots, nullptr, 0, &pass.seen, b.layers, &head_,
                  data(b.inputs));
      layers_.finish(member, layers_.own_norm(0), 0, a.rows, 1, 0, 1, b.layers, b.states);
      stages.product(data(b.states), head_, data(b.logits), &layers_.layers[0].qkv);
      stages.draw_drafts(a, sampled ? 32 : 4);
      features = norm_output_ ? data(b.states) : data(b.layers.residual);
      token = a.tokens;
      stride = a.stride;
      if (a.probs) a.probs += a.columns;
      ++a.keys, ++a.tokens, ++a.confidence;
    }
  }

  // Reads the inputs and the residual of each request's row: its token, `stride` numbers apart, and its features.
  void read_inputs(TeamMember& member, const int64_t* tokens, int64_t stride, const char* features, int64_t requests,
                   const Buffers& b) const {
    const int64_t hidden = layers_.hidden, bytes = hidden * layers_.size();
    const auto norm = kernels().norm[layers_.type];
    const auto share = [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        char *const embedded = data(b.embedded) + r * bytes, *const inputs = data(b.inputs) + 2 * r * bytes;
        char* const residual = data(b.layers.residual) + r * bytes;
        const char* const given = features + r * bytes;  // may be the residual of the last pass
        embed(tokens[r * stride], embedded);
        norm(embedded, nullptr, layers_.own_norm(1), inputs, hidden, layers_.eps, 0, 1);
        norm(given, nullptr, layers_.layers[0].norm_before, inputs + bytes, hidden, layers_.eps, 0, 1);
        const char* const rest = norm_before_residual_ ? inputs + bytes : given;
        if (rest != residual) std::memcpy(residual, rest, bytes);
      }
    };
    member.run_ranges(requests, share, 2 * requests * hidden * WORK_PER_NUMBER);
  }

  void embed(int64_t token, void* to) const {
    const int64_t bytes = layers_.hidden * layers_.size();
    if (embedding_kind_ < 0) std::memcpy(to, data(embedding_) + token * bytes, bytes);
    else
      kernels().expand_rows[embedding_kind_](embedding_.data_ptr<uint8_t>(), &token, to, layers_.hidden, 0, 1);
  }

  // The first token of a text has no row: the first row belongs to the second token.
  std::vector<Pass> passes_of(const Tensor& seq_lens, const Tensor& rows, const Tensor& page_table,
                              int64_t gamma) const {
    const int64_t requests = rows.numel();
    check_dense(seq_lens, at::kLong, {requests}, "seq_lens");
    check_range(seq_lens, 1, page_table.size(-1), "seq_lens");
    const Tensor starts = at::empty({requests}, seq_lens.options()), seen = page_table.slice(1, 1);
    std::vector<Pass> passes;
    for (int64_t step = 0; step < gamma; ++step) {
      for (int64_t r = 0; r < requests; ++r)
        starts.data_ptr<int64_t>()[r] = seq_lens.data_ptr<int64_t>()[r] + step;
      QueryPlacement places(starts, rows, page_table, [](int64_t) { return 1; });
      for (int64_t r = 0; r < requests; ++r) {
        places.positions.data_ptr<int64_t>()[r] = std::min(places.positions.data_ptr<int64_t>()[r] - 1, last_position_);
        --places.kv_lens.data_ptr<int32_t>()[r];
      }
      layers_.check_places(places.positions, places.slots);
      SharedAttention own = layers_.plan(requests, places.indptr, places.kv_lens, rows, seen, false);
      passes.push_back({std::move(places), std::move(own)});
    }
    return passes;
  }

  // Reads the features [R, d] of the last token of each text.
  void read_features(const Tensor& seq_lens, const Tensor& rows, const Tensor& page_table, const Tensor& to) const {
    const int64_t bytes = layers_.hidden * layers_.size();
    for (int64_t r = 0; r < rows.numel(); ++r) {
      const int64_t length = seq_lens.data_ptr<int64_t>()[r];
      const int64_t slot = *slots_of(page_table, r, rows.data_ptr<int64_t>()[r], length - 1, length);
      TORCH_CHECK(0 <= slot && slot < features_.size(0), "slot ", slot, " of request ", r, " is outside 0 .. ",
                  features_.size(0) - 1);
      std::memcpy(data(to) + r * bytes, data(features_) + slot * bytes, bytes);
    }
  }

  Buffers buffers_for(int64_t requests, const SharedAttention& seen) const {
    Buffers b{layers_.buffers(requests, {&seen}), layers_.matrix(requests, layers_.hidden),
              layers_.matrix(requests, 2 * layers_.hidden), layers_.matrix(requests, layers_.hidden),
              layers_.matrix(requests, layers_.hidden), layers_.matrix(requests, head_.outputs)};
    b.layers.rounded.reserve(requests, head_);
    return b;
  }

  const DraftLayers layers_;
  const Weight head_;
  const int64_t last_position_;
  const Tensor features_, embedding_;
  const int64_t embedding_kind_;
  const std::optional<Tensor> vocab_;
  const Tensor mix_;
  const bool norm_before_residual_, norm_output_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(outrider, m) {
  m.class_<ChainDrafter>("ChainDrafter")
      .def(torch::init<Tensors, std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>, Tensors, Tensor,
                       Tensor, Tensor, std::optional<Tensor>, Tensor, Tensor, int64_t, std::optional<Tensor>,
                       Tensor, bool, bool, double>())
      .def("propose", &ChainDrafter::propose);
}

}  // namespace outrider
