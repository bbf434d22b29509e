// The bookkeeping of a ragged decode step: a few numbers per request, so the number of calls decides its time.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "ops.h"

namespace outrider {
namespace {

// x, or a dense copy if it is not dense; a different type is an error.
Tensor dense(const Tensor& x, at::ScalarType type, int64_t dims, const char* name) {
  TORCH_CHECK(x.scalar_type() == type && x.dim() == dims, name, " must be ", type, " with ", dims, " dimensions");
  return x.contiguous();
}

Tensor integers(const Tensor& x, int64_t count, const char* name) {
  const Tensor out = dense(x, at::kLong, 1, name);
  TORCH_CHECK(out.numel() == count, name, " must have ", count, " entries, not ", out.numel());
  return out;
}

using Flattened = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// input_ids, positions, slots [B], qo_indptr [R + 1], request, step [B].
Flattened flatten_verify(const Tensor& anchors, const Tensor& drafts, const Tensor& verify_lens, const Tensor& seq_lens,
                   const Tensor& page_table, const Tensor& rows) {
  const Tensor draft = dense(drafts, at::kLong, 2, "drafts");
  const int64_t requests = draft.size(0), gamma = draft.size(1);
  const Tensor anchor = integers(anchors, requests, "anchors"), lens = integers(verify_lens, requests, "verify_lens"),
               cached = integers(seq_lens, requests, "seq_lens"), row = integers(rows, requests, "rows");
  Tensor indptr = at::empty({requests + 1}, anchor.options());
  auto* ends = indptr.data_ptr<int64_t>();
  ends[0] = 0;
  std::vector<const int32_t*> slots(requests);
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t len = lens.data_ptr<int64_t>()[r], start = cached.data_ptr<int64_t>()[r];
    TORCH_CHECK(0 <= len && len <= gamma, "verify_lens must be in 0..", gamma, ", not ", len);
    slots[r] = slots_of(page_table, r, row.data_ptr<int64_t>()[r], start, start + len + 1);
    ends[r + 1] = ends[r] + len + 1;
  }
  Tensor out[5];
  int64_t* to[5];
  for (int i = 0; i < 5; ++i) {
    out[i] = at::empty({ends[requests]}, anchor.options());
    to[i] = out[i].data_ptr<int64_t>();
  }
  for (int64_t r = 0; r < requests; ++r) {
    for (int64_t k = 0, b = ends[r]; b < ends[r + 1]; ++k, ++b) {
      const int64_t position = cached.data_ptr<int64_t>()[r] + k;
      to[0][b] = k ? draft.data_ptr<int64_t>()[r * gamma + k - 1] : anchor.data_ptr<int64_t>()[r];
      to[1][b] = position;
      to[2][b] = slots[r][k];
      to[3][b] = r;
      to[4][b] = k;
    }
  }
  return {out[0], out[1], out[2], indptr, out[3], out[4]};
}

void write_page_table(Tensor page_table, const Tensor& rows, const Tensor& starts, const Tensor& ends,
                      const Tensor& slots) {
  const Tensor row = dense(rows, at::kLong, 1, "rows"), slot = dense(slots, at::kLong, 1, "slots");
  const int64_t requests = row.numel();
  const Tensor start = integers(starts, requests, "starts"), end = integers(ends, requests, "ends");
  int64_t done = 0;
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t from = start.data_ptr<int64_t>()[r], to = end.data_ptr<int64_t>()[r];
    int32_t* out = slots_of(page_table, r, row.data_ptr<int64_t>()[r], from, to);
    TORCH_CHECK(done + to - from <= slot.numel(), "positions of the page table need more than ", slot.numel(),
                " slots");
    for (int64_t p = from; p < to; ++p) *out++ = int32_t(slot.data_ptr<int64_t>()[done++]);
  }
}

