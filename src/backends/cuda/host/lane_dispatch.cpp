// Dispatches: turns a checked call into the arguments of its kernels, and launches them.
#include <algorithm>

#include "backends/cuda/host/block_roles.hpp"
#include "backends/cuda/host/lane.hpp"
#include "backends/cuda/operations/small_operations.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "base/text.hpp"
#include "exchange/checks.hpp"
#include "exchange/compared_options.hpp"
#include "exchange/configuration.hpp"

namespace ferry::cuda {

AgreedOptions agreed_options_of(Operation operation, const ComparedOptions& options) {
  AgreedOptions agreed = AgreedOptions::of(operation);
  for (const ComparedOption& option : options.values()) agreed.add(option.value);
  return agreed;
}

namespace {

// Kernels of dispatch store scales by rows; tiles are made from them afterwards.
PartList by_rows(PartList parts) {
  for (PartLayout& part : parts.part) {
    if (!part.tiles) continue;
    part.tiles = false;
    part.element_bytes = part.row_bytes;
  }
  return parts;
}

}  // namespace

DispatchArguments Lane::dispatch_arguments(const DispatchCall& call, bool keeps_inputs) const {
  const Config& config = exchange_.config;
  DispatchArguments arguments{};
  arguments.lane = view_;
  arguments.lane.load += std::int64_t{call.layer} * config.experts;
  const ComparedOptions options = options_of(config, call);
  arguments.terms = agreed_options_of(Operation::dispatch, options);
  arguments.hash_option = input_hash_option(options);
  arguments.parts = by_rows(message_parts(config, call));
  arguments.received = by_rows(received_parts(config, call));
  arguments.message = device_message_layout(arguments.parts);
  arguments.row_encoding = encoding_of(call.format);
  // Rows that are encoded at their destination travel unquantised.
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
  arguments.own_staged = quantised || !keeps_inputs;
  return arguments;
}

void Lane::set_receive_buffers(const DispatchCall& call, DispatchArguments& arguments) {
  const Config& config = exchange_.config;
  const ReceiveBuffers& memory = call.memory;
  // Receivers compare rows with the capacity in their view.
  if (memory.rows > 0 && !arguments.by_plan)
    arguments.lane.capacity = std::min(arguments.lane.capacity, memory.rows);
  arguments.terms.option[kRowLimitOption] = std::max(call.row_limit(view_.capacity), 0);
  const bool rank_major = config.layout == Layout::rank_major;
  const RowRoom room = row_room(config, view_.rank);
  const Plan plan = arguments.by_plan
                        ? call.plan
                        : Plan::over(memory.plan != nullptr ? memory.plan : array<void>(arrays_.plan),
                                     static_cast<std::size_t>(view_plan(nullptr, view_.plan_shape).bytes));
  DispatchResult result;
  std::int64_t end = 0;
  arguments.group_rows = static_cast<std::int32_t>(room.group_rows);
  for (int p = 0; p < arguments.received.count; ++p) {
    const auto i = static_cast<std::size_t>(p);
    const PartLayout& part = arguments.received.part[p];
    void* own = config.own_receive_buffers ? receive_buffers() + end : nullptr;
    end = align_up(end + part_bytes_total(part, room), 256);
    result.parts[i] = {.data = memory.parts[i] != nullptr ? memory.parts[i] : own,
                       .row_bytes = received_row_bytes(part),
                       .leading_dimension = leading_dimension(part, room)};
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
  if (call.weighted)
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
  further_scale_rows_ =
      DeviceMemory(view_.capacity_rows * largest_scale_tiles(exchange_.config.hidden).row_bytes);
  return further_scale_rows_.data();
}

// Tiles are made from scales by rows in the lane's memory, even if the caller passes memory for the tiles.
void Lane::set_tiles(const DispatchCall& call, DispatchArguments& arguments) {
  const Config& config = exchange_.config;
  const bool has_rows = config.own_receive_buffers || encoding_of(config.format).scale_tiles;
  std::byte* scales =
      has_rows ? array<std::byte>(arrays_.scale_rows) : further_scale_rows(call.options.stream);
  if (config.own_receive_buffers) {
    const std::int64_t values = part_bytes_total(arguments.received.part[0], row_room(config, view_.rank));
    scales = receive_buffers() + align_up(values, 256);
  }
  std::byte* const own =
      config.own_receive_buffers ? receive_buffers() + device_layout(config).tiles : nullptr;
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

void Lane::enqueue(const DispatchCall& call, Phase phase, bool keeps_inputs) {
  const Stream stream = call.options.stream;
  require_own_stream(Operation::dispatch, stream);
  pointer_check_.require_usable("dispatch", pointers_of(call));
  const LaunchShape shape = this->shape(call.options.sm_limit);
  DispatchArguments arguments = dispatch_arguments(call, keeps_inputs);
  arguments.phase = phase;
  set_receive_buffers(call, arguments);
  if (encoding_of(call.format).scale_tiles) set_tiles(call, arguments);
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
  if (is_carried()) {
    place_engine_messages(*exchange_.engine, arguments.message.bytes, &arguments.lane);
    arguments.message.bytes =
        static_cast<std::int32_t>(engine_message_bytes(arguments.message.bytes, view_.top_k));
    if (arguments.by_plan) kClearMetadataKernel(arguments.lane, {}, stream);
  }
  if (replicated && !arguments.by_plan) kInputHashKernel(arguments, {.blocks = shape.blocks}, stream);
  // Launched before the dispatch, which may wait for peers: a launch after it could hold up theirs where
  // ranks share a GPU and the driver's queues.
  if (view_.shared_experts > 0) {
    DispatchArguments shared = arguments;
    shared.dot_rows = nullptr;
    kSharedRowsKernel(shared, {.blocks = shape.blocks}, stream);
  }
  launch_dispatch(arguments, mode, shape, handle_of(stream));
  if (tiles_ && phase == Phase::fused) kScaleTilesKernel(*tiles_, {.blocks = shape.blocks}, stream);
  result_.call = calls_ + 1;
  if (!is_carried()) ++calls_;
  if (phase == Phase::send) {
    keep_scales(arguments, stream);
    dispatch_ = arguments;
    dispatch_.phase = Phase::receive;
    dispatch_mode_ = mode;
    phase_shape_ = shape;
  }
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

DispatchResult Lane::dispatch(const DispatchCall& call, bool split) {
  const Stream stream = call.options.stream;
  if (!carrier_) {
    const Phase phase = split ? Phase::send : Phase::fused;
    refusing(Operation::dispatch, stream, [&] { enqueue(call, phase, !split); });
    return result_;
  }
  const ComparedOptions options = options_of(exchange_.config, call);
  send(Operation::dispatch, options, CallPart::whole, split, stream, [&] {
    enqueue(call, Phase::send, !split && carrier_->keeps_inputs());
    const bool by_plan = dispatch_.by_plan;
    return Stored{
        .content = Stored::Content::messages,
        .shape = phase_shape_,
        .lane = dispatch_.lane,
        .plan = dispatch_.plan,
        .by_plan = by_plan,
        .part_bytes = dispatch_.message.bytes - static_cast<std::int64_t>(sizeof(LLPacket)) * view_.top_k,
        .counts = dispatch_.counts,
        .row_offsets = dispatch_.row_offsets,
        .hash_option =
            exchange_.config.input == Input::replicated && !by_plan ? input_hash_option(options) : -1};
  });
  return split ? result_ : dispatch_receive(stream);
}

DispatchResult Lane::dispatch_receive(Stream stream) {
  if (carrier_) carrier_->deliver(stream);
  launch_dispatch(dispatch_, dispatch_mode_, phase_shape_, handle_of(stream));
  if (tiles_) kScaleTilesKernel(*tiles_, {.blocks = phase_shape_.blocks}, stream);
  if (is_carried()) ++calls_;
  return result_;
}

}  // namespace ferry::cuda
