// A program with its names resolved: Evaluator runs it without looking up any name.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "exchange/device_work.hpp"
#include "ferry/evaluator.hpp"
#include "program/stream_plan.hpp"

namespace ferry {

// Memory of a value, uninitialised: pages that are never touched cost nothing.
struct ProgramMemoryDeleter {
  void operator()(std::byte* memory) const;
};
using ProgramMemory = std::unique_ptr<std::byte, ProgramMemoryDeleter>;

// A value's memory in the evaluator. Values that a call of an exchange makes have none.
struct CompiledValue {
  ValueKind kind = ValueKind::tokens;
  std::byte* memory = nullptr;
  ProgramMemory host_memory{};  // that owns it, unless it is memory of CompiledProgram::device
  std::int64_t most_rows = 0;   // rows that the value can have, and for which there is memory
  std::int64_t row_bytes = 0;
  DType type = DType::bf16;
  // The value lies in the memory of a join, behind the parts before it. `join` is the value that the join
  // makes; -1: none. Then it has no memory of its own.
  int join = -1;
  std::vector<int> parts_before{};
};

struct CompiledStep {
  StepKind kind = StepKind::call;
  std::string name;  // in messages
  Exchange* exchange = nullptr;
  int lane = 0;
  std::vector<int> inputs, outputs;  // numbers of values
  int result = -1;                   // combine, combine_send: the value that holds the result
  int sender = -1;                   // receive phases: the step of the send phase
  int index = 0, of = 1;
  int sm_limit = 0;
  std::int32_t* device_count = nullptr;  // device memory, reduce_scatter_v: where the kernel reads the rank's
  const ProgramFunction* function = nullptr;
};

struct CompiledProgram {
  std::unique_ptr<DeviceWork> device;  // null: host memory
  StreamPlan streams;
  int capture_obstacle = -1;          // the first step that cannot be captured into a CUDA graph
  std::vector<CompiledValue> values;  // the program's inputs first
  std::vector<CompiledStep> steps;
  std::vector<int> outputs;
};

// Checks the program, and what its exchanges must have for it. The functions must stay where they are.
CompiledProgram compile(const Program& program, const ProgramExchanges& exchanges,
                        const ProgramFunctions& functions);

}  // namespace ferry