// The number of drafted tokens up to and including the first of the `ends`; gamma + 1 without one.
int64_t tokens_until_end(const int64_t* drafted, int64_t gamma, const int64_t* ends, int64_t width) {
  int64_t k = 0;
  while (k < gamma && std::find(ends, ends + width, drafted[k]) == ends + width) ++k;
  return k + 1;
}

// sigmoid(logit(confidence) * inverse + shift); NaN stays.
float calibrate(float confidence, float inverse, float shift) {
  constexpr float MOST = 0x1.fffffep-1f;  // below 1
  const float c = confidence > MOST ? MOST : confidence;
  return 1 / (1 + std::exp(-(shift + std::log(c / (1 - c)) * inverse)));
}

// calibrated [R, gamma]: by the parameters [classes, gamma] of each request's class [R]; without parameters a copy.
// ends [R]: `tokens_until_end` of the drafted tokens [R, gamma] and the ends [rows, E] of the request's row.
std::tuple<Tensor, Tensor> weigh_drafts(const Tensor& tokens, const Tensor& confidence, const Tensor& classes,
                                        const Tensor& rows, const Tensor& ends, const std::optional<Tensor>& inverse,
                                        const std::optional<Tensor>& shifts) {
  const Tensor token = dense(tokens, at::kLong, 2, "tokens"), chance = dense(confidence, at::kFloat, 2, "confidence"),
               stops = dense(ends, at::kLong, 2, "ends");
  const int64_t requests = token.size(0), gamma = token.size(1), width = stops.size(1);
  TORCH_CHECK(chance.size(0) == requests && chance.size(1) == gamma, "confidence must be as large as tokens");
  TORCH_CHECK(inverse.has_value() == shifts.has_value(), "inverse and shifts belong together");
  const Tensor kind = integers(classes, requests, "classes"), row = integers(rows, requests, "rows");
  check_range(row, 0, stops.size(0), "rows");
  Tensor scale, shift;
  if (inverse) {
    scale = dense(*inverse, at::kFloat, 2, "inverse");
    shift = dense(*shifts, at::kFloat, 2, "shifts");
    TORCH_CHECK(scale.size(1) == gamma && shift.sizes() == scale.sizes(), "inverse and shifts are [classes, gamma]");
    check_range(kind, 0, scale.size(0), "classes");
  }
  Tensor calibrated = at::empty({requests, gamma}, chance.options());
  Tensor until = at::empty({requests}, token.options());
  for (int64_t r = 0; r < requests; ++r) {
    until.data_ptr<int64_t>()[r] =
        tokens_until_end(token.data_ptr<int64_t>() + r * gamma, gamma,
                         stops.data_ptr<int64_t>() + row.data_ptr<int64_t>()[r] * width, width);
    const float* from = chance.data_ptr<float>() + r * gamma;
    float* to = calibrated.data_ptr<float>() + r * gamma;
    const int64_t first = kind.data_ptr<int64_t>()[r] * gamma;
    for (int64_t k = 0; k < gamma; ++k)
      to[k] = inverse ? calibrate(from[k], scale.data_ptr<float>()[first + k], shift.data_ptr<float>()[first + k])
                      : from[k];
  }
  return {calibrated, until};
}

// The `rank`-th largest (from 1) of some numbers above 0, and how many are larger. Positive floats sort like their
// bits: a histogram of the leading bits leaves few numbers to sort.
std::pair<float, int64_t> nth_largest(const std::vector<float>& numbers, int64_t rank) {
  constexpr int SHIFT = 20;
  static thread_local std::vector<float> same;
  std::array<int32_t, 2048> counts{};  // the sign is 0
  const auto bucket = [](float x) { return std::bit_cast<uint32_t>(x) >> SHIFT; };
  for (const float x : numbers) ++counts[bucket(x)];
  uint32_t at = 2047;
  int64_t larger = 0;
  while (larger + counts[at] < rank) larger += counts[at--];
  same.clear();
  for (const float x : numbers)
    if (bucket(x) == at) same.push_back(x);
  std::sort(same.begin(), same.end(), std::greater<>());
  const float found = same[rank - larger - 1];
  return {found, larger + (std::find(same.begin(), same.end(), found) - same.begin())};
}

