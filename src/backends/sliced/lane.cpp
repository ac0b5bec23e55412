#include "backends/sliced/backend.hpp"

#include "base/errors.hpp"
#include "exchange/sliced.hpp"
#include "ferry/error.hpp"
#include "plan/shapes.hpp"
#include "plan/slot.hpp"

namespace ferry::sliced {
namespace {

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
  Calls(const SlicedContext& context, Operation operation, const CallOptions& options)
      : inner_(*context.inner),
        operation_(operation),
        left_(calls_of(operation, context.late_errors)),
        options_(options) {}

  template <class Call>
  auto make(Call call) {
    --left_;
    return or_refuse<UsageError>(
        [&](const Error& error) {
          for (; left_ > 0; --left_) inner_.refuse(operation_, error, options_);
        },
        call);
  }

 private:
  Backend& inner_;
  Operation operation_;
  int left_;
  const CallOptions options_;
};

std::int64_t dense_input_row(const DispatchCall& call, const PartLayout& part, int hidden) {
  return call.format.quantises() ? hidden * bytes_of(call.tokens.type) : part.row_bytes;
}

SliceShape shape_of(const SlicedContext& context) {
  const Config& config = context.config;
  const std::vector<int>& experts = config.placement.experts_of(context.me());
  return {.rank = context.me(),
          .ranks = context.ranks(),
          .tp = context.tp(),
          .top_k = config.top_k,
          .experts = config.experts,
          .first_expert = experts.front(),
          .local_experts = static_cast<std::int32_t>(experts.size()),
          .alignment = config.alignment,
          .max_tokens = config.max_tokens,
          .hidden = config.hidden,
          .capacity = row_capacity(config, context.me()),
          .zero_padding = config.zero_padding};
}

}  // namespace

Lane::Lane(const SlicedContext& context, int index, SliceSteps& steps, std::byte* memory, HostTotals* totals)
    : context_(context),
      index_(index),
      routed_(routed_config(context.config)),
      shape_(shape_of(context)),
      arrays_(sliced_arrays(context.config, context.me())),
      steps_(steps),
      memory_(memory),
      totals_(totals) {}

SegmentTables Lane::tables() const {
  auto* const first = array<std::int32_t>(arrays_.segments);
  const int segments = shape_.segments(), pairs = shape_.pairs();
  return {.gathered_row = first,
          .row = first + segments + 1,
          .pair_rows = first + 2 * segments + 1,
          .pair_first = first + 2 * segments + 1 + pairs,
          .group_first = first + 2 * segments + 1 + 2 * pairs};
}

void Lane::gather_terms(Stream stream) const {
  context_.inner->run(GatherCall{.options = {.lane = index_, .stream = stream},
                                 .rows = terms() + context_.ranks(),
                                 .out = terms(),
                                 .count = 1,
                                 .held = context_.ranks(),
                                 .row_bytes = sizeof(SliceTerms)});
}

void Lane::gather_rows(const Counted& rows, const void* from, std::int64_t row_bytes, void* to,
                       std::int64_t capacity, Stream stream) const {
  context_.inner->run(GatherCall{.options = {.lane = index_, .stream = stream},
                                 .sub_group = context_.tp(),
                                 .rows = from,
                                 .out = to,
                                 .count = rows.count,
                                 .held = capacity,
                                 .row_bytes = row_bytes,
                                 .device_count = rows.on_device});
}

FindSegments Lane::segments_of(const Plan& plan) const {
  return {.shape = shape_,
          .plan = view_plan(plan.storage(), plan_shape(routed_)),
          .tables = tables(),
          .state = state(),
          .counts = nullptr,
          .row_offsets = nullptr,
          .totals = nullptr,
          .all_calls = nullptr,
          .call = 0,
          .terms = nullptr,
          .types = 0,
          .arguments = 0};
}

// Dispatches this rank's slice. Earlier steps have written its ids and its number of tokens, which on a
// device is 0 if the ranks do not agree.
DispatchResult Lane::route(const DispatchCall& call) const {
  const Config& config = context_.config;
  const bool counted_on_device = call.tokens.device_count != nullptr;
  const TokenSlice slice = TokenSlice::of(call.tokens.count, shape_.tp_rank(), context_.tp());
  DispatchCall routed = call;
  routed.ids = Ids(array<std::int64_t>(arrays_.ids));
  routed.memory = {.plan = call.memory.plan};
  if (call.weights != nullptr) routed.weights = array<float>(arrays_.weights);
  // A slice of N or fewer tokens is at most as large as the largest slice of N.
  const std::int64_t most =
      counted_on_device ? (call.tokens.count + context_.tp() - 1) / context_.tp() : slice.count;
  const Counted tokens = counted(&state()->count, most);
  routed.tokens.count = tokens.count;
  routed.tokens.device_count = tokens.on_device;
  const PartList parts = parts_of(call.format, config.hidden);
  CopyTokens copy{};
  copy.state = state();
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
    end = align_up(end + most * dense, kSliceAlignment);
  }
  if (copy.parts > 0) steps_.copy_tokens(copy, {most, call.options.sm_limit}, call.options.stream);
  return context_.inner->dispatch(routed, false);
}

