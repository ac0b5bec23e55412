// Calls of CallRanks in two hops: the launches around those that wait, which the host does, and the launch
// between the phases.
#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include <gtest/gtest.h>

#include <cstring>

#include "backends/cuda/combine/packed_rows.cuh"
#include "backends/cuda/host/memory_layout.hpp"
#include "backends/cuda/two_hops/hop_block.cuh"
#include "kernels_on_host/call_ranks.hpp"
#include "kernels_on_host/grid.hpp"
#include "oracle/numbers.hpp"

namespace ferry::cuda {

// As the constructors of ExchangeState and Lane.
void CallRanks::place_hops() {
  topology_.emplace(case_.nodes);
  config_.backend = BackendKind::cuda;
  config_.hops = Hops::two;
  place_lanes();
  const EngineLayout& engine = ranks_[0].engine;
  hops_ = hop_layout(config_, *topology_, engine.header_bytes, engine.row_bytes);
  for (Rank& rank : ranks_) {
    rank.windows = of_bytes(hops_.bytes, std::byte{0});
    window_sections_.push_back(at(rank.windows));
    rank.hop_states.resize(sizeof(HopTaskState) * 32 *
                           static_cast<std::size_t>(hop_tasks(hops_.shape.ranks, hops_.shape.channels)));
  }
}

// As Lane::enqueue(), kClearMetadataKernel and kClearInboxKernel.
void CallRanks::place_messages(DispatchArguments& call, int index) {
  const Rank& rank = ranks_[static_cast<std::size_t>(index)];
  place_engine_messages(rank.engine, call.message.bytes, &call.lane);
  call.message.bytes = static_cast<std::int32_t>(engine_message_bytes(call.message.bytes, config_.top_k));
  if (!call.by_plan) return;
  for (int peer = 0; peer < size(); ++peer) {
    for (int i = 0; i < config_.max_tokens; ++i) {
      for (int slot = 0; slot < config_.top_k; ++slot) {
        memory::slot_metadata(call.lane, peer, 0, index, i)[slot] = {0, 0};
        memory::slot_metadata(call.lane, index, 0, peer, i)[slot] = {0, 0};
      }
    }
  }
}

// As Lane::pack_rows() and kPlaceRowsKernel.
void CallRanks::place_rows(CombineArguments& call, int index) {
  Rank& rank = ranks_[static_cast<std::size_t>(index)];
  std::byte* const memory = at(rank.engine_memory);
  const EngineLayout& layout = rank.engine;
  auto* first_row = reinterpret_cast<std::int32_t*>(memory + layout.first_row);
  auto* rows = reinterpret_cast<std::int32_t*>(memory + layout.rows);
  for (int source = 0; source < size(); ++source) {
    std::int32_t end = 0;
    for (std::int32_t i = 0; i < call.plan.tokens_between[source * size() + index]; ++i) {
      const std::int64_t message = std::int64_t{source} * config_.max_tokens + i;
      first_row[message] = end;
      std::int32_t of_message = 0;
      for (int slot = 0; slot < config_.top_k; ++slot)
        of_message += call.plan.received_rows_of_message[message * config_.top_k + slot] >= 0 ? 1 : 0;
      end += call.reduction == Reduction::partial ? 1 : of_message;
    }
    rows[source] = end;
  }
  std::memset(memory + layout.row_outbox, 0xff,  // NaN
              static_cast<std::size_t>(layout.sent_rows * layout.row_bytes));
  call.packed = {.outbox = memory + layout.row_outbox,
                 .row_bytes = layout.row_bytes,
                 .label_offset = layout.label_offset,
                 .first_row = first_row,
                 .rows = rows,
                 .arrived = reinterpret_cast<const LLPacket*>(memory + layout.arrived),
                 .most_rows = layout.sent_rows};
}

// As kAddOnNodesKernel, where relays add.
void CallRanks::add_on_nodes(CombineArguments& call, int index) {
  Rank& rank = ranks_[static_cast<std::size_t>(index)];
  std::byte* const memory = at(rank.engine_memory);
  auto* const arrived = reinterpret_cast<LLPacket*>(memory + rank.engine.arrived);
  auto* const token_ranks = reinterpret_cast<std::int32_t*>(memory + rank.engine.token_ranks);
  auto* const route_rank = reinterpret_cast<std::int32_t*>(memory + rank.engine.route_rank);
  const std::int64_t most = rank.view.most_ranks;
  const std::uint64_t number = rank.state.calls[0] + 1;
  for (std::int64_t token = 0; token < rank.tokens; ++token) {
    std::vector<std::byte*> first(static_cast<std::size_t>(topology_->nodes()), nullptr);
    std::vector<int> leader(first.size(), -1);
    std::vector<std::vector<std::byte*>> rows(first.size());
    for (std::int64_t p = 0; p < most; ++p) {
      const int from = call.plan.token_ranks[token * most + p];
      if (from < 0) break;
      const int node = topology_->node_of(from);
      const auto n = static_cast<std::size_t>(node);
      if (leader[n] >= 0 && node != topology_->node_of(index)) continue;
      const LLPacket row = arrived[token * most + p];
      ASSERT_EQ(row.call, number) << "row of token " << token << " from rank " << from;
      rows[n].push_back(reinterpret_cast<std::byte*>(row.word));
      if (leader[n] < 0) leader[n] = from;
    }
    std::int64_t nodes = 0;
    for (std::size_t n = 0; n < first.size(); ++n) {
      if (rows[n].empty()) continue;
      const std::int64_t step = bytes_of(config_.combine_type);
      for (int c = 0; rows[n].size() > 1 && c < config_.hidden; ++c) {
        float sum = 0;
        for (const std::byte* row : rows[n]) sum += oracle::load(config_.combine_type, row + c * step);
        oracle::store(config_.combine_type, sum, rows[n][0] + c * step);
      }
      for (int slot = 0; slot < config_.top_k; ++slot) {
        std::uint32_t joined = 0, word = 0;
        for (const std::byte* row : rows[n]) {
          std::memcpy(&word, row + call.row.tail_offset + 4 * slot, 4);
          joined |= word;
        }
        std::memcpy(rows[n][0] + call.row.tail_offset + 4 * slot, &joined, 4);
      }
      arrived[token * most + nodes] = {number, reinterpret_cast<std::uint64_t>(rows[n][0])};
      set_row_flags(rank.view, token * most + nodes, number);
      token_ranks[token * most + nodes++] = leader[n];
    }
    for (; nodes < most; ++nodes) token_ranks[token * most + nodes] = -1;
    for (int slot = 0; slot < config_.top_k; ++slot) {
      const std::int64_t route = token * config_.top_k + slot;
      const int to = call.plan.route_rank[route];
      route_rank[route] = to < 0 ? to : leader[static_cast<std::size_t>(topology_->node_of(to))];
    }
  }
  call.plan.token_ranks = token_ranks;
  call.plan.route_rank = route_rank;
}

// As HopCarrier::arguments().
HopArguments CallRanks::hop_arguments(int index, HopContent content) {
  Rank& rank = ranks_[static_cast<std::size_t>(index)];
  const EngineLayout& layout = rank.engine;
  std::byte* const memory = at(rank.engine_memory);
  HopArguments call{};
  call.wires = rank.view;
  call.wires.deadline = header_deadline(rank.view.deadline);
  call.deadline = rank.view.deadline;
  place_sections(window_sections_, &call.wires);
  call.layout = hops_;
  call.threads = kHopThreads;
  call.channels = hops_.shape.channels;
  call.topology = HopTopology::of(*topology_, index);
  call.memory = {rank.hop_states.data(), rank.hop_counts, &rank.hop_agreed};
  call.operation = content == HopContent::messages ? Operation::dispatch : Operation::combine;
  call.content = content;
  call.inbox = memory + layout.inbox;
  call.outbox = memory + layout.outbox;
  call.block_bytes = layout.block_bytes;
  call.header_bytes = layout.header_bytes;
  call.flags = layout.flags;
  call.end_of_stream = rank.view.signals.header_bytes;
  call.row_outbox = memory + layout.row_outbox;
  call.row_inbox = memory + layout.row_inbox;
  call.row_bytes = layout.row_bytes;
  call.label_offset = layout.label_offset;
  call.most_sent = layout.sent_rows;
  call.most_received = layout.received_rows;
  call.arrived = reinterpret_cast<LLPacket*>(memory + layout.arrived);
  call.row_flags = layout.row_flags - layout.inbox;
  call.combine_type = config_.combine_type;
  call.row = combine_row_layout(config_.combine_type, config_.hidden, config_.top_k);
  return call;
}

void CallRanks::run_hops(const std::vector<HopArguments>& calls, std::uint64_t seed) {
  on_host::Grid grid(seed);
  std::deque<std::deque<HopState>> states;
  std::deque<Pretended> transports;
  for (const HopArguments& call : calls) {
    auto& of_blocks = states.emplace_back(2);
    Pretended& transport = transports.emplace_back();
    for (int peer = 0; peer < size(); ++peer) {
      if (call.topology.node[peer] != call.topology.node[call.wires.rank]) transport.remote.add(peer);
    }
    grid.add(2, kHopThreads, [&call, &transport, &of_blocks](unsigned block) {
      HopBlock<Pretended>(call, transport, &of_blocks[block]).run();
    });
  }
  grid.run();
}

}  // namespace ferry::cuda
