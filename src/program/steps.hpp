// Facts about the kinds of steps and how names may look, shared by the check, the text form and the
// evaluator.
#pragma once

#include <array>
#include <span>
#include <string_view>

#include "ferry/program.hpp"

namespace ferry {

inline constexpr int kValueKinds = 9, kStepKinds = 13;

// Most steps of a text, and of a program in micro-batches: bounds the memory that a file from elsewhere can
// take.
inline constexpr std::size_t kMostSteps = std::size_t{1} << 17;

// A set of kinds.
constexpr unsigned kinds() {
  return 0;
}
template <class... Rest>
constexpr unsigned kinds(ValueKind first, Rest... rest) {
  return 1u << static_cast<int>(first) | kinds(rest...);
}
constexpr bool contains(unsigned set, ValueKind kind) {
  return (set & kinds(kind)) != 0;
}

// tokens, ids and weights: a row for each token of this rank.
inline constexpr unsigned kByToken = kinds(ValueKind::tokens, ValueKind::ids, ValueKind::weights);
inline constexpr unsigned kInputKinds = kByToken | kinds(ValueKind::count);
inline constexpr unsigned kCallOutputs = kInputKinds | kinds(ValueKind::outputs);
inline constexpr unsigned kAnyValue =
    kCallOutputs | kinds(ValueKind::received, ValueKind::metadata);  // all but send phases

// The inputs of a kind of step: a set of kinds for each position.
struct StepShape {
  std::array<unsigned, 3> inputs{};
  int required = 0;  // positions after these may stay empty
  int most = 0;      // positions; with `repeats`, any number of the first position's kinds
  bool repeats = false;
  bool has_lane = false;      // it starts a call of a lane
  bool has_exchange = false;  // it works on an exchange, or takes sizes from it
};

const StepShape& shape_of(StepKind kind);

// The phase that follows a send phase; `call` for other steps.
StepKind receive_phase_of(StepKind kind);
bool is_receive_phase(StepKind kind);
bool is_dispatch(StepKind kind);  // dispatch, dispatch_send
bool is_combine(StepKind kind);   // combine, combine_send
bool is_gather(StepKind kind);    // all_gather_v, reduce_scatter_v

// The kind of the value that a step makes, other than `call`. `inputs`: kinds of its inputs, which fit.
ValueKind made_by(StepKind kind, std::span<const ValueKind> inputs);

// Whether `name` is one: a letter or _, then letters, digits, _ and . but no word that starts a line of the
// text.
bool is_name(std::string_view name);

// Fills in the kinds of all values that steps make. Names that nothing has made are left to check().
void fill_in_kinds(Program& program);

// For messages: "tokens, ids or weights".
std::string list_of(unsigned set);

}  // namespace ferry
