// The pass of a diffusion drafter in one call by one team of threads: from the new tokens of the texts and their blocks
// to logits. Two helpers replace many small operations: the places of rows, and each text's first new position.
#include <torch/custom_class.h>
#include <torch/library.h>

#include <tuple>

#include "draft_layers.h"

namespace outrider {
namespace {

// The fields of `diffusion/spans.py: Spans`.
std::tuple<Tensor, Tensor, Tensor, Tensor> spans(const Tensor& page_table, const Tensor& rows, const Tensor& starts,
                                                 const Tensor& counts) {
  check_dense(counts, at::kLong, {rows.numel()}, "counts");
  const QueryPlacement p(starts, rows, page_table, [&](int64_t r) { return counts.data_ptr<int64_t>()[r]; });
  return {p.positions, p.slots, p.indptr, p.kv_lens};
}

// The first position of each text with a slot that is not `encoded` [S] bool, or the length of the text [R].
Tensor first_missing(const Tensor& encoded, const Tensor& page_table, const Tensor& rows, const Tensor& lengths) {
  check_dense(encoded, at::kBool, {encoded.numel()}, "encoded");
  check_dense(lengths, at::kLong, {rows.numel()}, "lengths");
  check_dense(rows, at::kLong, {rows.numel()}, "rows");
  const Tensor first = at::empty({rows.numel()}, lengths.options());
  for (int64_t r = 0; r < rows.numel(); ++r) {
    const int64_t length = lengths.data_ptr<int64_t>()[r];
    const int32_t* slot = slots_of(page_table, r, rows.data_ptr<int64_t>()[r], 0, length);
    int64_t i = 0;
    while (i < length && slot[i] >= 0 && slot[i] < encoded.numel() && encoded.data_ptr<bool>()[slot[i]]) ++i;
    first.data_ptr<int64_t>()[r] = i;
  }
  return first;
}

// Weights and caches, checked once at construction.
class DiffusionDrafter : public torch::CustomClassHolder {
 public:
  // own weights: the head. own norms: the last one. like: [1, d], has the type of all numbers.
  DiffusionDrafter(Tensors weights, std::vector<int64_t> kinds, std::vector<int64_t> outputs,
                   std::vector<int64_t> depths, Tensors norms, Tensors k_pools, Tensors v_pools, Tensor cos_sin,
                   Tensor like, double eps)
      : layers_({weights, kinds, outputs, depths, norms, k_pools, v_pools, cos_sin}, like, 1, 1, eps),
        head_(layers_.own_weights[0]) {
    TORCH_CHECK(head_.depth == layers_.hidden, "the head is of depth ", head_.depth, ", expected ", layers_.hidden);
  }

  // Normed states [R * count, d] and logits [R * count, V'] of rows first .. first + count of each request's block. x:
  // [N, d] inputs at `positions` and `slots` [N]: first the rows of the context, for requests `context_rows`, by
  // context_indptr and context_kv_lens; then equally many block rows for each of `rows` [R].
  std::tuple<Tensor, Tensor> forward(Tensor x, Tensor positions, Tensor slots, Tensor page_table, Tensor context_rows,
                                     Tensor context_indptr, Tensor context_kv_lens, Tensor rows, Tensor indptr,
                                     Tensor kv_lens, int64_t first, int64_t count) const {
    const int64_t tokens = positions.numel(), requests = rows.numel();
    check_dense(x, layers_.number(), {tokens, layers_.hidden}, "x");
    check_dense(positions, at::kLong, {tokens}, "positions");
    check_dense(slots, at::kLong, {tokens}, "slots");
    layers_.check_places(positions, slots);
    const int64_t context_tokens = context_rows.numel() ? context_indptr.data_ptr<int32_t>()[context_rows.numel()] : 0;
    const int64_t queries = requests ? (tokens - context_tokens) / requests : 0;
    TORCH_CHECK(context_tokens + queries * requests == tokens && first >= 0 && (!requests || first + count <= queries),
                "rows ", first, " .. ", first + count, " of ", requests, " blocks are not in ", tokens - context_tokens,
                " rows");
    std::optional<SharedAttention> context, block;
    if (context_tokens)
      context = layers_.plan(context_tokens, context_indptr, context_kv_lens, context_rows, page_table, true);
    if (requests) block = layers_.plan(tokens - context_tokens, indptr, kv_lens, rows, page_table, false);
    LayerBuffers b = layers_.buffers(tokens, {context ? &*context : nullptr, block ? &*block : nullptr});
    b.rounded.reserve(requests * count, head_);
    std::memcpy(data(b.residual), data(x), x.nbytes());
    const Tensor states = layers_.matrix(requests * count, layers_.hidden);
    const Tensor logits = layers_.matrix(requests * count, head_.outputs);
    run_team([&](TeamMember& member) {
      layers_.run(member, positions, slots, context ? &*context : nullptr, context_tokens, block ? &*block : nullptr, b,
                  &head_);
      if (!requests) return;
      layers_.finish(member, layers_.own_norm(0), context_tokens, requests, queries, first, count, b, states);
      Stages(member, layers_.type, requests * count, b.rounded).product(data(states), head_, data(logits), nullptr);
    });
    return {states, logits};
  }

 private:
  const DraftLayers layers_;
  const Weight head_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(outrider, m) {
  m.def("spans(Tensor page_table, Tensor rows, Tensor starts, Tensor counts) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("first_missing(Tensor encoded, Tensor page_table, Tensor rows, Tensor lengths) -> Tensor");
  m.class_<DiffusionDrafter>("DiffusionDrafter")
      .def(torch::init<Tensors, std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>, Tensors, Tensors,
                       Tensors, Tensor, Tensor, double>())
      .def("forward", &DiffusionDrafter::forward);
}

TORCH_LIBRARY_IMPL(outrider, CPU, m) {
  m.impl("spans", spans);
  m.impl("first_missing", first_missing);
}

}  // namespace outrider
