// Prompt lookup: earlier occurrences of the last tokens of each request's text, in that text and in further texts.
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>
#include <map>
#include <tuple>
#include <utility>

#include "corpus.h"
#include "ops.h"

namespace outrider {
namespace {

// Parameters of the logistic regression for the chance of each drafted token: by the length of the match [longest + 1,
// gamma], by two log odds [2, gamma], by the temperature [gamma].
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

// The latest of the longest matches of the end of a text: where it continues, and its length, 0 for none.
struct Match {
  int64_t start, length;
  float odds[2];  // log odds that text[start] follows matches of min_match, of one token
};

Match find_match(const std::vector<int64_t>& text, int64_t longest, int64_t min_match) {
  static thread_local std::vector<std::pair<int64_t, int64_t>> matched;  // tokens, and the token after each match
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
  int64_t counts[2][2] = {};  // followed by a different token, by text[start]
  for (const auto& [n, followed] : matched) {
    const bool agrees = followed == text[best.start];
    counts[0][agrees] += n >= min_match;
    counts[1][agrees] += 1;
  }
  for (int64_t j = 0; j < 2; ++j) best.odds[j] = std::log((counts[j][1] + .5f) / (counts[j][0] + .5f));
  return best;
}

using Drafted = std::tuple<Tensor, Tensor, Tensor>;

// For each of R texts, seq_lens [R] tokens by slot and then an anchor [R]: the gamma tokens after the latest of the
// longest matches of its end [R, gamma], or the repeated anchor without a match; how many of them are a draft [R], none
// or all; and the chance of each [R, gamma] float32, by `Regression` at the temperatures [R]. instead(r, text, length,
// tokens, chances) may draft from a second source with a match of more than `length` tokens: it writes both and returns
// the draft's length, or 0.
template <typename Instead>
Drafted lookup_with(const Tensor& slot_tokens, const Tensor& page_table, const Tensor& rows, const Tensor& seq_lens,
                    const Tensor& anchors, const Tensor& temperatures, const Regression& regression,
                    int64_t min_match, const Instead& instead) {
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
  const Tensor confidence = at::empty({requests, gamma}, regression.by_length.options());
  const auto draft = [&](int64_t r) {
    static thread_local std::vector<int64_t> text;
    const int64_t length = seq_lens.data_ptr<int64_t>()[r] + 1;
    text.resize(length);
    for (int64_t i = 0; i + 1 < length; ++i) text[i] = slot_tokens.data_ptr<int32_t>()[slots_by_request[r][i]];
    text[length - 1] = anchors.data_ptr<int64_t>()[r];
    const Match match = find_match(text, regression.longest(), min_match);
    int64_t* drafted = tokens.data_ptr<int64_t>() + r * gamma;
    float* chances = confidence.data_ptr<float>() + r * gamma;
    for (int64_t k = 0; k < gamma; ++k) drafted[k] = text[match.start + k % (length - match.start)];
    int64_t& found = lens.data_ptr<int64_t>()[r] = match.length >= min_match ? gamma : 0;
    if (const int64_t count = instead(r, text, found ? match.length : 0, drafted, chances)) {
      found = count;
      return;
    }
    const float temperature = temperatures.data_ptr<float>()[r];
    for (int64_t k = 0; k < gamma; ++k) chances[k] = regression.chance(match.length, match.odds, temperature, k);
  };
  std::atomic<int64_t> next{0};
  on_every_thread(requests, [&] { for (int64_t r; (r = next++) < requests;) draft(r); }, work);
  return {tokens, lens, confidence};
}

Drafted lookup(const Tensor& slot_tokens, const Tensor& page_table, const Tensor& rows, const Tensor& seq_lens,
               const Tensor& anchors, const Tensor& temperatures, const Tensor& by_length, const Tensor& by_odds,
               const Tensor& by_temperature, int64_t min_match) {
  const auto nothing = [](auto&&...) { return int64_t(0); };
  return lookup_with(slot_tokens, page_table, rows, seq_lens, anchors, temperatures,
                     {by_length, by_odds, by_temperature}, min_match, nothing);
}

// Corpora by number.
class Corpora : public torch::CustomClassHolder {
 public:
  // Adds an empty corpus of at most `capacity` tokens, a power of two; returns its number, which is never used again.
  int64_t add(int64_t capacity) {
    TORCH_CHECK(capacity >= 2 && capacity <= 1 << 30 && !(capacity & (capacity - 1)),
                "a corpus has a power of two tokens, not ", capacity);
    corpora_.emplace(++last_, Corpus(capacity));
    return last_;
  }
  void remove(int64_t number) { corpora_.erase(number); }
  int64_t bytes(int64_t number) const { return corpora_.at(number).bytes(); }
  int64_t bytes_of(int64_t capacity) const { return Corpus::bytes_of(capacity); }

