// Where a rank's programs run: memory for their inputs, the function `experts`, and a clock, on the CPU or on
// a GPU.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ferry/evaluator.hpp"
#include "tools/ferry/run/run_spec.hpp"

namespace ferry::app {

class ProgramContext {
 public:
  using Clock = std::chrono::steady_clock;

  virtual ~ProgramContext() = default;
  ProgramContext(const ProgramContext&) = delete;
  ProgramContext& operator=(const ProgramContext&) = delete;

  // The caller's stream of runs.
  virtual Stream stream() const { return {}; }

  // Addresses that programs can read, valid until the next call. The vectors stay where they are.
  struct InputAddresses {
    const void* tokens;
    const std::int32_t* ids;
    const float* weights;
  };
  virtual InputAddresses set_inputs(const std::vector<std::byte>& tokens, const Routes& routes) = 0;

  // The function of one step: writes a row of RunSpec::type to `outputs` for each received row, by scaling
  // experts or SwiGLU, see DeviceContext. On a GPU it enqueues and returns.
  virtual void run_experts(bool swiglu, const DispatchResult& received, ProgramValue& outputs,
                           Stream stream) = 0;

  // Waits for the run, and throws what its calls have found.
  virtual void synchronize() = 0;
  // Rows of a run that has ended, in host memory.
  virtual std::vector<std::byte> copy_rows(const ProgramValue& tokens) const = 0;

  // Times count from here.
  virtual void start_clock() { start_ = Clock::now(); }
  double now_us() const { return std::chrono::duration<double, std::micro>(Clock::now() - start_).count(); }
  // Marks a moment of a stream. take_marks() waits for the run and returns the moments in microseconds, in
  // the order of the calls.
  virtual void mark(Stream stream) = 0;
  virtual std::vector<double> take_marks() = 0;

 protected:
  ProgramContext() = default;

 private:
  Clock::time_point start_ = Clock::now();
};

// `calls`: of the function, in all programs that run. The exchange must outlive the context. The GPU context
// works on the current GPU.
// @throws UnsupportedError  make_gpu_program_context: the build has no backend cuda; the layout rank_major
std::unique_ptr<ProgramContext> make_host_program_context(const RunSpec& spec, const Exchange& exchange);
std::unique_ptr<ProgramContext> make_gpu_program_context(const RunSpec& spec, Exchange& exchange, int calls);

// Makes the GPU of the rank the current one of the calling thread, as make_gpu_context() does.
void choose_gpu(const Rank& rank);

}  // namespace ferry::app
