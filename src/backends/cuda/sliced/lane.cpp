#include "backends/cuda/sliced/lane.hpp"

#include <algorithm>
#include <utility>

#include "backends/cuda/runtime/launch.hpp"
#include "base/errors.hpp"
#include "ferry/error.hpp"
#include "plan/shapes.hpp"

namespace ferry::cuda {
namespace {

constexpr std::int64_t kRowsOfBlock = 16;  // one row for each warp

// The calls inside that an operation makes, the same on every rank: gather terms, route, gather rows; in a
// combine gather terms, add, combine, gather results. Where calls throw, the first one that does is the last
// on every rank.
int calls_of(Operation operation, bool late_errors) {
  if (!late_errors) return 1;
  return operation == Operation::dispatch ? 3 : 4;
}

// Makes the calls inside. If one throws, it has refused its own number; the rest are refused too, so that the
// peers' calls end.
class Calls {
 public:
  Calls(const SlicedContext& context, Operation operation, int lane, Stream stream)
      : inner_(*context.inner),
        operation_(operation),
        left_(calls_of(operation, context.late_errors)),
        lane_(lane),
        stream_(stream) {}

  template <class Call>
  auto make(Call call) {
    --left_;
    return or_refuse<UsageError>(
        [&](const Error& error) {
          for (; left_ > 0; --left_) inner_.refuse(operation_, lane_, error, stream_);
        },
        call);
  }

