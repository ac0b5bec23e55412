// One configuration and one way of calling it, drawn or written down.
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
  skewed,      // a few experts get most of it
  one_expert,  // every token of every rank to one expert
  one_rank,    // every token to the experts of one rank
};

enum class WeightsFrom { nowhere, rows, home };

struct Case {
  std::uint64_t seed = 1;
  int ranks = 2;
  Config config{.experts = 8, .top_k = 2, .hidden = 64, .max_tokens = 8, .check_calls = false};

  // Inputs.
  Routing routing = Routing::uniform;
  double masked = 0;         // share of slots that are -1
  double masked_tokens = 0;  // share of tokens without any expert
  double bad_ids = 0;        // share of slots with an id that does not exist
  bool duplicates = false;   // a token may list an expert more than once
  bool full = false;         // every rank brings max_tokens, otherwise any number up to it
  std::vector<int> tokens;   // of each rank, if not drawn
  IdType ids = IdType::int32;
  DType type = DType::bf16;  // of the values
  bool any_bits = false;     // values are random bits: NaN, infinities, denormals
  bool weighted = true;
  std::int64_t input_gap = 0;  // bytes between rows

  // Dispatch.
  bool split = false;
  bool caller_memory = true;
  bool apply_weights = false;
  bool dots = false;
  int lane = 0;
  int sm_limit = 0;  // of a device; also combine's

  // Combine.
  Reduction reduction = Reduction::partial;
  DType outputs = DType::bf16;
  DType result = DType::bf16;
  WeightsFrom weights_from = WeightsFrom::rows;
  bool values = false;  // one fp32 a row comes home
  std::int64_t output_gap = 0;
  std::int64_t result_gap = 0;
};

std::string describe(const Case& c);

// The type in which values of a format enter: its own, or bf16 for fp8 and raw.
DType natural_type(const Format& format);

// What random cases are made to cover.
enum class CaseSize {
  small,
  many_routes,  // some rank has at least 1024 routes
  wide,         // at least 2048 columns
};

Case draw_case(std::uint64_t seed, CaseSize size);

Placement draw_placement(Random& random, int experts, int ranks);

}  // namespace ferry::contract
