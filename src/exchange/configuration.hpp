// A configuration made complete and checked, and the shapes that follow from it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ferry/config.hpp"
#include "ferry/error.hpp"
#include "ferry/group.hpp"
#include "layout/exchange_layout.hpp"
#include "layout/plan_layout.hpp"

namespace ferry {

// What can be checked before it is known how many ranks there will be: sizes, types, formats. Throws
// UsageError.
void check_alone(const Config& config);

// Fills in defaults and checks everything that one rank can check alone. Throws UsageError or
// UnsupportedError.
Config complete(const Config& config, int ranks);

void check_rank(int rank, int ranks);  // UsageError unless `rank` is one of `ranks`

// Collective: completes this rank's configuration and compares it with the others'. Every rank throws when
// one refuses its own or when they differ: a UsageError that names the first difference.
Config agree(const Rank& rank, const Config& config);

// Collective: takes this rank's part in agree() when it has no configuration to compare.
void refuse_configuration(const Rank& rank, const Error& error);

// For a complete configuration:
PlanShape plan_shape(const Config& config);
ExchangeShape exchange_shape(const Config& config, std::int64_t signal_bytes);
// What travels beside a call's rows: three words about optional arguments, two about chunks, then (dispatch)
// int32 counts [E] and tokens [R].
inline constexpr int kNoteWords = 5;
std::int64_t note_bytes(const Config& config);
// Rows on a rank, and its groups (rank_major: the ranks).
std::int64_t row_capacity(const Config& config, int rank);  // all groups together
std::int64_t group_capacity(const Config& config,
                            int rank);  // expert_padded: of one expert; else row_capacity
int groups_of(const Config& config, int rank);
// Of everything that decides the place of a row: plans are exchanged between exchanges that agree on it.
std::uint64_t row_order_hash(const Config& config);

}  // namespace ferry
