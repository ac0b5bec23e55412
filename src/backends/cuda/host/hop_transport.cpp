#include "backends/cuda/host/hop_transport.hpp"

#include "backends/cuda/memory/symmetric.hpp"

namespace ferry::cuda {
namespace {

class MappedHopTransport final : public HopTransport {
 public:
  MappedHopTransport(const Rank& rank, std::int64_t bytes) : memory_(rank, bytes) {}

  std::byte* at(int rank, std::int64_t offset) const override { return memory_.at(rank, offset); }
  void register_sources(std::byte*, std::int64_t) override {}
  bool keeps_sources() const override { return false; }  // stores have arrived when a launch ends
  void prepare() const override {}                       // prepare_hops() has loaded the kernel
  void launch(const HopArguments& arguments, const LaunchShape& shape, cudaStream_t stream) const override {
    launch_hops(arguments, shape, stream);
  }

 private:
  DeviceSymmetricMemory memory_;
};

}  // namespace

std::unique_ptr<HopTransport> mapped_hop_transport(const Rank& rank, std::int64_t bytes) {
  return std::make_unique<MappedHopTransport>(rank, bytes);
}

}  // namespace ferry::cuda
