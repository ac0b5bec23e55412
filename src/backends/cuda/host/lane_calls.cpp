// Turns a checked call into the arguments of its kernel, and launches it.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <thread>

#include "backends/cuda/combine/shared_outputs.hpp"
#include "backends/cuda/dispatch/input_hash.hpp"
#include "backends/cuda/dispatch/shared_rows.hpp"
#include "backends/cuda/host/block_roles.hpp"
#include "backends/cuda/host/lane.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "base/pause.hpp"
#include "base/text.hpp"
#include "exchange/call_options.hpp"
#include "exchange/configuration.hpp"
#include "exchange/scale_checks.hpp"

namespace ferry::cuda {

AgreedOptions agreed_options_of(Operation operation, const CallOptions& options) {
  AgreedOptions agreed = AgreedOptions::of(operation);
  for (const CallOption& option : options.values()) agreed.add(option.value);
  return agreed;
}

namespace {

// Kernels of dispatch store by rows what becomes tiles afterwards.
PartList by_rows(PartList parts) {
  for (PartLayout& part : parts.part) {
    if (!part.tiles) continue;
    part.tiles = false;
    part.element_bytes = part.row_bytes;
  }
  return parts;
}

}  // namespace

DispatchArguments Lane::dispatch_arguments(const DispatchCall& call, bool fused) const {
  const Config& config = exchange_.config;
  DispatchArguments arguments{};
  arguments.lane = view_;
  const CallOptions options = options_of(config, call);
  arguments.terms = agreed_options_of(Operation::dispatch, options);
  arguments.hash_option = input_hash_option(options);
  arguments.parts = by_rows(message_parts(config, call));
  arguments.received = by_rows(received_parts(config, call));
  arguments.message = device_message_layout(arguments.parts);
  arguments.row_encoding = encoding_of(call.format);
  // Tokens whose rows are encoded where they arrive travel as they are.
  arguments.encoding = by_expert(call) ? Encoding{} : arguments.row_encoding;
  arguments.input_scales = call.input_scales.data();
  const bool quantised = arguments.encoding.quantises();
  for (int p = 0; p < kMaxParts; ++p) {
    const auto i = static_cast<std::size_t>(p);
    const std::int64_t dense =
        quantised ? config.hidden * bytes_of(call.tokens.type) : arguments.parts.part[p].row_bytes;
    arguments.part[p] = static_cast<const std::byte*>(call.tokens.parts[i]);
    arguments.stride[p] = call.tokens.strides[i] != 0 ? call.tokens.strides[i] : dense;
  }
  arguments.tokens = call.tokens.count;
  arguments.device_tokens = call.tokens.device_count;
  arguments.type = call.tokens.type;
  arguments.ids = call.ids.data;
  arguments.wide_ids = call.ids.type == IdType::int64;
  arguments.weights = call.weights;
  arguments.by_plan = !call.plan.empty();
  arguments.dot_rows = call.dot_rows;
  arguments.dot_type = config.combine_type;
  arguments.apply_weights = call.apply_weights;
  arguments.global_scale = call.global_scale;
  // Own rows go through staging where they are quantised, or where the caller may change them before the
  // receive phase.
  arguments.own_staged = quantised || !fused;
  return arguments;
}

void Lane::set_receive_buffers(const DispatchCall& call, DispatchArguments& arguments) {
  const Config& config = exchange_.config;
  const ReceiveBuffers& memory = call.memory;
  // Receivers compare rows with the capacity in their view.
  if (memory.rows > 0 && !arguments.by_plan)
    arguments.lane.capacity = std::min(arguments.lane.capacity, memory.rows);
  const bool rank_major = config.layout == Layout::rank_major;
  const std::int64_t rows = view_.capacity_rows;
  const Plan plan = arguments.by_plan
                        ? call.plan
                        : Plan::over(memory.plan != nullptr ? memory.plan : array<void>(arrays_.plan),
                                     static_cast<std::size_t>(view_plan(nullptr, view_.plan_shape).bytes));
  DispatchResult result;
  std::int64_t end = 0;
  for (int p = 0; p < arguments.received.count; ++p) {
    const auto i = static_cast<std::size_t>(p);
    const PartLayout& part = arguments.received.part[p];
    void* own = config.own_receive_buffers ? receive_buffers() + end : nullptr;
    end = align_up(end + part_bytes_total(part, rows, groups_of(config, view_.rank)), 256);
    result.parts[i] = {.data = memory.parts[i] != nullptr ? memory.parts[i] : own,
                       .row_bytes = received_row_bytes(part),
                       .leading_dimension = leading_dimension(part, rows)};
    arguments.received_parts[p] = static_cast<std::byte*>(result.parts[i].data);
    arguments.leading_dimension[p] = result.parts[i].leading_dimension;
  }
  arguments.own_memory =
      config.own_receive_buffers && memory.parts[0] == nullptr && arguments.input_scales == nullptr;
  arguments.plan = view_plan(plan.storage(), view_.plan_shape);
  arguments.counts = memory.counts != nullptr ? memory.counts : array<std::int32_t>(arrays_.counts);
  arguments.row_offsets =
      memory.row_offsets != nullptr ? memory.row_offsets : array<std::int32_t>(arrays_.row_offsets);
  arguments.count_sums = memory.count_sums;
  if (call.weights != nullptr)
    arguments.weight = memory.weight != nullptr ? memory.weight : array<float>(arrays_.weight);
  if (rank_major)
    arguments.local_ids =
        memory.local_ids != nullptr ? memory.local_ids : array<std::int32_t>(arrays_.local_ids);
  arguments.group_of_row = memory.group_of_row;
  if (call.dot_rows != nullptr)
    arguments.dots = memory.dots != nullptr ? memory.dots : array<float>(arrays_.dots);

  result.data = result.parts[0].data;
  result.groups = groups_of(config, view_.rank);
  result.capacity = view_.capacity;
  result.counts = arguments.counts;
  result.row_offsets = arguments.row_offsets;
  result.total = arguments.row_offsets + result.groups;
  result.group_expert = array<std::int32_t>(arrays_.group_expert);
  result.source = arguments.plan.sources;
  result.weight = arguments.weight;
  result.local_ids = arguments.local_ids;
  result.group_of_row = arguments.group_of_row;
  result.dots = arguments.dots;
  result.host = view_.totals;
  result.plan = plan;
  result_ = result;
  tiles_.reset();
}

// Memory for scales by rows where the configuration has neither tiles nor receive buffers: allocated in the
// first call that needs it.
std::byte* Lane::further_scale_rows(Stream stream) {
  if (further_scale_rows_.bytes() > 0) return further_scale_rows_.data();
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(handle_of(stream), &status), "query the capture state of a stream");
  if (status != cudaStreamCaptureStatusNone) {
    throw UsageError(
        "dispatch: the first call with scales as tiles allocates memory, so it cannot be captured: make one "
        "before, or construct the exchange with a format that has tiles");
  }
  further_scale_rows_ = DeviceMemory(view_.capacity_rows * largest_scales(exchange_.config).row_bytes);
  return further_scale_rows_.data();
}

