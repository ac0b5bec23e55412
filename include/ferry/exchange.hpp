// Dispatch and combine: the two all-to-all steps of a Mixture-of-Experts layer, and their gradients.
//
//   Exchange exchange(rank, config);                                  // once
//   DispatchResult received = exchange.dispatch(tokens, ids, weights);
//   ... run the experts on the received rows, group by group ...
//   exchange.combine(outputs, received.plan, result, {.row_weights = received.weight});
//
// Shapes use the symbols of ferry/types.hpp: N tokens, K slots, H columns, E experts, G groups, R ranks.
#pragma once

#include <cstdint>
#include <memory>

#include "ferry/calls.hpp"
#include "ferry/config.hpp"
#include "ferry/error.hpp"
#include "ferry/group.hpp"
#include "ferry/plan.hpp"

namespace ferry {

class Backend;

/// Dispatches tokens to experts and combines the experts' outputs, for one configuration. Owns the buffers.
///
/// Collective: every rank of the group constructs the exchange, and issues the same operations on a lane in
/// the same order. When a rank refuses its own call, the peers' call of that number ends with the same error.
///
/// Blocking: host backends run in the calling thread and return when the operation is done. Device backends
/// enqueue on the call's stream and return immediately; inputs must stay unchanged until the stream has
/// executed the operation. Errors that only the device can see are thrown by synchronize() and check().
///
/// Memory: pointers are host memory with host backends. With device backends they are memory that the
/// exchange's device can access, or pinned host memory. That device is the one that is current in the
/// constructing thread. Ranks that are threads and share a device use a stream each.
///
/// Overlap: an array that a call writes may share no byte with another array of the call, read or written;
/// the call is refused on every rank. A dispatch writes the lane's own received rows, weight, plan, counts
/// and so on where no memory is passed for them. Rows may lie between each other's by stride. Two addresses
/// of the same memory are not found. These work in place: a combine's result that is its residual, rows of
/// all_gather_v at their own place in `gathered`, and sums of reduce_scatter_v at theirs in `rows`.
///
/// Lanes: a call that may use the stream takes CallOptions; check() and last_dispatch_result(), which do not,
/// take the number of the lane.
///
/// Thread safety: different lanes may be used from different threads at once; one lane may not.
///
/// @throws UsageError  bad argument or data; the exchange stays usable
/// @throws OverflowError  a rank was sent more rows than its capacity; the rows that fit were delivered
/// @throws TimeoutError, PeerLostError  final for the group
class Exchange {
 public:
  /// Collective. Blocks until every rank has constructed its exchange.
  /// @throws UsageError  the configuration is wrong on a rank, or differs between ranks
  /// @throws UnsupportedError  this build or machine has no such backend
  /// @throws SystemError  not enough memory
  Exchange(Rank rank, const Config& config);

  /// Local. Device backends: waits for all work on the rank's device. If ranks share a device, none of them
  /// may start a call that waits for a rank which is still in its destructor: the two would wait for each
  /// other.
  ~Exchange();
  Exchange(const Exchange&) = delete;  // peers write to its memory
  Exchange& operator=(const Exchange&) = delete;

  // Local.
  const Config& config() const;  ///< with every default filled in
  const Rank& rank() const;
  Sizes sizes() const;            ///< bytes that this exchange takes on this rank
  std::int64_t capacity() const;  ///< rows that this rank can receive (expert_padded: rows of one expert)

  /// Sends every token to the ranks that hold its experts, and returns the rows that this rank receives,
  /// arranged by Config::layout.
  ///
  /// The gradient of this operation with respect to the tokens is a combine without weights.
  ///
  /// @param ids  [N, K] expert ids
  /// @param weights  [N, K], given by all ranks, or null on all. A rank without tokens that has no address to
  /// give sets DispatchOptions::weighted.
  DispatchResult dispatch(const Tokens& tokens, const Ids& ids, const float* weights = nullptr,
                          const DispatchOptions& options = {});
  /// Sends every token along the routes of an earlier dispatch: no ids are read. Each rank passes its own
  /// plan of the same dispatch, with the same N.
  DispatchResult dispatch(const Tokens& tokens, const Plan& plan, const float* weights = nullptr,
                          const DispatchOptions& options = {});

