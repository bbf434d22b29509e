// Torch operations of gated delta networks: checks, work lists, threads. gated_delta.h has the arithmetic.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstring>
#include <tuple>

#include "ops.h"

namespace outrider {
namespace {

// indptr rises from 0 to the number of rows; each request has a slot of the pool.
void check_requests(const Tensor& slots, const Tensor& indptr, const Tensor& pool, int64_t rows) {
  const int64_t requests = slots.numel();
  check_dense(slots, at::kLong, {requests}, "slots");
  check_dense(indptr, at::kLong, {requests + 1}, "indptr");
  check_range(slots, 0, pool.size(0), "slots");
  const int64_t* at = indptr.data_ptr<int64_t>();
  TORCH_CHECK(at[0] == 0 && at[requests] == rows && std::is_sorted(at, at + requests + 1),
              "indptr must rise from 0 to the ", rows, " rows");
}

// A request counts at most its number of rows.
void check_counts(const Tensor& counts, const Tensor& indptr) {
  check_dense(counts, at::kLong, {indptr.numel() - 1}, "counts");
  const int64_t *at = indptr.data_ptr<int64_t>(), *count = counts.data_ptr<int64_t>();
  for (int64_t r = 0; r < counts.numel(); ++r)
    TORCH_CHECK(0 <= count[r] && count[r] <= at[r + 1] - at[r], "request ", r, " has fewer rows than ", count[r]);
}

// A pool has float32 slots, each dense and of `dim` - 1 dimensions.
void check_pool(const Tensor& pool, int64_t dim, const char* name) {
  TORCH_CHECK(pool.scalar_type() == at::kFloat && pool.dim() == dim && pool.select(0, 0).is_contiguous(), name,
              " must be float32, of ", dim, " dimensions and with dense slots");
}

void check_rows(const Tensor& x, at::ScalarType type, int64_t rows, int64_t width, const char* name) {
  TORCH_CHECK(x.scalar_type() == type && x.dim() == 2 && x.size(0) == rows && x.size(1) == width && x.stride(1) == 1,
              name, " must be ", type, " [", rows, ", ", width, "] with dense rows");
}

Tensor convolve(const Tensor& inputs, const Tensor& weight, const Tensor& windows, const Tensor& slots,
                const Tensor& indptr) {
  const int type = type_of(inputs, "inputs");
  check_pool(windows, 3, "windows");
  const int64_t rows = inputs.size(0), channels = windows.size(2), taps = windows.size(1) + 1;
  TORCH_CHECK(channels % 16 == 0, "channels must be a multiple of 16, got ", channels);
  check_rows(inputs, inputs.scalar_type(), rows, channels, "inputs");
  check_dense(weight, at::kFloat, {taps, channels}, "weight");
  check_requests(slots, indptr, windows, rows);
  Tensor out = at::empty({rows, channels}, inputs.options());
  const ConvolutionArgs a{inputs.data_ptr(), out.data_ptr(), weight.data_ptr<float>(), windows.data_ptr<float>(),
                          slots.data_ptr<int64_t>(), indptr.data_ptr<int64_t>(), inputs.stride(0), windows.stride(0),
                          taps, channels};
  constexpr int64_t WORK_OF_SILU = 8;  // multiplications
  in_ranges(rows, [&](int64_t begin, int64_t end) { kernels().convolve[type](a, begin, end); },
            rows * channels * (taps + WORK_OF_SILU));
  return out;
}

// The states of all requests, and their sizes.
GatedDeltaArgs args_of(const Tensor& pool, const Tensor& slots, const Tensor& indptr, int64_t rows, int64_t key_heads) {
  check_pool(pool, 4, "pool");
  check_requests(slots, indptr, pool, rows);
  GatedDeltaArgs a{};
  a.pool = pool.data_ptr<float>();
  a.slots = slots.data_ptr<int64_t>();
  a.indptr = indptr.data_ptr<int64_t>();
  a.pool_stride = pool.stride(0);
  a.requests = slots.numel();
  a.key_heads = key_heads;
  a.heads = pool.size(1);
  a.key_dim = pool.size(2);
  a.value_dim = pool.size(3);
  TORCH_CHECK(key_heads > 0 && a.heads % key_heads == 0, a.heads, " heads do not group onto ", key_heads, " key heads");
  TORCH_CHECK(a.key_dim % 16 == 0 && a.value_dim % 16 == 0, "keys and values must have multiples of 16 numbers");
  return a;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> gated_delta(const Tensor& mixed, const Tensor& a, const Tensor& b,
                                                       const Tensor& rates, const Tensor& shifts, const Tensor& pool,
                                                       const Tensor& slots, const Tensor& indptr, int64_t key_heads,
                                                       bool write) {
  const int type = type_of(mixed, "mixed");
  const int64_t rows = mixed.size(0);
  GatedDeltaArgs args = args_of(pool, slots, indptr, rows, key_heads);
  check_dense(mixed, mixed.scalar_type(), {rows, args.channels()}, "mixed");
  check_rows(a, mixed.scalar_type(), rows, args.heads, "a");
  check_rows(b, mixed.scalar_type(), rows, args.heads, "b");
  check_dense(rates, at::kFloat, {args.heads}, "rates");
  check_dense(shifts, at::kFloat, {args.heads}, "shifts");
  const auto wide = mixed.options().dtype(at::kFloat);
  Tensor out = at::empty({rows, args.heads, args.value_dim}, mixed.options());
  Tensor deltas = at::empty(out.sizes(), wide), decays = at::empty({rows, args.heads}, wide);
  Tensor keys = at::empty({rows, key_heads, args.key_dim}, wide);
  const Tensor queries = at::empty(keys.sizes(), wide), strengths = at::empty(decays.sizes(), wide);
  args.mixed = mixed.data_ptr();
  args.a = a.data_ptr();
  args.b = b.data_ptr();
  args.a_stride = a.stride(0);
  args.b_stride = b.stride(0);
  args.out = out.data_ptr();
  args.rates = rates.data_ptr<float>();
  args.shifts = shifts.data_ptr<float>();
  args.queries = queries.data_ptr<float>();
  args.keys = keys.data_ptr<float>();
  args.decays = decays.data_ptr<float>();
  args.strengths = strengths.data_ptr<float>();
  args.deltas = deltas.data_ptr<float>();
  args.write = write;
  constexpr int64_t WORK_OF_GATES = 64;  // multiplications
  in_ranges(rows, [&](int64_t begin, int64_t end) { kernels().delta_inputs[type](args, begin, end); },
            rows * (4 * key_heads * args.key_dim + args.heads * WORK_OF_GATES));
  std::atomic<int64_t> next{0};
  on_every_thread(args.requests * args.heads, [&] { kernels().gated_delta[type](args, next); },
                  4 * rows * args.heads * args.key_dim * args.value_dim);
  return {out, decays, keys, deltas};
}

void replay_delta(const Tensor& pool, const Tensor& slots, const Tensor& decays, const Tensor& keys,
                  const Tensor& deltas, const Tensor& indptr, const Tensor& counts) {
  TORCH_CHECK(keys.dim() == 3, "keys must be [rows, key heads, numbers]");
  const int64_t rows = keys.size(0);
  GatedDeltaArgs args = args_of(pool, slots, indptr, rows, keys.size(1));
  check_dense(decays, at::kFloat, {rows, args.heads}, "decays");
  check_dense(keys, at::kFloat, {rows, args.key_heads, args.key_dim}, "keys");
  check_dense(deltas, at::kFloat, {rows, args.heads, args.value_dim}, "deltas");
  check_counts(counts, indptr);
  args.decays = decays.data_ptr<float>();
  args.keys = keys.data_ptr<float>();
  args.deltas = deltas.data_ptr<float>();
  args.counts = counts.data_ptr<int64_t>();
  std::atomic<int64_t> next{0};
  on_every_thread(args.requests * args.heads, [&] { kernels().replay_delta(args, next); },
                  2 * rows * args.heads * args.key_dim * args.value_dim);
}

// Widens `count` numbers of x from `at` on into `to`.
void copy_widened(float* to, const Tensor& x, int64_t at, int64_t count) {
  if (x.scalar_type() == at::kFloat) std::memcpy(to, x.data_ptr<float>() + at, count * sizeof(float));
  else std::copy_n(x.data_ptr<at::BFloat16>() + at, count, to);
}

// Moves each window past the first counts of its request's inputs.
void slide(const Tensor& windows, const Tensor& slots, const Tensor& inputs, const Tensor& indptr,
           const Tensor& counts) {
  type_of(inputs, "inputs");
  check_pool(windows, 3, "windows");
  const int64_t kept = windows.size(1), channels = windows.size(2);
  check_rows(inputs, inputs.scalar_type(), inputs.size(0), channels, "inputs");
  check_requests(slots, indptr, windows, inputs.size(0));
  check_counts(counts, indptr);
  for (int64_t r = 0; r < slots.numel(); ++r) {
    float* const window = windows.data_ptr<float>() + slots.data_ptr<int64_t>()[r] * windows.stride(0);
    const int64_t count = counts.data_ptr<int64_t>()[r], old = std::max<int64_t>(0, kept - count);
    if (old) std::memmove(window, window + count * channels, old * channels * sizeof(float));
    for (int64_t i = old; i < kept; ++i) {
      const int64_t row = indptr.data_ptr<int64_t>()[r] + count - kept + i;
      copy_widened(window + i * channels, inputs, row * inputs.stride(0), channels);
    }
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(outrider, m) {
  m.def("convolve(Tensor inputs, Tensor weight, Tensor windows, Tensor slots, Tensor indptr) -> Tensor");
  m.def("slide(Tensor(a!) windows, Tensor slots, Tensor inputs, Tensor indptr, Tensor counts) -> ()");
  m.def("gated_delta(Tensor mixed, Tensor a, Tensor b, Tensor rates, Tensor shifts, Tensor(a!) pool, Tensor slots, "
        "Tensor indptr, int key_heads, bool write) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("replay_delta(Tensor(a!) pool, Tensor slots, Tensor decays, Tensor keys, Tensor deltas, Tensor indptr, "
        "Tensor counts) -> ()");
}

TORCH_LIBRARY_IMPL(outrider, CPU, m) {
  m.impl("convolve", convolve);
  m.impl("slide", slide);
  m.impl("gated_delta", gated_delta);
  m.impl("replay_delta", replay_delta);
}

}  // namespace outrider