// Tiles come from scales by rows, which lie in the lane's memory, also where the caller passes memory for the
// tiles.
void Lane::set_tiles(const DispatchCall& call, DispatchArguments& arguments, Stream stream) {
  const Config& config = exchange_.config;
  const bool has_rows = config.own_receive_buffers || encoding_of(config.format).scale_tiles;
  std::byte* scales = has_rows ? array<std::byte>(arrays_.scale_rows) : further_scale_rows(stream);
  if (config.own_receive_buffers) {
    const std::int64_t values =
        part_bytes_total(arguments.received.part[0], view_.capacity_rows, groups_of(config, view_.rank));
    scales = view_.at(view_.rank, view_.receive_buffers + align_up(values, 256));
  }
  std::byte* const own = config.own_receive_buffers
                             ? view_.at(view_.rank, view_.receive_buffers + device_layout(config).tiles)
                             : nullptr;
  ReceivedPart& tiles = result_.parts[1];
  tiles.data = call.memory.parts[1] != nullptr ? call.memory.parts[1] : own;
  tiles.row_bytes = received_row_bytes(parts_of(call.format, config.hidden).part[1]);
  arguments.received_parts[1] = scales;
  result_.tile_offsets = array<std::int32_t>(arrays_.tile_offsets);
  tiles_ = {.layout = config.layout,
            .groups = view_.groups,
            .capacity = view_.capacity,
            .rows = view_.capacity_rows,
            .by_plan = arguments.by_plan ? arguments.plan.header : nullptr,
            .counts = arguments.counts,
            .row_offsets = arguments.row_offsets,
            .scales = scales,
            .words = static_cast<std::int32_t>(arguments.received.part[1].row_bytes / kScaleBytes),
            .tiles = static_cast<std::byte*>(tiles.data),
            .tile_offsets = array<std::int32_t>(arrays_.tile_offsets)};
}

