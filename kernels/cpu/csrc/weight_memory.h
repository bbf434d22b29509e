// Memory of packed weights, in huge pages if the system has them. A step reads all weights once; with pages of 4 KB it
// waits for address translation about as long as for the weights.
#pragma once
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <memory>
#include <mutex>

#include "ops.h"

namespace outrider {

// Zeroed pages that neighbouring weights share; freed with the last of these weights.
class WeightPages {
 public:
  explicit WeightPages(int64_t bytes) : size_((bytes + PAGE - 1) / PAGE * PAGE), mapped_(size_ + PAGE) {
    start_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(start_ != MAP_FAILED, "no memory for ", bytes, " bytes of weights");
    next_ = static_cast<char*>(start_) + (PAGE - reinterpret_cast<uintptr_t>(start_) % PAGE) % PAGE;
    end_ = next_ + size_;
    madvise(next_, size_, MADV_HUGEPAGE);  // small pages work too
  }
  WeightPages(const WeightPages&) = delete;
  ~WeightPages() { munmap(start_, mapped_); }

  bool fits(int64_t bytes) const { return bytes <= end_ - next_; }
  char* take(int64_t bytes) {
    char* const taken = next_;
    next_ += bytes;
    return taken;
  }

 private:
  static constexpr int64_t PAGE = 2 << 20;
  const int64_t size_, mapped_;
  void* start_;
  char *next_, *end_;
};

// A flat tensor for a packed weight, aligned to cache lines.
inline Tensor empty_weight(int64_t numbers, const at::TensorOptions& options) {
  constexpr int64_t SHARED = 32 << 20, LINE = 64;  // bytes
  static std::mutex mutex;
  static std::shared_ptr<WeightPages> shared;
  const int64_t bytes = (numbers * int64_t(options.dtype().itemsize()) + LINE - 1) / LINE * LINE;
  const std::lock_guard lock(mutex);
  std::shared_ptr<WeightPages> pages = shared;
  if (bytes > SHARED / 2) pages = std::make_shared<WeightPages>(bytes);
  else if (!pages || !pages->fits(bytes)) pages = shared = std::make_shared<WeightPages>(SHARED);
  return at::from_blob(pages->take(bytes), {numbers}, [pages](void*) {}, options);
}

}  // namespace outrider
