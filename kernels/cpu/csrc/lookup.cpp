// Prompt lookup: earlier occurrences of the last tokens of each request's text.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>
#include <tuple>
#include <utility>

#include "ops.h"

namespace outrider {
namespace {

// Parameters of the logistic regression that gives each drafted token's chance: on the match's length [longest + 1,
// gamma], on two log odds [2, gamma], on the temperature [gamma].
struct Regression {
  const Tensor &by_length, &by_odds, &by_temperature;
  int64_t longest() const { return by_length.size(0) - 1; }
  int64_t gamma() const { return by_length.size(1); }

  void check() const {
    check_index(by_length, at::kFloat, 2, "by_length");
    check_index(by_odds, at::kFloat, 2, "by_odds");
    check_index(by_temperature, at::kFloat, 1, "by_temperature");
    TORCH_CHECK(
        by_length.is_contiguous() && by_odds.is_contiguous() && by_odds.size(0) == 2 && by_odds.size(1) == gamma() &&
            by_temperature.numel() == gamma(),
        "by_length and by_odds must be dense, by_odds must have two and by_temperature one entry per drafted token");
  }
  float chance(int64_t length, const float (&odds)[2], float temperature, int64_t k) const {
    const float* by_odd = by_odds.data_ptr<float>();
    const float logit = by_length.data_ptr<float>()[length * gamma() + k] + odds[0] * by_odd[k] +
                        odds[1] * by_odd[gamma() + k] + temperature * by_temperature.data_ptr<float>()[k];
    return 1 / (1 + std::exp(-logit));
  }
};

// The latest of the longest matches of a text's end: where it goes on, and its length, 0 for none.
struct Match {
  int64_t start, length;
  float odds[2];  // log odds that matches of at least min_match tokens, and of one, went on with text[start]
};

Match find_match(const std::vector<int64_t>& text, int64_t longest, int64_t min_match) {
  static thread_local std::vector<std::pair<int64_t, int64_t>> matched;  // tokens, and what followed
  const int64_t length = text.size();
  matched.clear();
  Match best{length - 1, 0, {}};
  for (int64_t i = 1; i < length; ++i) {
    int64_t n = 0;
    while (n < std::min(longest, i) && text[i - 1 - n] == text[length - 1 - n]) ++n;
    if (n >= std::max<int64_t>(1, best.length)) {
      best.length = n;
      best.start = i;
    }
    if (n >= 1) matched.emplace_back(n, text[i]);
  }
  int64_t counts[2][2] = {};  // followed by another token, by text[start]
  for (const auto& [n, followed] : matched) {
    const bool agrees = followed == text[best.start];
    counts[0][agrees] += n >= min_match;
    counts[1][agrees] += 1;
  }
  for (int64_t j = 0; j < 2; ++j) best.odds[j] = std::log((counts[j][1] + .5f) / (counts[j][0] + .5f));
  return best;
}

// For each of R texts, seq_lens [R] tokens by slot and an anchor [R] behind them: the gamma tokens that followed the
// latest of the longest matches of its end [R, gamma], without a match the anchor, repeated; how many of these are a
// draft [R], none or all; and the chance of each [R, gamma] float32, by `Regression` at the temperatures [R].
std::tuple<Tensor, Tensor, Tensor> lookup(const Tensor& slot_tokens, const Tensor& page_table, const Tensor& rows,
                                          const Tensor& seq_lens, const Tensor& anchors, const Tensor& temperatures,
                                          const Tensor& by_length, const Tensor& by_odds, const Tensor& by_temperature,
                                          int64_t min_match) {
  const Regression regression{by_length, by_odds, by_temperature};
  regression.check();
  const int64_t requests = rows.numel(), slots = slot_tokens.numel(), gamma = regression.gamma();
  check_index(slot_tokens, at::kInt, 1, "slot_tokens");
  check_dense(temperatures, at::kFloat, {requests}, "temperatures");
  for (const Tensor& x : {rows, seq_lens, anchors}) check_dense(x, at::kLong, {requests}, "rows, seq_lens and anchors");
  std::vector<const int32_t*> slots_by_request(requests);
  int64_t work = 0;
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t length = seq_lens.data_ptr<int64_t>()[r];
    const int32_t* slot = slots_by_request[r] = slots_of(page_table, r, rows.data_ptr<int64_t>()[r], 0, length);
    for (int64_t i = 0; i < length; ++i)
      TORCH_CHECK(0 <= slot[i] && slot[i] < slots, "request ", r, ": slot ", slot[i], " of ", slots);
    work += length * 16;
  }
  const Tensor tokens = at::empty({requests, gamma}, anchors.options());
  const Tensor lens = at::empty({requests}, anchors.options());
  const Tensor confidence = at::empty({requests, gamma}, by_length.options());
  const auto draft = [&](int64_t r) {
    static thread_local std::vector<int64_t> text;
    const int64_t length = seq_lens.data_ptr<int64_t>()[r] + 1;
    text.resize(length);
    for (int64_t i = 0; i + 1 < length; ++i) text[i] = slot_tokens.data_ptr<int32_t>()[slots_by_request[r][i]];
    text[length - 1] = anchors.data_ptr<int64_t>()[r];
    const Match match = find_match(text, regression.longest(), min_match);
    lens.data_ptr<int64_t>()[r] = match.length >= min_match ? gamma : 0;
    const float temperature = temperatures.data_ptr<float>()[r];
    for (int64_t k = 0; k < gamma; ++k) {
      tokens.data_ptr<int64_t>()[r * gamma + k] = text[match.start + k % (length - match.start)];
      confidence.data_ptr<float>()[r * gamma + k] = regression.chance(match.length, match.odds, temperature, k);
    }
  };
  std::atomic<int64_t> next{0};
  on_every_thread(requests, [&] { for (int64_t r; (r = next++) < requests;) draft(r); }, work);
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