  /// The send phase of a dispatch. Waits for no peer's data. When it is done, tokens, ids and weights may be
  /// reused; a plan, DispatchOptions::memory and dot_rows must live until the receive phase is done. Between
  /// the phases, the lane accepts only dispatch_receive(), from this thread or another.
  void dispatch_send(const Tokens& tokens, const Ids& ids, const float* weights = nullptr,
                     const DispatchOptions& options = {});
  void dispatch_send(const Tokens& tokens, const Plan& plan, const float* weights = nullptr,
                     const DispatchOptions& options = {});
  /// The receive phase of the lane's dispatch: blocks and throws as dispatch().
  /// @throws UsageError  no dispatch has been sent on the lane
  DispatchResult dispatch_receive(const CallOptions& call = {});

  /// Returns the experts' outputs to their source ranks and adds the rows of each token, as Reduction says.
  ///
  /// @param plan  of the dispatch whose rows `outputs` correspond to
  /// @param outputs  one row for each received row; may be null if this rank has received none
  /// @param result  [N, H]; may be null if N is 0
  void combine(const Outputs& outputs, const Plan& plan, const Result& result,
               const CombineOptions& options = {});
  /// The send phase of a combine. Waits for no peer's data. When it is done, outputs, row_weights and
  /// row_values may be reused; the plan, the result, shared_outputs, the residual, topk_weights and
  /// route_values must live until the receive phase is done. Between the phases, the lane accepts only
  /// combine_receive(). topk_weights with `partial` are refused, because they need a round trip of their own.
  void combine_send(const Outputs& outputs, const Plan& plan, const Result& result,
                    const CombineOptions& options = {});
  /// The receive phase of the lane's combine: blocks and throws as combine().
  /// @throws UsageError  no combine has been sent on the lane
  void combine_receive(const CallOptions& call = {});

  /// Sends one fp32 of each route, `values` [N, K], to the route's row: `row_values` [total], 0 on padding.
  /// Not with rank_major.
  void route_values(const float* values, const Plan& plan, float* row_values, const CallOptions& call = {});
  /// The reverse: returns one fp32 of each row, `row_values` [total], to the row's source rank:
  /// `route_values` [N, K], 0 where the slot is masked or was dropped. Not with rank_major. A combine returns
  /// them beside its rows (CombineOptions::row_values).
  void return_values(const float* row_values, const Plan& plan, float* route_values,
                     const CallOptions& call = {});

  /// The gradients of combine, given the gradient dy of its result.
  ///
  /// Returns the gradient of the experts' outputs: dispatched rows of dy, multiplied by their weights. Writes
  /// the gradient of the weights, d_weights[token, slot] = dot(dy[token], v), with v the slot's row. Not
  /// with rank_major; the format is bf16, fp16 or fp32.
  ///
  /// It consists of a dispatch and a return_values on the lane. The result is owned as a dispatch's is.
  ///
  /// @param d_result  dy, [N, H]
  /// @param topk_weights  [N, K]
  /// @param outputs  the rows v that combine was given, [total, H] of type Config::combine_type, dense; not
  /// in the memory of the received rows, which this call writes
  /// @param d_weights  [N, K]
  /// @param options  without apply_weights and dot_rows, which the call sets itself
  DispatchResult combine_backward(const Tokens& d_result, const Plan& plan, const float* topk_weights,
                                  const Outputs& outputs, float* d_weights,
                                  const DispatchOptions& options = {});