// The least survival to admit, [gamma] or [R, 1]; 0 without bounds.
class SurvivalBounds {
 public:
  SurvivalBounds(const std::optional<Tensor>& bounds, int64_t requests, int64_t gamma) {
    if (!bounds) return;
    TORCH_CHECK(bounds->scalar_type() == at::kFloat && (bounds->dim() == 1 || bounds->dim() == 2),
                "bounds must be float32");
    values_ = bounds->contiguous();
    by_request_ = values_.dim() == 2 && values_.size(0) > 1;
    by_position_ = values_.size(-1) > 1;
    TORCH_CHECK((!by_request_ || (values_.size(0) == requests && !by_position_)) &&
                    (!by_position_ || values_.size(-1) == gamma),
                "bounds are [gamma] or [R, 1]");
    data_ = values_.data_ptr<float>();
  }
  bool admit(float survival, int64_t request, int64_t position) const {
    return !data_ || survival >= data_[by_position_ ? position : by_request_ ? request : 0];
  }

 private:
  Tensor values_;
  const float* data_ = nullptr;
  bool by_request_ = false, by_position_ = false;
};

// survival[k] = confidence[0] ... confidence[k] for k < len, then 0. NaN counts as 0.
void multiply_up(const float* confidence, int64_t len, int64_t gamma, float* survival) {
  double product = 1;
  for (int64_t k = 0; k < len; ++k) {
    product *= confidence[k] > 0 ? std::min(double(confidence[k]), 1.) : 0.;  // NaN is not above 0
    survival[k] = float(product);
  }
  std::fill(survival + len, survival + gamma, 0.f);
}

// Cuts the admitted tokens of all requests to the `most` of largest priority; ties go to the smaller request.
// priorities: of all admitted tokens, request by request.
void keep_largest(const std::vector<float>& priorities, int64_t most, int64_t requests, int64_t* admitted) {
  if (most >= int64_t(priorities.size())) return;
  float least = std::numeric_limits<float>::infinity();
  int64_t ties = 0;
  if (most) {
    const auto [last, larger] = nth_largest(priorities, most);
    least = last;
    ties = most - larger;
  }
  const float* next = priorities.data();
  for (int64_t r = 0; r < requests; ++r) {
    int64_t kept = 0;
    for (int64_t k = 0; k < admitted[r]; ++k) kept += next[k] > least || (next[k] == least && ties-- > 0);
    next += admitted[r];
    admitted[r] = kept;
  }
}

// verify_lens [R] and survival [R, gamma] float32: admits the tokens [1] drafts of largest survival c_1 ... c_k above
// 0; ties go to the smaller request. confidence: [R, gamma], NaN counts as 0. draft_lens: [R]; survival is 0 past it.
// bounds: [gamma] or [R, 1]; survival below its bound ends a request's admitted draft. first: [R], requests that come
// before all further ones.
std::tuple<Tensor, Tensor> admit(const Tensor& confidence, const Tensor& draft_lens, const Tensor& tokens,
                                 const std::optional<Tensor>& bounds, const std::optional<Tensor>& first) {
  constexpr float AHEAD = 0x1p64f;  // factor of the priority of `first`, above every survival
  const Tensor chance = dense(confidence, at::kFloat, 2, "confidence"), most = integers(tokens, 1, "tokens");
  const int64_t requests = chance.size(0), gamma = chance.size(1);
  const Tensor lens = integers(draft_lens, requests, "draft_lens");
  const SurvivalBounds bound(bounds, requests, gamma);
  Tensor ahead;
  if (first) ahead = dense(*first, at::kBool, 1, "first");
  TORCH_CHECK(!first || ahead.numel() == requests, "first must have one entry per request");
  Tensor survival = at::empty({requests, gamma}, chance.options());
  Tensor verify_lens = at::empty({requests}, lens.options());
  int64_t* admitted = verify_lens.data_ptr<int64_t>();
  static thread_local std::vector<float> priorities;
  priorities.resize(requests * gamma);
  float* end = priorities.data();
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t len = std::clamp<int64_t>(lens.data_ptr<int64_t>()[r], 0, gamma);
    float* s = survival.data_ptr<float>() + r * gamma;
    multiply_up(chance.data_ptr<float>() + r * gamma, len, gamma, s);
    const float scale = first && ahead.data_ptr<bool>()[r] ? AHEAD : 1.f;
    int64_t k = 0;
    for (; k < len && s[k] > 0 && bound.admit(s[k], r, k); ++k) *end++ = s[k] * scale;
    admitted[r] = k;
  }
  priorities.resize(end - priorities.data());
  keep_largest(priorities, std::max<int64_t>(most.data_ptr<int64_t>()[0], 0), requests, admitted);
  return {verify_lens, survival};
}

