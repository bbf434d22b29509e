// One table of functions per instruction set, chosen once at load time.
#pragma once
#include <atomic>
#include <bit>
#include <cstdint>
#include <span>
#include <vector>

// Up to `queries` neighbouring queries of one request; they share the packing of its keys and values.
struct Tile {
  int64_t request, first_query, queries, first_position, end;  // end: one past the last position that a query sees
};

struct AttentionArgs {
  const void *q, *k_pool, *v_pool;
  void* out;
  const int32_t* page_table;
  const int64_t* rows;
  const int32_t* kv_lens;
  int64_t q_stride, k_stride, v_stride, page_stride;  // elements from one token, slot or row to the next
  int64_t q_heads, kv_heads, head_dim, value_dim, window, tile_rows;
  int64_t heads_of_item;  // KV heads that a thread does together; divides kv_heads
  float scale, logit_cap;
  bool causal;
  std::span<const Tile> tiles;
  const float* sinks = nullptr;  // of each query head: the score of an extra position with value 0
  // Floats from one row's state to the next: values, largest score, sum of the weights; whole cache lines.
  int64_t state_stride() const { return (value_dim + 2 + 15) / 16 * 16; }
};

constexpr int64_t CHUNK = 256;  // positions of one partial softmax; fixed, since it sets the order of the sums
constexpr int64_t TILE_ROWS = 96;  // queries x heads of a group, at least, unless a group alone is larger
inline int64_t chunks_of(const Tile& tile) { return (tile.end + CHUNK - 1) / CHUNK; }

struct RopeArgs {
  void *q, *k;
  const void *v, *cos_sin;
  void *k_pool, *v_pool;  // null: rotate only
  const int64_t *positions, *slots;
  int64_t q_stride, k_stride, v_stride, k_slot, v_slot;
  int64_t q_heads, kv_heads, head_dim, value_dim, rotary_dim;
  bool wide_cache;  // cos_sin is float32, else of q's type
};

constexpr int64_t PANEL = 64;  // outputs of a packed panel
constexpr int64_t ROW_GROUP = 96;  // rows that a product takes through a panel at once

// Keys and values of some slots, to prefetch while a product computes.
struct CachePrefetch {
  struct Pool {
    const char* from;
    int64_t stride, bytes;  // from a slot to the next; of a slot
  };
  Pool pools[2];
  const int32_t *slot, *end;                    // slots left to prefetch
  const char *line = nullptr, *last = nullptr;  // of the current slot; past its end
  int64_t next_pool = 0;                             // keys or values
};

struct LinearArgs {
  const void *x, *packed;
  const float* bias;  // null, or one per output, padded to whole panels
  void* out;
  int64_t x_stride, rows, row_group, depth, outputs, panels, out_stride;
  CachePrefetch* prefetch;  // lines to prefetch with the weights, or null
};

// Storage of a checkpoint's weight: BLOCK neighbours in depth have codes and optionally scales; `span` such blocks, a
// power of two, share a scale (and a minimum or zero point). In the order of blocks.py.
enum BlockKind {
  Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4,
  GROUPS_32, GROUPS_64, GROUPS_128, BLOCK_KINDS
};
constexpr int64_t BLOCK = 32;

struct BlockFormat {
  int64_t bits, span;
  int64_t shared, own;  // bytes of scales: per span, per block
  int64_t file;         // bytes of a span in the checkpoint
  constexpr int64_t block() const { return bits * BLOCK / 8 + own; }  // bytes once packed, per output
  constexpr int64_t bytes() const { return shared + span * block(); }
  constexpr int64_t spans(int64_t blocks) const { return blocks >> std::countr_zero(uint64_t(span)); }
};
constexpr BlockFormat FORMATS[BLOCK_KINDS] = {
    {4, 1, 2, 0, 18},  {4, 1, 4, 0, 20},  {5, 1, 2, 0, 22},  {5, 1, 4, 0, 24},  {8, 1, 2, 0, 34}, {2, 8, 4, 2, 84},
    {3, 8, 2, 2, 110}, {4, 8, 4, 2, 144}, {5, 8, 4, 2, 176}, {6, 8, 2, 2, 210}, {4, 1, 2, 0, 18}, {4, 8, 2, 2, 136},
    {4, 1, 1, 0, 17},  {4, 1, 4, 0, 20},  {4, 2, 4, 0, 36},  {4, 4, 4, 0, 68},
};