DispatchResult Lane::dispatch(const DispatchCall& call, Phase phase, Stream stream) {
  require_own_stream(Operation::dispatch, stream);
  pointer_check_.require_usable("dispatch", pointers_of(call));
  const LaunchShape shape = this->shape(call.sm_limit);
  DispatchArguments arguments = dispatch_arguments(call, phase == Phase::fused);
  set_receive_buffers(call, arguments);
  if (encoding_of(call.format).scale_tiles) set_tiles(call, arguments, stream);
  const bool replicated = exchange_.config.input == Input::replicated;
  const DispatchWork work{.few = arguments.tokens < kManyTokens && !replicated,
                          .quantised = arguments.encoding.quantises(),
                          .direct_write = arguments.own_memory};
  arguments.many_token_blocks = {dispatch_senders(shape.blocks, exchange_.config, work), 0};
  arguments.few_token_blocks =
      dispatch_few_token_blocks(shape.blocks, exchange_.config, arguments.tokens, work.quantised);
  const DispatchMode mode =
      dispatch_mode({.phase = phase,
                     .computes_values = call.apply_weights || call.dot_rows != nullptr || by_expert(call),
                     .by_plan = arguments.by_plan,
                     .replicated = replicated,
                     .to_every_rank = view_.to_every_rank(),
                     .has_metadata_blocks = arguments.few_token_blocks.metadata_blocks > 0,
                     .count_on_device = arguments.device_tokens != nullptr,
                     .tokens = arguments.tokens});
  if (over_engine()) {
    place_engine_messages(*exchange_.engine, arguments.message.bytes, &arguments.lane);
    arguments.message.bytes =
        static_cast<std::int32_t>(engine_message_bytes(arguments.message.bytes, view_.top_k));
    if (arguments.by_plan) launch_clear_metadata(arguments.lane, handle_of(stream));
  }
  if (replicated && !arguments.by_plan) launch_input_hash(arguments, shape.blocks, handle_of(stream));
  // Before the dispatch, which may wait for peers: a launch behind it could hold up theirs where ranks share
  // a GPU and the driver's queues.
  if (view_.shared_experts > 0) launch_shared_rows(arguments, shape.blocks, handle_of(stream));
  launch_dispatch(arguments, mode, shape, handle_of(stream));
  if (tiles_ && phase == Phase::fused) launch_scale_tiles(*tiles_, shape.blocks, handle_of(stream));
  result_.call = calls_ + 1;
  if (!over_engine()) ++calls_;
  if (phase == Phase::send) {
    keep_scales(arguments, stream);
    dispatch_ = arguments;
    phase_shape_ = shape;
  }
  return result_;
}

// The caller may change the scales after the send phase, and the receive phase reads them.
void Lane::keep_scales(DispatchArguments& arguments, Stream stream) const {
  if (arguments.input_scales == nullptr) return;
  const int experts = view_.experts + view_.shared_experts;
  auto* const kept = array<float>(arrays_.input_scales);
  check(cudaMemcpyAsync(kept, arguments.input_scales, sizeof(float) * static_cast<std::size_t>(experts),
                        cudaMemcpyDefault, handle_of(stream)),
        "keep input_scales");
  arguments.input_scales = kept;
}

