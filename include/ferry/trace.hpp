// Routing traces: which experts a router chose for each token, with its weights. Recorded or synthesised.
//
// Shapes: [layers, tokens, K] with E experts, row-major. All functions are local host code without threads
// and block on files only. Errors: UsageError for a name, specification, argument or file content that is
// wrong, with file, offset, expected and found numbers; SystemError for what the operating system refuses.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ferry/placement.hpp"

namespace ferry {

/// One routing trace. The same tokens, in the same order, pass through every layer.
struct Trace {
  std::string name{};    ///< the name it was opened by, such as `synth:decode` or `olmoe_1b_7b/github`
  std::string source{};  ///< its origin, in words: recorded or synthesised, recipe, seed, assumptions

  int layers = 0;
  std::int64_t tokens = 0;  ///< tokens of one layer
  int top_k = 0;            ///< K
  int experts = 0;          ///< E

  std::vector<std::int32_t> ids{};  ///< [layers, tokens, K], each in [-1, E); -1 is a masked slot
  std::vector<float> weights{};     ///< [layers, tokens, K]; empty: not recorded, each is 1 / K
  std::vector<std::int64_t> sequence_lengths{};  ///< tokens of each sequence, in order; empty: not known

  /// Ids of one layer, [tokens, K].
  std::span<const std::int32_t> layer_ids(int layer) const;
  /// Weights of one layer, [tokens, K]; empty if `weights` is.
  std::span<const float> layer_weights(int layer) const;
};

/// The distribution from which a synthetic trace is drawn.
///
/// - `decode`, `prefill`: skewed like a recorded model's decode or prefill. The experts' popularity is
///   lognormal, 1 % of the experts are hot, and neighbouring tokens share experts.
/// - `uniform`: every set of K experts is equally likely, and tokens are independent.
enum class Workload : int { decode = 0, prefill = 1, uniform = 2 };

/// The specification of a synthetic trace. Equal specifications give equal traces, to the bit, on every
/// machine. A layer does not depend on the number of layers, nor a token on the number of tokens.
struct SynthSpec {
  Workload workload = Workload::decode;
  bool grouped = false;  ///< group-limited routing: experts of a token are in at most 4 of 8 groups
  int experts = 256;
  int top_k = 8;
  std::int64_t tokens = 4096;  ///< tokens of one layer
  int layers = 4;
  std::uint64_t seed = 1;
  /// Standard deviation of ln(factor), where each of 8 blocks of neighbouring experts has its popularity
  /// multiplied by a factor of its own. 0.3 gives the busiest of 8 ranks the load that recordings show. Not
  /// used by `uniform`.
  double block_sigma = 0.3;
};

/// Reads a specification: `synth:decode`, `synth:prefill` or `synth:uniform`, each with or without
/// `-grouped`, and optionally `:key=value,...` with the keys experts, top_k, tokens, layers, seed,
/// block_sigma. Keys that are not given have their value in `defaults`. Example:
/// `synth:prefill-grouped:experts=128,tokens=8192,seed=7`.
SynthSpec parse_synth_spec(const std::string& text, const SynthSpec& defaults = {});

/// Draws a trace. A token's ids are distinct and sorted by weight, highest first. Weights are positive and
/// sum to 1 within rounding: a softmax over the scores of the chosen experts. All tokens form one sequence.
Trace synthesise(const SynthSpec& spec);

struct TraceOptions {
  std::string directory{};  ///< the folder of recorded traces; empty: environment variable FERRY_TRACES
  /// E of a recorded trace. 0: known for its folder, or the least power of two above its ids.
  int experts = 0;
  SynthSpec synth{};  ///< defaults for a `synth:` name
};

/// Opens a trace by its name:
/// - `synth:...`: a specification, see parse_synth_spec()
/// - `folder/name`: recorded ids in `<directory>/folder/name.ids.npy`, or else `name.exact_top8.npy`
/// - a path that ends in `.npy`: recorded ids in that file
///
/// Ids are integers [layers, tokens, K], or [tokens, K] for one layer. Beside `x.ids.npy`, the files
/// `x.weights.npy` (fp16 or fp32, same shape) and `x.seqlens.npy` (integers [sequences], whose sum is tokens)
/// are read if they exist. Without recorded weights every weight is 1 / K, and Trace::source says so. Takes
/// at most four times the files' size and 64 MiB of memory.
Trace open_trace(const std::string& name, const TraceOptions& options = {});

/// Writes `<prefix>.ids.npy`, `<prefix>.weights.npy` and, if sequence lengths are known,
/// `<prefix>.seqlens.npy`. Replaces existing files. open_trace("<prefix>.ids.npy") reads them back.
void save_trace(const Trace& trace, const std::string& prefix);

/// Selects the tokens of a trace that one rank dispatches in one step.
///
/// A step takes ranks * tokens_per_rank consecutive tokens through the model, the same in every layer. Rank r
/// gets the r-th block of tokens_per_rank tokens. The next step continues where the last one ended, and the
/// first token of the trace follows the last one.
///
/// A caller that replays one call after another uses layer = c % trace.layers and step = c / trace.layers for
/// call c.
struct PartitionSpec {
  int layer = 0;
  int rank = 0;
  int ranks = 1;
  std::int64_t tokens_per_rank = 0;
  std::int64_t step = 0;
};

/// One rank's part of a trace.
struct TracePartition {
  std::int64_t first_token = 0;     ///< number of its first token in the trace
  std::vector<std::int32_t> ids{};  ///< [tokens_per_rank, K]
  std::vector<float> weights{};     ///< [tokens_per_rank, K]
};

/// Returns a rank's part of the trace. A pure function: each rank can compute its own.
/// @throws UsageError  no such layer or rank, or a negative number
TracePartition partition(const Trace& trace, const PartitionSpec& spec);

/// How unevenly the experts are loaded. The load of an expert is the number of its routes; `max` to `min` are
/// loads divided by the mean load of all experts.
struct LoadStatistics {
  std::int64_t routes = 0;  ///< sum of all loads
  double max = 0;
  /// Percentile p of n ascending values: the value at index round(p/100 * (n-1)), halves rounded up.
  double p99 = 0;
  double p90 = 0;
  double p50 = 0;
  double p10 = 0;
  double min = 0;
  double sigma_ln =
      0;            ///< standard deviation (divided by n) of ln(load), over the experts with a load above 0
  double gini = 0;  ///< sum over ascending loads x_i, i = 1..n, of (2i - n - 1) x_i / (n * sum of x)
  int idle = 0;     ///< experts without a route
};

/// Routes to each expert in one layer, [E]. Masked slots are not counted.
std::vector<std::int64_t> expert_counts(const Trace& trace, int layer);

/// Routes to each rank, [R], from `counts` [E].
/// @throws UsageError  a placement with replicas: which one a route takes, `counts` do not say
std::vector<std::int64_t> rank_counts(std::span<const std::int64_t> counts, const Placement& placement);

/// Routes to each rank in one layer, [R], if the ranks dispatch the whole trace as partition() cuts it.
/// Routes to an expert with replicas take the one that an exchange sends them to.
/// @param tokens_per_rank  of a step; 0: the trace is one step
std::vector<std::int64_t> rank_counts(const Trace& trace, int layer, const Placement& placement,
                                      std::int64_t tokens_per_rank = 0);

/// Statistics of `counts` [E].
/// @throws UsageError  no counts, a negative count, or a sum of 0
LoadStatistics load_statistics(std::span<const std::int64_t> counts);

/// The median over layers of each figure by itself (for an even number, the mean of the middle two).
LoadStatistics median(std::span<const LoadStatistics> layers);

/// Largest count / mean count: of the experts, or with rank_counts() of the ranks.
double busiest(std::span<const std::int64_t> counts);

/// Mean number of experts that two adjacent tokens of a sequence share; 0 if there are no such pairs.
double adjacent_overlap(const Trace& trace, int layer);

/// Mean number of ranks to which a token is sent, if the trace is dispatched in one step.
double distinct_ranks(const Trace& trace, int layer, const Placement& placement);

}  // namespace ferry
