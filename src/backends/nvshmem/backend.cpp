// The backend `nvshmem`: the kernels of the backend `cuda`, whose two hops use NVSHMEM's puts between nodes.
#include <algorithm>
#include <cerrno>
#include <memory>

#include "backends/cuda/host/hop_transport.hpp"
#include "backends/cuda/host/memory_layout.hpp"
#include "backends/cuda/memory/device_memory.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "backends/cuda/runtime/stream.hpp"
#include "backends/nvshmem/session.hpp"
#include "base/text.hpp"
#include "exchange/backend.hpp"
#include "ferry/error.hpp"
#include "group/agreement.hpp"
#include "group/rank_state.hpp"

namespace ferry {
namespace nvshmem {
namespace {

// NVSHMEM takes seconds to start and to allocate, whatever the deadline of calls is.
constexpr double kStartSeconds = 30;

// Windows in the symmetric heap. Ranks of other nodes are reached by puts, also where their memory is mapped.
class HeapHopTransport final : public cuda::HopTransport {
 public:
  HeapHopTransport(const Rank& rank, std::int64_t bytes, double deadline)
      : rank_(rank),
        wide_(cuda::takes_wide_kernels(rank.size())),
        session_(rank, deadline),
        heap_(session_.allocate(bytes)),
        pes_(static_cast<std::int64_t>(session_.pes().size() * sizeof(std::int32_t))) {
    cuda::copy_blocking(pes_.data(), session_.pes().data(), pes_.bytes());
    peers_.pes = reinterpret_cast<const std::int32_t*>(pes_.data());
    const Topology& topology = rank.topology();
    run_on_all_ranks(rank, [&] {
      for (int peer = 0; peer < rank.size(); ++peer) {
        if (topology.node_of(peer) != topology.node_of(rank.index())) {
          peers_.remote.add(peer);
        } else if (at(peer, 0) == nullptr) {
          throw UnsupportedError(str("NVSHMEM has not mapped the memory of rank ", peer, " on rank ",
                                     rank.index(),
                                     " of the same host: the GPUs of a host must reach each "
                                     "other (nvidia-smi topo -p2p w)"));
        }
      }
    });
  }
  ~HeapHopTransport() override {
    if (rank_.state().control().failed()) {
      Session::note_failure();
    } else if (sources_ != nullptr) {
      session_.module().unregister_source(sources_);
    }
  }

  std::byte* at(int rank, std::int64_t offset) const override {
    std::byte* const begin = rank == rank_.index() ? heap_.data() : heap_.mapped(rank);
    return begin == nullptr ? nullptr : begin + offset;
  }
  void register_sources(std::byte* memory, std::int64_t bytes) override {
    run_on_all_ranks(rank_, [&] {
      if (session_.module().register_source(memory, static_cast<std::size_t>(bytes)) != 0) {
        throw SystemError(
            str("NVSHMEM cannot register ", bytes, " bytes of device memory of rank ", rank_.index(),
                " to put from: the limit of locked memory (ulimit -l) may be "
                "too low, or nvidia-peermem and dma-buf missing"),
            EIO);
      }
      sources_ = memory;
    });
  }
  // No launch has waited for the puts of a call that was aborted.
  bool keeps_sources() const override { return rank_.state().control().failed(); }
  void prepare() const override {
    cuda::check(static_cast<cudaError_t>(session_.module().prepare_hops(wide_)),
                "load the kernel of NVSHMEM");
  }
  void launch(const cuda::HopArguments& arguments, const cuda::LaunchShape& shape,
              cudaStream_t stream) const override {
    const HopLaunch launch{.blocks = cuda::hop_blocks(arguments, shape.blocks),
                           .cooperative = shape.cooperative,
                           .wide = wide_,
                           .stream = stream};
    cuda::check(static_cast<cudaError_t>(session_.module().launch_hops(arguments, peers_, launch)),
                "launch the hops of a call over NVSHMEM");
  }

 private:
  Rank rank_;
  bool wide_;
  Session session_;
  HeapMemory heap_;
  cuda::DeviceMemory pes_;
  Peers peers_{};
  std::byte* sources_ = nullptr;
};

}  // namespace
}  // namespace nvshmem

void require_nvshmem() {
  nvshmem::Session::usable_module();
}

std::unique_ptr<Backend> make_nvshmem_backend(const Rank& rank, const Config& config) {
  // On one node the memory of all ranks is mapped.
  if (rank.topology().nodes() == 1) {
    if (config.reduction_level == ReductionLevel::node) {
      throw UnsupportedError(
          "the backend nvshmem has no reduction_level node on one node: pass automatic, or rank");
    }
    return make_cuda_backend(rank, config);
  }
  cuda::check_limits(config);
  return cuda::make_relayed_backend(
      rank, config,
      [deadline = std::max(config.deadline, nvshmem::kStartSeconds)](const Rank& of, std::int64_t bytes) {
        return std::make_unique<nvshmem::HeapHopTransport>(of, bytes, deadline);
      });
}

}  // namespace ferry