void Lane::count_dispatch(const Ids& ids, std::int32_t tokens, Stream stream) {
  require_own_stream(Operation::dispatch_counts, stream);
  CallPointers pointers;
  if (tokens > 0) pointers.add("ids", ids.data, bytes_of(ids.type));
  pointer_check_.require_usable("dispatch_counts", pointers);
  launch_dispatch_counts({.lane = view_,
                          .terms = AgreedOptions::of(Operation::dispatch_counts),
                          .ids = ids.data,
                          .wide_ids = ids.type == IdType::int64,
                          .tokens = tokens,
                          .host = reinterpret_cast<HostCounts*>(counts_.data()),
                          .call = ++counted_,
                          .posts_only = over_engine()},
                         handle_of(stream));
  if (!over_engine()) ++calls_;
}

bool Lane::await_dispatch_counts(Stream stream) const {
  constexpr int kPolls = 20'000;  // about a millisecond
  auto* host = reinterpret_cast<HostCounts*>(counts_.data());
  for (int poll = 0; poll < kPolls; ++poll) {
    // Acquire: the kernel has written the counts before.
    if (std::atomic_ref(host->ended.call).load(std::memory_order_acquire) == counted_) return true;
    pause_processor();
  }
  std::this_thread::yield();
  // A kernel that has ended has told so, unless it or one before it has failed.
  const cudaError_t state = cudaStreamQuery(handle_of(stream));
  if (state != cudaErrorNotReady) check(state, "count the rows of a dispatch");
  return false;
}

bool Lane::counted_dispatch() const {
  const auto* host = reinterpret_cast<const HostCounts*>(counts_.data());
  return host->ended.word == static_cast<std::uint64_t>(HostCounts::Result::counted);
}

DispatchCounts Lane::dispatch_counts() const {
  auto* host = reinterpret_cast<HostCounts*>(counts_.data());
  if (!counted_dispatch())
    throw UsageError("dispatch_counts: the call was aborted by an error that has been reported before");
  const auto ranks = static_cast<std::size_t>(view_.ranks);
  const auto experts = static_cast<std::size_t>(exchange_.config.placement.local_experts(view_.rank));
  const std::span<const std::int32_t> messages(host->messages(view_.ranks), ranks);
  DispatchCounts counts;
  counts.tokens = {host->tokens(), ranks};
  counts.routes = {host->routes(view_.ranks), experts};
  counts.total =
      total_rows(exchange_.config, view_.rank, counts.tokens[static_cast<std::size_t>(view_.rank)],
                 std::accumulate(messages.begin(), messages.end(), std::int64_t{0}), counts.routes);
  return counts;
}

DispatchResult Lane::dispatch_receive(Stream stream) {
  launch_dispatch(dispatch_, DispatchMode::receive_phase, phase_shape_, handle_of(stream));
  if (tiles_) launch_scale_tiles(*tiles_, phase_shape_.blocks, handle_of(stream));
  if (over_engine()) ++calls_;
  return result_;
}

// Decides who adds the rows of shared experts, and says so in the arguments.
Lane::SharedCopy Lane::plan_shared_copy(const CombineCall& call, Phase phase,
                                        CombineArguments* arguments) const {
  if (view_.shared_experts == 0 || arguments->outputs == nullptr || arguments->result == nullptr) return {};
  if (call.shared_outputs != nullptr)
    return {static_cast<std::byte*>(call.shared_outputs), arguments->result_type};
  arguments->shared_terms = view_.shared_experts;
  if (phase == Phase::fused && arguments->output_type == arguments->combine_type) return {};
  auto* const kept = array<std::byte>(arrays_.shared_outputs);
  arguments->kept_shared_rows = kept;
  return {kept, arguments->combine_type};
}

void Lane::copy_shared_rows(const CombineArguments& combine, const SharedCopy& copy, const LaunchShape& shape,
                            Stream stream) const {
  launch_shared_outputs({.lane = view_,
                         .plan = combine.plan,
                         .outputs = combine.outputs,
                         .output_stride = combine.output_stride,
                         .output_type = combine.output_type,
                         .combine_type = combine.combine_type,
                         .to = copy.to,
                         .type = copy.type},
                        shape.blocks, handle_of(stream));
}

