// Texts of earlier requests by corpus, with an index of their n-grams.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace outrider {

// A mark precedes every text in a ring; SECRET_TEXT forbids to store the text elsewhere. Tokens are at least 0.
constexpr int32_t TEXT_END = -1, SECRET_TEXT = -2;

// A match of a text's end in a corpus: the position after it, and its length, 0 for none.
struct FoundText {
  uint32_t next = 0;
  int64_t length = 0;
  int64_t agreeing = 0, counted = 0;  // compared matches, and how many continued with the same token
};

// A ring of token ids, which drops the oldest first, and the positions of its n-grams by hash: the latest for each
// length, and from every position the previous one. Positions count all tokens ever added, modulo 2^32.
class Corpus {
 public:
  explicit Corpus(int64_t capacity) : capacity_(capacity) { resize(std::min<int64_t>(capacity, SMALLEST)); }

  // Adds the parts of a text that the newer half of the ring lacks.
  void insert(const int64_t* text, int64_t length, bool secret) {
    const int32_t mark = secret ? SECRET_TEXT : TEXT_END;
    int64_t begin = 0;  // of the part still to be added
    for (int64_t i = 0; i + LONG <= length;) {
      const int64_t known = known_from(text + i, length - i);
      if (known < SKIPPED && known < length) {  // `known` may cover all of a short text
        ++i;
        continue;
      }
      if (i > begin) append(mark, text + begin, i + LONG - begin);  // with the known tokens, so that the copies join
      i += known;
      begin = std::max<int64_t>(i - LONGEST, begin);
      if (i == length) return;
    }
    if (length > begin) append(mark, text + begin, length - begin);
  }

  // The latest of the longest matches of a text's end, at most LONGEST tokens, among the last CHAIN positions with the
  // same last LONG tokens, or else SHORT tokens.
  FoundText find(const int64_t* text, int64_t length) const {
    FoundText best;
    for (int64_t level = 0; level < LEVELS && !best.length; ++level) {
      const int64_t n = SIZES[level];
      if (length < n) continue;
      std::array<int32_t, CHAIN> followed;
      int64_t walked = 0;
      int32_t next = TEXT_END;
      uint32_t at = heads_[level][slot(text + length - n, n)], before = end_;
      for (int64_t i = 0; i < 2 * CHAIN && walked < CHAIN && holds(at) && end_ - at > end_ - before; ++i) {
        before = at;
        const int64_t matched = backwards(at, text, length);
        const int32_t token = end_ - at > 1 ? token_at(at + 1) : TEXT_END;
        at = links_[level][at & mask()];
        if (matched < n || token < 0) continue;
        followed[walked++] = token;
        if (matched > best.length) {
          best.length = matched;
          best.next = before + 1;
          next = token;
        }
      }
      best.counted = walked;
      best.agreeing = std::count(followed.begin(), followed.begin() + walked, next);
    }
    return best;
  }

  // Reads at most `count` tokens from a position on; returns their number.
  int64_t read(uint32_t from, int64_t* tokens, int64_t count) const {
    int64_t n = 0;
    for (; n < count && from != end_; ++n, ++from) {
      if (token_at(from) < 0) break;
      tokens[n] = token_at(from);
    }
    return n;
  }

  // All tokens, oldest first. With `kept`, only texts with a mark in the ring other than SECRET_TEXT.
  std::vector<int32_t> contents(bool kept = false) const {
    std::vector<int32_t> found;
    bool taken = !kept;
    for (uint32_t i = uint32_t(held_); i > 0; --i) {
      const int32_t token = token_at(end_ - i);
      if (kept && token < 0) taken = token == TEXT_END;
      if (taken) found.push_back(token);
    }
    return found;
  }

  // Restores the tokens of `contents`.
  void fill(const int32_t* tokens, int64_t count) {
    for (int64_t i = 0; i < count; ++i) push(tokens[i]);
  }

  static int64_t bytes_of(int64_t tokens) { return tokens * int64_t(sizeof(int32_t)) * (1 + 2 * LEVELS); }
  int64_t bytes() const { return bytes_of(ring_.size()); }

