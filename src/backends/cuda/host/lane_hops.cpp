// The calls of a lane in two hops: between the phases a launch carries the stored messages (two_hops/).
#include "backends/cuda/host/lane.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "backends/cuda/runtime/stream.hpp"
#include "backends/cuda/two_hops/header_calls.hpp"
#include "base/text.hpp"
#include "exchange/configuration.hpp"

namespace ferry::cuda {

// The lane's windows in the memory of a rank, as this rank has mapped it.
std::byte* Lane::windows_of(int peer) const {
  return exchange_.hop_transport->at(peer, index_ * exchange_.hops->bytes);
}

// For large groups: kernels read the addresses of the windows from a table in device memory.
void Lane::init_hop_memory() const {
  if (view_.ranks <= kNarrowRanks) return;
  std::vector<std::byte*> sections;
  for (int peer = 0; peer < view_.ranks; ++peer) sections.push_back(windows_of(peer));
  copy_blocking(hop_memory_.data() + HopWorkingMemory::of(exchange_.hops->shape).sections, sections.data(),
                static_cast<std::int64_t>(sections.size() * sizeof(std::byte*)));
}

HopArguments Lane::hop_arguments(Operation operation, HopContent content) const {
  const EngineLayout& layout = *exchange_.engine;
  std::byte* const memory = exchange_.engine_lane(index_);
  const HopWorkingMemory working = HopWorkingMemory::of(exchange_.hops->shape);
  HopArguments arguments{};
  arguments.wires = view_;
  arguments.wires.deadline = header_deadline(view_.deadline);
  arguments.deadline = view_.deadline;
  if (view_.ranks <= kNarrowRanks) {
    for (int peer = 0; peer < view_.ranks; ++peer) arguments.wires.symmetric[peer] = windows_of(peer);
  } else {
    arguments.wires.symmetric[0] = hop_memory_.data() + working.sections;
  }
  arguments.layout = *exchange_.hops;
  arguments.topology = HopTopology::of(exchange_.rank.topology(), view_.rank, exchange_.config.hops);
  arguments.memory = {hop_memory_.data() + working.states,
                      reinterpret_cast<HopCounts*>(hop_memory_.data() + working.counts),
                      reinterpret_cast<std::uint32_t*>(hop_memory_.data() + working.agreed)};
  arguments.threads = exchange_.hop_width.threads;
  arguments.channels = exchange_.hop_width.channels;
  arguments.operation = operation;
  arguments.content = content;
  arguments.inbox = memory + layout.inbox;
  arguments.outbox = memory + layout.outbox;
  arguments.block_bytes = layout.block_bytes;
  arguments.header_bytes = layout.header_bytes;
  arguments.flags = layout.flags;
  arguments.end_of_stream = view_.signals.header_bytes;
  arguments.row_outbox = memory + layout.row_outbox;
  arguments.row_inbox = memory + layout.row_inbox;
  arguments.row_bytes = layout.row_bytes;
  arguments.label_offset = layout.label_offset;
  arguments.most_sent = layout.sent_rows;
  arguments.most_received = layout.received_rows;
  arguments.arrived = reinterpret_cast<LLPacket*>(memory + layout.arrived);
  arguments.row_flags = layout.row_flags - layout.inbox;
  arguments.combine_type = exchange_.config.combine_type;
  arguments.row =
      combine_row_layout(exchange_.config.combine_type, exchange_.config.hidden, exchange_.config.top_k);
  return arguments;
}

// `planned`: by this plan; `parts`: bytes of a message's parts.
void Lane::hop_messages(HopArguments arguments, const LaneView& lane, const PlanView& plan,
                        std::int64_t parts, bool planned, const LaunchShape& shape, Stream stream) const {
  if (planned) kClearInboxKernel(lane, {}, stream);
  arguments.payload_bytes = static_cast<std::int32_t>(align_up(parts, 16));
  arguments.metadata_bytes = static_cast<std::int32_t>(sizeof(LLPacket)) * view_.top_k;
  // Route values, which have no parts, are not counted and have no flags.
  arguments.sets_flags = parts > 0;
  if (parts == 0) arguments.memory.counts = nullptr;
  arguments.sent_tokens = plan.sent_tokens;
  if (planned) arguments.counts = plan.tokens_between + std::int64_t{view_.rank} * view_.ranks;
  exchange_.hop_transport->launch(arguments, shape, handle_of(stream));
}

DispatchResult Lane::hop_dispatch(const DispatchCall& call, Stream stream) {
  dispatch(call, Phase::send, stream, true);
  return hop_dispatch_receive(stream);
}

DispatchResult Lane::hop_dispatch_receive(Stream stream) {
  HopArguments arguments = hop_arguments(Operation::dispatch, HopContent::messages);
  arguments.result_counts = dispatch_.counts;
  arguments.result_offsets = dispatch_.row_offsets;
  hop_messages(arguments, dispatch_.lane, dispatch_.plan,
               dispatch_.message.bytes - std::int64_t{sizeof(LLPacket)} * view_.top_k, dispatch_.by_plan,
               phase_shape_, stream);
  return dispatch_receive(stream);
}

void Lane::hop_values(const RouteValuesCall& call, Stream stream) const {
  LaneView lane = view_;
  place_engine_messages(*exchange_.engine, 0, &lane);
  hop_messages(hop_arguments(call.needed_by(), HopContent::messages), lane,
               view_plan(call.plan.storage(), view_.plan_shape), 0, true,
               shape(call.combine != nullptr ? call.combine->sm_limit : 0), stream);
}

void Lane::hop_combine(const CombineCall& call, Stream stream) {
  // Sums by node look up this rank's own rows where they are packed.
  const bool keeps_inputs = !exchange_.has_node_sums();
  if (!call.weights_travel()) {
    combine(call, Phase::send, stream, keeps_inputs);
    hop_rows(false, stream);
    return;
  }
  // Nothing may be refused after the weights have been sent.
  require_own_stream(Operation::combine, stream);
  pointer_check_.require_usable("combine", pointers_of(call));
  shape(call.sm_limit);
  auto* const row_weights =
      reinterpret_cast<float*>(exchange_.engine_lane(index_) + exchange_.engine->row_weights);
  // The ranks compare the options of the combine before its weights.
  const RouteValuesCall weights{
      .values = call.topk_weights, .plan = call.plan, .row_values = row_weights, .combine = &call};
  run(weights, stream);
  CombineCall with_row_weights = call;
  with_row_weights.topk_weights = nullptr;
  with_row_weights.topk_weighted = false;
  with_row_weights.row_weights = row_weights;
  combine(with_row_weights, Phase::send, stream, keeps_inputs);
  hop_rows(true, stream);
}

// The hops and the receive phase of a combine. `continues`: its weights have been sent before.
void Lane::hop_rows(bool continues, Stream stream) {
  const HopContent content =
      adds_by_node() && exchange_.config.hops == Hops::two ? HopContent::sums : HopContent::rows;
  HopArguments arguments = hop_arguments(Operation::combine, content);
  arguments.counts =
      reinterpret_cast<const std::int32_t*>(exchange_.engine_lane(index_) + exchange_.engine->rows);
  arguments.packs_own_rows = packs_own_rows();
  arguments.continues = continues;
  exchange_.hop_transport->launch(arguments, phase_shape_, handle_of(stream));
  if (adds_by_node()) add_on_nodes(stream);
  combine_receive(stream);
}

void Lane::hop_headers(Operation operation, cudaStream_t stream) const {
  exchange_.hop_transport->launch(hop_arguments(operation, HopContent::headers), {}, stream);
}

void Lane::post_refusal(const RefusalArguments& arguments, cudaStream_t stream) const {
  if (!exchange_.hops) return kRefusalKernel(arguments, {}, {stream});
  kPostRefusalKernel(arguments, {}, {stream});
  hop_headers(arguments.operation, stream);
  kEndRefusalKernel(view_, {}, {stream});
}

DispatchCounts Lane::hop_dispatch_counts() {
  const EngineLayout& layout = *exchange_.engine;
  const std::byte* const inbox = exchange_.engine_lane(index_) + layout.inbox;
  std::vector<std::byte> header(static_cast<std::size_t>(layout.header_bytes));
  return counts_of_headers([&](int source) {
    copy_blocking(header.data(), inbox + source * layout.block_bytes, layout.header_bytes);
    return header.data();
  });
}

void Lane::add_hop_wire(WireCounts& counts) const {
  const ScopedDevice device(exchange_.device);
  HopCounts moved[4];
  copy_blocking(moved, hop_memory_.data() + HopWorkingMemory::of(exchange_.hops->shape).counts, sizeof moved);
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

}  // namespace ferry::cuda
