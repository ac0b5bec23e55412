// The operations of ferry::Exchange, called through the C interface. Statuses become exceptions again.
#pragma once

#include <memory>

#include "ferry/exchange.hpp"
#include "ferry/ferry.h"

namespace ferry::contract {

class ExchangeInC {
 public:
  ExchangeInC(const Rank& rank, const Config& config);

  template <class Routes>
  DispatchResult dispatch(const Tokens& tokens, const Routes& routes, const float* weights,
                          const DispatchOptions& options, Stream stream) {
    return dispatched(ferry_dispatch, arguments(tokens, routes, weights, options, stream));
  }
  template <class Routes>
  void dispatch_send(const Tokens& tokens, const Routes& routes, const float* weights,
                     const DispatchOptions& options, Stream stream) {
    require(ferry_dispatch_send, arguments(tokens, routes, weights, options, stream));
  }
  DispatchResult dispatch_receive(int lane, Stream stream);
  void combine(const Outputs& outputs, const Plan& plan, const Result& result, const CombineOptions& options,
               Stream stream);
  void combine_send(const Outputs& outputs, const Plan& plan, const Result& result,
                    const CombineOptions& options, Stream stream);
  void combine_receive(int lane, Stream stream);
  void route_values(const float* values, const Plan& plan, float* row_values, int lane, Stream stream);
  DispatchResult combine_backward(const Tokens& d_result, const Plan& plan, const float* topk_weights,
                                  const Outputs& outputs, float* d_weights, const DispatchOptions& options,
                                  Stream stream);
  void all_gather_v(const void* rows, std::int64_t count, std::int64_t row_bytes, void* gathered,
                    std::int64_t capacity, int lane, Stream stream);
  void reduce_scatter_v(const void* rows, std::int64_t total, DType type, void* sums, std::int64_t count,
                        int lane, Stream stream);
  DispatchCounts dispatch_counts(const Ids& ids, std::int64_t tokens, int lane, Stream stream);
  const StepMetadata* metadata(std::int32_t count, int lane, Stream stream, StepMetadata* into);

  void check(int lane);
  const DispatchResult& last_dispatch_result(int lane) const;
  LoadCounts load_counts() const;
  WireCounts wire_counts() const;

 private:
  static ferry_dispatch_args arguments(const Tokens& tokens, const Ids& ids, const float* weights,
                                       const DispatchOptions& options, Stream stream);
  static ferry_dispatch_args arguments(const Tokens& tokens, const Plan& plan, const float* weights,
                                       const DispatchOptions& options, Stream stream);

  // Calls the function; throws what its status means.
  template <class Function, class... Args>
  void require(Function function, const Args&... args) const {
    throw_unless_ok(function(handle_.get(), &args...));
  }
  // Calls a function whose arguments have a field for a result.
  template <class Function, class Args>
  DispatchResult dispatched(Function function, Args args) const {
    ferry_dispatch_result result{};
    result.size = sizeof result;
    args.result = &result;
    require(function, args);
    return to_cpp(result);
  }
  static void throw_unless_ok(ferry_status status);
  static DispatchResult to_cpp(const ferry_dispatch_result& c);

  std::unique_ptr<ferry_exchange, void (*)(ferry_exchange*)> handle_;
  mutable DispatchResult last_;
};

}  // namespace ferry::contract
