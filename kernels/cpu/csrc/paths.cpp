// Paths through the likeliest tokens of each position of a block (DFlash 2, LiLiCorr): finds these tokens, and draws a
// path.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "ops.h"

namespace outrider {
namespace {

// The `count` largest numbers of each row of x [N, columns], float32, and their columns [N, count].
std::tuple<Tensor, Tensor> likeliest(const Tensor& x, int64_t count) {
  const int type = type_of(x, "x");
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && 0 < count && count <= x.size(1), "x must be dense [rows, columns], ",
              "with ", count, " columns or more");
  const Tensor values = at::empty({x.size(0), count}, x.options().dtype(at::kFloat));
  const Tensor columns = at::empty({x.size(0), count}, x.options().dtype(at::kLong));
  at::parallel_for(0, x.size(0), grain(x.size(1)), [&](int64_t begin, int64_t end) {
    kernels().likeliest[type](x.data_ptr(), values.data_ptr<float>(), columns.data_ptr<int64_t>(), x.size(1), count,
                              begin, end);
  });
  return {values, columns};
}

// Draws tokens [R, G] of a path through the candidates ids [R, G, K], by scores [R, G, K, K] of each candidate after
// each previous one; returns also the distribution of each draw, [R, G, K], 0 for greedy requests, and confidences [R,
// G], by DraftDrawArgs' mix [2, 3]. keys: [R, G], of the draws.
std::tuple<Tensor, Tensor, Tensor> draw_path(const Tensor& ids, const Tensor& scores, const Tensor& temperatures,
                                             const std::optional<Tensor>& top_ks, const std::optional<Tensor>& top_ps,
                                             const std::optional<Tensor>& min_ps, const Tensor& keys,
                                             const Tensor& mix) {
  TORCH_CHECK(ids.dim() == 3 && ids.size(2) > 0, "ids must be [requests, positions, candidates]");
  const int64_t requests = ids.size(0), positions = ids.size(1), count = ids.size(2);
  check_dense(ids, at::kLong, ids.sizes(), "ids");
  check_dense(scores, at::kFloat, {requests, positions, count, count}, "scores");
  check_dense(keys, at::kLong, {requests, positions}, "keys");
  check_dense(mix, at::kFloat, {2, 3}, "mix");
  const Tensor tokens = at::empty({requests, positions}, ids.options());
  const Tensor probs = at::zeros(ids.sizes(), scores.options());
  const Tensor confidence = at::empty({requests, positions}, scores.options());
  std::vector<float> logits(requests * count);
  std::vector<int64_t> place(requests, 0);  // of the last token among its candidates
  DraftDrawArgs a{};
  a.logits = logits.data();
  a.rules = rules_of(temperatures, top_ks, top_ps, min_ps, requests);
  a.mix = mix.data_ptr<float>();
  a.rows = requests;
  a.rows_per_request = a.logit_stride = 1;
  a.stride = positions;
  a.columns = count;
  a.vocab_stride = positions * count;
  for (int64_t k = 0; k < positions; ++k) {
    for (int64_t r = 0; r < requests; ++r)
      std::copy_n(scores.data_ptr<float>() + ((r * positions + k) * count + place[r]) * count, count,
                  logits.data() + r * count);
    a.keys = keys.data_ptr<int64_t>() + k;
    a.vocab = ids.data_ptr<int64_t>() + k * count;
    a.probs = probs.data_ptr<float>() + k * count;
    a.tokens = tokens.data_ptr<int64_t>() + k;
    a.confidence = confidence.data_ptr<float>() + k;
    std::atomic<int64_t> next{0};
    kernels().draw_drafts[0](a, next);
    for (int64_t r = 0; r < requests; ++r) {
      const int64_t* own = a.vocab + r * a.vocab_stride;
      place[r] = std::find(own, own + count - 1, a.tokens[r * positions]) - own;
    }
  }
  return {tokens, probs, confidence};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(outrider, m) {
  m.def("likeliest(Tensor x, int count) -> (Tensor, Tensor)");
  m.def("draw_path(Tensor ids, Tensor scores, Tensor temperatures, Tensor? top_ks, Tensor? top_ps, Tensor? min_ps, "
        "Tensor keys, Tensor mix) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(outrider, CPU, m) {
  m.impl("likeliest", likeliest);
  m.impl("draw_path", draw_path);
}

}  // namespace outrider
