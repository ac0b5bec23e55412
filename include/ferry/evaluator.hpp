// Runs programs (ferry/program.hpp) on the exchanges of a rank.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "ferry/exchange.hpp"
#include "ferry/program.hpp"

namespace ferry {

/// A value while a program runs. Functions do not write what they take.
struct ProgramValue {
  ValueKind kind = ValueKind::tokens;
  void* data = nullptr;  ///< tokens [rows, H], ids and weights [rows, K], outputs [rows, H]
  /// N, also of a dispatch. Outputs, and rows of all ranks in device memory: how many rows `data` has room
  /// for.
  std::int64_t rows = 0;
  std::int64_t stride = 0;   ///< tokens, outputs: bytes from one row to the next; 0: dense
  DType type = DType::bf16;  ///< tokens, outputs
  IdType id_type = IdType::int32;
  std::int32_t count = 0;
  /// Device memory: where the count lies, if not null; then `count` is not used. Functions write it there.
  std::int32_t* device_count = nullptr;
  StepMetadata metadata{};
  const StepMetadata* device_metadata = nullptr;  ///< device memory: where the metadata lies
  DispatchResult received{};

  // Values to pass to Evaluator::run(). The memory is the caller's and is only read.
  static ProgramValue tokens(const void* data, std::int64_t rows, DType type, std::int64_t stride = 0);
  static ProgramValue ids(const Ids& ids, std::int64_t rows);
  static ProgramValue weights(const float* data, std::int64_t rows);
  static ProgramValue number(std::int32_t count);
  static ProgramValue device_number(const std::int32_t* count);
};

using ProgramInputs = std::span<const ProgramValue* const>;
using ProgramOutputs = std::span<ProgramValue* const>;

/// A function of the caller, in the order of the step's inputs and outputs.
///
/// Outputs point to memory of the evaluator with room for the most tokens or rows that the step's exchange
/// can have, tokens and outputs in its combine_type. The function may point `data` to other memory that lives
/// until the run ends, such as that of an input, and then sets `type` and `stride`. The rows of tokens, ids
/// and weights are those of the first such input, or 0; the function may set fewer or, up to max_tokens or
/// the most that the input may have, more.
///
/// Device memory: the function enqueues its work on the stream of its step and returns. A count is written to
/// `device_count`, or that is set to null and `count` to the number. Work that the function enqueues may
/// still run when the run returns.
class ProgramFunction {
 public:
  ProgramFunction() = default;
  template <class Function>
    requires std::invocable<Function&, ProgramInputs, ProgramOutputs, Stream>
  ProgramFunction(Function function) : call_(std::move(function)) {}
  template <class Function>
    requires(std::invocable<Function&, ProgramInputs, ProgramOutputs> &&
             !std::invocable<Function&, ProgramInputs, ProgramOutputs, Stream>)
  ProgramFunction(Function function)
      : call_([function = std::move(function)](ProgramInputs inputs, ProgramOutputs outputs, Stream) mutable {
          function(inputs, outputs);
        }) {}

  explicit operator bool() const { return static_cast<bool>(call_); }
  void operator()(ProgramInputs inputs, ProgramOutputs outputs, Stream stream = {}) const {
    call_(inputs, outputs, stream);
  }

 private:
  std::function<void(ProgramInputs, ProgramOutputs, Stream)> call_;
};

using ProgramFunctions = std::map<std::string, ProgramFunction, std::less<>>;
using ProgramExchanges = std::map<std::string, Exchange*, std::less<>>;

/// Runs a program, any number of times, on exchanges with host memory, or on exchanges of one device.
///
/// Every rank constructs its evaluator with the same program. The exchanges must outlive it; nothing else
/// calls the lanes of the program while it runs. It allocates memory only when it is constructed.
///
/// Device memory: the steps of stream 0 go to the stream that run() is given, those of other streams to
/// streams of the evaluator. A stream waits for another where a step takes a value that was made there; at
/// the beginning all wait for the caller's stream, and at the end that waits for all. Runs share the
/// evaluator's memory, so the stream of a run must wait for the run before it. The destructor waits for the
/// evaluator's streams.
class Evaluator {
 public:
  /// Local. `exchange` takes every step.
  /// @throws UsageError, UnsupportedError  as check() with the exchanges' configurations
  /// @throws UsageError  a function that is missing. Names the step
  Evaluator(Program program, Exchange& exchange, ProgramFunctions functions = {});
  /// Local. Takes exchanges by the names that the steps give them; the empty name is that of steps which
  /// name none.
  Evaluator(Program program, const ProgramExchanges& exchanges, ProgramFunctions functions = {});
  ~Evaluator();
  Evaluator(Evaluator&&) noexcept;
  Evaluator& operator=(Evaluator&&) noexcept;

  const Program& program() const;

  /// Collective. Runs the steps in order, in the calling thread, with the bits and errors of the same calls
  /// made one by one. Blocks as they do: with device memory it enqueues, and a step `wait` or
  /// Exchange::synchronize() throws what the device finds.
  ///
  /// When a step fails, the run ends with its error: that of an exchange names the step in its message, that
  /// of a function is passed on as it is. The rank refuses its calls that are left, so that the runs of the
  /// peers end with a UsageError at the next call that needs this rank. After that the lanes are idle on all
  /// ranks, and the program may be run again. TimeoutError and PeerLostError are final for the group.
  ///
  /// Device memory: a run may be captured into a CUDA graph whole. Outputs and inputs then are those of every
  /// replay.
  ///
  /// @param inputs  in the order of Program::inputs
  /// @return  in the order of Program::outputs; memory of the evaluator, of a lane or of a function, valid
  /// until the next run
  /// @throws UnsupportedError  `stream` is being captured, and a step prevents it: `wait`, and calls of the
  /// backend collective. Names the step. Nothing has been enqueued
  std::span<const ProgramValue* const> run(std::span<const ProgramValue> inputs, Stream stream = {});

  /// From now on run() calls `observer` with the number of each step before that step begins, and with the
  /// number of steps after the last: for timelines. On device memory `stream` is that of the step, and at the
  /// end the caller's. It must not throw. An empty function ends it.
  void set_observer(std::function<void(std::size_t step, Stream stream)> observer);

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace ferry
