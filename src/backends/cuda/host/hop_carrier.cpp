// The backend `cuda` in two hops, over any transport: between the phases of a call a launch carries the
// stored messages (two_hops/).
#include <vector>

#include "backends/cuda/host/cuda_backend.hpp"
#include "backends/cuda/host/hop_transport.hpp"
#include "backends/cuda/host/memory_layout.hpp"
#include "backends/cuda/memory/symmetric.hpp"
#include "backends/cuda/operations/small_operations.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "backends/cuda/runtime/stream.hpp"
#include "base/text.hpp"
#include "exchange/configuration.hpp"

namespace ferry {
namespace cuda {
namespace {

class HopCarrier final : public Carrier {
 public:
  HopCarrier(const ExchangeState& exchange, const Lane& lane);

  void begin(Operation operation, const ComparedOptions&, CallPart part, Stream) override {
    operation_ = operation;
    part_ = part;
  }
  void post(const Stored& stored, bool, Stream) override { stored_ = stored; }
  void deliver(Stream stream) override;
  bool keeps_inputs() const override { return true; }
  const std::byte* received_header(int source) override;
  void refuse(Operation operation, const ErrorRecord& error, cudaStream_t stream) override;
  void add_wire(WireCounts& counts) const override;

 private:
  std::byte* windows_of(int peer) const;
  HopArguments arguments(Operation operation, HopContent content) const;
  void carry_headers(Operation operation, cudaStream_t stream) const;
  void carry_messages(Stream stream) const;
  void carry_rows(Stream stream) const;
  // [R] rows, or answers to messages, that go to each rank.
  std::int32_t* row_counts() const {
    return reinterpret_cast<std::int32_t*>(exchange_.engine_lane(lane_.index()) + exchange_.engine->rows);
  }

  const ExchangeState& exchange_;
  const Lane& lane_;
  const HopWorkingMemory working_;
  DeviceMemory memory_;            // HopWorkingMemory
  std::vector<std::byte> header_;  // of received_header()

