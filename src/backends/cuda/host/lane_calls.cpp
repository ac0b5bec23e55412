// From a checked call to the arguments of its kernel.
#include "backends/cuda/host/block_roles.hpp"
#include "backends/cuda/host/lane.hpp"
#include "backends/cuda/memory/reachable.hpp"
#include "base/text.hpp"
#include "exchange/configuration.hpp"

namespace ferry::cuda {
namespace {

// Every rank passes these alike. Their names: names_of_options in ended_call.cpp.
CallTerms terms_of(const DispatchCall& call) {
  CallTerms terms = CallTerms::of(Operation::dispatch);
  terms.add(static_cast<std::int64_t>(call.format.kind));
  terms.add(call.format.fp8.column_major);
  terms.add(call.format.fp8.power_of_two);
  terms.add(call.format.fp8.packed);
  for (const std::int64_t bytes : call.format.part_bytes) terms.add(bytes);
  terms.add(!call.plan.empty());
  terms.add(call.apply_weights);
  return terms;
}

void check_reachable(const Config& config, int device, const DispatchCall& call) {
  const PartList parts = parts_of(call.format, config.hidden);
  const int inputs = call.format.kind == FormatKind::fp8_e4m3 ? 1 : parts.count;
  for (int p = 0; p < inputs; ++p)
    require_reachable("tokens", call.tokens.parts[static_cast<std::size_t>(p)], device);
  require_reachable("ids", call.ids.data, device);
  require_reachable("weights", call.weights, device);
  require_reachable("plan", call.plan.storage(), device);
  for (int p = 0; p < parts.count; ++p)
    require_reachable("memory for arrivals", call.memory.parts[static_cast<std::size_t>(p)], device);
}

}  // namespace

DispatchArguments Lane::dispatch_arguments(const DispatchCall& call, bool fused) const {
  const Config& config = shared_.config;
  DispatchArguments arguments{};
  arguments.lane = view_;
  arguments.terms = terms_of(call);
  arguments.parts = parts_of(call.format, config.hidden);
  arguments.message = device_message_layout(arguments.parts);
  const bool quantised = call.format.kind == FormatKind::fp8_e4m3;
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
  arguments.format = call.format.kind;
  arguments.fp8 = call.format.fp8;
  // What is converted lies converted in staging; what may change after a send half has to.
  arguments.own_staged = quantised || !fused;
  return arguments;
}

void Lane::set_receive_buffers(const DispatchCall& call, DispatchArguments& arguments) {
  const Config& config = shared_.config;
  const ReceiveBuffers& memory = call.memory;
  const bool rank_major = config.layout == Layout::rank_major;
  const std::int64_t rows = view_.capacity_rows;
  const Plan plan = arguments.by_plan
                        ? call.plan
                        : Plan::over(memory.plan != nullptr ? memory.plan : array<void>(arrays_.plan),
                                     static_cast<std::size_t>(view_plan(nullptr, view_.plan_shape).bytes));
  DispatchResult received;
  std::int64_t end = 0;
  for (int p = 0; p < arguments.parts.count; ++p) {
    const auto i = static_cast<std::size_t>(p);
    const PartLayout& part = arguments.parts.part[p];
    void* own = config.own_receive_buffers ? view_.at(view_.rank, view_.receive_buffers + end) : nullptr;
    end = align_up(end + part_bytes_total(part, rows), 256);
    received.parts[i] = {.data = memory.parts[i] != nullptr ? memory.parts[i] : own,
                         .row_bytes = part.columns ? part.element_bytes : part.row_bytes,
                         .leading_dimension = leading_dimension(part, rows)};
    arguments.received_parts[p] = static_cast<std::byte*>(received.parts[i].data);
    arguments.leading_dimension[p] = received.parts[i].leading_dimension;
  }
  arguments.own_memory = config.own_receive_buffers && memory.parts[0] == nullptr;
  arguments.plan = view_plan(plan.storage(), view_.plan_shape);
  arguments.counts = memory.counts != nullptr ? memory.counts : array<std::int32_t>(arrays_.counts);
  arguments.row_offsets =
      memory.row_offsets != nullptr ? memory.row_offsets : array<std::int32_t>(arrays_.row_offsets);
  if (call.weights != nullptr)
    arguments.weight = memory.weight != nullptr ? memory.weight : array<float>(arrays_.weight);
  if (rank_major)
    arguments.local_ids =
        memory.local_ids != nullptr ? memory.local_ids : array<std::int32_t>(arrays_.local_ids);
  arguments.group_of_row = memory.group_of_row;
  if (call.dot_rows != nullptr)
    arguments.dots = memory.dots != nullptr ? memory.dots : array<float>(arrays_.dots);

  received.data = received.parts[0].data;
  received.groups = groups_of(config, view_.rank);
  received.capacity = view_.capacity;
  received.counts = arguments.counts;
  received.row_offsets = arguments.row_offsets;
  received.total = arguments.row_offsets + received.groups;
  received.group_expert = array<std::int32_t>(arrays_.group_expert);
  received.source = arguments.plan.sources;
  received.weight = arguments.weight;
  received.local_ids = arguments.local_ids;
  received.group_of_row = arguments.group_of_row;
  received.dots = arguments.dots;
  received.host = view_.totals;
  received.plan = plan;
  received_ = received;
}

DispatchResult Lane::dispatch(const DispatchCall& call, Phase phase, Stream stream) {
  check_reachable(shared_.config, shared_.device, call);
  const LaunchShape shape = this->shape(call.sm_limit);
  DispatchArguments arguments = dispatch_arguments(call, phase == Phase::fused);
  set_receive_buffers(call, arguments);
  const DispatchWork work{.few = arguments.tokens < kPlaceFrom,
                          .quantised = call.format.kind == FormatKind::fp8_e4m3,
                          .placed = arguments.own_memory};
  arguments.many_token_blocks = {dispatch_senders(shape.blocks, shared_.config, work), 0};
  arguments.few_token_blocks =
      dispatch_by_token(shape.blocks, shared_.config, arguments.tokens, work.quantised);
  launch_dispatch(arguments, dispatch_mode(arguments, phase), shape, handle_of(stream));
  received_.call = ++calls_;
  if (phase == Phase::send) {
    dispatch_ = arguments;
    sent_shape_ = shape;
  }
  return received_;
}

DispatchResult Lane::dispatch_receive(Stream stream) {
  launch_dispatch(dispatch_, DispatchMode::receive_phase, sent_shape_, handle_of(stream));
  return received_;
}

void Lane::combine(const CombineCall& call, Phase phase, Stream stream) {
  const Config& config = shared_.config;
  for (const auto& [what, pointer] : {std::pair<const char*, const void*>{"outputs", call.outputs.data},
                                      {"result", call.result.data},
                                      {"plan", call.plan.storage()}}) {
    require_reachable(what, pointer, shared_.device);
  }
  const LaunchShape shape = this->shape(call.sm_limit);
  CombineArguments arguments{};
  arguments.lane = view_;
  arguments.terms = CallTerms::of(Operation::combine);
  arguments.terms.add(static_cast<std::int64_t>(call.reduction));
  arguments.weights_travel = call.reduction == Reduction::partial && call.topk_weights != nullptr;
  arguments.terms.add(arguments.weights_travel);
  arguments.plan = view_plan(call.plan.storage(), view_.plan_shape);
  arguments.reduction = call.reduction;
  arguments.wire = config.combine_type;
  arguments.row = combine_row_layout(config.combine_type, config.hidden, config.top_k);
  arguments.outputs = static_cast<const std::byte*>(call.outputs.data);
  arguments.output_stride =
      call.outputs.stride != 0 ? call.outputs.stride : config.hidden * bytes_of(call.outputs.type);
  arguments.output_type = call.outputs.type;
  arguments.weights = call.row_weights;
  arguments.row_values = call.row_values;
  arguments.result = static_cast<std::byte*>(call.result.data);
  arguments.result_stride =
      call.result.stride != 0 ? call.result.stride : config.hidden * bytes_of(call.result.type);
  arguments.result_type = call.result.type;
  arguments.topk_weights = call.topk_weights;
  arguments.route_values = call.route_values;
  // Sums of rows that are converted are made once, where the others are made.
  arguments.own_staged = phase != Phase::fused || call.outputs.type != config.combine_type;
  arguments.senders = combine_senders(shape.blocks, config, call.reduction, arguments.own_staged);
  launch_combine(arguments, phase, shape, handle_of(stream));
  ++calls_;
  if (phase == Phase::send) {
    combine_ = arguments;
    sent_shape_ = shape;
  }
}

void Lane::combine_receive(Stream stream) {
  launch_combine(combine_, Phase::receive, sent_shape_, handle_of(stream));
}

}  // namespace ferry::cuda
