// The backend `collective`: the operations of the cpu backend over messages that an engine carries. Also the
// backend `cpu` in two hops: the same, with transfers through shared memory.
#include <algorithm>
#include <utility>

#include "backends/collective/engine_call.hpp"
#include "backends/collective/window_communicator.hpp"
#include "backends/cpu/backend.hpp"
#include "base/text.hpp"
#include "exchange/backend.hpp"
#include "exchange/configuration.hpp"
#include "group/fault_points.hpp"
#include "group/rank_state.hpp"
#include "plan/shapes.hpp"

namespace ferry {
namespace collective {
namespace {

// One block of messages for each pair, not chunks.
constexpr std::int64_t kWholeCall = std::int64_t{1} << 40;

cpu::CpuContext engine_context(const Rank& rank, const Config& config) {
  return {.rank = rank,
          .config = config,
          .plan_shape = plan_shape(config),
          .row_order_hash = row_order_hash(config),
          .messages_per_chunk = kWholeCall,
          .tokens_per_chunk = kWholeCall,
          .kernels = cpu::kernels()};
}

// Windows in shared memory need no rounds.
HopOptions hops_of(const Config& config, const Topology& topology) {
  return {.relays = has_relays(config, topology),
          .window = config.backend == BackendKind::cpu ? 0 : config.window};
}

// Bytes of a lane's memory for messages. `second`: of the second hop; 0 with one hop.
struct MessageMemory {
  std::int64_t outbox, inbox;
  std::int64_t second_outbox = 0, second_inbox = 0;
};

// The memory that the messages of a dispatch and of a combine need. Each uses it alone.
struct Needs {
  MessageMemory dispatch, combine;

  MessageMemory of_lane() const {
    return {.outbox = std::max(dispatch.outbox, combine.outbox),
            .inbox = std::max(dispatch.inbox, combine.inbox),
            .second_outbox = std::max(dispatch.second_outbox, combine.second_outbox),
            .second_inbox = std::max(dispatch.second_inbox, combine.second_inbox)};
  }
};

Needs needs_of(const Config& config, const Topology& topology, int rank) {
  const ExchangeShape shape = exchange_shape(config, 0);
  const std::int64_t gaps = shape.ranks * kPairAlign;
  const std::int64_t sent_messages = std::int64_t{shape.max_tokens} * plan_shape(config).most_ranks();
  const std::int64_t received_messages = std::int64_t{shape.ranks} * shape.max_tokens;
  // Combine mirrors dispatch: one sum for each message received, or one row for each row received.
  const bool partial = config.reduction == Reduction::partial;
  const std::int64_t rows =
      partial ? received_messages : std::max(received_messages, row_capacity(config, rank));
  Needs needs{.dispatch = {.outbox = sent_messages * shape.message_bytes + gaps,
                           .inbox = received_messages * shape.message_bytes + gaps},
              .combine = {.outbox = rows * shape.combine_row_bytes + gaps,
                          .inbox = shape.combine_rows * shape.combine_row_bytes + gaps}};
  if (!hops_of(config, topology).relays) return needs;
  const std::int64_t row_bytes = shape.combine_row_bytes + static_cast<std::int64_t>(sizeof(cpu::SumHead));
  needs.combine.outbox = rows * row_bytes + gaps;
  needs.combine.inbox = shape.combine_rows * row_bytes + gaps;
  // What a relay holds: every token of the ranks that it serves, once for each rank of its node.
  const int node = topology.node_of(rank), node_ranks = static_cast<int>(topology.ranks_of(node).size());
  std::int64_t relayed_tokens = 0;
  for (int other = 0; other < shape.ranks; ++other) {
    if (topology.node_of(other) != node && topology.relay_of(other, node) == rank)
      relayed_tokens += shape.max_tokens;
  }
  const std::int64_t copies = std::min(config.top_k, node_ranks),
                     rows_of_token = partial ? copies : config.top_k;
  needs.dispatch.second_outbox = relayed_tokens * copies * shape.message_bytes + gaps;
  needs.dispatch.second_inbox =
      std::int64_t{shape.ranks - node_ranks} * shape.max_tokens * shape.message_bytes + gaps;
  needs.combine.inbox += relayed_tokens * rows_of_token * row_bytes;
  needs.combine.second_outbox = relayed_tokens * rows_of_token * row_bytes + gaps;
  needs.combine.second_inbox = shape.combine_rows * row_bytes + gaps;
  return needs;
}

// Sizes of a rank, except for what a communicator allocates.
Sizes packed_sizes(const Config& config, const Topology& topology, int rank) {
  const MessageMemory memory = needs_of(config, topology, rank).of_lane();
  const bool relays = hops_of(config, topology).relays;
  const int ranks = config.placement.ranks();
  std::int64_t blocks = 0;
  if (relays) {
    const HopTables tables(topology, rank);
    blocks = CallBlocks::bytes(call_summary_bytes(config), ranks, tables.first_hop()) +
             MessageHops::second_headers_bytes(tables.second_hop());
  } else {
    blocks = CallBlocks::bytes(call_summary_bytes(config), ranks, {});
  }
  Sizes sizes = cpu::local_sizes(config, rank);
  sizes.messages =
      config.lanes * (memory.outbox + memory.inbox + memory.second_outbox + memory.second_inbox + blocks);
  return sizes;
}

class CollectiveBackend final : public cpu::HostBackend {
 public:
  // `communicators`: one for each lane. `ordered`: see LaneConnection.
  CollectiveBackend(const Rank& rank, const Config& config,
                    std::vector<std::unique_ptr<Communicator>> communicators,
                    const std::shared_ptr<TransferThread>& ordered)
      : HostBackend(engine_context(rank, config)) {
    const HopOptions hops = hops_of(config, rank.topology());
    const MessageMemory memory = needs_of(config, rank.topology(), rank.index()).of_lane();
    for (int lane = 0; lane < config.lanes; ++lane) {
      add_lane(std::make_unique<EngineLink>(
          rank,
          LaneConnection{.communicator = std::move(communicators[static_cast<std::size_t>(lane)]),
                         .lane = lane,
                         .summary_bytes = call_summary_bytes(config),
                         .deadline = config.deadline,
                         .ordered = ordered,
                         .counts_waits = config.count_waits},
          hops,
          std::make_unique<HostHopMemory>(
              std::array{memory.outbox, memory.inbox, memory.second_outbox, memory.second_inbox})));
    }
    fault_point(FaultPoint::construct_mapped, rank.index());
  }