  // The current call.
  Operation operation_ = Operation::none;
  CallPart part_ = CallPart::whole;
  Stored stored_;
};

HopCarrier::HopCarrier(const ExchangeState& exchange, const Lane& lane)
    : exchange_(exchange),
      lane_(lane),
      working_(HopWorkingMemory::of(exchange.hops->shape)),
      memory_(working_.bytes),
      header_(static_cast<std::size_t>(exchange.engine->header_bytes)) {
  const int ranks = exchange.rank.size();
  prepare_hops(ranks);
  exchange.hop_transport->prepare();
  if (ranks <= kNarrowRanks) return;
  // Kernels of large groups read the addresses of the windows from a table in device memory.
  std::vector<std::byte*> sections;
  for (int peer = 0; peer < ranks; ++peer) sections.push_back(windows_of(peer));
  copy_blocking(memory_.data() + working_.sections, sections.data(),
                static_cast<std::int64_t>(sections.size() * sizeof(std::byte*)));
}

// The lane's windows in the memory of a rank, as this rank has mapped it.
std::byte* HopCarrier::windows_of(int peer) const {
  return exchange_.hop_transport->at(peer, lane_.index() * exchange_.hops->bytes);
}

HopArguments HopCarrier::arguments(Operation operation, HopContent content) const {
  const LaneView& view = lane_.view();
  const Config& config = exchange_.config;
  const EngineLayout& layout = *exchange_.engine;
  std::byte* const memory = exchange_.engine_lane(lane_.index());
  HopArguments arguments{};
  arguments.wires = view;
  arguments.wires.deadline = header_deadline(view.deadline);
  arguments.deadline = view.deadline;
  if (view.ranks <= kNarrowRanks) {
    for (int peer = 0; peer < view.ranks; ++peer) arguments.wires.symmetric[peer] = windows_of(peer);
  } else {
    arguments.wires.symmetric[0] = memory_.data() + working_.sections;
  }
  arguments.layout = *exchange_.hops;
  arguments.topology = HopTopology::of(exchange_.rank.topology(), view.rank, config.hops);
  arguments.memory = {memory_.data() + working_.states,
                      reinterpret_cast<HopCounts*>(memory_.data() + working_.counts),
                      reinterpret_cast<std::uint32_t*>(memory_.data() + working_.agreed)};
  arguments.threads = exchange_.hop_width.threads;
  arguments.channels = exchange_.hop_width.channels;
  arguments.operation = operation;
  arguments.content = content;
  arguments.inbox = memory + layout.inbox;
  arguments.outbox = memory + layout.outbox;
  arguments.block_bytes = layout.block_bytes;
  arguments.header_bytes = layout.header_bytes;
  arguments.flags = layout.flags;
  arguments.end_of_stream = view.signals.header_bytes;
  arguments.row_outbox = memory + layout.row_outbox;
  arguments.row_inbox = memory + layout.row_inbox;
  arguments.row_bytes = layout.row_bytes;
  arguments.label_offset = layout.label_offset;
  arguments.most_sent = layout.sent_rows;
  arguments.most_received = layout.received_rows;
  arguments.arrived = reinterpret_cast<LLPacket*>(memory + layout.arrived);
  arguments.row_flags = layout.row_flags - layout.inbox;
  arguments.combine_type = config.combine_type;
  arguments.row = combine_row_layout(config.combine_type, config.hidden, config.top_k);
  return arguments;
}

void HopCarrier::deliver(Stream stream) {
  switch (stored_.content) {
    case Stored::Content::headers:
      return carry_headers(operation_, handle_of(stream));
    case Stored::Content::messages:
      return carry_messages(stream);
    case Stored::Content::rows:
      return carry_rows(stream);
  }
}

void HopCarrier::carry_headers(Operation operation, cudaStream_t stream) const {
  exchange_.hop_transport->launch(arguments(operation, HopContent::headers), {}, stream);
}

void HopCarrier::carry_messages(Stream stream) const {
  const LaneView& view = lane_.view();
  HopArguments hops = arguments(operation_, HopContent::messages);
  if (stored_.by_plan) kClearInboxKernel(stored_.lane, {}, stream);
  hops.payload_bytes = static_cast<std::int32_t>(align_up(stored_.part_bytes, 16));
  hops.metadata_bytes = static_cast<std::int32_t>(sizeof(LLPacket)) * view.top_k;
  // Route values, which have no parts, are not counted and have no flags.
  hops.sets_flags = stored_.part_bytes > 0;
  if (stored_.part_bytes == 0) hops.memory.counts = nullptr;
  hops.sent_tokens = stored_.returns ? stored_.plan.received_token : stored_.plan.sent_tokens;
  if (stored_.returns) {
    // Those of the messages that have arrived here are a column.
    copy_rows({row_counts(), 4, stored_.plan.tokens_between + view.rank, 4 * std::int64_t{view.ranks}, 4,
               view.ranks},
              stream);
    hops.counts = row_counts();
  } else if (stored_.by_plan) {
    hops.counts = stored_.plan.tokens_between + std::int64_t{view.rank} * view.ranks;
  }
  hops.result_counts = stored_.counts;
  hops.result_offsets = stored_.row_offsets;
  exchange_.hop_transport->launch(hops, stored_.shape, handle_of(stream));
}

void HopCarrier::carry_rows(Stream stream) const {
  const bool adds = stored_.adds_by_node && exchange_.config.hops == Hops::two;
  HopArguments hops = arguments(operation_, adds ? HopContent::sums : HopContent::rows);
  hops.counts = row_counts();
  hops.packs_own_rows = stored_.own_rows;
  hops.continues = part_ == CallPart::last;
  exchange_.hop_transport->launch(hops, stored_.shape, handle_of(stream));
}

// By a call of its own, which all ranks end when they have its headers.
void HopCarrier::refuse(Operation operation, const ErrorRecord& error, cudaStream_t stream) {
  kPostRefusalKernel({.lane = lane_.view(), .operation = operation, .refusal = error}, {}, {stream});
  carry_headers(operation, stream);
  kEndRefusalKernel(lane_.view(), {}, {stream});
}

const std::byte* HopCarrier::received_header(int source) {
  const EngineLayout& layout = *exchange_.engine;
  copy_blocking(header_.data(),
                exchange_.engine_lane(lane_.index()) + layout.inbox + source * layout.block_bytes,
                layout.header_bytes);
  return header_.data();
}

void HopCarrier::add_wire(WireCounts& counts) const {
  const ScopedDevice device(exchange_.device);
  HopCounts moved[4];
  copy_blocking(moved, memory_.data() + working_.counts, sizeof moved);
  const auto add = [](const HopCounts& of, std::int64_t& bytes, std::int64_t& messages) {
    bytes += static_cast<std::int64_t>(of.bytes);
    messages += static_cast<std::int64_t>(of.messages);
  };
  for (int between = 0; between < 2; ++between) {
    add(moved[between], counts.dispatch_bytes, counts.dispatch_messages);
    add(moved[2 + between], counts.combine_bytes, counts.combine_messages);
  }
  add(moved[1], counts.between_nodes.dispatch_bytes, counts.between_nodes.dispatch_messages);
  add(moved[3], counts.between_nodes.combine_bytes, counts.between_nodes.combine_messages);
}

// For ranks whose device memory is mapped; the nodes are simulated.
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
  const auto set_carriers = [](const ExchangeState& exchange, std::deque<Lane>& lanes) {
    for (Lane& lane : lanes) lane.carry_by(std::make_unique<HopCarrier>(exchange, lane));
  };
  return std::make_unique<CudaBackend>(rank, config, Reach::hops, set_carriers, make_hops);
}

}  // namespace cuda

std::unique_ptr<Backend> make_relayed_cuda_backend(const Rank& rank, const Config& config) {
  return cuda::make_relayed_backend(rank, config, [](const Rank& of, std::int64_t bytes) {
    return std::make_unique<cuda::MappedHopTransport>(of, bytes);
  });
}

}  // namespace ferry