void Lane::combine(const CombineCall& call, Phase phase, Stream stream) {
  const Config& config = exchange_.config;
  require_own_stream(Operation::combine, stream);
  pointer_check_.require_usable("combine", pointers_of(call));
  const LaunchShape shape = this->shape(call.sm_limit);
  CombineArguments arguments{};
  arguments.lane = view_;
  arguments.phase = phase;
  arguments.terms = agreed_options_of(Operation::combine, options_of(call));
  arguments.weights_travel = call.reduction == Reduction::partial && call.topk_weights != nullptr;
  arguments.plan = view_plan(call.plan.storage(), view_.plan_shape);
  arguments.reduction = call.reduction;
  arguments.combine_type = config.combine_type;
  arguments.row = combine_row_layout(config.combine_type, config.hidden, config.top_k);
  arguments.outputs = static_cast<const std::byte*>(call.outputs.data);
  arguments.output_stride =
      call.outputs.stride != 0 ? call.outputs.stride : config.hidden * bytes_of(call.outputs.type);
  arguments.output_type = call.outputs.type;
  arguments.row_weights = call.row_weights;
  arguments.row_values = call.row_values;
  arguments.result = static_cast<std::byte*>(call.result.data);
  arguments.result_stride =
      call.result.stride != 0 ? call.result.stride : config.hidden * bytes_of(call.result.type);
  arguments.result_type = call.result.type;
  arguments.topk_weights = call.topk_weights;
  arguments.route_values = call.route_values;
  // Own rows go through staging where they are converted: the sender role then sums them like all others.
  arguments.own_staged = phase != Phase::fused || call.outputs.type != config.combine_type;
  const SharedCopy shared = plan_shared_copy(call, phase, &arguments);
  arguments.senders =
      combine_senders(shape.blocks, config, call.reduction, arguments.own_staged, arguments.shared_terms);
  if (over_engine()) pack_rows(arguments, stream);
  // The fused kernel adds the rows that are copied; a send phase has more urgent work.
  if (shared.to != nullptr && phase == Phase::fused) copy_shared_rows(arguments, shared, shape, stream);
  launch_combine(arguments, shape, handle_of(stream));
  if (shared.to != nullptr && phase == Phase::send) copy_shared_rows(arguments, shared, shape, stream);
  if (!over_engine()) ++calls_;
  const std::optional<EpilogueArguments> epilogue = plan_epilogue(call, arguments);
  if (epilogue && phase == Phase::fused) launch_epilogue(*epilogue, shape.blocks, handle_of(stream));
  if (phase == Phase::send) {
    epilogue_ = epilogue;
    combine_ = arguments;
    combine_.phase = Phase::receive;
    phase_shape_ = shape;
  }
}

void Lane::combine_receive(Stream stream) {
  launch_combine(combine_, phase_shape_, handle_of(stream));
  if (epilogue_) launch_epilogue(*epilogue_, phase_shape_.blocks, handle_of(stream));
  if (over_engine()) ++calls_;
}

std::optional<EpilogueArguments> Lane::plan_epilogue(const CombineCall& call,
                                                     const CombineArguments& combine) const {
  if (call.epilogue.empty() || combine.result == nullptr) return std::nullopt;
  return EpilogueArguments{.lane = view_,
                           .plan = combine.plan,
                           .result = combine.result,
                           .result_stride = combine.result_stride,
                           .type = combine.result_type,
                           .residual = static_cast<const std::byte*>(call.epilogue.residual),
                           .residual_stride = call.epilogue.stride != 0
                                                  ? call.epilogue.stride
                                                  : view_.hidden * bytes_of(combine.result_type),
                           .scale = call.epilogue.scale};
}