  // See `Corpus::insert`; text: [N] int64. secret: `contents` leaves it out.
  void insert(int64_t number, Tensor text, bool secret) {
    check_dense(text, at::kLong, {text.numel()}, "text");
    check_range(text, 0, INT32_MAX, "text");
    corpora_.at(number).insert(text.data_ptr<int64_t>(), text.numel(), secret);
  }

  // The tokens of a corpus, oldest first, with -1 before each text, [N] int32; and back again.
  Tensor contents(int64_t number) const {
    const std::vector<int32_t> found = corpora_.at(number).contents(true);
    const Tensor tokens = at::empty({int64_t(found.size())}, at::kInt);
    std::copy(found.begin(), found.end(), tokens.data_ptr<int32_t>());
    return tokens;
  }
  void fill(int64_t number, Tensor tokens) {
    check_dense(tokens, at::kInt, {tokens.numel()}, "tokens");
    const int32_t* each = tokens.data_ptr<int32_t>();
    TORCH_CHECK(std::all_of(each, each + tokens.numel(), [](int32_t token) { return token >= TEXT_END; }),
                "tokens are at least 0, and ", TEXT_END, " before a text");
    corpora_.at(number).fill(each, tokens.numel());
  }

  // Like `lookup`, but a longer match in the corpus with the request's number [R] (0 means none) gives the draft, with
  // chances by others_… in place of by_…; also returns which requests have such a draft [R] bool.
  std::tuple<Tensor, Tensor, Tensor, Tensor> lookup(
      Tensor slot_tokens, Tensor page_table, Tensor rows, Tensor seq_lens, Tensor anchors, Tensor temperatures,
      Tensor by_length, Tensor by_odds, Tensor by_temperature, int64_t min_match, Tensor numbers,
      Tensor others_by_length, Tensor others_by_odds, Tensor others_by_temperature) const {
    const int64_t requests = rows.numel();
    const Regression others{others_by_length, others_by_odds, others_by_temperature};
    others.check();
    check_dense(numbers, at::kLong, {requests}, "numbers");
    const Tensor across = at::empty({requests}, at::kBool);
    const auto instead = [&](int64_t r, const std::vector<int64_t>& text, int64_t least, int64_t* tokens,
                             float* chances) {
      bool& taken = across.data_ptr<bool>()[r] = false;
      const auto corpus = corpora_.find(numbers.data_ptr<int64_t>()[r]);
      if (corpus == corpora_.end()) return int64_t(0);
      const FoundText found = corpus->second.find(text.data(), text.size());
      if (found.length <= least) return int64_t(0);
      const int64_t gamma = others.gamma();
      const int64_t count = corpus->second.read(found.next, tokens, gamma);
      std::fill(tokens + count, tokens + gamma, text.back());
      const float odds[2] = {std::log((found.agreeing + .5f) / (found.counted - found.agreeing + .5f)),
                             std::log(float(found.counted))};
      const int64_t length = std::min(found.length, others.longest());
      for (int64_t k = 0; k < gamma; ++k)
        chances[k] = k < count ? others.chance(length, odds, temperatures.data_ptr<float>()[r], k) : 0;
      taken = true;
      return count;
    };
    const auto [tokens, lens, confidence] =
        lookup_with(slot_tokens, page_table, rows, seq_lens, anchors, temperatures,
                    {by_length, by_odds, by_temperature}, min_match, instead);
    return {tokens, lens, confidence, across};
  }

 private:
  std::map<int64_t, Corpus> corpora_;
  int64_t last_ = 0;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(outrider, m) {
  m.def("lookup(Tensor slot_tokens, Tensor page_table, Tensor rows, Tensor seq_lens, Tensor anchors, "
        "Tensor temperatures, Tensor by_length, Tensor by_odds, Tensor by_temperature, int min_match) "
        "-> (Tensor, Tensor, Tensor)");
  m.class_<Corpora>("Corpora")
      .def(torch::init<>())
      .def("add", &Corpora::add)
      .def("remove", &Corpora::remove)
      .def("bytes", &Corpora::bytes)
      .def("bytes_of", &Corpora::bytes_of)
      .def("insert", &Corpora::insert)
      .def("contents", &Corpora::contents)
      .def("fill", &Corpora::fill)
      .def("lookup", &Corpora::lookup);
}

TORCH_LIBRARY_IMPL(outrider, CPU, m) { m.impl("lookup", lookup); }

}  // namespace outrider
