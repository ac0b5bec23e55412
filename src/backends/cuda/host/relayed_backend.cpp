// The backend `cuda` in two hops: the kernels of the phases, and between them a launch that carries their
// messages.
#include "backends/cuda/host/relayed_backend.hpp"

#include "backends/cuda/host/cuda_backend.hpp"
#include "backends/cuda/host/memory_layout.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "base/text.hpp"

namespace ferry {
namespace cuda {
namespace {

class RelayedCudaBackend final : public CudaBackend {
 public:
  RelayedCudaBackend(const Rank& rank, const Config& config, const MakeHopTransport& make_hops)
      : CudaBackend(rank, config, Reach::hops, make_hops) {}

  DispatchResult dispatch(const DispatchCall& call, Stream stream) override {
    begin(Operation::dispatch);
    return run_or_refuse(Operation::dispatch, call.lane, stream,
                         [&] { return lane(call.lane).hop_dispatch(call, stream); });
  }
  DispatchResult dispatch_receive(int index, Stream stream) override {
    throw_if_failed(Operation::dispatch);
    return lane(index).hop_dispatch_receive(stream);
  }

  void combine(const CombineCall& call, Stream stream) override {
    begin(Operation::combine);
    run_or_refuse(Operation::combine, call.lane, stream, [&] { lane(call.lane).hop_combine(call, stream); });
  }
  void combine_receive(int index, Stream stream) override {
    throw_if_failed(Operation::combine);
    lane(index).hop_combine_receive(stream);
  }

  SmallResult run(const SmallCall& call, Stream stream) override {
    const Operation operation = operation_of(call);
    if (is_gather(operation)) {
      throw UnsupportedError(str(to_string(operation),
                                 ": not available in two hops on device memory yet: use an exchange with "
                                 "hops one"));
    }
    return CudaBackend::run(call, stream);
  }

  // Not in two hops.
  SourceOperations* source_operations() override { return nullptr; }
  void refuse(Operation operation, int index, const Error& error, Stream stream) noexcept override {
    // No rank has such a call.
    if (!is_gather(operation)) CudaBackend::refuse(operation, index, error, stream);
  }

  WireCounts wire_counts() const override {
    WireCounts sum;
    for (int index = 0; index < exchange_.config.lanes; ++index) lane(index).add_hop_wire(sum);
    return sum;
  }

 private:
  static bool is_gather(Operation operation) {
    return operation == Operation::all_gather_v || operation == Operation::reduce_scatter_v;
  }

  DispatchCounts await_counts(Lane& lane, Stream stream) override {
    // Every wait of the launches has a deadline.
    check(cudaStreamSynchronize(handle_of(stream)), "wait for the counts of a dispatch");
    throw_if_failed(Operation::dispatch_counts);
    lane.raise_device_error();
    return lane.hop_dispatch_counts();
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