// accept_lens [R] and out [R, gamma + 1]: keeps a token if and only if the row before it wants that token.
std::tuple<Tensor, Tensor> accept_wanted(const Tensor& tokens, const Tensor& verify_lens, const Tensor& qo_indptr,
                                         const Tensor& wanted) {
  const Tensor token = dense(tokens, at::kLong, 2, "tokens");
  const int64_t requests = token.size(0), gamma = token.size(1);
  const Tensor lens = integers(verify_lens, requests, "verify_lens"), best = dense(wanted, at::kLong, 1, "wanted"),
               indptr = integers(qo_indptr, requests + 1, "qo_indptr");
  Tensor accept_lens = at::empty({requests}, lens.options());
  Tensor out = at::empty({requests, gamma + 1}, token.options());
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t len = lens.data_ptr<int64_t>()[r], first = indptr.data_ptr<int64_t>()[r];
    TORCH_CHECK(0 <= len && len <= gamma && 0 <= first && first + len < best.numel() &&
                    indptr.data_ptr<int64_t>()[r + 1] == first + len + 1,
                "qo_indptr must give every request verify_lens + 1 rows");
    const int64_t* drafted = token.data_ptr<int64_t>() + r * gamma;
    const int64_t* next = best.data_ptr<int64_t>() + first;
    int64_t* emitted = out.data_ptr<int64_t>() + r * (gamma + 1);
    int64_t kept = 0;
    while (kept < len && drafted[kept] == next[kept]) ++kept;
    for (int64_t k = 0; k <= gamma; ++k) emitted[k] = k <= kept ? next[k] : 0;
    accept_lens.data_ptr<int64_t>()[r] = kept + 1;
  }
  return {accept_lens, out};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(outrider, m) {
  m.def("flatten_verify(Tensor anchors, Tensor drafts, Tensor verify_lens, Tensor seq_lens, Tensor page_table, "
        "Tensor rows) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("write_page_table(Tensor(a!) page_table, Tensor rows, Tensor starts, Tensor ends, Tensor slots) -> ()");
  m.def("weigh_drafts(Tensor tokens, Tensor confidence, Tensor classes, Tensor rows, Tensor ends, Tensor? inverse, "
        "Tensor? shifts) -> (Tensor, Tensor)");
  m.def(
      "admit(Tensor confidence, Tensor draft_lens, Tensor tokens, Tensor? bounds, Tensor? first) -> (Tensor, Tensor)");
  m.def("accept_wanted(Tensor tokens, Tensor verify_lens, Tensor qo_indptr, Tensor wanted) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(outrider, CPU, m) {
  m.impl("flatten_verify", flatten_verify);
  m.impl("write_page_table", write_page_table);
  m.impl("weigh_drafts", weigh_drafts);
  m.impl("admit", admit);
  m.impl("accept_wanted", accept_wanted);
}

}  // namespace outrider
