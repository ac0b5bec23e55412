// The call shapes of ferry/max.hpp on device memory: every array is device memory that kernels on the
// caller's stream read and write, so nothing waits on the host and a call can be captured into a CUDA graph.
//
//   max::DeviceExchange exchange(rank, config);  // backend cuda
//   max::DeviceDispatchResult received = exchange.ep_fused_dispatch(tokens, topk_ids, 0, stream);
//   ... run the experts on received.output_tokens, group by group ...
//   exchange.ep_fused_combine({outputs, received}, {.output_tokens = result, .router_weights = weights}, 0,
//                             stream);
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "ferry/max.hpp"

namespace ferry::max {

/// What a rank has received: memory of the lane, whose next dispatch overwrites it. The arrays have the
/// lengths that they can need; `number` is expert_usage_stats[1].
struct DeviceDispatchResult {
  const void* output_tokens = nullptr;          ///< [capacity, H] values
  std::array<ReceivedPart, kMaxParts> parts{};  ///< all parts, as in max::DispatchResult
  const std::int32_t* tile_offsets = nullptr;   ///< [groups + 1] as in max::DispatchResult
  const std::uint32_t* row_offsets = nullptr;   ///< [groups + 1]; from entry `number` on the number of rows
  const std::int32_t* expert_ids = nullptr;     ///< [groups]; -1 from entry `number` on
  const std::uint32_t* expert_usage_stats = nullptr;  ///< [2] the most rows of a group, and `number`
  const std::int32_t* src_info = nullptr;  ///< [capacity, 2]; rows past the number of rows are not written
  const std::int32_t* counts = nullptr;    ///< [groups, R]
  std::int64_t capacity = 0;               ///< rows
  int groups = 0;                          ///< S + L
};

/// As CombineInput: arrays of a DeviceDispatchResult, or copies of them.
struct DeviceCombineInput {
  DeviceCombineInput() = default;
  DeviceCombineInput(const Outputs& outputs, const DeviceDispatchResult& received)
      : input_tokens(outputs),
        src_info(received.src_info),
        row_offsets(received.row_offsets),
        counts(received.counts) {}

  Outputs input_tokens;
  const std::int32_t* src_info = nullptr;
  const std::uint32_t* row_offsets = nullptr;
  const std::int32_t* counts = nullptr;
  /// The ids of the dispatch, [tokens, K], and its N. With -1 tokens: those of the lane's last dispatch,
  /// which the lane keeps.
  Ids topk_ids{};
  std::int64_t tokens = -1;
};

/// Dispatch and combine for one configuration, in device memory.
///
/// As Exchange, with these differences. Calls are enqueued on `stream` and return. Tokens::device_count may
/// give N. Arrays that are wrong end the combine on every rank with a UsageError that synchronize() throws;
/// the rank whose arrays they are names the numbers. An id out of range is reported by check().
class DeviceExchange {
 public:
  /// @throws UnsupportedError  a backend of host memory; experts in slices
  /// @throws UsageError  as Exchange
  DeviceExchange(const Rank& rank, const Config& config);
  ~DeviceExchange();

  const Config& config() const;  ///< with every default filled in
  const Rank& rank() const;

  void ep_dispatch_async(const Tokens& input_tokens, const Ids& topk_ids, int lane = 0, Stream stream = {},
                         const TokenFormat& format = {});
  DeviceDispatchResult ep_dispatch_wait(int lane = 0, Stream stream = {});
  DeviceDispatchResult ep_fused_dispatch(const Tokens& input_tokens, const Ids& topk_ids, int lane = 0,
                                         Stream stream = {}, const TokenFormat& format = {});

  void ep_combine_async(const DeviceCombineInput& input, const CombineOutput& output, int lane = 0,
                        Stream stream = {});
  void ep_combine_wait(int lane = 0, Stream stream = {});
  void ep_fused_combine(const DeviceCombineInput& input, const CombineOutput& output, int lane = 0,
                        Stream stream = {});

  /// Waits for the stream and throws the error of a call that has ended with one.
  void synchronize(int lane = 0, Stream stream = {});
  /// The same without waiting; also throws what completed calls have found, such as BadIdError.
  void check(int lane = 0);

  /// Takes part in the lane's next call, Operation::dispatch or combine, by refusing it, as
  /// ferry::Exchange::refuse() does. For bindings that find arguments which they cannot convert.
  void refuse(Operation operation, int lane, const Error& error, Stream stream = {}) noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ferry::max
