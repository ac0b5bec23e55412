// The configuration of an exchange, and how much memory it takes.
#pragma once

#include <cstdint>

#include "ferry/format.hpp"
#include "ferry/placement.hpp"
#include "ferry/types.hpp"

namespace ferry {

// The same on every rank: construction compares it and names the first difference.
struct Config {
  int experts = 0;     // E
  int top_k = 0;       // K, 1 to 32
  int hidden = 0;      // H, columns of a token; raw rows do not use it for dispatch
  int max_tokens = 0;  // T, most tokens a rank may have in a call

  BackendKind backend = BackendKind::cpu;
  Placement placement{};  // empty: Placement::blocks(experts, ranks)

  Layout layout = Layout::expert_major;
  int alignment = 1;  // expert_major: experts start at multiples of it; expert_padded: see docs/contract.md
  std::int64_t capacity = 0;  // rows a rank can receive (expert_padded: rows an expert); 0: any routing fits
  bool repeats = false;       // the default capacity also holds tokens that list an expert more than once
  bool zero_padding = false;  // padding rows become zero instead of being left alone

  Format format = Format::bf16();            // the largest message of a dispatch, and the default of calls
  DType combine_type = DType::bf16;          // type of the experts' rows that combine carries
  Reduction reduction = Reduction::partial;  // the largest combine (exact and unreduced: T*K rows of staging)

  int lanes = 1;
  double deadline = 30.0;           // seconds a wait may last
  bool own_receive_buffers = true;  // false: every dispatch brings memory for its arrivals
  bool check_calls = true;          // host backends call check() at the end of every call
};

// Bytes of one rank's exchange, by what they are for.
struct Sizes {
  std::int64_t dispatch_staging = 0;  // symmetric: 2 * lanes * R*T messages
  std::int64_t combine_staging = 0;   // symmetric: 2 * lanes * T*K rows (exact, unreduced) or T*min(K,R) rows
  std::int64_t signals = 0;           // symmetric: flags, counts, refusals
  std::int64_t results = 0;           // owned outputs, all lanes
  std::int64_t plans = 0;             // lanes' plans and working memory
  std::int64_t total() const { return dispatch_staging + combine_staging + signals + results + plans; }
};

// Exact: what an exchange of this configuration maps on one rank of `ranks`. Throws what construction would
// throw for a bad configuration, and UsageError for a rank outside [0, ranks). Needs no group and allocates
// nothing.
Sizes size_of(const Config& config, int ranks, int rank = 0);

// Rows a rank can receive under this configuration (expert_padded: rows of one expert).
std::int64_t capacity_of(const Config& config, int ranks, int rank = 0);

// Bytes of a plan's storage: the same on every rank.
std::int64_t plan_bytes(const Config& config, int ranks);

}  // namespace ferry