// A row of an integer product: signed bytes, their scale and sums. Blocks of 32 serve kinds with float scales, blocks
// of 256 superblocks.
struct NarrowBlock {
  int8_t codes[BLOCK];
  float scale;
  int32_t sum;
};
struct WideBlock {
  int8_t codes[8 * BLOCK];
  float scale;
  int16_t sums[8], halves[16];  // sums of 32 codes; of 16, times -16
};
constexpr bool rounds_wide(int64_t kind) { return FORMATS[kind].span == 8; }
inline int64_t rounded_bytes(int64_t depth, bool wide) {
  return wide ? depth / (8 * BLOCK) * sizeof(WideBlock) : depth / BLOCK * sizeof(NarrowBlock);
}
// Added to the number of a kind if rows are rounded to bytes; as in blocks.py.
constexpr int64_t ROUNDED = 256;

// Gumbel noise G of a token in the stream `key`, as e^-G. It is compiled once, and never with ISA's flags, since its
// bits decide the drawn token.
double exponential_noise(uint64_t key, int64_t token);
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;  // of SplitMix64

// Sampling rules of each row; temperature 0 means the best token.
struct Rules {
  const float* temperatures;
  const int64_t* top_ks;
  const float *top_ps, *min_ps;  // null: off (all three)
};

struct ProbsArgs {
  const void* logits;
  float* out;
  Rules rules;
  int64_t rows, vocab, stride;
};

// Draws a token from each of the `count` rows of the logits in `rows`; rules and keys are per draw.
struct DrawArgs {
  const void* logits;
  const int64_t *rows, *keys;
  int64_t* tokens;
  Rules rules;
  int64_t count, vocab, stride;
};

// Verifies the drafts of `count` requests: kept and last have a number for each, further arrays cover all requests.
struct AcceptArgs {
  const float *probs, *q;  // q null: point masses
  const int64_t *requests, *first_rows, *lens, *tokens, *vocab, *keys;  // vocab: of the columns of q; null: all tokens
  const double* uniforms;
  int64_t *kept, *last;
  int64_t count, gamma, width, columns;
  bool by_block;
};

// Draft tokens of `rows` rows, `stride` rows apart in keys, probs, tokens and confidence.
struct DraftDrawArgs {
  const void *logits, *bias;  // [columns] each row; bias is added, null: none
  const void* states;         // [width] each row
  Rules rules;                // one for rows_per_request neighbouring rows
  const int64_t *keys, *vocab, *previous;  // vocab: the columns' tokens, null: 0, 1 ..; previous: last tokens
  const float *state_weight, *token_weight;  // of the confidence head; null: none
  // [2, 3], sampled and greedy: the weights in the logit of the confidence of the head's logit (without a head, the
  // entropy of the distribution), of the logit of the largest probability, and of 1; null: the confidence is the
  // largest probability.
  const float* mix;
  float *probs, *confidence;  // probs null: not wanted
  int64_t* tokens;
  int64_t rows, stride, rows_per_request, previous_stride, columns, width;
  int64_t logit_stride;  // distance in rows in logits and states
  int64_t vocab_stride;  // numbers between the vocabs of two rows; 0: all share one
};

// A convolution over the rows of each block, in place: [blocks * rows, width]. A row's kernel is base + added; added
// has a number for each group of channels, a multiple of 16.
struct BlockConvolutionArgs {
  void* x;
  const void *base, *added;  // [taps, width]; of each row [taps, groups], `stride` numbers apart
  int64_t rows, width, taps, groups, stride;
};

// A short causal convolution of each channel over the tokens of several requests, laid end to end.
struct ConvolutionArgs {
  const void* inputs;
  void* out;
  const float *weight, *windows;  // [taps, channels]; earlier inputs of each slot, [taps - 1, channels]
  const int64_t *slots, *indptr;  // of each request
  int64_t stride, window_stride, taps, channels;
};

// A gated delta rule over the same tokens. Work on rows writes queries, keys, decays and strengths; work on tiles does
// the rest.
struct GatedDeltaArgs {
  const void *mixed, *a, *b;  // queries|keys|values of all heads side by side; inputs of the gates
  void* out;
  const float *rates, *shifts;  // of each head
  float *queries, *keys, *decays, *strengths, *deltas;
  float* pool;  // states of each slot: [heads, key_dim, value_dim]
  const int64_t *slots, *indptr, *counts;  // of each request; counts: rows to replay
  int64_t a_stride, b_stride, pool_stride, requests, key_heads, heads, key_dim, value_dim;
  bool write;  // stores the states after the last rows
  int64_t channels() const { return 2 * key_heads * key_dim + heads * value_dim; }
  int64_t key_at(int64_t row, int64_t head) const { return (row * key_heads + head) * key_dim; }
  int64_t value_at(int64_t row, int64_t head) const { return (row * heads + head) * value_dim; }
  float* state(int64_t request, int64_t head) const {
    return pool + slots[request] * pool_stride + head * key_dim * value_dim;
  }
};

