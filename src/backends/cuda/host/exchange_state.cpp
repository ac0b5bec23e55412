#include "backends/cuda/host/exchange_state.hpp"

#include <algorithm>
#include <vector>

#include "backends/cuda/protocol/lane_view.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "backends/cuda/runtime/stream.hpp"
#include "base/environment.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"
#include "group/rank_state.hpp"
#include "plan/shapes.hpp"

namespace ferry::cuda {
namespace {

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "find the current device");
  return device;
}

int blocks_of_rank(int ranks_on_device, int device, int lanes) {
  int processors = 0;
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "count multiprocessors");
  const int needed = ranks_on_device * lanes;
  if (processors < needed) {
    throw UnsupportedError(str(counted(ranks_on_device, "rank"), " with ", counted(lanes, "lane"),
                               " each share a device of ", processors,
                               " multiprocessors: every lane needs at least one"));
  }
  return std::min(processors / ranks_on_device, kMaxBlocks);
}

}  // namespace

ExchangeState::ExchangeState(const Rank& this_rank, const Config& exchange_config, Reach reach,
                             const MakeHopTransport& make_hops)
    : rank(this_rank),
      config(exchange_config),
      device(current_device()),
      arrays(exchange_arrays(exchange_config)),
      tables(arrays.bytes),
      report_memory(sizeof(HostSignals)) {
  if (reach != Reach::mapped) {
    engine = engine_layout(config, rank.topology(), rank.index());
    registers = config.engine == EngineKind::nccl && Environment::says_yes(&Environment::nccl_register);
  }
  if (reach == Reach::hops) {
    hops = hop_layout(config, rank.topology(), engine->header_bytes, engine->row_bytes);
    hop_width = HopWidth::of(config, hops->shape);
    hop_transport = make_hops(rank, config.lanes * hops->bytes);
  }
  if (reach == Reach::mapped) {
    memory.emplace(rank, device_layout(config).bytes());
    ranks_on_device = memory->ranks_on_my_device();
  } else {
    ranks_on_device = ranks_on_current_device(rank);
  }
  if (engine) engine_memory = memory_for_engine(config.lanes * engine->bytes);
  if (hop_transport) hop_transport->register_sources(engine_memory.data(), engine_memory.bytes());
  blocks = blocks_of_rank(ranks_on_device, device, config.lanes);
  write_placement();
}

void ExchangeState::write_placement() {
  const std::vector<std::byte> routing = routing_tables(config);
  copy_blocking(tables.data() + arrays.routing, routing.data(), static_cast<std::int64_t>(routing.size()));
  const Epoch epoch{rank.state().control().epoch(), row_order_hash(config), config.placement.version()};
  copy_blocking(tables.data() + arrays.epoch, &epoch, sizeof epoch);
}

ExchangeState::~ExchangeState() {
  if (hop_transport && hop_transport->keeps_sources()) engine_memory.abandon();
}

DeviceMemory ExchangeState::memory_for_engine(std::int64_t bytes) const {
  return registers ? DeviceMemory::exportable(bytes) : DeviceMemory(bytes);
}

}  // namespace ferry::cuda
