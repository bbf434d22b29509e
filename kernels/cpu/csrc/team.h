// Threads that run one function together: one parallel region for a whole forward, with barriers between stages,
// instead of a region per operation.
#pragma once
#include <omp.h>

#include <thread>

#include "ops.h"

namespace outrider {

constexpr int64_t MIN_WORK_PER_MEMBER = 1 << 15;  // multiplications; a team's threads already run

// Spins briefly, since stages are short, then yields: the awaited thread may need the core. OpenMP's barrier spins for
// milliseconds; if another process holds a core, each operation can then cost a time slice.
class Barrier {
 public:
  // Returns when `size` threads have called it; the last one runs last() before the rest continue.
  template <typename F>
  void wait(int64_t size, const F& last) {
    const uint32_t mine = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived_.store(0, std::memory_order_relaxed);
      last();
      round_.store(mine + 1, std::memory_order_release);
      if (size > 1) round_.notify_all();
      return;
    }
    const auto open = [&] { return round_.load(std::memory_order_acquire) != mine; };
    for (int i = 0; i < SPINS; ++i) {
      if (open()) return;
      __builtin_ia32_pause();
    }
    for (int i = 0; i < YIELDS; ++i) {
      if (open()) return;
      std::this_thread::yield();
    }
    round_.wait(mine, std::memory_order_acquire);
  }

 private:
  static constexpr int SPINS = 500, YIELDS = 1000;  // much less than a time slice
  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
};

struct ThreadTeam {
  Barrier barrier;
  alignas(64) std::atomic<int64_t> next[2] = {0, 0};  // item counters of this and the next stage
};

// A thread of a team. All members call the same stages with the same arguments; stages must not throw. A stage begins
// when all members have finished the previous one, so it may read the previous results.
class TeamMember {
 public:
  TeamMember(ThreadTeam& team, int64_t index, int64_t size) : index(index), size(size), team_(team) {}
  const int64_t index, size;

  // Until run_shared() every member runs whole stages alone; begins when all members have finished the previous stage.
  void run_unshared() {
    begin();
    unshared_ = true;
  }
  void run_shared() { unshared_ = false; }
  // The index of this member and the number of members that share a stage.
  int64_t shard() const { return unshared_ ? 0 : index; }
  int64_t shards() const { return unshared_ ? 1 : size; }

  // The last member to arrive runs work(); the rest wait.
  template <typename F>
  void run_once(const F& work) {
    if (unshared_) return work();
    team_.barrier.wait(size, work);
    unfinished_ = false;
  }

  // Runs work(begin, end) on as many members as pay off, each with one range of neighbouring items.
  template <typename F>
  void run_ranges(int64_t items, const F& work, int64_t multiplications = INT64_MAX) {
    const int64_t threads = threads_worth(items, multiplications);
    if (threads <= 1) return run_once([&] { work(0, items); });
    begin();
    if (index < threads) work(items * index / threads, items * (index + 1) / threads);
  }

  // Runs work(next), which takes items from the shared counter until it reaches `items`.
  template <typename F>
  void run_items(int64_t items, const F& work, int64_t multiplications = INT64_MAX) {
    const int64_t threads = threads_worth(items, multiplications);
    if (threads <= 1) {
      return run_once([&] {
        std::atomic<int64_t> next{0};
        work(next);
      });
    }
    begin();
    std::atomic<int64_t>& next = team_.next[stage_++ % 2];
    if (index == 0) team_.next[stage_ % 2] = 0;  // unused until the next barrier
    if (index < threads) work(next);
  }

 private:
  int64_t threads_worth(int64_t items, int64_t multiplications) const {
    return std::min({items, shards(), std::max<int64_t>(1, multiplications / MIN_WORK_PER_MEMBER)});
  }

  void begin() {
    if (unfinished_) team_.barrier.wait(size, [] {});
    unfinished_ = true;
  }

  ThreadTeam& team_;
  int64_t stage_ = 0;  // the number of counted stages
  bool unshared_ = false;
  bool unfinished_ = false;  // members may have unfinished work since the last barrier
};

// Runs work(member) on all of torch's threads, or on the caller alone inside a parallel region.
template <typename F>
void run_team(const F& work) {
  ThreadTeam team;
#pragma omp parallel
  {
    TeamMember member(team, omp_get_thread_num(), omp_get_num_threads());
    work(member);
    member.run_once([] {});  // waits here, not in OpenMP's barrier
  }
}

}  // namespace outrider
