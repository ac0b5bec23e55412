#include "backends/cuda/host/cuda_backend.hpp"

#include "backends/cuda/by_source/source_rows.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "backends/cuda/runtime/stream.hpp"
#include "base/text.hpp"
#include "exchange/configuration.hpp"
#include "exchange/lane_counts.hpp"
#include "group/fault_points.hpp"
#include "group/rank_state.hpp"

namespace ferry {

namespace cuda {
namespace {

FaultPoint begin_of(Operation operation) {
  switch (operation) {
    case Operation::combine:
      return FaultPoint::combine_begin;
    case Operation::dispatch:
    case Operation::dispatch_counts:
      return FaultPoint::dispatch_begin;
    case Operation::route_values:
    case Operation::return_values:
      return FaultPoint::route_values_begin;
    case Operation::all_gather_v:
    case Operation::reduce_scatter_v:
      return FaultPoint::gather_begin;
    default:
      return FaultPoint::metadata_begin;
  }
}

// Throws UsageError if the stream is being captured: `call` waits for the host.
void require_no_capture(Stream stream, const char* call) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(handle_of(stream), &status), "query the capture state of a stream");
  if (status != cudaStreamCaptureStatusNone)
    throw UsageError(str(call, ": cannot be captured into a CUDA graph, because it waits for its result"));
}

}  // namespace

CudaBackend::CudaBackend(const Rank& rank, const Config& config, Reach reach, const SetCarriers& set_carriers,
                         const MakeHopTransport& make_hops)
    : exchange_(rank, config, reach, make_hops), monitor_(rank, exchange_.report(), config.deadline) {
  for (int lane = 0; lane < config.lanes; ++lane) lanes_.emplace_back(exchange_, lane);
  if (set_carriers) set_carriers(exchange_, lanes_);
  fault_point(FaultPoint::construct_mapped, rank.index());
  // No kernel may write to a peer before that peer's memory is initialised.
  rank.barrier();
}

CudaBackend::~CudaBackend() {
  const ScopedDevice device(exchange_.device);
  cudaDeviceSynchronize();
  for (Lane& lane : lanes_) lane.carry_by(nullptr);
  cudaDeviceSynchronize();  // for what threads of the carriers have enqueued
}

Sizes CudaBackend::sizes() const {
  const auto sizes = exchange_.hops     ? relayed_cuda_backend_sizes
                     : exchange_.engine ? device_collective_sizes
                                        : cuda_backend_sizes;
  return sizes(exchange_.config, exchange_.rank.topology(), exchange_.me());
}

DispatchResult CudaBackend::dispatch(const DispatchCall& call, bool split) {
  begin(Operation::dispatch);
  return lane(call.options.lane).dispatch(call, split);
}

DispatchResult CudaBackend::dispatch_receive(const CallOptions& call) {
  throw_if_failed(Operation::dispatch);
  return lane(call.lane).dispatch_receive(call.stream);
}

void CudaBackend::combine(const CombineCall& call, bool split) {
  begin(Operation::combine);
  lane(call.options.lane).combine(call, split);
}

void CudaBackend::combine_receive(const CallOptions& call) {
  throw_if_failed(Operation::combine);
  lane(call.lane).combine_receive(call.stream);
}

SmallResult CudaBackend::run(const SmallCall& call) {
  const Operation operation = operation_of(call);
  const bool counts = operation == Operation::dispatch_counts;
  const CallOptions& options = call_options_of(call);
  Lane& lane = this->lane(options.lane);
  begin(operation);
  if (counts && capabilities().capture) require_no_capture(options.stream, "dispatch_counts");
  SmallResult result = lane.run(call);
  if (counts) result.counts = await_counts(lane, options.stream);
  return result;
}

DispatchCounts CudaBackend::await_counts(Lane& lane, Stream stream) {
  if (exchange_.hops) {
    // Every wait of the launches has a deadline.
    check(cudaStreamSynchronize(handle_of(stream)), "wait for the counts of a dispatch");
    throw_if_failed(Operation::dispatch_counts);
    lane.raise_device_error();
  } else if (!exchange_.engine) {
    while (!lane.await_dispatch_counts(stream)) throw_if_failed(Operation::dispatch_counts);
    if (!lane.counted_dispatch()) {
      throw_if_failed(Operation::dispatch_counts);
      lane.raise_device_error();
    }
    // Does not raise an error of an earlier call: this rank alone would then omit the dispatch that follows.
  }
  return lane.dispatch_counts();
}

