// Makes an exchange's configuration from the program's options and a trace, and computes sizes that follow.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ferry/exchange.hpp"
#include "ferry/trace.hpp"

namespace ferry::app {

// Call before CUDA starts. In two hops kernels of ranks that share a GPU wait for one another, several of a
// stream at a time, so each stream needs a queue of its own.
void prepare_for_hops(const std::string& name);
// Refuses raw formats: the program's experts need values to compute with.
Format format_of(const std::string& name);

// Whether dispatches of the format take a scale g of the call: nvfp4 without a scale for each token.
bool takes_global_scale(const Format& format);
// Throws UsageError if g is given and not positive and finite, or if none of the formats takes it.
void check_global_scale(std::optional<double> g, const std::vector<std::string>& formats);

// Throws UsageError for a reduction that rank_major does not have.
void check_reduction(Layout layout, Reduction reduction);

// The type of a format's values before quantisation. Results have it too.
DType token_type(const Format& format);

// Long, because on few cores a rank may spend minutes in its checks while its peers wait.
inline constexpr double kHostDeadlineSeconds = 300.0;

struct ConfigOptions {
  BackendKind backend = BackendKind::cpu;
  EngineKind engine = EngineKind::automatic;
  MemoryKind memory = MemoryKind::automatic;
  int ranks = 0;
  int tokens = 0;  // at most, per rank and call
  int hidden = 0;
  Layout layout = Layout::expert_major;
  Format format = Format::bf16();
  Reduction reduction = Reduction::partial;
  ReductionLevel reduction_level = ReductionLevel::automatic;
  Hops hops = Hops::automatic;
  int alignment = 1;
  int shared_experts = 0;
  Input input = Input::own;
  Transfer transfer = Transfer::routed;
  double deadline_seconds = 0;
};

// The configuration for the experts of `trace`, in equal blocks over the ranks. Combine carries token_type().
// Throws what constructing the exchange would throw.
Config make_config(const ConfigOptions& options, const Trace& trace);

// The most rows that one dispatch can deliver, over all groups.
std::int64_t received_row_capacity(const Exchange& exchange);

// Whether a rank's arrays are on a GPU.
bool on_device(const Config& config);

// Bytes of one received row, scales included.
std::int64_t received_row_bytes(const Config& config);

// Whether combine multiplies the experts' rows by row weights. Otherwise the experts have applied them
// (rank_major) or the caller will (unreduced).
bool combine_applies_weights(Layout layout, Reduction reduction);

}  // namespace ferry::app
