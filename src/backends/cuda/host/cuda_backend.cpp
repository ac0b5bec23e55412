#include "backends/cuda/host/cuda_backend.hpp"

#include "backends/cuda/runtime/error.hpp"
#include "backends/cuda/runtime/stream.hpp"
#include "base/text.hpp"
#include "exchange/configuration.hpp"
#include "group/fault_points.hpp"
#include "group/rank_state.hpp"

namespace ferry {
namespace cuda {

CudaBackend::CudaBackend(const Rank& rank, const Config& config, Reach reach,
                         const MakeHopTransport& make_hops)
    : exchange_(rank, config, reach, make_hops), monitor_(rank, exchange_.report(), config.deadline) {
  for (int lane = 0; lane < config.lanes; ++lane) lanes_.emplace_back(exchange_, lane);
  fault_point(FaultPoint::construct_mapped, rank.index());
  // No kernel may write to a peer before that peer's memory is initialised.
  rank.barrier();
}

CudaBackend::~CudaBackend() {
  const ScopedDevice device(exchange_.device);
  cudaDeviceSynchronize();
}

void CudaBackend::require_no_capture(Stream stream, const char* call) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(handle_of(stream), &status), "query the capture state of a stream");
  if (status != cudaStreamCaptureStatusNone)
    throw UsageError(str(call, ": cannot be captured into a CUDA graph, because it waits for its result"));
}

DispatchResult CudaBackend::dispatch_receive(int lane, Stream stream) {
  throw_if_failed(Operation::dispatch);
  return this->lane(lane).dispatch_receive(stream);
}

void CudaBackend::combine_receive(int lane, Stream stream) {
  throw_if_failed(Operation::combine);
  this->lane(lane).combine_receive(stream);
}

void CudaBackend::route_values(const float* values, const Plan& plan, float* row_values, int lane,
                               Stream stream) {
  throw_if_failed(Operation::route_values);
  fault_point(FaultPoint::route_values_begin, exchange_.me());
  run_or_refuse(Operation::route_values, lane, stream, [&] {
    this->lane(lane).route_values(values, plan, row_values, Phase::fused, Operation::route_values, stream);
  });
}

DispatchCounts CudaBackend::dispatch_counts(const Ids& ids, std::int32_t tokens, int lane, Stream stream) {
  throw_if_failed(Operation::dispatch_counts);
  Lane& mine = this->lane(lane);
  require_no_capture(stream, "dispatch_counts");
  run_or_refuse(Operation::dispatch_counts, lane, stream, [&] { mine.count_dispatch(ids, tokens, stream); });
  while (!mine.await_dispatch_counts(stream)) throw_if_failed(Operation::dispatch_counts);
  if (!mine.counted_dispatch()) {
    throw_if_failed(Operation::dispatch_counts);
    mine.raise_device_error();
  }
  // Does not raise an error of an earlier call: this rank alone would then omit the dispatch that follows.
  return mine.dispatch_counts();
}

void CudaBackend::refuse(Operation operation, int lane, const Error& error, Stream stream) noexcept {
  try {
    if (lane >= 0 && lane < exchange_.config.lanes) this->lane(lane).refuse(operation, error, stream);
  } catch (...) {
    return;  // the device has failed; the next call throws the reason
  }
}

void CudaBackend::synchronize(int lane, Stream stream) {
  cudaStreamCaptureStatus capture{};
  check(cudaStreamIsCapturing(handle_of(stream), &capture), "find out whether a stream is captured");
  if (capture != cudaStreamCaptureStatusNone) {
    throw UsageError(str("synchronize: the stream is captured on rank ", exchange_.me(),
                         ": its calls run when the graph is launched; synchronize after that"));
  }
  check(cudaStreamSynchronize(handle_of(stream)), "wait for a stream");
  raise_device_error(lane);
}

void CudaBackend::raise_device_error(int lane) {
  throw_if_failed(Operation::none);
  this->lane(lane).raise_device_error();
}