template <typename... A>
using Function = void (*)(A...);

// [0] float32, [1] bfloat16. Ranges are rows; for linear and block_linear items.
struct Kernels {
  // Does items until `next` runs out; partials: null, or room for every (tile, head, chunk).
  Function<const AttentionArgs&, std::atomic<int64_t>&, float*, const int64_t*> attention[2];
  Function<const AttentionArgs&, std::atomic<int64_t>&, const float*, const int64_t*> merge[2];
  Function<const void*, void*, const void*, void*, int64_t, float, int64_t, int64_t> norm[2];
  Function<const void*, void*, int64_t, int64_t, int64_t> silu_mul[2];
  Function<void*, const void*, int64_t, int64_t, int64_t, int64_t> add_bias[2];
  Function<const RopeArgs&, int64_t, int64_t> rope[2];
  Function<const void*, void*, int64_t, int64_t, int64_t, int64_t> pack[2];
  Function<const LinearArgs&, int64_t, int64_t> linear[2];
  Function<const uint8_t*, uint8_t*, int64_t, int64_t, int64_t, int64_t> pack_blocks[BLOCK_KINDS];
  Function<const LinearArgs&, int64_t, int64_t> block_linear[2][BLOCK_KINDS];
  Function<const uint8_t*, const int64_t*, void*, int64_t, int64_t, int64_t> expand_rows[BLOCK_KINDS];
  Function<const void*, void*, int64_t, int64_t, int64_t> round_rows[2][2];  // second index: in blocks of 256
  Function<const uint8_t*, uint8_t*, int64_t, int64_t, int64_t, int64_t> pack_int_blocks[BLOCK_KINDS];
  Function<const LinearArgs&, int64_t, int64_t> int_block_linear[2][BLOCK_KINDS];  // of few rows
  Function<const LinearArgs&, int64_t, int64_t> int_blocks_many_rows[2][BLOCK_KINDS];
  int64_t many_rows;  // at least, for many-row products
  Function<const ProbsArgs&, std::atomic<int64_t>&> target_probs[2];
  Function<const void*, int64_t*, int64_t, int64_t, int64_t, int64_t> argmax[2];
  Function<const DrawArgs&, std::atomic<int64_t>&> draw_tokens[2];
  Function<const float*, const int64_t*, const int64_t*, int64_t*, int64_t, int64_t, int64_t> gumbel_argmax;
  Function<const AcceptArgs&, std::atomic<int64_t>&> accept_sampled;
  Function<const DraftDrawArgs&, std::atomic<int64_t>&> draw_drafts[2];
  Function<const void*, float*, int64_t*, int64_t, int64_t, int64_t, int64_t> likeliest[2];
  Function<const BlockConvolutionArgs&, int64_t, int64_t> convolve_blocks[2];
  Function<const ConvolutionArgs&, int64_t, int64_t> convolve[2];
  Function<const GatedDeltaArgs&, int64_t, int64_t> delta_inputs[2];
  Function<const GatedDeltaArgs&, std::atomic<int64_t>&> gated_delta[2];
  Function<const GatedDeltaArgs&, std::atomic<int64_t>&> replay_delta;
  int64_t tile_rows;  // of attention, at most: a multiple of TILE_ROWS
  // Bytes between two products of a decoder that fit a core's caches, if threads take their own rows; else 0.
  int64_t cache_bytes_for_rows[2];
};

// Functions of a set that multiplies by tiles; the set it extends has all further functions.
struct TileKernels {
  Function<const AttentionArgs&, std::atomic<int64_t>&, float*, const int64_t*> attention;
  Function<const AttentionArgs&, std::atomic<int64_t>&, const float*, const int64_t*> merge;
  Function<const void*, void*, int64_t, int64_t, int64_t, int64_t> pack;
  Function<const LinearArgs&, int64_t, int64_t> linear;
  Function<const uint8_t*, uint8_t*, int64_t, int64_t, int64_t, int64_t> pack_blocks[BLOCK_KINDS];
  Function<const LinearArgs&, int64_t, int64_t> block_linear[2][BLOCK_KINDS];
  Function<const uint8_t*, uint8_t*, int64_t, int64_t, int64_t, int64_t> pack_int_blocks[BLOCK_KINDS];
  Function<const LinearArgs&, int64_t, int64_t> int_block_linear[2][BLOCK_KINDS];
};

namespace scalar {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avxvnni {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace avx512bf16 {
extern const Kernels kernels;
}
namespace amx {
extern const TileKernels kernels;
}
namespace amx_emulated {
extern const TileKernels kernels;
}
