// The backend `cuda` in two hops: the kernels of the phases, and between them a launch that carries their
// messages.
#include "backends/cuda/host/relayed_backend.hpp"

#include "backends/cuda/host/cuda_backend.hpp"
#include "backends/cuda/host/memory_layout.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "base/text.hpp"
#include "group/fault_points.hpp"

namespace ferry {
namespace cuda {
namespace {

class RelayedCudaBackend final : public CudaBackend {
 public:
  RelayedCudaBackend(const Rank& rank, const Config& config, const MakeHopTransport& make_hops)
      : CudaBackend(rank, config, Reach::hops, make_hops) {}

  DispatchResult dispatch(const DispatchCall& call, Stream stream) override {
    begin(Operation::dispatch, FaultPoint::dispatch_begin);
    return run_or_refuse(Operation::dispatch, call.lane, stream,
                         [&] { return lane(call.lane).hop_dispatch(call, stream); });
  }
  DispatchResult dispatch_receive(int index, Stream stream) override {
    throw_if_failed(Operation::dispatch);
    return lane(index).hop_dispatch_receive(stream);
  }

  void combine(const CombineCall& call, Stream stream) override {
    begin(Operation::combine, FaultPoint::combine_begin);
    run_or_refuse(Operation::combine, call.lane, stream, [&] { lane(call.lane).hop_combine(call, stream); });
  }
  void combine_receive(int index, Stream stream) override {
    throw_if_failed(Operation::combine);
    lane(index).hop_combine_receive(stream);
  }

  void route_values(const float* values, const Plan& plan, float* row_values, int index,
                    Stream stream) override {
    begin(Operation::route_values, FaultPoint::route_values_begin);
    run_or_refuse(Operation::route_values, index, stream, [&] {
      lane(index).hop_route_values(values, plan, row_values, Operation::route_values,
                                   AgreedOptions::of(Operation::route_values), stream);
    });
  }
  const StepMetadata* metadata(const MetadataCall& call, Stream stream) override {
    begin(Operation::metadata, FaultPoint::metadata_begin);
    return run_or_refuse(Operation::metadata, call.lane, stream,
                         [&] { return lane(call.lane).hop_metadata(call, stream); });
  }
  DispatchCounts dispatch_counts(const Ids& ids, std::int32_t tokens, int index, Stream stream) override {
    begin(Operation::dispatch_counts, FaultPoint::dispatch_begin);
    require_no_capture(stream, "dispatch_counts");
    run_or_refuse(Operation::dispatch_counts, index, stream,
                  [&] { lane(index).hop_count_dispatch(ids, tokens, stream); });
    // Every wait of the launches has a deadline.
    check(cudaStreamSynchronize(handle_of(stream)), "wait for the counts of a dispatch");
    throw_if_failed(Operation::dispatch_counts);
    lane(index).raise_device_error();
    return lane(index).hop_dispatch_counts();
  }

  // A combine takes several call numbers here.
  SourceOperations* source_operations() override { return nullptr; }
  void refuse(Operation operation, int index, const Error& error, Stream stream) noexcept override {
    // No rank has such a call.
    if (operation == Operation::all_gather_v || operation == Operation::reduce_scatter_v) return;
    CudaBackend::refuse(operation, index, error, stream);
  }

  WireCounts wire_counts() const override {
    WireCounts sum;
    for (int index = 0; index < exchange_.config.lanes; ++index) lane(index).add_hop_wire(sum);
    return sum;
  }

 private:
  std::int64_t all_gather_v(const AllGatherCall&, Stream) override { refuse_gather("all_gather_v"); }
  void reduce_scatter_v(const ReduceScatterCall&, Stream) override { refuse_gather("reduce_scatter_v"); }
  [[noreturn]] static void refuse_gather(const char* operation) {
    throw UnsupportedError(
        str(operation, ": not available in two hops on device memory yet: use an exchange with hops one"));
  }

  void begin(Operation operation, FaultPoint point) {
    throw_if_failed(operation);
    fault_point(point, exchange_.me());
  }
};

}  // namespace

std::unique_ptr<Backend> make_relayed_backend(const Rank& rank, const Config& config,
                                              const MakeHopTransport& make_hops) {
  const Topology& topology = rank.topology();
  for (int node = 0; node < topology.nodes(); ++node) {
    const std::size_t ranks = topology.ranks_of(node).size();
    if (ranks <= kMaxHopNodeRanks) continue;
    throw UnsupportedError(str("kernels take two hops between nodes of up to ",
                               counted(kMaxHopNodeRanks, "rank"), ", node ", node, " has ", ranks,
                               ": use hops one, or the backend collective"));
  }
  return std::make_unique<RelayedCudaBackend>(rank, config, make_hops);
}

}  // namespace cuda

Sizes relayed_cuda_backend_sizes(const Config& config, const Topology& topology, int rank) {
  cuda::check_limits(config);
  const cuda::EngineLayout engine = cuda::engine_layout(config, topology, rank);
  const cuda::HopLayout hops = cuda::hop_layout(config, topology, engine.header_bytes, engine.row_bytes);
  Sizes sizes = device_collective_sizes(config, topology, rank);
  sizes.dispatch_staging = config.lanes * (hops.bytes - hops.signals_end);
  sizes.signals = config.lanes * hops.signals_end;
  sizes.plans += config.lanes * cuda::HopWorkingMemory::of(hops.shape).bytes;
  return sizes;
}

std::unique_ptr<Backend> make_relayed_cuda_backend(const Rank& rank, const Config& config) {
  return cuda::make_relayed_backend(rank, config, cuda::mapped_hop_transport);
}

}  // namespace ferry