LoadCounts CudaBackend::load_counts() const {
  LoadCounts counts;
  counts.experts.resize(static_cast<std::size_t>(exchange_.config.experts));
  counts.ranks.resize(static_cast<std::size_t>(exchange_.rank.size()));
  for (const Lane& lane : lanes_) lane.add_load(counts.experts, counts.dispatches);
  for (std::size_t e = 0; e < counts.experts.size(); ++e) {
    const int rank = exchange_.config.placement.location(static_cast<int>(e)).rank;
    counts.ranks[static_cast<std::size_t>(rank)] += counts.experts[e];
  }
  return counts;
}

WireCounts CudaBackend::wire_counts() const {
  WireCounts sum;
  for (const Lane& lane : lanes_) lane.add_wire(sum);
  return sum;
}

void CudaBackend::throw_if_failed(Operation operation) {
  RankState& state = exchange_.rank.state();
  const std::optional<WaitRecord> timeout = timeout_of(*exchange_.report(), exchange_.rank.topology());
  if (timeout && !state.control().failed()) state.time_out(*timeout, exchange_.config.deadline);
  if (!state.control().failed()) return;
  state.control().throw_failure(timeout.value_or(WaitRecord{operation, 0, exchange_.me(), -1, 0, 0}),
                                &exchange_.rank.topology());
}

DispatchResult CudaBackend::dispatch(const DispatchCall& call, Phase phase, Stream stream) {
  throw_if_failed(Operation::dispatch);
  fault_point(FaultPoint::dispatch_begin, exchange_.me());
  return run_or_refuse(Operation::dispatch, call.lane, stream,
                       [&] { return lane(call.lane).dispatch(call, phase, stream); });
}

void CudaBackend::combine(const CombineCall& call, Phase phase, Stream stream) {
  throw_if_failed(Operation::combine);
  fault_point(FaultPoint::combine_begin, exchange_.me());
  run_or_refuse(Operation::combine, call.lane, stream, [&] { lane(call.lane).combine(call, phase, stream); });
}

const StepMetadata* CudaBackend::metadata(const MetadataCall& call, Stream stream) {
  throw_if_failed(Operation::metadata);
  fault_point(FaultPoint::metadata_begin, exchange_.me());
  return run_or_refuse(Operation::metadata, call.lane, stream,
                       [&] { return lane(call.lane).metadata(call, stream); });
}

std::int64_t CudaBackend::all_gather_v(const AllGatherCall& call, Stream stream) {
  throw_if_failed(Operation::all_gather_v);
  fault_point(FaultPoint::gather_begin, exchange_.me());
  run_or_refuse(Operation::all_gather_v, call.lane, stream,
                [&] { lane(call.lane).all_gather_v(call, stream); });
  return -1;
}

void CudaBackend::reduce_scatter_v(const ReduceScatterCall& call, Stream stream) {
  throw_if_failed(Operation::reduce_scatter_v);
  fault_point(FaultPoint::gather_begin, exchange_.me());
  run_or_refuse(Operation::reduce_scatter_v, call.lane, stream,
                [&] { lane(call.lane).reduce_scatter_v(call, stream); });
}

}  // namespace cuda

Sizes cuda_backend_sizes(const Config& config, const Topology& topology, int rank) {
  if (has_relays(config, topology)) return relayed_cuda_backend_sizes(config, topology, rank);
  cuda::check_limits(config);
  const cuda::DeviceLayout layout = cuda::device_layout(config);
  const std::int64_t lanes = config.lanes;
  return {.dispatch_staging = 2 * lanes * layout.exchange.dispatch,
          .combine_staging = 2 * lanes * layout.exchange.combine,
          .signals = lanes * layout.exchange.signals,
          .results = lanes * layout.received,
          .plans = lanes * cuda::lane_arrays(config, rank).bytes + cuda::exchange_arrays(config).bytes};
}

std::unique_ptr<Backend> make_cuda_backend(const Rank& rank, const Config& config) {
  cuda::check_limits(config);
  if (has_relays(config, rank.topology())) return make_relayed_cuda_backend(rank, config);
  return std::make_unique<cuda::CudaBackend>(rank, config);
}

}  // namespace ferry
