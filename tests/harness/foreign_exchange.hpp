// The operations of ferry::Exchange through the interface of another language, for the contract suite.
#pragma once

#include <memory>

#include "ferry/exchange.hpp"

namespace ferry::contract {

// What decides where tokens go: ids, or the plan of an earlier dispatch.
struct Routes {
  Routes(const Ids& given) : ids(given) {}
  Routes(const Plan& given) : plan(given) {}

  Ids ids;
  Plan plan;
};

// Takes and returns what C++ does; errors become exceptions of C++ again.
class ForeignExchange {
 public:
  virtual ~ForeignExchange() = default;

  virtual DispatchResult dispatch(const Tokens& tokens, const Routes& routes, const float* weights,
                                  const DispatchOptions& options) = 0;
  virtual void dispatch_send(const Tokens& tokens, const Routes& routes, const float* weights,
                             const DispatchOptions& options) = 0;
  virtual DispatchResult dispatch_receive(const CallOptions& call) = 0;
  virtual void combine(const Outputs& outputs, const Plan& plan, const Result& result,
                       const CombineOptions& options) = 0;
  virtual void combine_send(const Outputs& outputs, const Plan& plan, const Result& result,
                            const CombineOptions& options) = 0;
  virtual void combine_receive(const CallOptions& call) = 0;
  virtual void route_values(const float* values, const Plan& plan, float* row_values,
                            const CallOptions& call) = 0;
  virtual void return_values(const float* row_values, const Plan& plan, float* route_values,
                             const CallOptions& call) = 0;
  virtual DispatchResult combine_backward(const Tokens& d_result, const Plan& plan, const float* topk_weights,
                                          const Outputs& outputs, float* d_weights,
                                          const DispatchOptions& options) = 0;
  virtual void all_gather_v(const AllGather& given, const CallOptions& call) = 0;
  virtual void reduce_scatter_v(const ReduceScatter& given, const CallOptions& call) = 0;
  virtual DispatchCounts dispatch_counts(const Ids& ids, std::int64_t tokens, const CallOptions& call) = 0;
  virtual const StepMetadata* metadata(std::int32_t count, const CallOptions& call, StepMetadata* into) = 0;

  virtual void check(int lane) = 0;
  virtual const DispatchResult& last_dispatch_result(int lane) = 0;
  virtual LoadCounts load_counts() = 0;
  virtual WireCounts wire_counts() = 0;
};

struct Language {
  const char* name;
  // Makes the rank's exchange. Collective, as the constructor of ferry::Exchange.
  std::unique_ptr<ForeignExchange> (*make_exchange)(const Rank& rank, const Config& config);
};

extern const Language kC, kPython;

}  // namespace ferry::contract