 private:
  Backend& inner_;
  Operation operation_;
  int left_, lane_;
  Stream stream_;
};

std::int64_t dense_input_row(const DispatchCall& call, const PartLayout& part, int hidden) {
  return call.format.quantises() ? hidden * bytes_of(call.tokens.type) : part.row_bytes;
}

std::int64_t slots_of(const CombineCall& call, const Config& config) {
  return call.reduction == Reduction::unreduced ? config.top_k : 1;
}

}  // namespace

SlicedLane::SlicedLane(const SlicedContext& context, int index, const LaneView& view, std::byte* memory,
                       HostTotals* totals)
    : context_(context),
      index_(index),
      view_(view),
      arrays_(sliced_arrays(context.config, context.me())),
      memory_(memory),
      totals_(totals) {}

SegmentTables SlicedLane::tables() const {
  const SliceShape of = shape();
  const std::int64_t segments = std::int64_t{of.local_experts} * context_.ranks(),
                     pairs = std::int64_t{of.local_experts} * of.tp;
  auto* const first = array<std::int32_t>(arrays_.segments);
  return {.gathered_row = first,
          .row = first + segments + 1,
          .pair_rows = first + 2 * segments + 1,
          .pair_first = first + 2 * segments + 1 + pairs,
          .group_first = first + 2 * segments + 1 + 2 * pairs};
}

SliceShape SlicedLane::shape() const {
  const Config& config = context_.config;
  const std::vector<int>& experts = config.placement.experts_of(context_.me());
  return {.tp = context_.tp(),
          .experts = config.experts,
          .first_expert = experts.front(),
          .local_experts = static_cast<std::int32_t>(experts.size()),
          .alignment = config.alignment,
          .max_tokens = config.max_tokens,
          .capacity = row_capacity(config, context_.me()),
          .zero_padding = config.zero_padding};
}

int SlicedLane::blocks_for(std::int64_t rows, int sm_limit) const {
  const int most = sm_limit > 0 ? std::min(sm_limit, context_.blocks) : context_.blocks;
  return static_cast<int>(std::clamp<std::int64_t>((rows + kRowsOfBlock - 1) / kRowsOfBlock, 1, most));
}

void SlicedLane::gather_terms(Stream stream) const {
  context_.inner->run(GatherCall{.lane = index_,
                                 .rows = terms() + context_.ranks(),
                                 .out = terms(),
                                 .count = 1,
                                 .held = context_.ranks(),
                                 .row_bytes = sizeof(SliceTerms)},
                      stream);
}

FindSegmentsArguments SlicedLane::segments_of(const Plan& plan) const {
  return {.lane = view_,
          .shape = shape(),
          .plan = view_plan(plan.storage(), view_.plan_shape),
          .tables = tables(),
          .state = array<SliceState>(arrays_.state),
          .counts = nullptr,
          .row_offsets = nullptr,
          .totals = nullptr,
          .all_calls = nullptr,
          .terms = nullptr,
          .types = 0,
          .arguments = 0};
}

// Dispatches this rank's slice. Earlier kernels have written its ids and, in device memory, its number of
// tokens, which is 0 if the ranks do not agree.
DispatchResult SlicedLane::route(const DispatchCall& call, Stream stream) const {
  const Config& config = context_.config;
  auto* const state = array<SliceState>(arrays_.state);
  const bool counted_on_device = call.tokens.device_count != nullptr;
  const TokenSlice slice = TokenSlice::of(call.tokens.count, context_.me() % context_.tp(), context_.tp());
  DispatchCall routed = call;
  routed.ids = Ids(array<std::int64_t>(arrays_.ids));
  routed.memory = {.plan = call.memory.plan};
  if (call.weights != nullptr) routed.weights = array<float>(arrays_.weights);
  routed.tokens.device_count = &state->count;
  // A slice of N or fewer tokens is at most as large as the largest slice of N.
  routed.tokens.count =
      counted_on_device ? (call.tokens.count + context_.tp() - 1) / context_.tp() : slice.count;
  const PartList parts = parts_of(call.format, config.hidden);
  CopyTokensArguments copy{};
  copy.state = state;
  std::int64_t end = arrays_.tokens;
  for (int p = 0; p < parts.count; ++p) {
    const auto i = static_cast<std::size_t>(p);
    if (call.tokens.parts[i] == nullptr) continue;
    const std::int64_t dense = dense_input_row(call, parts.part[p], config.hidden);
    const std::int64_t stride = call.tokens.strides[i] != 0 ? call.tokens.strides[i] : dense;
    const auto* const from = static_cast<const std::byte*>(call.tokens.parts[i]);
    if (!counted_on_device) {
      routed.tokens.parts[i] = from + slice.first * stride;
      continue;
    }
    copy.from[copy.parts] = from;
    copy.to[copy.parts] = memory_ + end;
    copy.stride[copy.parts] = stride;
    copy.row_bytes[copy.parts++] = dense;
    routed.tokens.parts[i] = memory_ + end;
    routed.tokens.strides[i] = 0;
    end = align_up(end + routed.tokens.count * dense, kSliceAlignment);
  }
  if (copy.parts > 0)
    kCopyTokensKernel(copy, {.blocks = blocks_for(routed.tokens.count, call.sm_limit)}, stream);
  return context_.inner->dispatch(routed, stream);
}

DispatchResult SlicedLane::result_of(const DispatchResult& routed, const DispatchCall& call) const {
  const Config& config = context_.config;
  const ReceiveBuffers& memory = call.memory;
  const auto chosen = [&]<class T>(T* given, std::int64_t own) {
    return given != nullptr ? given : array<T>(own);
  };
  const std::int64_t capacity = row_capacity(config, context_.me());
  DispatchResult result;
  std::int64_t end = arrays_.parts;
  for (std::size_t p = 0; p < static_cast<std::size_t>(parts_of(call.format, config.hidden).count); ++p) {
    const std::int64_t bytes = routed.parts[p].row_bytes;
    result.parts[p] = {.data = chosen(static_cast<std::byte*>(memory.parts[p]), end), .row_bytes = bytes};
    end = align_up(end + capacity * bytes, kSliceAlignment);
  }
  result.data = result.parts[0].data;
  result.groups = config.placement.local_experts(context_.me());
  result.capacity = capacity;
  result.counts = chosen(memory.counts, arrays_.counts);
  result.row_offsets = chosen(memory.row_offsets, arrays_.row_offsets);
  result.total = result.row_offsets + result.groups;
  result.group_expert = array<std::int32_t>(arrays_.group_expert);
  result.source = array<Source>(arrays_.source);
  if (call.weighted) result.weight = chosen(memory.weight, arrays_.weight);
  result.group_of_row = memory.group_of_row;
  result.host = totals_;
  result.plan = routed.plan;
  return result;
}

OwnArrays SlicedLane::own_arrays() const {
  return {
      .parts = {array<std::byte>(arrays_.parts), static_cast<std::size_t>(arrays_.source - arrays_.parts)},
      .weight = array<float>(arrays_.weight),
      .counts = array<std::int32_t>(arrays_.counts),
      .row_offsets = array<std::int32_t>(arrays_.row_offsets),
      .source = array<Source>(arrays_.source),
      .plan = context_.inner->own_arrays(index_).plan,
      .totals = totals_};
}

void SlicedLane::unpack(const DispatchResult& result, std::int64_t row_bytes, int sm_limit,
                        Stream stream) const {
  UnpackRowsArguments arguments{};
  arguments.lane = view_;
  arguments.shape = shape();
  arguments.state = array<SliceState>(arrays_.state);
  arguments.tables = tables();
  arguments.counts = result.counts;
  arguments.row_offsets = result.row_offsets;
  arguments.from = array<std::byte>(arrays_.all);
  arguments.row_bytes = row_bytes;
  for (const ReceivedPart& part : result.parts) {
    if (part.row_bytes == 0) break;
    arguments.to[arguments.parts] = static_cast<std::byte*>(const_cast<void*>(part.data));
    arguments.part_bytes[arguments.parts++] = part.row_bytes;
  }
  arguments.sources = const_cast<Source*>(result.source);
  arguments.all_calls = array<SliceTotals>(arrays_.all_calls);
  arguments.weight = const_cast<float*>(result.weight);
  arguments.group_of_row = const_cast<std::int32_t*>(result.group_of_row);
  kUnpackRowsKernel(arguments, {.blocks = blocks_for(result.capacity, sm_limit)}, stream);
}

DispatchResult SlicedLane::dispatch(const DispatchCall& call, Stream stream) {
  Calls calls(context_, Operation::dispatch, index_, stream);
  kPostDispatchKernel({.lane = view_,
                       .ids = call.ids.data,
                       .wide_ids = call.ids.type == IdType::int64,
                       .tokens = call.tokens.count,
                       .device_tokens = call.tokens.device_count,
                       .terms = terms() + context_.ranks()},
                      {}, stream);
  calls.make([&] { gather_terms(stream); });
  kTakeSliceKernel({.lane = view_,
                    .shape = shape(),
                    .terms = terms(),
                    .may_be_aborted = context_.late_errors,
                    .ids = call.ids.data,
                    .wide_ids = call.ids.type == IdType::int64,
                    .weights = call.weights,
                    .slice_ids = array<std::int64_t>(arrays_.ids),
                    .slice_weights = array<float>(arrays_.weights),
                    .state = array<SliceState>(arrays_.state)},
                   {}, stream);
  const DispatchResult routed = calls.make([&] { return route(call, stream); });
  DispatchResult result = result_of(routed, call);
  // Not the number of the call inside: a gather of several rounds uses up more numbers than the host knows.
  result.call = ++dispatches_;
  FindSegmentsArguments segments = segments_of(routed.plan);
  segments.counts = const_cast<std::int32_t*>(result.counts);
  segments.row_offsets = const_cast<std::int32_t*>(result.row_offsets);
  segments.totals = totals_;
  segments.all_calls = array<SliceTotals>(arrays_.all_calls);
  kFindSegmentsKernel(segments, {}, stream);

  PackRowsArguments pack{};
  pack.lane = view_;
  pack.shape = shape();
  pack.state = array<SliceState>(arrays_.state);
  pack.terms = terms();
  pack.row_bytes = sizeof(SliceRowTail);
  for (const ReceivedPart& part : result.parts) {
    if (part.row_bytes == 0) break;
    pack.from[pack.parts] =
        static_cast<const std::byte*>(routed.parts[static_cast<std::size_t>(pack.parts)].data);
    pack.part_bytes[pack.parts++] = part.row_bytes;
    pack.row_bytes += part.row_bytes;
  }
  pack.sources = routed.source;
  pack.weight = routed.weight;
  pack.to = array<std::byte>(arrays_.own);
  const std::int64_t routed_rows = view_.capacity_rows;
  kPackRowsKernel(pack, {.blocks = blocks_for(routed_rows, call.sm_limit)}, stream);
  calls.make([&] {
    context_.inner->run(GatherCall{.lane = index_,
                                   .sub_group = context_.tp(),
                                   .rows = pack.to,
                                   .out = array<std::byte>(arrays_.all),
                                   .count = routed_rows,
                                   .held = result.capacity,
                                   .row_bytes = pack.row_bytes,
                                   .device_count = &pack.state->own_rows},
                        stream);
  });
  unpack(result, pack.row_bytes, call.sm_limit, stream);
  return result;
}

void SlicedLane::combine(const CombineCall& call, Stream stream) {
  const Config& config = context_.config;
  Calls calls(context_, Operation::combine, index_, stream);
  auto* const state = array<SliceState>(arrays_.state);
  auto* const own = array<std::byte>(arrays_.own);
  auto* const all = array<std::byte>(arrays_.all);
  // A sum is rounded once, to the combine type: by the gather if the outputs have that type, else by the
  // combine.
  const DType type = call.outputs.type == config.combine_type ? call.outputs.type : DType::fp32;
  const std::int64_t slots = slots_of(call, config), output_row = config.hidden * bytes_of(type),
                     result_row = config.hidden * bytes_of(call.result.type);
  FindSegmentsArguments segments = segments_of(call.plan);
  segments.terms = terms() + context_.ranks();
  segments.types = slice_types(static_cast<int>(call.outputs.type), static_cast<int>(call.result.type));
  segments.arguments =
      (call.outputs.data != nullptr ? kHasOutputs : 0) | (call.result.data != nullptr ? kHasResult : 0);
  kFindSegmentsKernel(segments, {}, stream);
  calls.make([&] { gather_terms(stream); });
  kTakeCombineKernel({.lane = view_,
                      .shape = shape(),
                      .terms = terms(),
                      .may_be_aborted = context_.late_errors,
                      .topk_weights = call.topk_weights,
                      .slice_weights = array<float>(arrays_.weights),
                      .slots = static_cast<std::int32_t>(slots),
                      .output_bytes = output_row,
                      .result_bytes = result_row,
                      .all_calls = array<SliceTotals>(arrays_.all_calls),
                      .state = state},
                     {}, stream);
  const std::int64_t capacity = row_capacity(config, context_.me());
  kPackOutputsKernel({.shape = shape(),
                      .rank = context_.me(),
                      .ranks = context_.ranks(),
                      .hidden = config.hidden,
                      .state = state,
                      .tables = tables(),
                      .outputs = static_cast<const std::byte*>(call.outputs.data),
                      .output_stride = call.outputs.stride != 0 ? call.outputs.stride
                                                                : config.hidden * bytes_of(call.outputs.type),
                      .output_type = call.outputs.type,
                      .type = type,
                      .to = all,
                      .row_weights = call.row_weights,
                      .own_weights = array<float>(arrays_.row_weights)},
                     {.blocks = blocks_for(capacity, call.sm_limit)}, stream);
  calls.make([&] {
    context_.inner->run(GatherCall{.operation = Operation::reduce_scatter_v,
                                   .lane = index_,
                                   .sub_group = context_.tp(),
                                   .rows = all,
                                   .out = own,
                                   .count = view_.capacity_rows,
                                   .held = capacity,
                                   .row_bytes = config.hidden * bytes_of(type),
                                   .type = type,
                                   .device_count = &state->own_rows},
                        stream);
  });
  CombineCall routed = call;
  routed.outputs = {.data = own, .type = type, .stride = 0};
  if (call.row_weights != nullptr) routed.row_weights = array<float>(arrays_.row_weights);
  if (call.topk_weights != nullptr) routed.topk_weights = array<float>(arrays_.weights);
  routed.result = {.data = all, .type = call.result.type, .stride = 0};
  calls.make([&] { context_.inner->combine(routed, stream); });

  const bool dense =
      call.result.data != nullptr && (call.result.stride == 0 || call.result.stride == result_row);
  auto* const results = dense ? static_cast<std::byte*>(call.result.data) : own;
  calls.make([&] {
    context_.inner->run(GatherCall{.lane = index_,
                                   .sub_group = context_.tp(),
                                   .rows = all,
                                   .out = results,
                                   .count = view_.max_tokens * slots,
                                   .held = config.max_tokens * slots,
                                   .row_bytes = result_row,
                                   .device_count = &state->slots},
                        stream);
  });
  if (dense || call.result.data == nullptr) return;
  kCopyResultsKernel({.state = state,
                      .slots = static_cast<std::int32_t>(slots),
                      .from = own,
                      .to = static_cast<std::byte*>(call.result.data),
                      .stride = call.result.stride,
                      .row_bytes = result_row},
                     {.blocks = blocks_for(config.max_tokens * slots, call.sm_limit)}, stream);
}

void SlicedLane::refuse(Operation operation, const Error& error, Stream stream) const noexcept {
  for (int i = 0; i < calls_of(operation, context_.late_errors); ++i)
    context_.inner->refuse(operation, index_, error, stream);
}

}  // namespace ferry::cuda
