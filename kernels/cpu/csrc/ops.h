// The operations that layer.cpp is made of, and the stopwatch that is inside all of them.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <ctime>
#include <optional>
#include <vector>

namespace outrider {

using at::Tensor;

Tensor flat_attention(const Tensor& q, const Tensor& k_pool, const Tensor& v_pool, const Tensor& qo_indptr,
                      const Tensor& kv_lens, const Tensor& rows, const Tensor& page_table, double scale, bool causal,
                      int64_t window, double logit_cap);
Tensor rms_norm(const Tensor& x, const std::optional<Tensor>& residual, const Tensor& weight, double eps);
Tensor silu_mul(const Tensor& x);
void rope(Tensor q, Tensor k, const std::optional<Tensor>& v, const Tensor& positions, const Tensor& cos_sin,
          std::optional<Tensor> k_pool, std::optional<Tensor> v_pool, const std::optional<Tensor>& slots);
Tensor packed_linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t outputs);
Tensor int8_linear(const Tensor& x, const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& bias,
                   int64_t outputs);

enum Part { PRODUCTS, ATTENTION, SMALL, SAMPLING, PARTS };

// Adds the time between its birth and its death to a part, where somebody asked for that. One thread calls operations.
class Timed {
 public:
  explicit Timed(Part part) : part_(part), start_(on ? now() : 0) {}
  ~Timed() {
    if (on) spent[part_] += now() - start_;
  }
  inline static bool on = false;
  inline static double spent[PARTS] = {};

 private:
  // CPU time on one thread, which does not count the time that others held the core.
  static double now() {
    timespec t;
    clock_gettime(at::get_num_threads() == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
  }
  const Part part_;
  const double start_;
};

}  // namespace outrider
