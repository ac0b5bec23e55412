// Dispatch to experts in slices: route a slice of the tokens, then gather the received rows in the sub-group.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

#include "backends/sliced/lane.hpp"
#include "exchange/slice_fault.hpp"
#include "format/parts.hpp"
#include "plan/shapes.hpp"

namespace ferry::sliced {
namespace {

std::int64_t id_at(const Ids& ids, std::int64_t index) {
  return ids.type == IdType::int32 ? static_cast<const std::int32_t*>(ids.data)[index]
                                   : static_cast<const std::int64_t*>(ids.data)[index];
}

struct DispatchTerms {
  std::int64_t tokens;
  std::uint64_t ids_hash;
};

// What a packed row ends with.
struct RowTail {
  Source source;
  float weight;
};

}  // namespace

std::vector<std::int64_t> Lane::agree_on_tokens(const DispatchCall& call) const {
  const std::int64_t slots = call.tokens.count * context_.config.top_k;
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (std::int64_t i = 0; i < slots; ++i)
    hash = (hash ^ static_cast<std::uint64_t>(id_at(call.ids, i))) * 0x100000001b3;
  const std::vector<DispatchTerms> all =
      exchange_terms(Operation::dispatch, DispatchTerms{call.tokens.count, hash});
  std::vector<std::int64_t> tokens;
  for (std::size_t r = 0; r < all.size(); ++r) {
    const std::size_t first = r - r % static_cast<std::size_t>(context_.tp());
    const auto differ = [&](SliceFault fault) {
      raise_slice_fault(fault, static_cast<int>(r), static_cast<int>(first), all[r].tokens,
                        all[first].tokens);
    };
    if (all[r].tokens != all[first].tokens) differ(SliceFault::tokens);
    if (all[r].ids_hash != all[first].ids_hash) differ(SliceFault::ids);
    tokens.push_back(all[r].tokens);
  }
  return tokens;
}

const std::int64_t* Lane::slice_of_ids(const DispatchCall& call, const TokenSlice& slice) const {
  const std::int64_t top_k = context_.config.top_k;
  const ExpertSlices slices{context_.config.experts, context_.tp()};
  auto* const routed = array<std::int64_t>(arrays_.ids);
  for (std::int64_t i = 0; i < slice.count * top_k; ++i)
    routed[i] = slices.id_of_slice(id_at(call.ids, slice.first * top_k + i), context_.tp_rank());
  return routed;
}

std::int64_t Lane::pack(const DispatchResult& routed, const DispatchCall& call,
                        const std::vector<std::int64_t>& tokens) const {
  const int parts = parts_of(call.format, context_.config.hidden).count;
  auto* to = array<std::byte>(arrays_.own);
  std::int64_t row_bytes = sizeof(RowTail);
  for (int p = 0; p < parts; ++p) row_bytes += routed.parts[static_cast<std::size_t>(p)].row_bytes;
  for (std::int64_t row = 0; row < *routed.total; ++row) {
    for (int p = 0; p < parts; ++p) {
      const ReceivedPart& part = routed.parts[static_cast<std::size_t>(p)];
      std::memcpy(to, static_cast<const std::byte*>(part.data) + row * part.row_bytes,
                  static_cast<std::size_t>(part.row_bytes));
      to += part.row_bytes;
    }
    RowTail tail{routed.source[row], routed.weight != nullptr ? routed.weight[row] : 0};
    const std::int64_t of_source = tokens[static_cast<std::size_t>(tail.source.rank)];
    tail.source.token += static_cast<std::int32_t>(
        TokenSlice::of(of_source, tail.source.rank % context_.tp(), context_.tp()).first);
    std::memcpy(to, &tail, sizeof tail);
    to += sizeof tail;
  }
  return row_bytes;
}

DispatchResult Lane::unpack(const DispatchResult& routed, const DispatchCall& call, const Segments& segments,
                            std::int64_t row_bytes) {
  const Config& config = context_.config;
  const PartList parts = parts_of(call.format, config.hidden);
  const ReceiveBuffers& memory = call.memory;
  const auto chosen = [&]<class T>(T* given, std::int64_t own) {
    return given != nullptr ? given : array<T>(own);
  };
  const std::int64_t capacity = row_capacity(config, context_.me());
  DispatchResult result;
  std::int64_t part_offset = arrays_.parts;
  for (int p = 0; p < parts.count; ++p) {
    const auto i = static_cast<std::size_t>(p);
    const std::int64_t bytes = routed.parts[i].row_bytes;
    result.parts[i] = {.data = chosen(static_cast<std::byte*>(memory.parts[i]), part_offset),
                       .row_bytes = bytes};
    part_offset += padded(capacity * bytes);
  }
  auto* const counts = chosen(memory.counts, arrays_.counts);
  auto* const row_offsets = chosen(memory.row_offsets, arrays_.row_offsets);
  auto* const source = array<Source>(arrays_.source);
  auto* const weight = routed.weight != nullptr ? chosen(memory.weight, arrays_.weight) : nullptr;
  std::copy(segments.counts.begin(), segments.counts.end(), counts);
  std::copy(segments.row_offsets.begin(), segments.row_offsets.end(), row_offsets);
  const std::int64_t total = segments.row_offsets.back();
  std::fill_n(source, total, Source{});
  const auto zero_row = [&](std::int64_t row) {
    for (int p = 0; p < parts.count; ++p) {
      const auto& [data, bytes, leading] = result.parts[static_cast<std::size_t>(p)];
      std::memset(static_cast<std::byte*>(data) + row * bytes, 0, static_cast<std::size_t>(bytes));
    }
  };
  for (std::size_t group = 0; group < segments.counts.size(); ++group) {
    const std::int64_t end = segments.row_offsets[group] + segments.counts[group];
    const std::int64_t next = segments.row_offsets[group + 1];
    if (weight != nullptr) std::fill(weight + end, weight + next, 0.0f);
    for (std::int64_t row = end; config.zero_padding && row < next; ++row) zero_row(row);
    if (memory.group_of_row == nullptr) continue;
    std::fill(memory.group_of_row + segments.row_offsets[group], memory.group_of_row + end,
              static_cast<std::int32_t>(group));
    std::fill(memory.group_of_row + end, memory.group_of_row + next, -1);
  }
  for (const Segment& segment : segments.all) {
    const auto* from = array<std::byte>(arrays_.all) + segment.gathered_row * row_bytes;
    for (std::int64_t row = segment.row; row < segment.row + segment.count; ++row) {
      for (int p = 0; p < parts.count; ++p) {
        const auto& [data, bytes, leading] = result.parts[static_cast<std::size_t>(p)];
        std::memcpy(static_cast<std::byte*>(data) + row * bytes, from, static_cast<std::size_t>(bytes));
        from += bytes;
      }
      RowTail tail;
      std::memcpy(&tail, from, sizeof tail);
      from += sizeof tail;
      source[row] = tail.source;
      if (weight != nullptr) weight[row] = tail.weight;
    }
  }
  result.data = result.parts[0].data;
  result.groups = static_cast<int>(segments.counts.size());
  result.capacity = capacity;
  result.counts = counts;
  result.row_offsets = row_offsets;
  result.total = row_offsets + result.groups;
  result.group_expert = context_.config.placement.experts_of(context_.me()).data();
  result.source = source;
  result.weight = weight;
  result.group_of_row = memory.group_of_row;
  result.host = &totals_;
  result.call = routed.call;
  result.plan = routed.plan;
  totals_.total = total;
  std::atomic_ref(totals_.call).store(routed.call, std::memory_order_release);
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
      .totals = &totals_};
}