 private:
  static constexpr int64_t LEVELS = 2, LONG = 8, SHORT = 3, CHAIN = 16, LONGEST = 32;
  static constexpr int64_t SIZES[LEVELS] = {LONG, SHORT};
  static constexpr int64_t SMALLEST = 4096, SKIPPED = 64;

  uint32_t mask() const { return uint32_t(ring_.size()) - 1; }
  int32_t token_at(uint32_t at) const { return ring_[at & mask()]; }
  bool holds(uint32_t at) const { return end_ - at - 1 < uint32_t(held_); }

  template <typename T>
  uint32_t slot(const T* tokens, int64_t n) const {
    uint64_t hash = 0;
    for (int64_t i = 0; i < n; ++i) hash = (hash ^ uint64_t(uint32_t(tokens[i]))) * 0x9E3779B97F4A7C15u;
    return uint32_t(hash >> 32) & mask();
  }

  // Counts the tokens up to a position that equal the last ones of a text.
  int64_t backwards(uint32_t at, const int64_t* text, int64_t length) const {
    int64_t n = 0;
    while (n < std::min(LONGEST, length) && holds(at - uint32_t(n)) &&
           token_at(at - uint32_t(n)) == text[length - 1 - n])
      ++n;
    return n;
  }

  // Counts the first tokens of `text` that the newer half of the ring has together.
  int64_t known_from(const int64_t* text, int64_t length) const {
    int64_t longest = 0;
    uint32_t at = heads_[0][slot(text, LONG)], before = end_;
    for (int64_t i = 0; i < CHAIN && holds(at) && end_ - at > end_ - before; ++i) {
      before = at;
      const uint32_t first = at - uint32_t(LONG - 1);
      at = links_[0][at & mask()];
      if (!holds(first) || int64_t(end_ - first) > std::max<int64_t>(capacity_ / 2, LONG)) continue;
      int64_t n = 0;
      while (n < length && first + uint32_t(n) != end_ && token_at(first + uint32_t(n)) == text[n]) ++n;
      longest = std::max(longest, n);
    }
    return longest < LONG ? 0 : longest;
  }

  void append(int32_t mark, const int64_t* text, int64_t length) {
    push(mark);
    for (int64_t i = 0; i < length; ++i) push(int32_t(text[i]));
  }

  void push(int32_t token) {
    if (held_ == int64_t(ring_.size()) && held_ < capacity_) {
      const std::vector<int32_t> before = contents();
      resize(2 * held_);
      fill(before.data(), before.size());
    }
    ring_[end_ & mask()] = token;
    ++end_;
    held_ = std::min<int64_t>(held_ + 1, ring_.size());
    const uint32_t at = end_ - 1;
    run_ = token < 0 ? 0 : run_ + 1;
    for (int64_t level = 0; level < LEVELS; ++level) {
      const int64_t n = SIZES[level];
      if (run_ < n) continue;
      std::array<int32_t, LONG> gram;
      for (int64_t i = 0; i < n; ++i) gram[i] = token_at(at - uint32_t(n - 1 - i));
      uint32_t& head = heads_[level][slot(gram.data(), n)];
      links_[level][at & mask()] = head;
      head = at;
    }
  }

  // Makes an empty ring of `size` tokens; positions begin where the ring holds no token.
  void resize(int64_t size) {
    ring_.assign(size, TEXT_END);
    for (int64_t level = 0; level < LEVELS; ++level) {
      heads_[level].assign(size, 0);
      links_[level].assign(size, 0);
    }
    end_ = uint32_t(2 * size);
    held_ = run_ = 0;
  }

  const int64_t capacity_;
  std::vector<int32_t> ring_;
  std::array<std::vector<uint32_t>, LEVELS> heads_, links_;
  uint32_t end_ = 0;
  int64_t held_ = 0, run_ = 0;  // tokens in the ring; tokens since the last TEXT_END
};

}  // namespace outrider