// Places the rows that this rank will send, and says so in the arguments.
void Lane::pack_rows(CombineArguments& arguments, Stream stream) const {
  const EngineLayout& layout = *exchange_.engine;
  std::byte* const memory = exchange_.engine_lane(index_);
  auto* first_row = reinterpret_cast<std::int32_t*>(memory + layout.first_row);
  auto* rows = reinterpret_cast<std::int32_t*>(memory + layout.rows);
  launch_place_rows({.lane = view_,
                     .plan = arguments.plan,
                     .one_row = arguments.reduction == Reduction::partial,
                     .first_row = first_row,
                     .rows = rows},
                    handle_of(stream));
  arguments.packed = {.outbox = memory + layout.row_outbox,
                      .row_bytes = layout.row_bytes,
                      .label_offset = layout.label_offset,
                      .first_row = first_row,
                      .rows = rows,
                      .arrived = reinterpret_cast<const LLPacket*>(memory + layout.arrived),
                      .most_rows = layout.sent_rows};
}

void Lane::mark_arrived(const std::int32_t* from, Stream stream) const {
  ArrivedMessages arguments{.lane = dispatch_.lane, .from = {}};
  std::copy_n(from, view_.ranks, arguments.from);
  launch_mark_arrived(arguments, handle_of(stream));
}

void Lane::find_rows(const ArrivedRows* from, Stream stream) const {
  const EngineLayout& layout = *exchange_.engine;
  FindRowsArguments arguments{
      .lane = view_,
      .from = {},
      .row_bytes = layout.row_bytes,
      .label_offset = layout.label_offset,
      .arrived = reinterpret_cast<LLPacket*>(exchange_.engine_lane(index_) + layout.arrived),
      .most = layout.received_rows};
  std::copy_n(from, view_.ranks, arguments.from);
  launch_find_rows(arguments, handle_of(stream));
}

bool Lane::adds_by_node() const {
  return exchange_.config.reduction_level == ReductionLevel::node && combine_.reduction == Reduction::partial;
}

void Lane::add_on_nodes(Stream stream) {
  const Topology& topology = exchange_.rank.topology();
  const EngineLayout& layout = *exchange_.engine;
  std::byte* const memory = exchange_.engine_lane(index_);
  AddOnNodesArguments arguments{.lane = view_,
                                .plan = combine_.plan,
                                .node_of = {},
                                .combine_type = combine_.combine_type,
                                .row = combine_.row,
                                .has_rows = combine_.result != nullptr,
                                .has_values = combine_.route_values != nullptr,
                                .relays_add = has_relays(exchange_.config, topology),
                                .arrived = reinterpret_cast<LLPacket*>(memory + layout.arrived),
                                .token_ranks = reinterpret_cast<std::int32_t*>(memory + layout.token_ranks),
                                .route_rank = reinterpret_cast<std::int32_t*>(memory + layout.route_rank)};
  for (int rank = 0; rank < view_.ranks; ++rank) arguments.node_of[rank] = topology.node_of(rank);
  launch_add_on_nodes(arguments, handle_of(stream));
  combine_.plan.token_ranks = arguments.token_ranks;
  combine_.plan.route_rank = arguments.route_rank;
}

void Lane::add_for_relay(std::span<const ArrivedRows> rows, std::byte* out, std::int32_t* count,
                         cudaStream_t stream) const {
  const EngineLayout& layout = *exchange_.engine;
  std::byte* const memory = exchange_.engine_lane(index_);
  RelaySumsArguments arguments{.lane = view_,
                               .combine_type = combine_.combine_type,
                               .row = combine_.row,
                               .row_bytes = layout.row_bytes,
                               .label_offset = layout.label_offset,
                               .held = static_cast<int>(rows.size()),
                               .from = {},
                               .row_of = reinterpret_cast<std::int32_t*>(memory + layout.row_of),
                               .place_of = reinterpret_cast<std::int32_t*>(memory + layout.place_of),
                               .out = out,
                               .count = count};
  std::copy(rows.begin(), rows.end(), arguments.from);
  const std::size_t bytes = 4 * rows.size() * static_cast<std::size_t>(view_.max_tokens);
  check(cudaMemsetAsync(arguments.row_of, 0, bytes, stream), "clear a relay's table of rows");
  launch_relay_sums(arguments, stream);
}

}  // namespace ferry::cuda
