// The bookkeeping around a ragged decode step: a few numbers per request, so what counts is the number of calls.
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

// A dense copy where it is not dense already; numbers of another type are an error.
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

// calibrated [R, gamma] = sigmoid(logit(confidence) * inverse + shift), with the parameters [cases, gamma] of each
// request's case [R]; without parameters a copy. And ends [R]: drafted tokens [R, gamma] up to the first that is among
// the ends [rows, E] of the request's row, itself included; gamma + 1 without such a token.
std::tuple<Tensor, Tensor> weigh_drafts(const Tensor& tokens, const Tensor& confidence, const Tensor& cases,
                                        const Tensor& rows, const Tensor& ends, const std::optional<Tensor>& inverse,
                                        const std::optional<Tensor>& shifts) {
  const Tensor token = dense(tokens, at::kLong, 2, "tokens"), chance = dense(confidence, at::kFloat, 2, "confidence"),
               stops = dense(ends, at::kLong, 2, "ends");
  const int64_t requests = token.size(0), gamma = token.size(1), width = stops.size(1);
  TORCH_CHECK(chance.size(0) == requests && chance.size(1) == gamma, "confidence must be as large as tokens");
  TORCH_CHECK(inverse.has_value() == shifts.has_value(), "inverse and shifts belong together");
  const Tensor kind = integers(cases, requests, "cases"), row = integers(rows, requests, "rows");
  check_range(row, 0, stops.size(0), "rows");
  Tensor scale, shift;
  if (inverse) {
    scale = dense(*inverse, at::kFloat, 2, "inverse");
    shift = dense(*shifts, at::kFloat, 2, "shifts");
    TORCH_CHECK(scale.size(1) == gamma && shift.sizes() == scale.sizes(), "inverse and shifts are [cases, gamma]");
    check_range(kind, 0, scale.size(0), "cases");
  }
  const float most = std::nextafter(1.f, 0.f);
  Tensor calibrated = at::empty({requests, gamma}, chance.options());
  Tensor until = at::empty({requests}, token.options());
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t* drafted = token.data_ptr<int64_t>() + r * gamma;
    const int64_t* end = stops.data_ptr<int64_t>() + row.data_ptr<int64_t>()[r] * width;
    int64_t k = 0;
    while (k < gamma && std::find(end, end + width, drafted[k]) == end + width) ++k;
    until.data_ptr<int64_t>()[r] = k + 1;
    const float* from = chance.data_ptr<float>() + r * gamma;
    float* to = calibrated.data_ptr<float>() + r * gamma;
    if (!inverse) {
      std::copy(from, from + gamma, to);
      continue;
    }
    const int64_t first = kind.data_ptr<int64_t>()[r] * gamma;
    for (k = 0; k < gamma; ++k) {
      const float c = from[k] > most ? most : from[k];  // NaN stays
      const float logit = std::log(c / (1 - c));
      to[k] = 1 / (1 + std::exp(-(shift.data_ptr<float>()[first + k] + logit * scale.data_ptr<float>()[first + k])));
    }
  }
  return {calibrated, until};
}

// The `rank`-th largest of some numbers above 0, counted from 1, and how many are larger. Floats above 0 are ordered as
// their bits are, so that a count by the first of these leaves few to be sorted.
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

// verify_lens [R] and survival [R, gamma] float32: the tokens [1] drafts of largest survival c_1 ... c_k that are above
// 0, ties going to the smaller request. confidence: [R, gamma], NaN counts as 0. draft_lens: [R], beyond which survival
// is 0. bounds: [gamma] or [R, 1], survival below its bound ends what is admitted of a request. first: [R], requests
// that come before all others.
std::tuple<Tensor, Tensor> admit(const Tensor& confidence, const Tensor& draft_lens, const Tensor& tokens,
                                 const std::optional<Tensor>& bounds, const std::optional<Tensor>& first) {
  const Tensor chance = dense(confidence, at::kFloat, 2, "confidence"), most = integers(tokens, 1, "tokens");
  const int64_t requests = chance.size(0), gamma = chance.size(1);
  const Tensor lens = integers(draft_lens, requests, "draft_lens");
  Tensor bound, ahead;
  int64_t by_request = 0, by_position = 0;
  if (bounds) {
    TORCH_CHECK(bounds->scalar_type() == at::kFloat && (bounds->dim() == 1 || bounds->dim() == 2),
                "bounds must be float32");
    bound = bounds->contiguous();
    by_request = bound.dim() == 2 && bound.size(0) > 1;
    by_position = bound.size(-1) > 1;
    TORCH_CHECK((by_request ? bound.size(0) == requests && !by_position : true) &&
                    (by_position ? bound.size(-1) == gamma : true),
                "bounds are [gamma] or [R, 1]");
  }
  if (first) ahead = dense(*first, at::kBool, 1, "first");
  TORCH_CHECK(!first || ahead.numel() == requests, "first must have one entry per request");
  Tensor survival = at::empty({requests, gamma}, chance.options());
  Tensor verify_lens = at::empty({requests}, lens.options());
  const float *c = chance.data_ptr<float>(), *least_of = bounds ? bound.data_ptr<float>() : nullptr;
  const int64_t* len_of = lens.data_ptr<int64_t>();
  const bool* before = first ? ahead.data_ptr<bool>() : nullptr;
  float* s = survival.data_ptr<float>();
  int64_t* admitted = verify_lens.data_ptr<int64_t>();
  static thread_local std::vector<float> candidates;
  candidates.resize(requests * gamma);
  float* end = candidates.data();
  for (int64_t r = 0; r < requests; ++r, c += gamma, s += gamma) {
    const int64_t len = std::clamp<int64_t>(len_of[r], 0, gamma);
    const float scale = before && before[r] ? 0x1p64f : 1.f;
    double product = 1;
    for (int64_t k = 0; k < len; ++k) {
      product *= c[k] > 0 ? std::min(double(c[k]), 1.) : 0.;  // NaN is not above 0
      s[k] = float(product);
    }
    std::fill(s + len, s + gamma, 0.f);
    int64_t k = 0;
    for (; k < len && s[k] > 0 && (!least_of || s[k] >= least_of[by_position ? k : by_request ? r : 0]); ++k)
      *end++ = s[k] * scale;
    admitted[r] = k;
  }
  candidates.resize(end - candidates.data());
  const int64_t wanted = std::max<int64_t>(most.data_ptr<int64_t>()[0], 0);
  if (wanted >= int64_t(candidates.size())) return {verify_lens, survival};
  float least = std::numeric_limits<float>::infinity();
  int64_t ties = 0;
  if (wanted) {
    const auto [last, larger] = nth_largest(candidates, wanted);
    least = last;
    ties = wanted - larger;
  }
  const float* next = candidates.data();
  for (int64_t r = 0; r < requests; ++r) {
    int64_t kept = 0;
    for (int64_t k = 0; k < admitted[r]; ++k) kept += next[k] > least || (next[k] == least && ties-- > 0);
    next += admitted[r];
    admitted[r] = kept;
  }
  return {verify_lens, survival};
}

// accept_lens [R] and out [R, gamma + 1]: a token is kept if and only if it is the one wanted after the row before its
// own.
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
  m.def("weigh_drafts(Tensor tokens, Tensor confidence, Tensor cases, Tensor rows, Tensor ends, Tensor? inverse, "
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
