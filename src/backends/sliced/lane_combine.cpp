// Combine of experts in slices: add the outputs of an expert's slices in the sub-group, combine the sums,
// then give every rank of the sub-group all results.
#include <cstring>

#include "backends/sliced/lane.hpp"
#include "exchange/slice_fault.hpp"
#include "format/numbers.hpp"
#include "format/parts.hpp"

namespace ferry::sliced {
namespace {

struct CombineTerms {
  std::int64_t tokens;  // of the slice
  std::int64_t rows;    // received by the rank, of all slices' tokens
  std::int32_t types;   // slice_types()
  std::int32_t has_outputs, has_result, plan_damaged;
};

float value_at(DType type, const std::byte* data) {
  std::uint16_t bits = 0;
  std::memcpy(&bits, data, sizeof bits);
  return type == DType::fp16 ? fp16_to_fp32(bits) : bf16_to_fp32(bits);
}

}  // namespace

// Returns N of every rank.
std::vector<std::int64_t> Lane::agree_on_combine(const CombineCall& call, const SegmentsOfPlan& rows) const {
  const auto all = exchange_terms(Operation::combine,
                                  CombineTerms{.tokens = call.plan.tokens(),
                                               .rows = rows.segments.gathered,
                                               .types = slice_types(static_cast<int>(call.outputs.type),
                                                                    static_cast<int>(call.result.type)),
                                               .has_outputs = call.outputs.data != nullptr,
                                               .has_result = call.result.data != nullptr,
                                               .plan_damaged = rows.damaged});
  const auto tp = static_cast<std::size_t>(context_.tp());
  std::vector<std::int64_t> tokens(all.size(), 0);
  for (std::size_t r = 0; r < all.size(); ++r) {
    for (std::size_t i = 0; i < tp; ++i) tokens[r] += all[r / tp * tp + i].tokens;
    const TokenSlice slice = TokenSlice::of(tokens[r], static_cast<int>(r % tp), context_.tp());
    const auto wrong = [&](SliceFault fault, std::int64_t mine, std::int64_t theirs) {
      raise_slice_fault(fault, static_cast<int>(r), static_cast<int>(slice.count), mine, theirs);
    };
    if (all[r].plan_damaged != 0) wrong(SliceFault::plan, 0, 0);
    if (all[r].rows > 0 && all[r].has_outputs == 0) wrong(SliceFault::outputs, all[r].rows, 0);
    if (tokens[r] > 0 && all[r].has_result == 0) wrong(SliceFault::result, tokens[r], 0);
    if (all[r].types != all[0].types) wrong(SliceFault::types, all[r].types, all[0].types);
    if (slice.count != all[r].tokens || tokens[r] > context_.config.max_tokens)
      wrong(SliceFault::slice, all[r].tokens, tokens[r]);
  }
  return tokens;
}

DType Lane::pack_outputs(const CombineCall& call, const Segments& segments) const {
  const std::int64_t hidden = context_.config.hidden;
  // A sum is rounded once, to the combine type: by the gather if the outputs have it, else by the combine.
  const DType type = call.outputs.type == context_.config.combine_type ? call.outputs.type : DType::fp32;
  const std::int64_t row_bytes = hidden * bytes_of(type), value_bytes = bytes_of(call.outputs.type);
  const std::int64_t stride = call.outputs.stride != 0 ? call.outputs.stride : hidden * value_bytes;
  for (const Segment& segment : segments.all) {
    for (std::int64_t i = 0; i < segment.count; ++i) {
      const auto* from = static_cast<const std::byte*>(call.outputs.data) + (segment.row + i) * stride;
      auto* to = array<std::byte>(arrays_.all) + (segment.gathered_row + i) * row_bytes;
      if (type == call.outputs.type) {
        std::memcpy(to, from, static_cast<std::size_t>(row_bytes));
        continue;
      }
      for (std::int64_t column = 0; column < hidden; ++column)
        reinterpret_cast<float*>(to)[column] = value_at(call.outputs.type, from + column * value_bytes);
    }
  }
  return type;
}

const float* Lane::own_row_weights(const CombineCall& call, const Segments& segments) const {
  if (call.row_weights == nullptr) return nullptr;
  auto* const own = array<float>(arrays_.row_weights);
  const std::int64_t first = segments.first_of(context_.tp_rank());
  for (const Segment& segment : segments.all) {
    if (segment.tp_rank != context_.tp_rank()) continue;
    std::memcpy(own + segment.gathered_row - first, call.row_weights + segment.row,
                static_cast<std::size_t>(4 * segment.count));
  }
  return own;
}

void Lane::combine(CombineCall call, Stream stream) {
  const Config& config = context_.config;
  const SegmentsOfPlan of_plan = segments_of(config, context_.me(), call.plan);
  const std::vector<std::int64_t> tokens = agree_on_combine(call, of_plan);
  const Segments& segments = of_plan.segments;
  const std::int64_t own_rows = segments.rows[static_cast<std::size_t>(context_.tp_rank())];
  auto* const own = array<std::byte>(arrays_.own);
  auto* const all = array<std::byte>(arrays_.all);
  const DType type = pack_outputs(call, segments);
  context_.inner->run(GatherCall{.operation = Operation::reduce_scatter_v,
                                 .lane = index_,
                                 .sub_group = context_.tp(),
                                 .rows = all,
                                 .out = own,
                                 .count = own_rows,
                                 .held = segments.gathered,
                                 .row_bytes = config.hidden * bytes_of(type),
                                 .type = type},
                      {});
  count_sent(false, config.hidden * bytes_of(type),
             [&](int i) { return segments.rows[static_cast<std::size_t>(i)]; });

  const std::int64_t count = tokens[static_cast<std::size_t>(context_.me())];
  const TokenSlice slice = TokenSlice::of(count, context_.tp_rank(), context_.tp());
  const std::int64_t slots = call.reduction == Reduction::unreduced ? config.top_k : 1;
  const std::int64_t value_row = config.hidden * bytes_of(call.result.type), stride = padded(value_row);
  CombineCall routed = call;
  routed.outputs = {.data = own, .type = type, .stride = 0};
  routed.row_weights = own_row_weights(call, segments);
  if (call.topk_weights != nullptr) routed.topk_weights = call.topk_weights + slice.first * config.top_k;
  routed.result = {.data = all, .type = call.result.type, .stride = stride};
  context_.inner->combine(routed, stream);

  context_.inner->run(GatherCall{.lane = index_,
                                 .sub_group = context_.tp(),
                                 .rows = all,
                                 .out = own,
                                 .count = slice.count * slots,
                                 .held = std::int64_t{config.max_tokens} * slots,
                                 .row_bytes = stride},
                      {});
  count_sent(false, stride, [&](int) { return slice.count * slots; });
  const std::int64_t to_stride = call.result.stride != 0 ? call.result.stride : value_row;
  for (std::int64_t row = 0; row < count * slots; ++row)
    std::memcpy(static_cast<std::byte*>(call.result.data) + row * to_stride, own + row * stride,
                static_cast<std::size_t>(value_row));
}

}  // namespace ferry::sliced