  /// Counts what a dispatch of these ids would deliver, without sending rows: for receive buffers of exactly
  /// as many rows as the dispatch that follows needs (ReceiveBuffers::rows).
  ///
  /// Blocks with every backend until all ranks have called it; with device backends also until the work that
  /// is on the stream has been done. It cannot be captured. Every error is thrown here.
  ///
  /// @param ids  [tokens, K], in memory as for dispatch(). Ids out of range are not counted; the dispatch
  /// reports them.
  DispatchCounts dispatch_counts(const Ids& ids, std::int64_t tokens, const CallOptions& call = {});

  /// Computes sum, prefix sum and maximum of the ranks' counts.
  ///
  /// @param count  0 to (2^31 - 1) / R; with device backends also an address in device memory
  /// @param into  the caller's memory for them, int32 [3]; with device backends device memory, which a kernel
  /// on the stream writes. Null: memory of the lane, at a fixed address.
  /// @return  `into`, or the lane's memory; of the same kind
  /// @throws UnsupportedError  an address with host backends
  const StepMetadata* metadata(const Count& count, const CallOptions& call = {},
                               StepMetadata* into = nullptr);

  /// Copies the rows of all ranks to every rank, one rank's after another's in rank order. Ranks may have
  /// different numbers of rows, also none.
  ///
  /// Rows of any size and any number of them may be gathered: larger calls go through the lane's dispatch
  /// staging in rounds, so the exchange takes no memory for it (Sizes).
  ///
  /// @return  the sum of all counts; device backends, which do not wait for it: -1
  /// @throws UsageError  on every rank, with nothing written: `gathered` is too small on a rank
  /// @throws UnsupportedError  device_count on host backends; cuda in two hops, nvshmem on several nodes
  std::int64_t all_gather_v(const AllGather& arguments, const CallOptions& call = {});

  /// Adds what the ranks hold for each row, and gives every rank its own rows of the sum: the first counts[0]
  /// rows belong to rank 0, and so on. The opposite of all_gather_v().
  ///
  /// Each value is added in fp32, in rank order from +0, and rounded once to `type`. Takes no memory of its
  /// own, as all_gather_v().
  ///
  /// @throws UsageError  on every rank, with nothing written: `total` is not the sum of the counts on a rank
  /// @throws UnsupportedError  device_count on host backends; cuda in two hops, nvshmem on several nodes
  void reduce_scatter_v(const ReduceScatter& arguments, const CallOptions& call = {});

  /// Takes part in the lane's next call by refusing it: the peers' call ends with `error`. For bindings that
  /// find arguments which they cannot convert. Has no effect where no call could start.
  void refuse(Operation operation, const Error& error, const CallOptions& call = {}) noexcept;

  /// Local. Throws the findings of the lane's calls since the last check. Those calls were carried out
  /// nevertheless; their rows are in last_dispatch_result().
  ///
  /// Host backends call it at the end of every call, unless Config::check_calls is off. On device backends it
  /// covers the calls that have ended, and also throws what synchronize() would; it does not wait, and may be
  /// called while a stream is captured: the captured calls end when the graph is launched.
  /// @throws OverflowError, BadIdError, BadSourceError  the first that applies, in this order
  /// @throws UsageError  after these: a scale with which a block could not be encoded (nvfp4, input_scales)
  void check(int lane = 0);

  /// Local. Device backends: blocks until the work on the stream is done, then throws the error that ended a
  /// call of the lane on the device: a peer's refusal, options that differ between ranks, a count or plan
  /// that only the device could check, a timeout, a lost peer. Host backends have already thrown: no effect.
  /// @throws UsageError  the stream is being captured; the capture goes on
  void synchronize(const CallOptions& call = {});

  /// Local. Result of the lane's last dispatch; empty if it failed. Valid until the lane's next dispatch.
  const DispatchResult& last_dispatch_result(int lane = 0) const;

  /// Local. Any thread may call it at any time, also while calls run or a stream is captured; it counts the
  /// dispatches that have run.
  LoadCounts load_counts() const;
  WireCounts wire_counts() const;  ///< Local. As load_counts().
  WaitTimes wait_times() const;    ///< Local. As load_counts().

 private:
  friend class ExchangeAccess;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ferry
