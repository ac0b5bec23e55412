// Routing traces: which experts a router chose, token by token, with its weights. Recorded or synthesised.
//
// Everything here is host code without threads; nothing blocks except on files. Errors: UsageError for a bad
// name, specification or file content (naming file, offset, expected and found numbers), SystemError for what
// the operating system refuses.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ferry/placement.hpp"

namespace ferry {

// One routing trace. The same tokens, in the same order, pass through every layer.
struct Trace {
  std::string name{};    // what was asked for, such as `synth:decode` or `olmoe_1b_7b/github`
  std::string source{};  // where it comes from, in words: recorded or synthesised, recipe, seed, assumptions

  int layers = 0;
  std::int64_t tokens = 0;  // of one layer
  int top_k = 0;            // K
  int experts = 0;          // E

  std::vector<std::int32_t> ids{};  // [layers][tokens][top_k], each in [-1, experts); -1 is a masked slot
  std::vector<float> weights{};     // [layers][tokens][top_k]
  std::vector<std::int64_t> sequence_lengths{};  // tokens of each sequence, in order; empty: not known

  std::span<const std::int32_t> layer_ids(int layer) const;  // [tokens][top_k]
  std::span<const float> layer_weights(int layer) const;     // [tokens][top_k]
};

// What a synthesised trace is drawn from.
//   decode, prefill  skewed like a recorded model's decode or prefill: lognormal popularity of the experts,
//                    1 % of them hot, neighbouring tokens that share experts
//   uniform          every set of top_k experts equally likely, tokens independent of one another
enum class Workload : int { decode = 0, prefill = 1, uniform = 2 };

// A synthesised trace, exactly: the same values give the same trace to the bit on every machine. A layer does
// not depend on how many layers follow, nor a token on how many tokens follow.
struct SynthSpec {
  Workload workload = Workload::decode;
  bool grouped = false;  // group-limited: a token's experts lie in at most 4 of 8 groups of neighbours
  int experts = 256;
  int top_k = 8;
  std::int64_t tokens = 4096;  // of one layer
  int layers = 4;
  std::uint64_t seed = 1;
  // Standard deviation of ln(factor) by which each of 8 blocks of neighbouring experts is more or less
  // popular as a whole. It brings the busiest of 8 ranks to what recordings show. Not used by `uniform`.
  double block_sigma = 0.3;
};

// Reads `synth:decode`, `synth:prefill`, `synth:uniform`, each also with `-grouped` (`synth:decode-grouped`),
// followed by nothing or by `:key=value,...` with the keys experts, top_k, tokens, layers, seed, block_sigma.
// Keys not given keep their value in `defaults`. Example: synth:prefill:experts=128,tokens=8192,seed=7
SynthSpec parse_synth_spec(const std::string& text, const SynthSpec& defaults = {});

// Draws the trace. Ids of a token are distinct and stand in the router's order, highest weight first. Weights
// are positive and renormalised: a softmax over the scores of the chosen experts, so they sum to 1 within
// rounding. Sequence lengths: one sequence of all tokens.
Trace synthesise(const SynthSpec& spec);

struct TraceOptions {
  std::string directory{};  // holds the folders of recorded traces; empty: environment variable FERRY_TRACES
  int experts = 0;    // of a recorded trace; 0: known from its folder, or least power of two above its ids
  SynthSpec synth{};  // what a `synth:` name leaves open
};

// Opens a trace by its name:
//   synth:...         a specification, see parse_synth_spec
//   folder/name       <directory>/folder/name.ids.npy, or else name.exact_top8.npy: recorded ids
//   path ending .npy  recorded ids at that path
// Ids: integers [layers][tokens][top_k], or [tokens][top_k] for one layer. Beside `x.ids.npy`,
// `x.weights.npy` (fp16 or fp32, same shape) and `x.seqlens.npy` (integers [sequences], sum = tokens) are
// read if they exist; without recorded weights every weight is 1 / top_k, and Trace::source says so.
Trace open_trace(const std::string& name, const TraceOptions& options = {});

// Writes <prefix>.ids.npy, <prefix>.weights.npy and, if lengths are known, <prefix>.seqlens.npy.
// open_trace("<prefix>.ids.npy") reads them back. Files that exist are replaced.
void save_trace(const Trace& trace, const std::string& prefix);

// Which part of a trace one rank plays in one call.
//
// A step is one pass through the model by ranks * tokens_per_rank tokens, which are the same in every layer.
// Rank r plays the r-th block of tokens_per_rank neighbouring tokens of the step; the next step goes on where
// the last one ended; after the last token of the trace comes the first. A caller that plays one call after
// another takes, for call c, layer = c % trace.layers and step = c / trace.layers.
struct ShareOf {
  int layer = 0;
  int rank = 0;
  int ranks = 1;
  std::int64_t tokens_per_rank = 0;
  std::int64_t step = 0;
};

struct Share {
  std::int64_t first_token = 0;     // number in the trace of the share's first token
  std::vector<std::int32_t> ids{};  // [tokens_per_rank][top_k]
  std::vector<float> weights{};     // [tokens_per_rank][top_k]
};

// The share, a pure function of its arguments: every rank can ask for its own. Throws UsageError for a layer
// or rank that does not exist and for negative numbers.
Share share(const Trace& trace, const ShareOf& of);

// How unevenly experts are chosen. The load of an expert is the number of routes to it; `max` to `min` are
// loads divided by the mean load over all experts.
struct LoadStatistics {
  std::int64_t routes = 0;  // sum of all loads
  double max = 0;
  // Percentile p of n ascending values: the one at index round(p/100 * (n-1)), halves rounded up.
  double p99 = 0;
  double p90 = 0;
  double p50 = 0;
  double p10 = 0;
  double min = 0;
  double sigma_ln = 0;  // standard deviation (divided by n) of ln(load) over the experts with a load above 0
  double gini = 0;      // sum over ascending loads x_i, i = 1..n, of (2i - n - 1) x_i / (n * sum of x)
  int idle = 0;         // experts without a route
};

// Routes to each expert in a layer, [experts]. Masked slots are not counted.
std::vector<std::int64_t> expert_counts(const Trace& trace, int layer);

// Routes to each rank, [ranks], for counts [experts].
std::vector<std::int64_t> rank_counts(std::span<const std::int64_t> counts, const Placement& placement);

// Throws UsageError for no counts, a negative one, or a sum of 0.
LoadStatistics load_statistics(std::span<const std::int64_t> counts);

// Each figure by itself: its median over layers (the mean of the middle two for an even number).
LoadStatistics median(std::span<const LoadStatistics> layers);

// Largest count / mean count: of the experts, or with rank_counts() of the ranks.
double busiest(std::span<const std::int64_t> counts);

// How many experts two neighbouring tokens of a sequence share, mean over all such pairs; 0 if there is no
// pair.
double adjacent_overlap(const Trace& trace, int layer);

// On how many ranks the experts of a token lie, mean over tokens.
double distinct_ranks(const Trace& trace, int layer, const Placement& placement);

}  // namespace ferry
