// The exchange that contract tests call: the same operations as ferry::Exchange, but synchronous, with
// results in host memory, on every backend.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "ferry/exchange.hpp"
#include "harness/device_mirror.hpp"
#include "harness/foreign_exchange.hpp"

namespace ferry::contract {

// The number of the device that a rank works on, modulo the devices that there are. With the backend nvshmem
// each rank has one if there are enough, otherwise each node.
int device_number(const Rank& rank, BackendKind backend);

// Hides the operations of ferry::Exchange, which it calls through the interface under test. On a device
// backend each one enqueues the operation on a stream of the calling thread, waits for it, throws what ended
// it, and copies the results to host memory.
class SyncExchange : public ferry::Exchange {
 public:
  SyncExchange(Rank rank, const Config& config);

  // The interface that exchanges call which are made from now on; null: that of C++.
  static void call_through(const Language* language);

  DispatchResult dispatch(const Tokens& tokens, const Ids& ids, const float* weights = nullptr,
                          const DispatchOptions& options = {});
  DispatchResult dispatch(const Tokens& tokens, const Plan& plan, const float* weights = nullptr,
                          const DispatchOptions& options = {});
  void dispatch_send(const Tokens& tokens, const Ids& ids, const float* weights = nullptr,
                     const DispatchOptions& options = {});
  void dispatch_send(const Tokens& tokens, const Plan& plan, const float* weights = nullptr,
                     const DispatchOptions& options = {});
  DispatchResult dispatch_receive(int lane = 0);

  void combine(const Outputs& outputs, const Plan& plan, const Result& result,
               const CombineOptions& options = {});
  void combine_send(const Outputs& outputs, const Plan& plan, const Result& result,
                    const CombineOptions& options = {});
  void combine_receive(int lane = 0);

  void route_values(const float* values, const Plan& plan, float* row_values, int lane = 0);
  void return_values(const float* row_values, const Plan& plan, float* route_values, int lane = 0);
  DispatchResult combine_backward(const Tokens& d_result, const Plan& plan, const float* topk_weights,
                                  const Outputs& outputs, float* d_weights,
                                  const DispatchOptions& options = {});

  void all_gather_v(const void* rows, std::int64_t count, std::int64_t row_bytes, void* gathered,
                    std::int64_t capacity, int lane = 0);
  void reduce_scatter_v(const void* rows, std::int64_t total, DType type, void* sums, std::int64_t count,
                        int lane = 0);

  DispatchCounts dispatch_counts(const Ids& ids, std::int64_t tokens, int lane = 0);

  // On device backends, a host copy; equal device addresses give equal host addresses.
  const StepMetadata* metadata(std::int32_t count, int lane = 0, StepMetadata* into = nullptr);

  void check(int lane = 0);
  const DispatchResult& last_dispatch_result(int lane = 0) const;
  LoadCounts load_counts() const;
  WireCounts wire_counts() const;

 private:
  struct Lane {
    DeviceMirror memory;
    bool awaits_receive = false;  // a send phase was called and its receive phase was not
    Format format{};              // of the last dispatch
    bool by_expert = false;       // its rows were encoded where they arrived
    DispatchResult received;
    std::map<const StepMetadata*, StepMetadata> metadata;
  };

  // Calls the exchange of the interface under test.
  template <class Call>
  decltype(auto) called(const Call& call) {
    return foreign_ ? call(*foreign_) : call(static_cast<ferry::Exchange&>(*this));
  }

  bool on_device() const { return config().memory == MemoryKind::device; }
  Stream stream() const;
  CallOptions call_of(int index) const { return {.lane = index, .stream = stream()}; }
  template <class Options>
  Options on_stream(Options options) const {
    options.call.stream = stream();
    return options;
  }
  Lane& lane(int index);
  DeviceMirror& begin(int index);
  DeviceMirror& begin(const DispatchOptions& options);
  void finish_send(int index);
  void begin_receive(int index);
  void wait(int index);
  void finish(int index);
  DispatchResult finish(int index, const DispatchResult& received);

  std::vector<Lane> lanes_;
  std::unique_ptr<ForeignExchange> foreign_;  // all calls are its, if another language is under test
};

}  // namespace ferry::contract