  Sizes sizes() const override { return size_of(context_.config, context_.rank.topology(), context_.me()); }
};

// Without Config::window, the size of all windows of a lane on a rank.
constexpr std::int64_t kHostWindowsBytes = 4 << 20;

WindowLayout window_layout(const Config& config) {
  const ExchangeShape shape = exchange_shape(config, 0);
  const std::int64_t row_bytes = shape.combine_row_bytes + static_cast<std::int64_t>(sizeof(cpu::SumHead));
  const std::int64_t largest = std::max(shape.message_bytes, row_bytes);
  const std::int64_t window =
      config.window > 0 ? config.window * largest : std::max(largest, kHostWindowsBytes / shape.ranks);
  return {.ranks = shape.ranks, .lanes = config.lanes, .window_bytes = align_up(window, 64)};
}

}  // namespace
}  // namespace collective

std::unique_ptr<Backend> make_collective_backend(const Rank& rank, const Config& config) {
  if (config.engine == EngineKind::nccl) return make_device_collective_backend(rank, config, nullptr);
  Engine* engine = rank.state().engine();
  if (engine == nullptr) {
    throw UnsupportedError(
        "backend collective: this group has no engine: make it with Group::mpi(), in Python also with "
        "Group.torch(), or with Group::custom() and the functions of an engine");
  }
  if (config.engine != EngineKind::automatic && config.engine != engine->kind()) {
    throw UsageError(str("configuration: engine is ", to_string(config.engine),
                         ", and the group has brought ", to_string(engine->kind()),
                         ": pass the same or automatic"));
  }
  if (config.memory == MemoryKind::device) return make_device_collective_backend(rank, config, engine);
  return std::make_unique<collective::CollectiveBackend>(
      rank, config, engine->communicators(config.lanes),
      engine->ordered_lanes() ? engine->transfer_thread() : nullptr);
}

Sizes collective_backend_sizes(const Config& config, const Topology& topology, int rank) {
  if (config.memory == MemoryKind::device) return device_collective_sizes(config, topology, rank);
  return collective::packed_sizes(config, topology, rank);
}

std::unique_ptr<Backend> make_relayed_cpu_backend(const Rank& rank, const Config& config) {
  const collective::WindowLayout layout = collective::window_layout(config);
  const auto memory = std::make_shared<const SymmetricMemory>(rank, layout.bytes());
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (int lane = 0; lane < config.lanes; ++lane)
    communicators.push_back(std::make_unique<collective::WindowCommunicator>(rank, memory, layout, lane));
  return std::make_unique<collective::CollectiveBackend>(rank, config, std::move(communicators), nullptr);
}

Sizes relayed_cpu_backend_sizes(const Config& config, const Topology& topology, int rank) {
  const collective::WindowLayout layout = collective::window_layout(config);
  Sizes sizes = collective::packed_sizes(config, topology, rank);
  sizes.dispatch_staging = layout.lanes * layout.windows_bytes();
  sizes.signals = layout.lanes * layout.pairs_bytes();
  return sizes;
}

}  // namespace ferry
