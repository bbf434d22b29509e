// The rows of a step that are read after its last layer.
#pragma once
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>

#include <vector>

#include "ops.h"

namespace outrider {

// The read rows as a batch: each is the last query of its request. like: the attention of all rows.
struct ReadRows {
  ReadRows(const AttentionArgs& like, const Tensor& read, const Tensor& qo_indptr, const Tensor& lens,
           const Tensor& rows, const Tensor& page_table)
      : numbers(read.data_ptr<int64_t>(), read.data_ptr<int64_t>() + read.numel()),
        indptr(at::arange(read.numel() + 1, lens.options())), kv_lens(at::empty({read.numel()}, lens.options())),
        table_rows(at::empty({read.numel()}, rows.options())) {
    const int32_t* ends = qo_indptr.data_ptr<int32_t>() + 1;
    for (size_t i = 0, r = 0; i < numbers.size(); ++i) {
      TORCH_CHECK(i == 0 || numbers[i - 1] < numbers[i], "rows to read must rise");
      while (ends[r] <= numbers[i]) ++r;
      kv_lens.data_ptr<int32_t>()[i] = lens.data_ptr<int32_t>()[r] - int32_t(ends[r] - 1 - numbers[i]);
      table_rows.data_ptr<int64_t>()[i] = rows.data_ptr<int64_t>()[r];
    }
    plan = plan_attention(read.numel(), like.q_heads, like.kv_heads, like.head_dim, like.value_dim, indptr, kv_lens,
                          table_rows, page_table, true);
    if (plan.split(at::get_num_threads()))
      partials = at::empty({plan.partials_size()}, lens.options().dtype(at::kFloat));
  }

  const std::vector<int64_t> numbers;
  const Tensor indptr, kv_lens, table_rows;
  AttentionPlan plan;
  Tensor partials;  // room for the plan's, where it is split
};

}  // namespace outrider
