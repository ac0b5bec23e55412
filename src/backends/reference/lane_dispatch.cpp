// Dispatch of the reference backend: every rank publishes its tokens and ids; each rank computes its rows
// from all of them.
#include <algorithm>
#include <cstring>

#include "backends/reference/lane.hpp"
#include "backends/reference/plan_storage.hpp"
#include "exchange/call_options.hpp"
#include "exchange/configuration.hpp"
#include "exchange/scale_checks.hpp"
#include "group/fault_points.hpp"
#include "oracle/expected.hpp"

namespace ferry::reference {
void Lane::dispatch_send(const DispatchCall& call) {
  dispatch_ = call;
  global_scale_ = call.global_scale != nullptr ? *call.global_scale : 1;
  input_scales_.assign(call.input_scales.begin(), call.input_scales.end());
  CallOptions options = options_of(context_.config, call);
  add_plan(call.plan, &options);
  // Peers read the rows as they are, so they must know their type.
  options.add(type_option("type of the tokens", call.tokens.type));
  channel_.begin(Operation::dispatch, options);
  fault_point(FaultPoint::dispatch_begin, context_.me());
  stage_inputs();
  write_summary(
      {.count = call.tokens.count, .weights_given = CallSummary::given(call.weights, call.tokens.count > 0)});
  fault_point(FaultPoint::dispatch_rows_sent, context_.me());
  post_all();
  fault_point(FaultPoint::dispatch_posted, context_.me());
}

std::vector<std::int64_t> Lane::ids_of_call() {
  const std::int64_t slots = dispatch_.tokens.count * context_.config.top_k;
  std::vector<std::int64_t> ids(slots);
  if (dispatch_.plan.empty()) {
    for (std::int64_t i = 0; i < slots; ++i) {
      ids[i] = dispatch_.ids.type == IdType::int64 ? static_cast<const std::int64_t*>(dispatch_.ids.data)[i]
                                                   : static_cast<const std::int32_t*>(dispatch_.ids.data)[i];
    }
    return ids;
  }
  const PlanView plan = view_plan(dispatch_.plan.storage(), plan_shape(context_.config));
  for (std::int64_t i = 0; i < slots; ++i) {
    ids[i] = plan.route_expert[i];
    if (ids[i] >= -1 && ids[i] < context_.config.experts) continue;
    record_bad_source(i);
    ids[i] = -1;
  }
  return ids;
}

void Lane::stage_inputs() {
  const std::int64_t tokens = dispatch_.tokens.count, slots = tokens * context_.config.top_k;
  std::byte* staging = dispatch_staging(context_.me());
  const std::vector<std::int64_t> ids = ids_of_call();
  if (slots > 0) std::memcpy(staging, ids.data(), slots * 8);
  staging += context_.staging.slots * 8;
  if (slots > 0 && dispatch_.weights != nullptr) std::memcpy(staging, dispatch_.weights, slots * 4);
  staging += context_.staging.slots * 4;
  const auto row_bytes =
      oracle::input_row_bytes(dispatch_.format, dispatch_.tokens.type, context_.config.hidden);
  for (std::size_t part = 0; part < row_bytes.size(); ++part) {
    const auto* in = static_cast<const std::byte*>(dispatch_.tokens.parts[part]);
    const std::int64_t stride =
        dispatch_.tokens.strides[part] > 0 ? dispatch_.tokens.strides[part] : row_bytes[part];
    for (std::int64_t token = 0; token < tokens; ++token, staging += row_bytes[part]) {
      std::memcpy(staging, in + token * stride, row_bytes[part]);
    }
  }
}

oracle::GlobalInputs Lane::read_global_inputs() {
  oracle::GlobalInputs inputs{.config = context_.config,
                              .format = dispatch_.format,
                              .type = dispatch_.tokens.type,
                              .weighted = false,
                              .apply_weights = dispatch_.apply_weights,
                              .global_scale = global_scale_,
                              .input_scales = input_scales_,
                              .ranks = {}};
  const auto row_bytes =
      oracle::input_row_bytes(dispatch_.format, dispatch_.tokens.type, context_.config.hidden);
  for (int peer = 0; peer < context_.ranks(); ++peer) {
    oracle::RankInputs rank_inputs;
    rank_inputs.tokens = summary_of(peer).count;
    inputs.weighted = inputs.weighted || summary_of(peer).weights_given == 1;
    const std::int64_t slots = rank_inputs.tokens * context_.config.top_k;
    const std::byte* staging = dispatch_staging(peer);
    rank_inputs.ids.resize(slots);
    if (slots > 0) std::memcpy(rank_inputs.ids.data(), staging, slots * 8);
    staging += context_.staging.slots * 8;
    rank_inputs.weights.resize(slots);
    if (slots > 0) std::memcpy(rank_inputs.weights.data(), staging, slots * 4);
    staging += context_.staging.slots * 4;
    for (std::size_t part = 0; part < row_bytes.size(); ++part) {
      const std::int64_t bytes = rank_inputs.tokens * row_bytes[part];
      rank_inputs.parts[part].assign(staging, staging + bytes);
      staging += bytes;
    }
    inputs.ranks.push_back(std::move(rank_inputs));
  }
  return inputs;
}

DispatchResult Lane::dispatch_receive() {
  wait_all();
  fault_point(FaultPoint::dispatch_waited, context_.me());
  require_same("dispatch", "weights", &CallSummary::weights_given);
  const oracle::GlobalInputs inputs = read_global_inputs();
  const oracle::RowPositions positions = oracle::find_row_positions(inputs);
  result_ = {};
  if (dispatch_.plan.empty()) {
    const PlanView plan = open_plan();
    finish_plan(inputs, positions, plan);
    if (dispatch_.memory.rows > 0) drop_rows(positions, plan);
    const BadId& bad = positions.bad_ids[context_.me()];
    if (bad.count > 0) diagnostics.bad_id = bad;
    if (positions.overflow.dropped > 0) diagnostics.overflow = positions.overflow;
    counts.count_routes(positions.counts);
  } else {
    result_.plan = dispatch_.plan;
  }
  if (input_scales_.empty()) {
    find_bad_scales(inputs);
  } else {
    find_bad_scales_of_experts(inputs, positions);
  }
  write_received(inputs, positions);
  count_traffic(inputs, positions);
  fault_point(FaultPoint::dispatch_done, context_.me());
  return result_;
}

void Lane::find_bad_scales(const oracle::GlobalInputs& inputs) {
  const int me = context_.me(), top_k = context_.config.top_k;
  if (!marks_bad_scales(inputs.format)) return;
  for (std::int64_t token = 0; token < inputs.ranks[me].tokens; ++token) {
    const auto ids = inputs.ranks[me].ids.begin() + token * top_k;
    const bool sent = context_.config.shared_experts > 0 ||
                      std::any_of(ids, ids + top_k,
                                  [&](std::int64_t id) { return id >= 0 && id < context_.config.experts; });
    const std::vector<std::byte> scales = oracle::encoded_part(inputs, me, token, 1, nullptr);
    if (sent && std::count(scales.begin(), scales.end(), std::byte{0x7F}) > 0)
      diagnostics.record({.rank = me, .expert = -1, .scale = inputs.global_scale});
  }
}

// With input_scales the rank that receives a row encodes it.
void Lane::find_bad_scales_of_experts(const oracle::GlobalInputs& inputs,
                                      const oracle::RowPositions& positions) {
  const oracle::RankRows& here = positions.ranks[context_.me()];
  if (!marks_bad_scales(inputs.format)) return;
  for (const oracle::RowInfo& row : here.rows) {
    if (row.state != oracle::RowState::kept) continue;
    const std::int32_t expert = here.group_expert[row.group];
    const float* scale = &inputs.input_scales[expert];
    const auto scales = oracle::encoded_part(inputs, row.source.rank, row.source.token, 1, nullptr, scale);
    if (std::count(scales.begin(), scales.end(), std::byte{0x7F}) > 0)
      diagnostics.record({.rank = context_.me(), .expert = expert, .scale = *scale});
  }
}

PlanView Lane::open_plan() {
  const PlanShape shape = plan_shape(context_.config);
  const std::int64_t bytes = view_plan(nullptr, shape).bytes;
  void* storage = dispatch_.memory.plan;
  if (storage == nullptr) {
    received_.plan.resize(bytes + 15);
    storage =
        received_.plan.data() + (16 - reinterpret_cast<std::uintptr_t>(received_.plan.data()) % 16) % 16;
  }
  result_.plan = Plan::over(storage, bytes, channel_.call());
  return view_plan(storage, shape);
}

void Lane::finish_plan(const oracle::GlobalInputs& inputs, const oracle::RowPositions& positions,
                       const PlanView& plan) {
  write_plan(inputs, positions, context_.me(), plan);
  PlanHeader& header = *plan.header;
  header = {.magic = kPlanMagic,
            .config_hash = row_order_hash(context_.config),
            .placement_version = context_.config.placement.version(),
            .call = channel_.call(),
            .shape = plan_shape(context_.config),
            .rank = context_.me(),
            .tokens = static_cast<std::int32_t>(inputs.ranks[context_.me()].tokens),
            .total = positions.ranks[context_.me()].row_offsets.back(),
            .dropped = positions.overflow.dropped,
            .check = 0};
  header.check = header_check(header);
}

// Drops the rows that the caller's memory has no room for.
void Lane::drop_rows(const oracle::RowPositions& positions, const PlanView& plan) {
  leaves_out_rows_ = true;
  const std::int64_t top_k = context_.config.top_k;
  const auto is_past = [&](std::int32_t row) { return row >= dispatch_.memory.rows; };
  for (int source = 0; source < context_.ranks(); ++source) {
    const std::int64_t messages = positions.tokens_between[source * context_.ranks() + context_.me()];
    std::int32_t* rows = plan.received_rows_of_message + source * context_.config.max_tokens * top_k;
    std::replace_if(rows, rows + messages * top_k, is_past, -1);
  }
  for (std::int64_t route = 0; route < plan.header->tokens * top_k; ++route) {
    if (plan.route_rank[route] == context_.me() && is_past(plan.route_row[route])) plan.route_row[route] = -1;
  }
}

namespace {

// Never null, also for an empty vector: null means that the array was not requested.
template <class T>
T* data_of(std::vector<T>& values) {
  values.reserve(1);
  return values.data();
}

// Copies the entries of kept and padding rows; those of other rows are undefined.
template <class T>
void copy_defined(const std::vector<oracle::RowInfo>& rows, const std::vector<T>& in, std::int64_t per_row,
                  T* out) {
  for (std::size_t row = 0; row < rows.size(); ++row) {
    if (rows[row].state == oracle::RowState::untouched) continue;
    std::copy_n(in.begin() + row * per_row, per_row, out + row * per_row);
  }
}

}  // namespace

void Lane::write_received(const oracle::GlobalInputs& inputs, const oracle::RowPositions& positions) {
  const ReceiveBuffers& buffers = dispatch_.memory;
  oracle::RowPositions stored = positions;
  oracle::RankRows& here = stored.ranks[context_.me()];
  const bool limited = buffers.rows > 0 && dispatch_.plan.empty();
  for (std::size_t row = limited ? buffers.rows : here.rows.size(); row < here.rows.size(); ++row)
    here.rows[row].state = oracle::RowState::untouched;
  const bool by_source = context_.config.layout == Layout::rank_major;
  const std::int64_t slots = by_source ? context_.config.top_k : 1;
  received_.counts = here.counts;
  received_.row_offsets = here.row_offsets;
  received_.group_expert = here.group_expert;
  received_.metadata = oracle::row_metadata(inputs, positions, context_.me());
  received_.totals = {.call = channel_.call(), .total = here.row_offsets.back()};

  const std::vector<oracle::PartShape> shapes = oracle::received_shapes(inputs, positions, context_.me());
  const std::int64_t capacity = row_capacity(context_.config, context_.me());
  for (std::size_t part = 0; part < shapes.size(); ++part) {
    auto* data = static_cast<std::byte*>(buffers.parts[part]);
    if (data == nullptr) {
      received_.parts[part].resize(
          shapes[part].bytes_of(capacity, static_cast<std::int64_t>(here.counts.size())));
      data = received_.parts[part].data();
    }
    oracle::write_part(inputs, stored, context_.me(), static_cast<int>(part), data);
    result_.parts[part] = {.data = data,
                           .row_bytes = shapes[part].row_bytes(),
                           .leading_dimension = shapes[part].leading_dimension};
  }
  const bool has_tiles = std::any_of(shapes.begin(), shapes.end(),
                                     [](const oracle::PartShape& shape) { return shape.tile_blocks > 0; });
  if (has_tiles) received_.tile_offsets = oracle::group_tiles(inputs, positions, context_.me());
  result_.tile_offsets = has_tiles ? received_.tile_offsets.data() : nullptr;
  result_.data = result_.parts[0].data;
  result_.groups = static_cast<int>(here.counts.size());
  result_.capacity = here.capacity;
  const auto copied_or_own = [](std::vector<std::int32_t>& own, std::int32_t* buffer) {
    return buffer != nullptr ? (std::copy(own.begin(), own.end(), buffer), buffer) : own.data();
  };
  result_.counts = copied_or_own(received_.counts, buffers.counts);
  result_.row_offsets = copied_or_own(received_.row_offsets, buffers.row_offsets);
  for (std::size_t group = 0; buffers.count_sums != nullptr && group < here.counts.size(); ++group)
    buffers.count_sums[group] += here.counts[group];
  result_.total = result_.row_offsets + result_.groups;
  result_.group_expert = received_.group_expert.data();
  result_.source = result_.plan.sources().data();
  if (inputs.weighted) result_.weight = data_of(received_.metadata.weight);
  if (inputs.weighted && buffers.weight != nullptr) {
    copy_defined(here.rows, received_.metadata.weight, slots, buffers.weight);
    result_.weight = buffers.weight;
  }
  if (by_source) result_.local_ids = data_of(received_.metadata.local_ids);
  if (by_source && buffers.local_ids != nullptr) {
    copy_defined(here.rows, received_.metadata.local_ids, slots, buffers.local_ids);
    result_.local_ids = buffers.local_ids;
  }
  if (buffers.group_of_row != nullptr) {
    copy_defined(here.rows, received_.metadata.group_of_row, 1, buffers.group_of_row);
    result_.group_of_row = buffers.group_of_row;
  }
  if (dispatch_.dot_rows != nullptr) {
    received_.dots =
        oracle::row_dots(inputs, positions, context_.me(), static_cast<const std::byte*>(dispatch_.dot_rows),
                         context_.config.combine_type);
    result_.dots = data_of(received_.dots);
    if (buffers.dots != nullptr) {
      copy_defined(here.rows, received_.dots, 1, buffers.dots);
      result_.dots = buffers.dots;
    }
  }
  result_.host = &received_.totals;
  result_.call = channel_.call();
}

void Lane::count_traffic(const oracle::GlobalInputs& inputs, const oracle::RowPositions& positions) {
  std::int64_t message_bytes = 8 + 8 * std::int64_t{positions.top_k};  // token and position; ids; weights
  if (!inputs.input_scales.empty()) {
    message_bytes += context_.config.hidden * bytes_of(inputs.type);
  } else {
    for (const oracle::PartShape& shape : oracle::part_shapes(inputs.format, context_.config.hidden, 0, 0))
      message_bytes += oracle::round_up(shape.elements * shape.element_bytes, 16);
  }
  message_bytes = oracle::round_up(message_bytes, 16);
  const oracle::SentMessages sent =
      oracle::dispatch_messages(positions, {.topology = context_.rank.topology()}, context_.me());
  counts.count_dispatch({.messages = sent.within_node, .bytes = sent.within_node * message_bytes}, false);
  counts.count_dispatch({.messages = sent.between_nodes, .bytes = sent.between_nodes * message_bytes}, true);
}

}  // namespace ferry::reference