void CudaBackend::refuse(Operation operation, const Error& error, const CallOptions& call) noexcept {
  if (call.lane >= 0 && call.lane < exchange_.config.lanes)
    lane(call.lane).refuse(operation, ErrorRecord::of(error), call.stream);
}

void CudaBackend::synchronize(const CallOptions& call) {
  cudaStreamCaptureStatus capture{};
  check(cudaStreamIsCapturing(handle_of(call.stream), &capture), "find out whether a stream is captured");
  if (capture != cudaStreamCaptureStatusNone) {
    throw UsageError(str("synchronize: the stream is captured on rank ", exchange_.me(),
                         ": its calls run when the graph is launched; synchronize after that"));
  }
  check(cudaStreamSynchronize(handle_of(call.stream)), "wait for a stream");
  raise_device_error(call.lane);
}

void CudaBackend::raise_device_error(int lane) {
  throw_if_failed(Operation::none);
  this->lane(lane).raise_device_error();
}

LoadCounts CudaBackend::load_counts() const {
  LoadCounts counts = no_load(exchange_.config);
  for (const Lane& lane : lanes_) lane.add_load(counts);
  add_up_layers(exchange_.config.placement, counts);
  return counts;
}

WireCounts CudaBackend::wire_counts() const {
  WireCounts sum;
  for (const Lane& lane : lanes_) lane.add_wire(sum);
  return sum;
}

void CudaBackend::throw_if_failed(Operation operation) {
  RankState& state = exchange_.rank.state();
  const std::optional<WaitRecord> timeout =
      timeout_of(*exchange_.report(), state.control().epoch(), exchange_.rank.topology());
  if (timeout && !state.control().failed()) state.time_out(*timeout, exchange_.config.deadline);
  if (!state.control().failed()) return;
  state.control().throw_failure(timeout.value_or(WaitRecord{operation, 0, exchange_.me(), -1, 0, 0}),
                                &exchange_.rank.topology());
}

void CudaBackend::begin(Operation operation) {
  throw_if_failed(operation);
  fault_point(begin_of(operation), exchange_.me());
}

// --- combine by source --------------------------------------------------------------------------------

void CudaBackend::keep_ids(const KeepIdsCall& call) {
  kKeepIdsKernel({view_of(call.options.lane), call}, {.blocks = blocks_of_lane()}, call.options.stream);
}

void CudaBackend::describe_rows(const DescribeRowsCall& call) {
  const LaneView& view = view_of(call.options.lane);
  kDescribeRowsKernel({view, view_plan(call.received.plan.storage(), view.plan_shape), call},
                      {.blocks = blocks_of_lane()}, call.options.stream);
}

void CudaBackend::plan_return(const PlanReturnCall& call) {
  CallPointers pointers;
  pointers.add("src_info", call.src_info, 4);
  pointers.add("row_offsets", call.row_offsets, 4);
  pointers.add("counts", call.counts, 4);
  pointers.add("topk_ids", call.ids.data, bytes_of(call.ids.type));
  pointers.add("device_tokens", call.device_tokens, 4);
  require_usable(call.options.lane, "ep_combine", pointers);
  const LaneView& view = view_of(call.options.lane);
  launch_plan_return({view, view_plan(call.plan.storage(), view.plan_shape), call}, blocks_of_lane(),
                     call.options.stream);
}

void CudaBackend::check_returned(const CheckReturnedCall& call) {
  const LaneView& view = view_of(call.options.lane);
  kCheckReturnedKernel({view, view_plan(call.plan.storage(), view.plan_shape), call.returned}, {},
                       call.options.stream);
}

std::int64_t CudaBackend::scratch_bytes() const {
  return return_scratch_bytes(lanes_.front().view());
}

}  // namespace cuda

std::unique_ptr<Backend> make_cuda_backend(const Rank& rank, const Config& config) {
  cuda::check_limits(config);
  if (has_relays(config, rank.topology())) return make_relayed_cuda_backend(rank, config);
  return std::make_unique<cuda::CudaBackend>(rank, config, cuda::Reach::mapped);
}

}  // namespace ferry
