#include "capi/convert.hpp"

#include <algorithm>
#include <cstddef>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/errors.hpp"
#include "capi/boundary.hpp"
#include "exchange/config_fields.hpp"
#include "exchange/configuration.hpp"
#include "format/encoding.hpp"

namespace ferry::capi {
namespace {

// The flags of the interface are the options of formats.
static_assert(FERRY_SCALE_COLUMNS == kScaleColumns && FERRY_FP8_POWER_OF_TWO == kPowerOfTwo &&
              FERRY_FP8_PACKED == kPackedScales && FERRY_MX_UP == kMxUp && FERRY_MX_OCP == kMxOcp &&
              FERRY_NVFP4_PER_TOKEN == kPerToken && FERRY_SCALE_TILES == kScaleTiles);

constexpr std::pair<OptionBits, const char*> kFlags[] = {{kScaleColumns, "FERRY_SCALE_COLUMNS"},
                                                         {kScaleTiles, "FERRY_SCALE_TILES"},
                                                         {kPowerOfTwo, "FERRY_FP8_POWER_OF_TWO"},
                                                         {kPackedScales, "FERRY_FP8_PACKED"},
                                                         {kMxUp, "FERRY_MX_UP"},
                                                         {kMxOcp, "FERRY_MX_OCP"},
                                                         {kPerToken, "FERRY_NVFP4_PER_TOKEN"}};

// "FERRY_SCALE_COLUMNS, FERRY_SCALE_TILES"
std::string names_of_flags(OptionBits options) {
  std::string names;
  for (const auto& [option, name] : kFlags)
    if ((options & option) != 0) names += str(names.empty() ? "" : ", ", name);
  return names.empty() ? "none" : names;
}

bool is_registered(const Format& format) {
  return encoding_of(format).by_caller;
}

// Pointers to these structs are cast from one interface to the other.
static_assert(sizeof(ferry_source) == sizeof(Source) &&
              offsetof(ferry_source, slot) == offsetof(Source, slot));
static_assert(sizeof(ferry_host_totals) == sizeof(HostTotals) &&
              offsetof(ferry_host_totals, total) == offsetof(HostTotals, total));
static_assert(FERRY_MAX_PARTS == kMaxParts && FERRY_MAX_TOP_K == kMaxTopK);

}  // namespace

template <class Given>
Placement to_placement(const Given& given, int ranks, std::uint64_t version) {
  const std::int32_t* const next = given.held_experts;
  if ((next == nullptr) != (given.held_counts == nullptr))
    throw UsageError("held_experts and held_counts go together: set both or neither");
  if ((given.expert_rank == nullptr) != (given.expert_local == nullptr))
    throw UsageError("expert_rank and expert_local go together: set both or neither");
  if (next == nullptr && given.expert_rank == nullptr) return {};
  if (next != nullptr && given.expert_rank != nullptr)
    throw UsageError("expert_rank and held_experts are two placements: set one of them to NULL");
  if (next == nullptr) {
    std::vector<ExpertLocation> locations;
    for (int e = 0; e < given.experts; ++e)
      locations.push_back({given.expert_rank[e], given.expert_local[e]});
    return Placement::table(std::move(locations), ranks, version);
  }
  std::vector<std::vector<int>> held;
  for (std::ptrdiff_t rank = 0, begin = 0; rank < ranks; ++rank) {
    const std::int32_t count = given.held_counts[rank];
    if (count < 0 || count > given.experts) {
      throw UsageError(
          str("held_counts[", rank, "] = ", count, ", must be 0 to the ", counted(given.experts, "expert")));
    }
    held.emplace_back(next + begin, next + begin + count);
    begin += count;
  }
  return Placement::replicas(std::move(held), given.experts, version);
}

template Placement to_placement(const ferry_config& given, int ranks, std::uint64_t version);
template Placement to_placement(const ferry_dispatch_layout_args& given, int ranks, std::uint64_t version);

Topology to_topology(const std::int32_t* node_of_rank, int ranks) {
  required(node_of_rank, "node_of_rank");
  if (ranks < 1) throw UsageError(str("ranks = ", ranks, ", must be 1 or more"));
  return Topology({node_of_rank, node_of_rank + ranks});
}

DType to_dtype(std::int32_t type, const char* field) {
  return to_enum(type, DType::fp32, field);
}

std::span<const float> to_input_scales(const float* scales, std::int64_t count) {
  if (count < 0)
    throw UsageError(str("dispatch: input_scale_count = ", count, ", must be the number of experts"));
  return {scales, static_cast<std::size_t>(count)};
}

std::optional<Format> to_format(const ferry_format& given) {
  check_reserved(given, "ferry_format");
  const auto kind = to_choice(given.kind, FormatKind::registered, "ferry_format.kind");
  const char* name = kConstants<FormatKind>[given.kind].name;
  Format format = kind ? format_with(*kind, given.flags) : Format{};
  if (is_registered(format)) {
    format.registered = static_cast<int>(given.flags);
  } else {
    const OptionBits known = kind ? options_taken_by(*kind) : 0;
    if ((given.flags & ~known) != 0 || (given.flags & kMxRules) == kMxRules) {
      throw UsageError(str("ferry_format.flags = ", given.flags, " with kind ", name,
                           ": the flags of this kind are ", names_of_flags(known),
                           (known & kMxRules) != 0 ? ", of FERRY_MX_UP and FERRY_MX_OCP one" : ""));
    }
  }
  const bool parts =
      std::any_of(given.part_bytes, given.part_bytes + kMaxParts, [](auto b) { return b != 0; });
  if (parts && !format.is_raw()) {
    throw UsageError(
        str("ferry_format.part_bytes is set with kind ", name, ": only FERRY_FORMAT_RAW has parts"));
  }
  if (!kind) return std::nullopt;
  std::copy(given.part_bytes, given.part_bytes + kMaxParts, format.part_bytes.begin());
  return format;
}

std::optional<Reduction> to_reduction(std::int32_t reduction) {
  return to_choice(reduction, Reduction::unreduced, "reduction");
}

namespace {

// The placement that ferry_config describes: a table, or experts in slices, whose table may be repeated.
Placement placement_of(const ferry_config& given, int ranks) {
  Placement table = to_placement(given, ranks, given.placement_version);
  const std::int64_t slices = given.expert_slices;
  if (slices == 0 || slices == 1) return table;
  if (slices < 0 || ranks % slices != 0) {
    throw UsageError(str("ferry_config.expert_slices = ", slices, ", must be 0 or a divisor of the ",
                         counted(ranks, "rank")));
  }
  const int tp = static_cast<int>(slices);
  Placement sliced = Placement::ep_tp(given.experts, ranks / tp, tp);
  if (!table.empty() && table.locations() != sliced.locations()) {
    throw UsageError(
        str("ferry_config.expert_slices = ", slices, " with another placement: set its arrays to NULL"));
  }
  if (given.placement_version != 0)
    throw UsageError("ferry_config.placement_version with expert_slices: must be 0");
  return sliced;
}

// Enumerations whose 0 in C is the default.
template <class Field>
constexpr bool kHasDefault = std::is_same_v<Field, BackendKind> || std::is_same_v<Field, Reduction>;
template <class Enum>
constexpr auto kLast = static_cast<Enum>(std::size(kConstants<Enum>) - 1 - kHasDefault<Enum>);

// Reads a field, which holds its default, from ferry_config. A number 0 leaves it.
template <class Field, class Value>
void read(const char* name, Field& field, const Value& value) {
  const std::string where = str("ferry_config.", name);
  if constexpr (std::is_same_v<Field, Format>) {
    field = to_format(value).value_or(field);
  } else if constexpr (kHasDefault<Field>) {
    field = to_choice(value, kLast<Field>, where.c_str()).value_or(field);
  } else if constexpr (std::is_enum_v<Field>) {
    field = to_enum(value, kLast<Field>, where.c_str());
  } else if (value != 0) {
    field = static_cast<Field>(value);
  }
}

template <class Field, class Value>
void write(const Field& field, Value& value) {
  if constexpr (std::is_same_v<Field, Format>) {
    value = to_c(field);
  } else {
    value = static_cast<Value>(field) + static_cast<Value>(kHasDefault<Field>);
  }
}

}  // namespace

Config to_config(const ferry_config& given, int ranks) {
  Config config;
  if (given.shared_experts < 0 || given.shared_experts > kMaxSharedExperts) {
    throw UsageError(
        str("ferry_config.shared_experts = ", given.shared_experts, ", must be 0 to ", kMaxSharedExperts));
  }
  visit_common_fields([](const char* name, auto& field, const auto& value) { read(name, field, value); },
                      config, given);
  config.placement = placement_of(given, ranks);
  config.own_receive_buffers = given.external_receive_buffers == 0;
  config.check_calls = given.manual_check == 0;
  return config;
}

Config config_or_refuse(const Rank& rank, const ferry_config* given) {
  return or_refuse([&](const Error& error) { refuse_configuration(rank, error); },
                   [&] { return to_config(read_sized(given, "ferry_config"), rank.size()); });
}

CallOptions known_call_options(const ferry_call_options& given) {
  return {.lane = given.lane, .stream = {given.stream}, .sm_limit = given.sm_limit};
}

CallOptions to_call_options(const ferry_call_options& given) {
  check_reserved(given, "ferry_call_options");
  return known_call_options(given);
}

CallOptions to_call_options(const ferry_call_options* given) {
  return given == nullptr ? CallOptions() : to_call_options(*given);
}

Tokens to_tokens(const ferry_tokens& given) {
  check_reserved(given, "ferry_tokens");
  Tokens tokens;
  std::copy(given.parts, given.parts + kMaxParts, tokens.parts.begin());
  std::copy(given.strides, given.strides + kMaxParts, tokens.strides.begin());
  tokens.count = given.count;
  tokens.device_count = given.device_count;
  tokens.type = to_dtype(given.type, "ferry_tokens.type");
  return tokens;
}

Ids to_ids(const void* data, std::int32_t type) {
  Ids ids;
  ids.data = data;
  ids.type = to_enum(type, IdType::int64, "id_type");
  return ids;
}

Plan to_plan(const ferry_plan& plan) {
  check_reserved(plan, "ferry_plan");
  return plan.storage == nullptr ? Plan() : Plan::over(plan.storage, plan.bytes, plan.call);
}

ReceiveBuffers to_receive_buffers(const ferry_receive_buffers& given) {
  check_reserved(given, "ferry_receive_buffers");
  ReceiveBuffers buffers;
  std::copy(given.parts, given.parts + kMaxParts, buffers.parts.begin());
  buffers.weight = given.weight;
  buffers.local_ids = given.local_ids;
  buffers.group_of_row = given.group_of_row;
  buffers.plan = given.plan;
  buffers.counts = given.counts;
  buffers.row_offsets = given.row_offsets;
  buffers.dots = given.dots;
  buffers.count_sums = given.count_sums;
  buffers.rows = given.rows;
  buffers.allow_truncation = given.allow_truncation != 0;
  return buffers;
}

Outputs to_outputs(const ferry_rows& rows) {
  check_reserved(rows, "ferry_rows");
  return {.data = rows.data,
          .type = to_dtype(rows.type, "outputs.type"),
          .stride = rows.stride,
          .rows = rows.rows};
}

Result to_result(const ferry_rows& rows) {
  check_reserved(rows, "ferry_rows");
  return {.data = rows.data,
          .type = to_dtype(rows.type, "result.type"),
          .stride = rows.stride,
          .rows = rows.rows};
}

Epilogue to_epilogue(const ferry_epilogue* given) {
  if (given == nullptr) return {};
  const auto epilogue = read_sized(given, "ferry_epilogue");
  return {.residual = epilogue.residual,
          .stride = epilogue.stride,
          .scale = epilogue.scale == 0 ? 1 : static_cast<float>(epilogue.scale)};
}

ferry_format to_c(const Format& format) {
  ferry_format c{};
  c.kind = static_cast<std::int32_t>(format.kind) + 1;
  c.flags = is_registered(format) ? static_cast<std::uint32_t>(format.registered) : options_of(format);
  std::copy(format.part_bytes.begin(), format.part_bytes.end(), c.part_bytes);
  return c;
}

ferry_config to_c(const Config& config) {
  ferry_config c{};
  visit_common_fields([](const char*, const auto& field, auto& value) { write(field, value); }, config, c);
  c.placement_version = config.placement.version();
  c.expert_slices = config.placement.tp() > 1 ? config.placement.tp() : 0;
  c.external_receive_buffers = !config.own_receive_buffers;
  c.manual_check = !config.check_calls;
  return c;
}

void copy_parts(const std::array<ReceivedPart, kMaxParts>& parts, ferry_received_part* to) {
  for (const ReceivedPart& part : parts) *to++ = {part.data, part.row_bytes, part.leading_dimension, {}};
}

ferry_dispatch_result to_c(const DispatchResult& received) {
  ferry_dispatch_result c{};
  c.data = received.data;
  copy_parts(received.parts, c.parts);
  c.groups = received.groups;
  c.capacity = received.capacity;
  c.counts = received.counts;
  c.row_offsets = received.row_offsets;
  c.total = received.total;
  c.group_expert = received.group_expert;
  c.source = reinterpret_cast<const ferry_source*>(received.source);
  c.weight = received.weight;
  c.local_ids = received.local_ids;
  c.group_of_row = received.group_of_row;
  c.dots = received.dots;
  c.host = reinterpret_cast<const ferry_host_totals*>(received.host);
  c.call = received.call;
  c.plan = {received.plan.storage(), received.plan.bytes(), received.plan.call(), {}};
  c.tile_offsets = received.tile_offsets;
  c.index = received.index;
  c.slot = received.slot;
  c.block_group = received.block_group;
  c.source_offsets = received.source_offsets;
  c.row_total = received.row_total;
  c.row_capacity = received.row_capacity;
  return c;
}

}  // namespace ferry::capi