DispatchResult Lane::dispatch(DispatchCall call, Stream stream) {
  const Config& config = context_.config;
  const std::vector<std::int64_t> tokens = agree_on_tokens(call);
  const TokenSlice slice = TokenSlice::of(call.tokens.count, context_.tp_rank(), context_.tp());
  first_token_ = slice.first;
  DispatchCall routed_call = call;
  routed_call.ids = Ids(slice_of_ids(call, slice));
  routed_call.memory = {.plan = call.memory.plan};
  routed_call.tokens.count = slice.count;
  const PartList parts = parts_of(call.format, config.hidden);
  for (int p = 0; p < parts.count; ++p) {
    const auto i = static_cast<std::size_t>(p);
    if (call.tokens.parts[i] == nullptr) continue;
    const std::int64_t dense =
        call.format.quantises() ? config.hidden * bytes_of(call.tokens.type) : parts.part[p].row_bytes;
    const std::int64_t stride = call.tokens.strides[i] != 0 ? call.tokens.strides[i] : dense;
    routed_call.tokens.parts[i] = static_cast<const std::byte*>(call.tokens.parts[i]) + slice.first * stride;
  }
  if (call.weights != nullptr) routed_call.weights = call.weights + slice.first * config.top_k;
  const DispatchResult routed = context_.inner->dispatch(routed_call, stream);
  const SegmentsOfPlan of_plan = segments_of(config, context_.me(), routed.plan);
  if (of_plan.damaged)
    throw SystemError("dispatch: the counts of rows that rank " + std::to_string(context_.me()) +
                          " has received are damaged",
                      EIO);
  const Segments& segments = of_plan.segments;
  const std::int64_t row_bytes = pack(routed, call, tokens);
  context_.inner->run(GatherCall{.lane = index_,
                                 .sub_group = context_.tp(),
                                 .rows = array<std::byte>(arrays_.own),
                                 .out = array<std::byte>(arrays_.all),
                                 .count = *routed.total,
                                 .held = row_capacity(config, context_.me()),
                                 .row_bytes = row_bytes},
                      {});
  count_sent(true, row_bytes, [&](int) { return std::int64_t{*routed.total}; });
  return unpack(routed, call, segments, row_bytes);
}

}  // namespace ferry::sliced
