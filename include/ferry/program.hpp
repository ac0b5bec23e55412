// Programs: one or several layers as a list of steps over named values, in the order in which the steps run.
//
//   const Program layer = parse_program(R"(
//     program moe
//     input x: tokens
//     input ids: ids
//     input weights: weights
//     rows = dispatch(x, ids, weights)
//     outputs: outputs = call experts(rows)
//     y = combine(outputs, rows, rows)
//     output y
//   )");
//
// ferry/evaluator.hpp runs programs. docs/programs.md defines steps, values and the text form.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/config.hpp"

namespace ferry {

/// The kind of a value of a program.
///
/// - `tokens`: rows of this rank's tokens, [N, H]; also what combine makes
/// - `ids`, `weights`: [N, K]
/// - `received`: a DispatchResult: the received rows and their plan
/// - `outputs`: the experts' outputs, [total, H], a row for each received row
/// - `count`: an int32 of this rank
/// - `metadata`: a StepMetadata
/// - `sent_dispatch`, `sent_combine`: a send phase, which the receive phase takes
enum class ValueKind : int {
  tokens = 0,
  ids = 1,
  weights = 2,
  received = 3,
  outputs = 4,
  count = 5,
  metadata = 6,
  sent_dispatch = 7,
  sent_combine = 8,
};

/// The kind of a step, which decides the kinds of the values that it takes. Each step makes one value; `call`
/// may make several.
///
/// - `dispatch`, `dispatch_send`: (tokens, ids) or (tokens, received), whose plan is used; weights may follow
/// - `combine`, `combine_send`: (outputs, received); weights may follow: `received` for the weights of its
///   rows, `weights` for topk_weights
/// - `dispatch_receive`, `combine_receive`: the value that the send phase made
/// - `metadata`: (count)
/// - `call`: the caller's function, of any values but send phases
/// - `wait`: a value that an exchange made: blocks until it is there and throws what Exchange::synchronize()
///   and Exchange::check() of its lane throw. Makes the same value
/// - `part`: rows [i*N/n, (i+1)*N/n) of tokens, ids or weights, without a copy
/// - `join`: rows of several tokens values, one after the other
/// - `all_gather_v`: (tokens, ids or weights): the rows of all ranks, one rank's after another's
/// - `reduce_scatter_v`: (tokens, like): tokens with a row for each row of all ranks; the ranks' values are
///   added, and each rank gets its own rows of the sum, as many as `like` has or says: tokens, ids, weights
///   or count
enum class StepKind : int {
  dispatch = 0,
  dispatch_send = 1,
  dispatch_receive = 2,
  combine = 3,
  combine_send = 4,
  combine_receive = 5,
  metadata = 6,
  call = 7,
  wait = 8,
  part = 9,
  join = 10,
  all_gather_v = 11,
  reduce_scatter_v = 12,
};

/// Names as they are written above; "unknown" for a value that is not an enumerator. Static strings.
const char* to_string(ValueKind kind);
const char* to_string(StepKind kind);

/// A value that the caller passes, or that a step makes.
struct ProgramName {
  std::string name;  ///< a letter or _, then letters, digits, _ and ., but not program, input or output
  /// Steps other than `call` do not need it: their kind says it. check() ignores it there.
  ValueKind kind = ValueKind::tokens;

  friend bool operator==(const ProgramName&, const ProgramName&) = default;
};

struct ProgramStep {
  StepKind kind = StepKind::call;
  std::vector<std::string> inputs{};
  /// `call`: one or more of kind tokens, ids, weights, outputs or count. Other steps: one.
  std::vector<ProgramName> outputs{};
  std::string function{};  ///< `call`: name of the caller's function
  /// Steps that start a call of an exchange: that exchange. `call`, `part`, `join`: the exchange whose
  /// configuration says how large a row is and how many there may be.
  std::string exchange{};
  int lane = 0;           ///< steps that start a call of an exchange
  int index = 0, of = 1;  ///< `part`: i and n
  /// Exchanges on GPUs: number of the stream that does the step's work, 0: the caller's. On host memory steps
  /// run one after the other, whatever their streams.
  int stream = 0;
  /// dispatch, combine, their send phases: CallOptions::sm_limit.
  int sm_limit = 0;
  /// Values made before, of other streams: on GPUs the step's stream waits for the steps that made them, as
  /// if it took them. On host memory every step comes after those before it.
  std::vector<std::string> after{};

  /// "rows (dispatch)", as errors name the step.
  std::string name() const;
  friend bool operator==(const ProgramStep&, const ProgramStep&) = default;
};

/// A plain value: it may be built field by field or read from text, copied, compared and kept.
struct Program {
  std::string name;
  std::vector<ProgramName> inputs;   ///< of kind tokens, ids, weights or count
  std::vector<ProgramStep> steps;    ///< in the order in which they run
  std::vector<std::string> outputs;  ///< values that the caller receives; no send phases

  friend bool operator==(const Program&, const Program&) = default;
};

/// Local. Says what is wrong with a program, whatever its exchanges are.
///
/// Refuses: names that are no names or are made twice, values used before they are made, cycles, kinds that
/// do not fit, a step on a lane between the phases of a call, phases without partner, received rows and
/// plans used after a later dispatch has overwritten them, a lane or what it received used on two streams.
/// @throws UsageError  names the first step at fault, the value and the remedy
void check(const Program& program);

/// Configurations by the names that the steps give their exchanges; the empty name is that of steps which
/// name none. A single one without a name is that of every step.
using ProgramConfigs = std::map<std::string, Config, std::less<>>;

/// Local. Says also which calls of exchanges those of these configurations cannot carry out: needs no group.
/// @throws UsageError  as check(program); an exchange or lane that is not there, an option that a step cannot
/// have
/// @throws UnsupportedError  a step that such an exchange does not have. Both name the step
void check(const Program& program, const ProgramConfigs& configs);
void check(const Program& program, const Config& config);

/// The text form. parse_program() of it gives an equal program, if check() accepts it and the kinds of its
/// values are filled in, as parse_program() does.
std::string to_string(const Program& program);
/// @throws UsageError  names the line; also what check() throws
Program parse_program(std::string_view text);

/// A drawing: a box for each step, from top to bottom as they run, with a column for each lane and one for
/// calls; a line for each value.
/// @throws UsageError  as check()
std::string to_svg(const Program& program);

/// The program in `batches` micro-batches: the tokens [i*N/n, (i+1)*N/n) of each rank take micro-batch i.
/// Each has lanes of its own: lane l of an exchange becomes l + i * (lanes that the program uses of it); and
/// in the same way streams of its own. Dispatch and combine become phases, and the micro-batches take turns
/// before each receive phase, so that messages of one are on their way while the functions of another run.
/// On GPUs `after` orders the streams so: send phases and functions come after those of the micro-batch
/// before, and functions one after the other.
///
/// Outputs have the bytes of the plain program if nothing is dropped and the functions treat each row alone.
/// Inputs must be tokens, ids or weights, outputs tokens. A combine with topk_weights stays in one piece. A
/// step's sm_limit is divided among the micro-batches, so that together they take as many as before.
/// @throws UsageError  fewer than one batch or more than an exchange can have lanes (64), other inputs or
/// outputs, steps of the kinds metadata, part or join, a call that takes nothing and makes tokens, ids or
/// weights, rows of all ranks that are returned, or added without having been gathered; as check()
Program overlap(const Program& program, int batches);

}  // namespace ferry
