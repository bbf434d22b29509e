// Prompt lookup: where did the last tokens of each request's text stand before?
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>
#include <tuple>
#include <utility>

#include "ops.h"

namespace outrider {
namespace {

// For each of R texts, seq_lens [R] tokens by slot and an anchor [R] behind them: the gamma tokens that followed the
// latest of the longest matches of its end [R, gamma], without a match the anchor, repeated; how many of these are a
// draft [R], none or all; and the chance of each [R, gamma] float32, by logistic regression on that match's length
// (by_length [longest + 1, gamma]), on the log odds that matches went on with the first of these tokens, those of at
// least min_match tokens and those of one (by_odds [2, gamma]), and on the temperature [R] (by_temperature [gamma]).
std::tuple<Tensor, Tensor, Tensor> lookup(const Tensor& slot_tokens, const Tensor& page_table, const Tensor& rows,
                                          const Tensor& seq_lens, const Tensor& anchors, const Tensor& temperatures,
                                          const Tensor& by_length, const Tensor& by_odds, const Tensor& by_temperature,
                                          int64_t min_match) {
  const int64_t requests = rows.numel(), slots = slot_tokens.numel();
  check_index(slot_tokens, at::kInt, 1, "slot_tokens");
  check_index(by_length, at::kFloat, 2, "by_length");
  const int64_t max_match = by_length.size(0) - 1, gamma = by_length.size(1);
  check_index(temperatures, at::kFloat, 1, "temperatures");
  check_index(by_odds, at::kFloat, 2, "by_odds");
  check_index(by_temperature, at::kFloat, 1, "by_temperature");
  TORCH_CHECK(by_length.is_contiguous() && by_odds.is_contiguous() && temperatures.numel() == requests &&
                  by_odds.size(0) == 2 && by_odds.size(1) == gamma && by_temperature.numel() == gamma,
              "by_length and by_odds must be dense, temperatures must have one entry per request, by_odds two and "
              "by_temperature one "
              "per drafted token");
  for (const Tensor& x : {rows, seq_lens, anchors})
    TORCH_CHECK(x.scalar_type() == at::kLong && x.is_contiguous() && x.numel() == requests,
                "rows, seq_lens and anchors must be dense int64, one per request");
  const Tensor tokens = at::empty({requests, gamma}, anchors.options());
  const Tensor lens = at::empty({requests}, anchors.options());
  const Tensor confidence = at::empty({requests, gamma}, by_length.options());
  std::vector<const int32_t*> places_of(requests);
  int64_t work = 0;
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t length = seq_lens.data_ptr<int64_t>()[r];
    places_of[r] = slots_of(page_table, r, rows.data_ptr<int64_t>()[r], 0, length);
    const int32_t* places = places_of[r];
    for (int64_t i = 0; i < length; ++i)
      TORCH_CHECK(0 <= places[i] && places[i] < slots, "request ", r, ": slot ", places[i], " of ", slots);
    work += length * 16;
  }
  const auto one = [&](int64_t r) {
    static thread_local std::vector<int64_t> text;
    static thread_local std::vector<std::pair<int64_t, int64_t>> matched;  // tokens, and what followed
    const int64_t length = seq_lens.data_ptr<int64_t>()[r] + 1;
    const int32_t* places = places_of[r];
    text.resize(length);
    for (int64_t i = 0; i + 1 < length; ++i) text[i] = slot_tokens.data_ptr<int32_t>()[places[i]];
    text[length - 1] = anchors.data_ptr<int64_t>()[r];
    matched.clear();
    int64_t start = length - 1, longest = 0;
    for (int64_t i = 1; i < length; ++i) {
      int64_t n = 0;
      while (n < std::min(max_match, i) && text[i - 1 - n] == text[length - 1 - n]) ++n;
      if (n >= std::max<int64_t>(1, longest)) {
        longest = n;
        start = i;
      }
      if (n >= 1) matched.emplace_back(n, text[i]);
    }
    int64_t* to = tokens.data_ptr<int64_t>() + r * gamma;
    for (int64_t k = 0; k < gamma; ++k) to[k] = text[start + k % (length - start)];
    int64_t counts[2][2] =
        {};  // of matches of min_match tokens and of one: followed by another token, by the first of these
    for (const auto& [n, followed] : matched) {
      const bool agrees = followed == text[start];
      counts[0][agrees] += n >= min_match;
      counts[1][agrees] += 1;
    }
    float odds[2];
    for (int64_t j = 0; j < 2; ++j) odds[j] = std::log((counts[j][1] + .5f) / (counts[j][0] + .5f));
    lens.data_ptr<int64_t>()[r] = longest >= min_match ? gamma : 0;
    const float temperature = temperatures.data_ptr<float>()[r];
    const float* weights = by_length.data_ptr<float>() + longest * gamma;
    const float* by_odd = by_odds.data_ptr<float>();
    for (int64_t k = 0; k < gamma; ++k) {
      const float logit = weights[k] + odds[0] * by_odd[k] + odds[1] * by_odd[gamma + k] +
                          temperature * by_temperature.data_ptr<float>()[k];
      confidence.data_ptr<float>()[r * gamma + k] = 1 / (1 + std::exp(-logit));
    }
  };
  std::atomic<int64_t> next{0};
  on_every_thread(requests, [&] { for (int64_t r; (r = next++) < requests;) one(r); }, work);
  return {tokens, lens, confidence};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(outrider, m) {
  m.def("lookup(Tensor slot_tokens, Tensor page_table, Tensor rows, Tensor seq_lens, Tensor anchors, "
        "Tensor temperatures, Tensor by_length, Tensor by_odds, Tensor by_temperature, int min_match) "
        "-> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(outrider, CPU, m) { m.impl("lookup", lookup); }

}  // namespace outrider
