// The arguments of each kernel. Every argument is one 8-byte word, so that a call is an array of words
// that Python can write and a tape can store. P: pointer, I: integer, F: float. Strides count elements.
//
// This list generates the structs that kernels read, the table of kernels, and the names that Python
// checks its calls against.
#pragma once

#include <cstdint>

namespace kvik {

union Word {
    int64_t i;
    double f;
    void* p;
};

// Element types of tensors. Activations have one of the first two; the others are for KV caches and
// weights to be packed.
enum Dtype : int64_t { kF32 = 0, kBF16 = 1, kI8 = 2, kFP8 = 3, kI4 = 4 };
// The function applied to x W^T + b before the residual is added.
enum Activation : int64_t {
    kNone = 0,
    kSiluAndMul = 1,  // odd: the first half of the outputs is the gate of the second
    kGeluTanh = 2,
    kGeluTanhAndMul = 3,
    kGelu = 4,
    kGeluAndMul = 5,
    kRelu = 6,
    kReluSquared = 8,
    kClampedSwiglu = 9,
    kTanh = 10,
    kLimitedSwiglu = 11,
    kClippedSwiglu = 13,
};
// The function of the gate that `gated` multiplies x by.
enum Gate : int64_t { kGateNone = 0, kGateSilu = 1, kGateSigmoid = 2, kGateSoftplus = 3 };
// How a router computes scores from its logits, in the order of `Scores` (spec/experts.py).
enum Scores : int64_t {
    kSoftmaxScores = 0,
    kSigmoidScores = 1,
    kSparsemixer = 2,
    kLogitScores = 3,
    kRootSoftplusScores = 4,
};
constexpr int64_t kMaxTaps = 8;  // inputs of a short convolution
// How a matrix is stored and multiplied.
enum MatrixKind : int64_t {
    kMatrixF32 = 0,
    kMatrixBF16 = 1,
    // W8A8: activations quantised per row, and per group where there are groups. A group of any kind has at
    // most 65536 inputs, so that integers can be summed in 32 bits; for this kind it is a multiple of 4.
    kMatrixI8 = 2,
    kMatrixI8WeightOnly = 3,  // int8 weights, float activations; a group is a multiple of 4
    // 4 bits in groups, activations quantised per row and group. The size of a group is a multiple of 8,
    // and at most 256 where it has a zero point.
    kMatrixI4 = 4,
    kMatrixI4Min = 5,  // the same with a minimum for each group: w = q * scale - minimum
    kMatrixFp8 = 6,     // E4M3 weights, activations as `Fp8Activations` says; a group is a multiple of 4
    kMatrixMxfp4 = 7,   // as kMatrixI4, but values are E2M1 and scales powers of two (E8M0)
    // As kMatrixI4, but values are numbers of a table (nibble_tables.hpp): those of IQ4, and twice those of E2M1.
    kMatrixIq4 = 8,
    kMatrixFp4 = 9,
    kMatrixNf4 = 10,     // 112 times those of NF4, rounded
    kMatrixBnbFp4 = 11,  // 120 times those of bitsandbytes' FP4, rounded
};
// The operand that E4M3 weights are multiplied by: x unchanged, or x rounded to E4M3 with a scale for each
// row, a scale for each row and group of the weights, or one given scale. Other kinds have kFloatX.
enum Fp8Activations : int64_t { kFloatX = 0, kRowX = 1, kGroupX = 2, kStaticX = 3 };

// y [rows, inner, dim] = x / rms(x) * weight, over dim. weight_dtype: the dtype of x, or fp32. weight_stride: from
// the weight of an inner row to that of the next; 0: all inner rows share it.
#define KVIK_ARGS_rms_norm(P, I, F)                                                      \
    P(x) I(x_stride) I(x_inner_stride) P(weight) I(weight_stride) P(y) I(y_stride)       \
    I(y_inner_stride) I(rows) I(inner) I(dim) F(eps) I(dtype) I(weight_dtype)

// y [rows, inner, dim] = (x - mean) / std * weight + bias, over dim. weight_stride, also of the bias: see rms_norm.
#define KVIK_ARGS_layer_norm(P, I, F)                                                    \
    P(x) I(x_stride) I(x_inner_stride) P(weight) P(bias) I(weight_stride) P(y)           \
    I(y_stride) I(y_inner_stride) I(rows) I(inner) I(dim) F(eps) I(dtype)

// y [rows, inner, dim] = x * rms(like) / sqrt(max(mean of x^2, least)), over dim; like [rows, dim].
#define KVIK_ARGS_rescaled(P, I, F)                                                      \
    P(x) I(x_stride) I(x_inner_stride) P(like) I(like_stride) P(y) I(y_stride)           \
    I(y_inner_stride) I(rows) I(inner) I(dim) F(least) I(dtype)

// y [rows, columns] fp32 = most * sigmoid(gain * logits / rms(x) + bias) + least; x [rows, dim], logits [rows, columns]
// fp32, factors [4, columns] fp32: gains, biases, most and least. The last streams^2 columns are instead a matrix of
// each row, and its transpose in y: the softmax of its rows plus least, whose columns and rows are in turn divided by
// their sums plus least, `rounds` times by those of columns.
#define KVIK_ARGS_stream_weights(P, I, F)                                                \
    P(x) I(x_stride) P(logits) I(logits_stride) P(factors) P(y) I(y_stride) I(rows)      \
    I(dim) I(columns) F(eps) I(streams) I(rounds) I(dtype)

// y [rows, columns] = activation(x), or for an odd activation(x[:, :columns]) * x[:, columns:].
#define KVIK_ARGS_activate(P, I, F)                                                      \
    P(x) I(x_stride) P(y) I(y_stride) I(rows) I(columns) I(activation) I(dtype)

// y [rows, columns] = activation(gate) * up, of x = (gate, up) and an odd activation, where gate is max(0, gate - mean -
// deviations * std) of its row.
#define KVIK_ARGS_activate_top(P, I, F)                                                  \
    P(x) I(x_stride) P(y) I(y_stride) I(rows) I(columns) I(activation) F(deviations) I(dtype)

#define KVIK_ARGS_add(P, I, F)                                                           \
    P(x) I(x_stride) P(y) I(y_stride) P(out) I(out_stride) I(rows) I(dim) I(dtype)

// y = x / 2, plus positive * x^2 above 0, else plus negative * (e^x - 1 - x).
#define KVIK_ARGS_xielu(P, I, F)                                                         \
    P(x) I(x_stride) P(y) I(y_stride) I(rows) I(dim) F(positive) F(negative) I(dtype)

// y = x * factor.
#define KVIK_ARGS_scaled(P, I, F)                                                        \
    P(x) I(x_stride) P(y) I(y_stride) I(rows) I(dim) F(factor) I(dtype)

// y = x, with -limit for what is below it and limit for what is above it.
#define KVIK_ARGS_clipped(P, I, F)                                                       \
    P(x) I(x_stride) P(y) I(y_stride) I(rows) I(dim) F(limit) I(dtype)

// x fp32, in place: cap * tanh(x / cap).
#define KVIK_ARGS_softcap(P, I, F) P(x) I(x_stride) I(rows) I(dim) F(cap)

// y [rows, dim] = x * by(gate); by: `Gate`. gate [rows, gate_dim], each for as many columns of a row; it has the dtype
// of x, or is fp32 (wide).
#define KVIK_ARGS_gated(P, I, F)                                                         \
    P(x) I(x_stride) P(gate) I(gate_stride) I(gate_dim) P(y) I(y_stride) I(rows) I(dim)  \
    I(by) I(wide) I(dtype)

// out [rows, sums * dim] = residual + x [rows, parts * dim] weighted: sum s of row r adds, of each part p, weights[r, s
// * parts + p] times that part. weights fp32; residual may be null.
#define KVIK_ARGS_weighted_sums(P, I, F)                                                 \
    P(x) I(x_stride) P(weights) I(weights_stride) P(residual) I(residual_stride) P(out)  \
    I(out_stride) I(rows) I(parts) I(sums) I(dim) I(dtype)

// Short convolutions of all sequences of a step: y [tokens, channels]. Sequence s owns tokens [starts[s],
// starts[s + 1]), the last ones of its lengths[s]; its state is row state_rows[s] of state, or none where that is
// negative (all int32). A sequence whose tokens are all in this step begins with zeros. Its last drafts[s] tokens
// are drafts, and its first pending[s] tokens before this step were drafts of the step before (int32, or null:
// none are). weight [width, channels], width up to kMaxTaps; bias may be null; state [rows, width - 1 + most
// drafts, channels] fp32.
#define KVIK_ARGS_causal_conv(P, I, F)                                                   \
    P(x) I(x_stride) P(weight) P(bias) P(state) I(state_stride) P(starts) P(lengths)     \
    P(state_rows) P(pending) P(drafts) I(num_seqs) I(channels) I(width) I(silu) P(y)     \
    I(y_stride) I(dtype)

// The gated delta rule over the same sequences, or, with a skip, a state space. x: queries and keys of all key heads,
// then values of all value heads, or values, keys, queries; gates: b, then a of all value heads, or a; decay and skip
// (or null) fp32 [value_heads]; bias as a, fp32; by_row: a head has an a for each row of its state, not one, and if
// bound < 0 the logarithm of a decay is at least bound; by_channel: it has an a and a skip for each of its value_dim
// channels, and decay is [value_heads, key_dim, value_dim]; state [rows, value_heads, key_dim, value_dim] fp32; log
// [rows, most drafts, columns of x and gates] fp32, or null; y [tokens, value_heads * value_dim]. `Ops.recurrence` has
// the rules.
#define KVIK_ARGS_recurrence(P, I, F)                                                    \
    P(x) I(x_stride) P(gates) I(gates_stride) P(decay) P(bias) P(skip) I(by_row)         \
    I(by_channel) F(beta_scale) F(bound) P(state) I(state_stride) P(log) I(log_stride)   \
    P(starts) P(lengths) P(state_rows) P(pending) P(drafts) I(num_seqs) I(key_heads)     \
    I(value_heads) I(key_dim) I(value_dim) P(y) I(y_stride) I(dtype)

// out [rows, row_bytes] = table[ids]; strides in bytes, ids int64.
#define KVIK_ARGS_gather_rows(P, I, F)                                                   \
    P(table) I(table_stride) P(ids) P(out) I(out_stride) I(rows) I(row_bytes)

// out [rows, head_dim] fp32: for each position p (int64), row p / low_rows of high times row p % low_rows of
// low, as complex numbers; positions beyond `last` count as `last`. Rows of all three: cosines, then sines.
#define KVIK_ARGS_rotations(P, I, F)                                                     \
    P(high) P(low) I(low_rows) P(positions) I(last) P(out) I(rows) I(head_dim)

// q [rows, heads, head_dim] and k [rows, kv_heads, head_dim], rotated in place (element j with
// element j + head_dim / 2). rotation [rows, head_dim] fp32: cosines, then sines. Heads are dense within a row.
#define KVIK_ARGS_rotary(P, I, F)                                                        \
    P(q) I(q_stride) I(heads) P(k) I(k_stride) I(kv_heads) P(rotation) I(rows)           \
    I(head_dim) I(dtype)

// Stores k [rows, kv_heads, head_dim] and v [rows, kv_heads, value_dim], followed by zeros up to head_dim, in the cache
// (layout: kv_layout.hpp). Scales: 16-bit words [blocks, kv_heads, block_size] (kv_numbers.hpp), only for int8, fp8 and
// int4 caches.
#define KVIK_ARGS_store_kv(P, I, F)                                                      \
    P(k) I(k_stride) P(v) I(v_stride) I(value_dim) P(k_cache) P(v_cache) P(k_scales) P(v_scales) \
    P(slot_mapping) I(rows) I(kv_heads) I(head_dim) I(block_size) I(dtype) I(kv_dtype)

// Loads keys and values from the cache: k and v [rows, kv_heads, head_dim] of the
// positions in slot_mapping. Without v_cache, only keys.
#define KVIK_ARGS_load_kv(P, I, F)                                                       \
    P(k) I(k_stride) P(v) I(v_stride) P(k_cache) P(v_cache) P(k_scales) P(v_scales)      \
    P(slot_mapping) I(rows) I(kv_heads) I(head_dim) I(block_size) I(dtype) I(kv_dtype)

// Stores the latent vectors of tokens, [rows, latent_dim], each followed by its rotary key, [rows, head_dim -
// latent_dim], as keys of one kv head of head_dim: the keys of attention without v_cache.
#define KVIK_ARGS_store_latent(P, I, F)                                                  \
    P(latent) I(latent_stride) P(rope) I(rope_stride) P(cache) P(scales) P(slot_mapping) \
    I(rows) I(latent_dim) I(head_dim) I(block_size) I(dtype) I(kv_dtype)

// Copies the contents of the cache from the positions in source (int64) to those in target, unchanged and in
// order. v_cache may be null.
#define KVIK_ARGS_move_kv(P, I, F)                                                       \
    P(k_cache) P(v_cache) P(k_scales) P(v_scales) P(source) P(target) I(rows)            \
    I(kv_heads) I(head_dim) I(block_size) I(kv_dtype)

// Stores the last queries of each sequence of a step, times scale, in its row of ring [rows, last, dim] fp32: the
// query at position p goes to p % last. starts, lengths and state_rows are as for causal_conv.
#define KVIK_ARGS_keep_queries(P, I, F)                                                  \
    P(q) I(q_stride) P(starts) P(lengths) P(state_rows) I(num_seqs) I(dim) I(last)       \
    F(scale) P(ring) I(dtype)

// Stores the keys of an indexer, k [rows, dim], in strips like keys of attention. Of a head, the first `rope` channels
// are rotated: neighbours together if interleaved, else those of two halves. rotation as for rotary.
#define KVIK_ARGS_store_index(P, I, F)                                                   \
    P(k) I(k_stride) P(rotation) I(rope) I(interleaved) P(cache) P(slot_mapping) I(rows) \
    I(dim) I(block_size) I(dtype)

// Chooses the keys that each token reads: of those that it sees the `top` with the largest scores, the first ones of
// equals. A score is the sum over heads of the token's weight times relu(q k), over sqrt(heads * dim). q [tokens,
// heads * dim], rotated as keys are; weights [tokens, heads]. out [tokens, out_stride] int64: bit i of word w is key
// 64 w + i of the token's sequence; a node of a tree counts as in `attention`. Other arguments are as for attention.
// span > 0: each head, a kv head of attention, chooses `top` blocks of as many keys (a divisor of 1024), which begin at
// multiples of it: the last `local` ones, and those whose best key has the largest q k. Then weights is null, and out
// [tokens, heads, out_stride / heads].
// every > 0: keys are of entries that sum up as many tokens, and a token sees those whose last token is not after it.
// Then cache has rows: the key of an entry is row s / entry_tokens, where s is its last token's place in the cache.
// Of a head of q the last `rope` channels are rotated, neighbours together. Without tree, first_keys and span. pools:
// each of `every` keys, of which a token reads the `top` with the largest scores and the keys after the last whole pool;
// out has a bit for each key. A row of cache has cache_stride numbers, of which the first dim are the key.
#define KVIK_ARGS_choose_keys(P, I, F)                                                   \
    P(q) I(q_stride) P(weights) I(weights_stride) P(rotation) I(rope) I(interleaved)     \
    P(cache) P(block_table) I(table_stride) P(query_start_loc) P(seq_lens) I(num_seqs)   \
    P(tree) P(first_keys) I(heads) I(dim) I(block_size) I(top) I(span) I(local) I(every) \
    I(entry_tokens) I(cache_stride) I(pools) P(out) I(out_stride) I(dtype)

// Stores tokens as rows of cache: k [rows, dim], of which the last `rope` channels are rotated, neighbours together, and
// inputs [rows, cache_stride - dim], or null.
#define KVIK_ARGS_store_tokens(P, I, F)                                                  \
    P(k) I(k_stride) P(rotation) I(rope) P(inputs) I(inputs_stride) P(cache)             \
    I(cache_stride) P(slot_mapping) I(rows) I(dim) I(dtype)

// Makes the entries of each sequence whose last tokens are in this step, of rows of cache: dim channels from inputs_at on,
// with overlap twice as many, of which the first ones take part in the entry after the token's; then as many gates, to
// which bias fp32 [every, gates] is added. weight [dim], of the dtype of cache or fp32, and eps as for rms_norm, or null;
// high, low, low_rows and last as for rotations of the last `rope` channels. Places of tokens and entries as for
// attend_entries. entries: rows of entries_stride numbers, maybe those of cache, as an entry is written when it is made.
#define KVIK_ARGS_make_entries(P, I, F)                                                  \
    P(cache) I(cache_stride) I(inputs_at) P(bias) P(weight) I(weight_dtype) F(eps)       \
    P(high) P(low) I(low_rows) I(last) I(rope) P(table) I(table_stride) P(entries) I(entries_stride) \
    P(entry_table) I(entry_table_stride) I(block_size) I(every) I(overlap)               \
    I(entry_tokens) P(query_start_loc) P(seq_lens) I(num_seqs) I(dim) I(dtype)

// Attention over the last `window` tokens, and over the entries that each token sees, as in `choose_keys`; every 0:
// there are none. q, out [tokens, heads, dim], heads dense. cache: rows of tokens, of which the first dim channels are
// key and value; entries: rows of dim. Each has a block table, and blocks of one size. Of each head of q the last `rope`
// channels are rotated, neighbours together, and those of the result are rotated back. chosen: null, or as `choose_keys`
// writes it. dim is a multiple of 16; sinks as for attention, not null.
#define KVIK_ARGS_attend_entries(P, I, F)                                                \
    P(q) I(q_stride) P(rotation) I(rope) P(cache) I(cache_stride) P(table)               \
    I(table_stride) P(entries) P(entry_table) I(entry_table_stride) I(block_size)        \
    I(every) I(entry_tokens) P(query_start_loc) P(seq_lens) I(num_seqs) I(heads) I(dim)  \
    I(window) P(chosen) I(chosen_stride) F(scale) P(sinks) P(out) I(out_stride) I(dtype)

// Attention of all sequences of a step over the paged cache. q [tokens, heads, head_dim], out [tokens, heads, out_dim],
// heads dense; sequence s owns tokens query_start_loc[s] .. [s + 1] (int32), which are the last ones of its seq_lens[s]
// (int32) keys. block_table [num_seqs, table_stride] int32. window: the most visible keys, including the query's own; 0
// for all. chunked: they begin at a multiple of window. tree: null, or int64 [tokens]: 0 for all tokens of a plain
// sequence. Otherwise the sequence has at most 63 tokens in this step, the nodes of a tree: bit j of a token's word
// says whether the j-th of them is an ancestor or itself. A node attends exactly, to the bit, as if only the keys of
// its path followed the cached ones. value_dim: columns of a value. Without v_cache the values are the first value_dim
// columns of the keys, and q has value_dim columns: the others are in q_rope [tokens, heads, head_dim - value_dim].
// out_dim: how many of the columns of a value out has. A score s = scale * q k becomes softcap * tanh(s / softcap),
// unless softcap is 0. sinks: null, or fp32 [heads]: an extra score for each head, with no value. sink_keys: with a
// window, how many of the first keys all queries also see. sink_q: the queries for these keys, shaped like q [tokens,
// heads, head_dim]; null: q itself. reach: 0, or a query sees up to this many keys before and after its own, where they
// exist, and there is neither window nor tree. first_keys: null, or int32 [num_seqs]: the first key of each sequence
// that any of its queries sees; then there is no window. chosen: null, or the keys that each token reads, as
// `choose_keys` writes them: for each kv head, or with a stride of 0 for all heads together. biases: null, or
// what is added to capped scores, fp32. bias_reach 0: slopes [heads], for slope * (position of the key - position of the
// query), where a query counts the keys that it sees for its position on sink_keys; without reach. Else tables [heads, 1
// + 2 * bias_reach], by that distance, from -bias_reach on; greater ones count as bias_reach; without sink_keys.
#define KVIK_ARGS_attention(P, I, F)                                                     \
    P(q) I(q_stride) P(q_rope) I(q_rope_stride) I(value_dim) P(k_cache) P(v_cache) P(k_scales) P(v_scales) P(block_table)        \
    I(table_stride) P(query_start_loc) P(seq_lens) I(num_seqs) I(heads) I(kv_heads)      \
    I(head_dim) I(block_size) I(window) I(chunked) I(reach) P(tree) F(scale) F(softcap) P(sinks) P(biases) I(bias_reach) \
    I(sink_keys) P(sink_q) I(sink_q_stride) P(first_keys) P(chosen)               \
    I(chosen_stride) I(chosen_head_stride) P(out) I(out_stride) I(out_dim)                                     \
    I(dtype) I(kv_dtype)

// y [rows, outputs] = act(x W^T + bias) + residual. weight, scales, zeros as `pack_matrix` laid them
// out. group: inputs that share a scale, 0: all of them. order: null, or int32 [inputs]: input i of W
// is column order[i] of x. outputs counts rows of W; an odd activation writes outputs / 2 columns, and the
// bias of its other half is bias_pair numbers after the bias of its gate. bias fp32; bias and residual may be
// null; residual has the dtype of x. fp8_x: `Fp8Activations`; x_scale fp32 [1], only with kStaticX.
#define KVIK_ARGS_linear(P, I, F)                                                        \
    P(x) I(x_stride) I(rows) P(weight) P(scales) P(zeros) I(kind) I(inputs) I(outputs)   \
    I(group) P(order) I(activation) P(bias) I(bias_pair) P(residual) I(residual_stride)  \
    P(y) I(y_stride) I(dtype) I(out_dtype) I(fp8_x) P(x_scale)

// y [rows, heads, outputs]: for each head, x [rows, heads, inputs] times the head's own float matrix. Strides are
// given for tokens and heads; y is dense. weight: a packed matrix of heads * head_rows rows; head_rows is a
// multiple of 32, and only the first `outputs` rows of a head count.
#define KVIK_ARGS_linear_each(P, I, F)                                                   \
    P(x) I(x_stride) I(x_head_stride) I(rows) I(heads) P(weight) I(kind) I(inputs)       \
    I(outputs) I(head_rows) P(y) I(dtype)

// ids [rows, active] int64 and weights [rows, active] fp32: the experts of each row of logits [rows, experts]
// fp32, best first; the lower id wins a tie. scores: `Scores`; `correction` fp32 [experts], or null, is
// added only for the choice. groups > 1: experts are chosen only from the kept_groups best of equal-sized groups,
// ranked by their best expert or their two_of_group best. normalise: weights of a row sum to `scale`; else they are
// scores times `scale`, or where the scores are logits as `Router` says, with its jitter. each_scale: null, or fp32
// [experts]: a final factor for the weights of each expert. given: null, or the ids, int64 [rows, active]. zero: as many
// of the last experts return their input; their ids become -1, and ids and weights have a further column, -1 and the sum
// of the weights of those that were chosen; 0: there are none, and no such column.
#define KVIK_ARGS_route(P, I, F)                                                         \
    P(logits) I(stride) I(rows) I(experts) I(active) I(scores) P(correction) I(groups)   \
    I(kept_groups) I(two_of_group) I(normalise) F(scale) F(jitter) P(each_scale)         \
    P(given) I(zero) P(ids) P(weights)

// y [rows, outputs] = residual + the sum over a row's experts, in ascending order, of weight * down(act(up(x))). ids,
// weights as `route` makes them; no expert twice in a row; an id below 0 is no expert; weights null: all 1.
// weigh_inputs: x is multiplied by the weight, and rounded to its dtype, instead of the output of down. up, down:
// `ExpertMatrix` [count], all of one kind; the biases of gate and up are bias_pair apart. residual (or null) and y have
// the dtype of x, and may be the same. part 0: everything. Otherwise made [rows * active, ..], of the dtype of x, holds
// the intermediate activations, ordered by expert, then row: part 1 computes `inner` columns of made from `inputs`
// columns of x; part 2 `outputs` columns of y from `inner` of made. Or up and down have only `owned` of `count`
// experts, from `first` on: part 3 writes their unweighted outputs to y [rows * active, outputs] fp32, ordered by
// expert, then row; part 4 sums the outputs that all put in `made`.
#define KVIK_ARGS_experts(P, I, F)                                                       \
    P(x) I(x_stride) I(rows) P(ids) P(weights) I(weigh_inputs) I(active) I(count)        \
    I(first) I(owned) P(up) P(down) I(inputs) I(inner) I(outputs) I(activation)          \
    I(bias_pair) I(up_kind) I(up_group) I(up_fp8_x) I(down_kind) I(down_group) I(down_fp8_x) P(residual) I(residual_stride)  \
    I(part) P(made) I(made_stride) P(y) I(y_stride) I(dtype)

// Packs rows [first, first + count) of a weight [outputs, inputs] into the packed weight. values:
// fp32 or bf16 (value_dtype), int8, E4M3, or two 4-bit values to a byte; scales fp32 [count, groups],
// or [count] without groups, uint8 for kMatrixMxfp4; zeros: null, uint8 [count, groups], or for
// kMatrixI4Min the minima, fp32.
// paired: the matrix is gate and up for an activation that multiplies them.
#define KVIK_ARGS_pack_matrix(P, I, F)                                                   \
    P(values) I(values_stride) P(scales) P(zeros) I(first) I(count) I(kind) I(inputs)    \
    I(outputs) I(group) I(paired) I(value_dtype) P(weight) P(packed_scales) P(packed_zeros)

// out [rows, inputs] = rows `ids` (int64) of a matrix, dequantised; order as for `linear`. Only rows [first,
// first + outputs) of the matrix are packed here; a row of out whose id is outside them is left unchanged.
#define KVIK_ARGS_matrix_rows(P, I, F)                                                   \
    P(weight) P(scales) P(zeros) I(kind) I(inputs) I(first) I(outputs) I(group) P(order) \
    P(ids) P(out) I(out_stride) I(rows) I(dtype)

// top [rows] fp32 and ids [rows] int64: the largest of each row; the first wins a tie. NaN anywhere in a
// row makes its top NaN.
#define KVIK_ARGS_largest(P, I, F) P(logits) I(logits_stride) I(rows) I(vocab) P(top) P(ids)

// Penalises, in place, some rows of logits [.., vocab] fp32 for tokens already seen: in_prompt bool and counts int32
// [.., vocab], whose row `seen` gives. rows and seen int64, the penalties fp32: [count] each.
#define KVIK_ARGS_penalize(P, I, F)                                                      \
    P(logits) I(logits_stride) I(vocab) I(count) P(rows) P(seen) P(repetition) P(frequency)     \
    P(presence) P(in_prompt) P(counts) I(seen_stride)

// Sets logit i of some rows of logits [.., vocab] fp32 to -inf where bit i % 32 of word i // 32 is not set. rows
// int64 [count], words int32 [count, ..].
#define KVIK_ARGS_mask(P, I, F)                                                          \
    P(logits) I(logits_stride) I(vocab) I(count) P(rows) P(words) I(words_stride)

// ids [rows] int64: a token drawn for each row, among those that top_k, top_p and min_p keep in this
// order, by inverse CDF. For each row: temperature fp32, uniforms fp64 in [0, 1), top_k int64 at least 1
// (vocab: off), top_p fp64 (1: off), min_p fp32 (0: off); the rules may be null.
#define KVIK_ARGS_draw(P, I, F)                                                          \
    P(logits) I(logits_stride) I(rows) I(vocab) P(temperature) P(uniforms) P(top_k) P(top_p)    \
    P(min_p) P(ids)

// shares [rows, vocab] fp32: the probability that `draw` draws each token.
#define KVIK_ARGS_probabilities(P, I, F)                                                 \
    P(logits) I(logits_stride) I(rows) I(vocab) P(temperature) P(top_k) P(top_p) P(min_p)       \
    P(shares) I(shares_stride)

// Waits for the other processes of a group: `Barrier` (group.hpp).
#define KVIK_ARGS_exchange(P, I, F) P(barrier) I(rank)

// The machine's limits, for benchmarks: read `bytes` at `data`; `steps` rounds of multiply-add that
// stay in registers (result: operations done by the team, fp64).
#define KVIK_ARGS_read_memory(P, I, F) P(data) I(bytes) P(result)
#define KVIK_ARGS_peak_f32(P, I, F) I(steps) P(result)
#define KVIK_ARGS_peak_bf16(P, I, F) I(steps) P(result)
#define KVIK_ARGS_peak_i8(P, I, F) I(steps) P(result)

#define KVIK_KERNELS(K)                                                                  \
    K(rms_norm) K(layer_norm) K(activate) K(xielu) K(scaled) K(clipped) K(softcap)       \
    K(add) K(rescaled) K(activate_top) K(weighted_sums) K(stream_weights)                \
    K(gather_rows) K(rotations) K(rotary) K(gated) K(causal_conv) K(recurrence)          \
    K(store_kv) K(store_latent) K(load_kv) K(move_kv) K(keep_queries) K(store_index)     \
    K(choose_keys) K(store_tokens) K(make_entries) K(attend_entries) K(attention)        \
    K(linear) K(linear_each) K(route) K(experts)                                         \
    K(pack_matrix) K(matrix_rows) K(largest)                                             \
    K(penalize) K(mask) K(draw) K(probabilities) K(exchange)                             \
    K(read_memory) K(peak_f32) K(peak_bf16) K(peak_i8)

#define KVIK_POINTER(name) void* name;
#define KVIK_INTEGER(name) int64_t name;
#define KVIK_FLOAT(name) double name;
#define KVIK_STRUCT(kernel)                                                              \
    struct kernel##_args {                                                               \
        KVIK_ARGS_##kernel(KVIK_POINTER, KVIK_INTEGER, KVIK_FLOAT)                       \
    };
KVIK_KERNELS(KVIK_STRUCT)
#undef KVIK_POINTER
#undef KVIK_INTEGER
#undef KVIK_FLOAT
#undef KVIK_STRUCT

}  // namespace kvik
