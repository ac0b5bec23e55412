// A program with its names resolved: Evaluator runs it without looking up any name. On which stream each step
// runs, where a stream waits for another, and the streams and events of a run.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "base/log.hpp"
#include "exchange/device_work.hpp"
#include "ferry/error.hpp"
#include "ferry/evaluator.hpp"
#include "ferry/program.hpp"

namespace ferry {

// The streams of a program are numbered here from 0, the caller's, without gaps.
struct StreamPlan {
  struct Step {
    int stream = 0;
    std::vector<int> waits_for{};  // steps on other streams, which the step's stream waits for before it
    bool awaited = false;          // another stream waits for this step
  };

  int streams = 1;
  std::vector<Step> steps;
  // The steps that stream 0 waits for at the end: the last ones of streams that it has not waited for before.
  std::vector<int> ends;
};

// A run begins with every other stream waiting for stream 0. A stream waits for a step only if one of its
// steps takes a value of that step or comes after it, and no earlier wait has covered it.
StreamPlan plan_streams(const Program& program);

// The streams and events of an evaluator on device memory. On host memory nothing here has an effect.
class RunStreams {
 public:
  // `device`: null on host memory. Both must outlive this.
  RunStreams(const StreamPlan& plan, DeviceWork* device) : plan_(plan), device_(device) {
    if (device == nullptr) return;
    streams_.resize(static_cast<std::size_t>(plan.streams));
    for (std::size_t i = 1; i < streams_.size(); ++i) streams_[i] = device->make_stream();
    for (const StreamPlan::Step& step : plan.steps)
      events_.push_back(step.awaited ? device->make_event() : -1);
    if (streams_.size() > 1) fork_or_join_ = device->make_event();
  }

  // Makes all other streams wait for the caller's.
  void begin(Stream caller) {
    if (device_ == nullptr) return;
    streams_[0] = caller;
    if (streams_.size() == 1) return;
    device_->record(fork_or_join_, caller);
    for (std::size_t i = 1; i < streams_.size(); ++i) device_->wait(fork_or_join_, streams_[i]);
    begun_ = true;
  }

  // Makes the caller's stream wait for the others.
  void end() {
    if (!begun_) return;
    for (const int step : plan_.ends) device_->wait(event_of(step), streams_[0]);
    begun_ = false;
  }
  // end() for a run that has ended early: waits for everything that the streams hold.
  void join_all() noexcept {
    if (!begun_) return;
    begun_ = false;
    try {
      for (std::size_t i = 1; i < streams_.size(); ++i) {
        device_->record(fork_or_join_, streams_[i]);
        device_->wait(fork_or_join_, streams_[0]);
      }
    } catch (const Error& error) {
      log_line(std::string("a program's streams could not be joined after an error: ") + error.what());
    }
  }

  void before(std::size_t step) {
    if (device_ == nullptr) return;
    for (const int maker : plan_.steps[step].waits_for) device_->wait(event_of(maker), of(step));
  }
  void after(std::size_t step) {
    if (device_ != nullptr && plan_.steps[step].awaited)
      device_->record(event_of(static_cast<int>(step)), of(step));
  }

  Stream of(std::size_t step) const {
    if (device_ == nullptr || step >= plan_.steps.size()) return {};
    return streams_[static_cast<std::size_t>(plan_.steps[step].stream)];
  }

 private:
  int event_of(int step) const { return events_[static_cast<std::size_t>(step)]; }

  const StreamPlan& plan_;
  DeviceWork* device_;
  std::vector<Stream> streams_;  // by number of the plan; 0: the caller's
  std::vector<int> events_;      // by step; -1: no stream waits for it
  int fork_or_join_ = -1;
  bool begun_ = false;
};

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
