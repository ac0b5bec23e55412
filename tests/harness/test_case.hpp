// One test case: a configuration, how its inputs are drawn, and the options of its calls.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ferry/exchange.hpp"
#include "harness/random.hpp"

namespace ferry::contract {

// How tokens choose experts.
enum class Routing {
  uniform,
  skewed,      // a few experts get most tokens
  one_expert,  // every token of every rank goes to one expert
  one_rank,    // every token goes to experts of one rank
};

// Which weights combine multiplies rows with.
enum class WeightsFrom {
  none,
  row_weights,   // CombineOptions::row_weights, received with the rows
  topk_weights,  // CombineOptions::topk_weights, given on the source rank
};

struct TestCase {
  std::uint64_t seed = 1;
  int ranks = 2;
  std::vector<int> nodes;  // node of each rank, simulated; empty: those that the kind of ranks has
  Config config{.experts = 8, .top_k = 2, .hidden = 64, .max_tokens = 8, .check_calls = false};

  // Inputs.
  Routing routing = Routing::uniform;
  double masked = 0;         // probability that a slot is -1
  double masked_tokens = 0;  // probability that all slots of a token are -1
  double bad_ids = 0;        // probability that a slot names an expert that does not exist
  bool duplicates = false;   // a token may choose an expert more than once
  bool full = false;         // every rank has max_tokens; otherwise a random number up to it
  std::vector<int> tokens;   // tokens of each rank; empty: random
  IdType ids = IdType::int32;
  DType type = DType::bf16;   // of the tokens' values
  float global_scale = 1;     // of nvfp4
  bool input_scales = false;  // rows are encoded where they arrive, with a scale of their expert
  bool own_format =
      false;              // the exchange's format is own_format(), and config.format that of the encoded rows
  bool any_bits = false;  // values are random bits: NaN, infinities and denormals included
  bool weighted = true;
  std::int64_t input_gap = 0;  // unused bytes between rows

  // Dispatch.
  bool split_phases = false;
  bool caller_memory = true;  // outputs go to memory of the test; otherwise to the lane's
  bool apply_weights = false;
  bool dots = false;  // DispatchOptions::dot_rows is given
  int lane = 0;
  int layer = 0;
  int sm_limit = 0;  // of device backends; for combine too

  // Combine.
  Reduction reduction = Reduction::partial;
  DType outputs = DType::bf16;
  DType result = DType::bf16;
  WeightsFrom weights_from = WeightsFrom::row_weights;
  bool row_values = false;      // CombineOptions::row_values is given: one fp32 per row
  bool shared_outputs = false;  // CombineOptions::shared_outputs is given, if there are shared experts
  std::int64_t output_gap = 0;
  std::int64_t result_gap = 0;
};

std::string describe(const TestCase& c);

// True if calls take pointers to device memory.
constexpr bool on_device(BackendKind backend, MemoryKind memory) {
  return has_kernels(backend) || memory == MemoryKind::device;
}
inline bool on_device(const Config& config) {
  return on_device(config.backend, config.memory);
}

// The configuration of the case's exchange. TestCase::config has the format of the received rows; that of the
// exchange is with input_scales the format of the tokens, which travel as they are, and with own_format the
// registered one.
Config exchange_config(const TestCase& c);

// The type of a format's input values: its own type, or bf16 for fp8 and raw.
DType natural_type(const Format& format);

enum class CaseSize {
  small,
  many_routes,  // some rank has at least 1024 routes
  wide,         // at least 2048 columns
};

TestCase draw_case(std::uint64_t seed, CaseSize size);

Placement draw_placement(Random& random, int experts, int ranks);
// A placement of which about half of the experts have replicas; some ranks may hold none.
Placement draw_replicas(Random& random, int experts, int ranks);
// Replaces the case's placement by one of draw_replicas().
void give_replicas(Random& random, TestCase& c);

}  // namespace ferry::contract