DispatchResult Lane::result_of(const DispatchResult& routed, const DispatchCall& call) const {
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

OwnArrays Lane::own_arrays() const {
  return {
      .parts = {array<std::byte>(arrays_.parts), static_cast<std::size_t>(arrays_.source - arrays_.parts)},
      .weight = array<float>(arrays_.weight),
      .counts = array<std::int32_t>(arrays_.counts),
      .row_offsets = array<std::int32_t>(arrays_.row_offsets),
      .source = array<Source>(arrays_.source),
      .plan = context_.inner->own_arrays(index_).plan,
      .totals = totals_};
}

// Returns the bytes of a packed row.
std::int64_t Lane::pack(const DispatchResult& routed, const DispatchResult& result,
                        const CallOptions& options) const {
  PackRows pack{};
  pack.shape = shape_;
  pack.state = state();
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
  steps_.pack_rows(pack, {row_capacity(routed_, context_.me()), options.sm_limit}, options.stream);
  return pack.row_bytes;
}

void Lane::unpack(const DispatchResult& result, std::int64_t row_bytes, const CallOptions& options) const {
  UnpackRows unpack{};
  unpack.shape = shape_;
  unpack.state = state();
  unpack.tables = tables();
  unpack.counts = result.counts;
  unpack.row_offsets = result.row_offsets;
  unpack.from = array<std::byte>(arrays_.all);
  unpack.row_bytes = row_bytes;
  for (const ReceivedPart& part : result.parts) {
    if (part.row_bytes == 0) break;
    unpack.to[unpack.parts] = static_cast<std::byte*>(const_cast<void*>(part.data));
    unpack.part_bytes[unpack.parts++] = part.row_bytes;
  }
  unpack.sources = const_cast<Source*>(result.source);
  unpack.all_calls = array<SliceTotals>(arrays_.all_calls);
  unpack.weight = const_cast<float*>(result.weight);
  unpack.group_of_row = const_cast<std::int32_t*>(result.group_of_row);
  steps_.unpack_rows(unpack, {result.capacity, options.sm_limit}, options.stream);
}

DispatchResult Lane::dispatch(const DispatchCall& call) {
  const Stream stream = call.options.stream;
  Calls calls(context_, Operation::dispatch, call.options);
  const bool wide_ids = call.ids.type == IdType::int64;
  steps_.post_dispatch({.shape = shape_,
                        .ids = call.ids.data,
                        .wide_ids = wide_ids,
                        .tokens = call.tokens.count,
                        .device_tokens = call.tokens.device_count,
                        .terms = terms() + context_.ranks()},
                       stream);
  calls.make([&] { gather_terms(stream); });
  steps_.take_slice({.shape = shape_,
                     .terms = terms(),
                     .ids = call.ids.data,
                     .wide_ids = wide_ids,
                     .weights = call.weights,
                     .slice_ids = array<std::int64_t>(arrays_.ids),
                     .slice_weights = array<float>(arrays_.weights),
                     .state = state()},
                    stream);
  const DispatchResult routed = calls.make([&] { return route(call); });
  DispatchResult result = result_of(routed, call);
  // On a device not the number of the call inside: a gather of several rounds uses up more numbers than the
  // host knows.
  result.call = context_.on_device ? ++dispatches_ : routed.call;
  FindSegments segments = segments_of(routed.plan);
  segments.counts = const_cast<std::int32_t*>(result.counts);
  segments.row_offsets = const_cast<std::int32_t*>(result.row_offsets);
  segments.totals = totals_;
  segments.all_calls = array<SliceTotals>(arrays_.all_calls);
  segments.call = result.call;
  steps_.find_segments(segments, stream);
  const std::int64_t row_bytes = pack(routed, result, call.options);
  calls.make([&] {
    gather_rows(counted(&state()->own_rows, row_capacity(routed_, context_.me())),
                array<std::byte>(arrays_.own), row_bytes, array<std::byte>(arrays_.all), result.capacity,
                stream);
  });
  unpack(result, row_bytes, call.options);
  return result;
}

// Packs the experts' outputs as `type`, to be added in the sub-group.
void Lane::add_outputs(const CombineCall& call, DType type) const {
  const std::int64_t hidden = context_.config.hidden;
  steps_.pack_outputs(
      {.shape = shape_,
       .state = state(),
       .tables = tables(),
       .outputs = static_cast<const std::byte*>(call.outputs.data),
       .output_stride = call.outputs.stride != 0 ? call.outputs.stride : hidden * bytes_of(call.outputs.type),
       .output_type = call.outputs.type,
       .type = type,
       .row_bytes = hidden * bytes_of(type),
       .to = array<std::byte>(arrays_.all),
       .row_weights = call.row_weights,
       .own_weights = array<float>(arrays_.row_weights)},
      {shape_.capacity, call.options.sm_limit}, call.options.stream);
}

void Lane::combine(const CombineCall& call) {
  const Config& config = context_.config;
  const Stream stream = call.options.stream;
  Calls calls(context_, Operation::combine, call.options);
  auto* const own = array<std::byte>(arrays_.own);
  auto* const all = array<std::byte>(arrays_.all);
  // A sum is rounded once, to the combine type: by the gather if the outputs have that type, else by the
  // combine.
  const DType type = call.outputs.type == config.combine_type ? call.outputs.type : DType::fp32;
  const std::int32_t slots = call.reduction == Reduction::unreduced ? config.top_k : 1;
  const std::int64_t result_row = config.hidden * bytes_of(call.result.type);
  FindSegments segments = segments_of(call.plan);
  segments.terms = terms() + context_.ranks();
  segments.types = slice_types(static_cast<int>(call.outputs.type), static_cast<int>(call.result.type));
  segments.arguments =
      (call.outputs.data != nullptr ? kHasOutputs : 0) | (call.result.data != nullptr ? kHasResult : 0);
  steps_.find_segments(segments, stream);
  calls.make([&] { gather_terms(stream); });
  steps_.take_combine({.shape = shape_,
                       .terms = terms(),
                       .topk_weights = call.topk_weights,
                       .slice_weights = array<float>(arrays_.weights),
                       .slots = slots,
                       .tables = tables(),
                       .output_bytes = config.hidden * bytes_of(type),
                       .result_bytes = result_row,
                       .all_calls = array<SliceTotals>(arrays_.all_calls),
                       .state = state()},
                      stream);
  add_outputs(call, type);
  const Counted sums = counted(&state()->own_rows, row_capacity(routed_, context_.me()));
  calls.make([&] {
    context_.inner->run(GatherCall{.operation = Operation::reduce_scatter_v,
                                   .options = {.lane = index_, .stream = stream},
                                   .sub_group = context_.tp(),
                                   .rows = all,
                                   .out = own,
                                   .count = sums.count,
                                   .held = counted(&state()->gathered, shape_.capacity).count,
                                   .row_bytes = config.hidden * bytes_of(type),
                                   .type = type,
                                   .device_count = sums.on_device});
  });
  CombineCall routed = call;
  routed.outputs = {.data = own, .type = type, .stride = 0};
  if (call.row_weights != nullptr) routed.row_weights = array<float>(arrays_.row_weights);
  if (call.topk_weights != nullptr) routed.topk_weights = array<float>(arrays_.weights);
  routed.result = {.data = all, .type = call.result.type, .stride = 0};
  calls.make([&] { context_.inner->combine(routed, false); });

  const bool dense =
      call.result.data != nullptr && (call.result.stride == 0 || call.result.stride == result_row);
  auto* const results = dense ? static_cast<std::byte*>(call.result.data) : own;
  calls.make([&] {
    gather_rows(counted(&state()->slots, std::int64_t{routed_.max_tokens} * slots), all, result_row, results,
                std::int64_t{config.max_tokens} * slots, stream);
  });
  if (dense || call.result.data == nullptr) return;
  steps_.copy_results({.state = state(),
                       .slots = slots,
                       .from = own,
                       .to = static_cast<std::byte*>(call.result.data),
                       .stride = call.result.stride,
                       .row_bytes = result_row},
                      {std::int64_t{config.max_tokens} * slots, call.options.sm_limit}, stream);
}

void Lane::refuse(Operation operation, const Error& error, Stream stream) const noexcept {
  for (int i = 0; i < calls_of(operation, context_.late_errors); ++i)
    context_.inner->refuse(operation, error, {.lane = index_, .stream = stream});
}

}  // namespace ferry::sliced
