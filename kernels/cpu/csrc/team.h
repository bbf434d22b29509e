// Threads that run one function together: one parallel region for a whole forward, with barriers between its stages,
// instead of a region for each operation.
#pragma once
#include <omp.h>

#include <thread>

#include "ops.h"

namespace outrider {

constexpr int64_t WORTH_A_MEMBER = 1 << 15;  // multiplications, about 1 us: the team is awake

// Spins briefly, since stages are short. Then it gives its core away: the one it waits for may need it. OpenMP's own
// barrier spins for milliseconds, and where another process holds a core every operation can cost a time slice.
class Barrier {
 public:
  // Returns when `size` threads have called it; the last of them runs last() before the others go on.
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
  static constexpr int SPINS = 500, YIELDS = 1000;  // about 10 and 300 us on cores that are free
  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
};

struct Team {
  Barrier barrier;
  alignas(64) std::atomic<int64_t> next[2] = {0, 0};  // of the items of a stage; the other one is at rest
  Part part = SMALL;  // what the first member's time counts for
  Clock clock;
};

// A thread of a team. All members call the same stages with the same arguments, which must not throw. A stage begins
// when every member has done the one before it, so it may read what that wrote.
class Member {
 public:
  Member(Team& team, int64_t index, int64_t size) : index(index), size(size), team_(team) {}
  const int64_t index, size;

  // From the end of the stage before on, every member does stages of its own, all of their work; until together().
  void apart() {
    begin(SMALL);
    apart_ = true;
  }
  void together() { apart_ = false; }
  // This member and how many share a stage.
  int64_t place() const { return apart_ ? 0 : index; }
  int64_t sharing() const { return apart_ ? 1 : size; }

  // One member runs work(), whichever comes last; the others wait for it.
  template <typename F>
  void alone(Part part, const F& work) {
    if (apart_) return note(part), work();
    team_.barrier.wait(size, [&] {
      team_.clock.add_to(team_.part);
      work();
      team_.clock.add_to(part);
    });
    open_ = false;
  }

  // work(begin, end) on as many members as the stage is worth, each with one range of neighbouring items.
  template <typename F>
  void ranges(Part part, int64_t items, const F& work, int64_t multiplications = INT64_MAX) {
    const int64_t threads = threads_worth(items, multiplications);
    if (threads <= 1) return alone(part, [&] { work(0, items); });
    begin(part);
    if (index < threads) work(items * index / threads, items * (index + 1) / threads);
  }

  // work(next), which takes items from the shared counter until it reaches `items`.
  template <typename F>
  void counted(Part part, int64_t items, const F& work, int64_t multiplications = INT64_MAX) {
    const int64_t threads = threads_worth(items, multiplications);
    if (threads <= 1) {
      return alone(part, [&] {
        std::atomic<int64_t> next{0};
        work(next);
      });
    }
    begin(part);
    std::atomic<int64_t>& next = team_.next[stage_++ % 2];
    if (index == 0) team_.next[stage_ % 2] = 0;  // nobody counts with that one before the next barrier
    if (index < threads) work(next);
  }

 private:
  int64_t threads_worth(int64_t items, int64_t multiplications) const {
    return std::min({items, sharing(), std::max<int64_t>(1, multiplications / WORTH_A_MEMBER)});
  }

  void begin(Part part) {
    if (open_) team_.barrier.wait(size, [] {});
    open_ = true;
    note(part);
  }

  // Time counts for this part from now on.
  void note(Part part) {
    if (index) return;
    team_.clock.add_to(team_.part);
    team_.part = part;
  }

  Team& team_;
  int64_t stage_ = 0;  // of those that count
  bool apart_ = false;
  bool open_ = false;  // since the last barrier there was work that others may not have finished
};

// Runs work(member) on all of torch's threads, or on the caller alone inside a parallel region.
template <typename F>
void run_team(const F& work) {
  Team team;
#pragma omp parallel
  {
    Member member(team, omp_get_thread_num(), omp_get_num_threads());
    work(member);
    member.alone(SMALL, [] {});  // not in OpenMP's barrier
  }
  team.clock.add_to(team.part);
}

}  // namespace outrider
