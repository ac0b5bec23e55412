// Where a rank's rows lie and its experts work: in the processor's memory, or in that of a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ferry/exchange.hpp"
#include "ferry/group.hpp"
#include "tools/ferry/run/run_spec.hpp"

namespace ferry::app {

// What a rank brings to a step.
struct StepInputs {
  std::vector<std::byte> tokens;  // [N, hidden] of Job::type
  Routes routes;
};

// Owns the exchange of a rank. What a method starts is done when it returns.
class Site {
 public:
  virtual ~Site() = default;
  Site(const Site&) = delete;
  Site& operator=(const Site&) = delete;

  // Inputs of the dispatches that follow, alive until the next ones are taken. The last result is overwritten
  // with bytes that no combine writes.
  virtual void take(const StepInputs& inputs) = 0;

  virtual void dispatch() = 0;  // collective
  virtual void multiply() = 0;  // elementwise experts: Experts::multiply
  virtual void swiglu() = 0;
  virtual void combine() = 0;  // collective

  // Of the last dispatch and combine, in memory that the processor reads, the plan too. DispatchResult are
  // valid until the next dispatch.
  virtual const DispatchResult& received() = 0;
  virtual std::span<const std::byte> result() = 0;

  const Exchange& exchange() const { return exchange_; }

 protected:
  Site(const Rank& rank, const Job& job) : job_(job), exchange_(rank, job.config) {}

  std::int64_t arrived_rows() const;  // most of them
  CombineOptions combine_options(const DispatchResult& received) const;

  const Job& job_;
  Exchange exchange_;
};

// Collective. The second chooses the rank's GPU, in turn, and makes it the thread's current one; it throws
// UnsupportedError where the build, the driver, a GPU or cuBLAS is missing.
std::unique_ptr<Site> make_host_site(const Rank& rank, const Job& job);
std::unique_ptr<Site> make_device_site(const Rank& rank, const Job& job);

}  // namespace ferry::app
