// Dispatch of the reference backend.
#include <algorithm>
#include <cstring>

#include "backends/reference/lane.hpp"
#include "backends/reference/plan_storage.hpp"
#include "exchange/call_options.hpp"
#include "exchange/configuration.hpp"
#include "group/fault_points.hpp"
#include "oracle/expected.hpp"

namespace ferry::reference {
void Lane::dispatch_send(const DispatchCall& call) {
  dispatch_ = call;
  CallOptions options = options_of(call);
  add_plan(call.plan, &options);
  // Peers read the rows as they are, so they must know their type.
  options.add("type of the tokens", static_cast<std::int64_t>(call.tokens.type));
  channel_.begin(Operation::dispatch, options);
  fault_point(FaultPoint::dispatch_begin, shared_.me());
  stage_rows();
  write_note({.count = call.tokens.count, .weighted = Note::said(call.weights, call.tokens.count > 0)});
  fault_point(FaultPoint::dispatch_rows_sent, shared_.me());
  post_all();
  fault_point(FaultPoint::dispatch_posted, shared_.me());
}

std::vector<std::int64_t> Lane::own_ids() {
  const std::int64_t slots = dispatch_.tokens.count * shared_.config.top_k;
  std::vector<std::int64_t> ids(slots);
  if (dispatch_.plan.empty()) {
    for (std::int64_t i = 0; i < slots; ++i) {
      ids[i] = dispatch_.ids.type == IdType::int64 ? static_cast<const std::int64_t*>(dispatch_.ids.data)[i]
                                                   : static_cast<const std::int32_t*>(dispatch_.ids.data)[i];
    }
    return ids;
  }
  const PlanView plan = view_plan(dispatch_.plan.storage(), plan_shape(shared_.config));
  for (std::int64_t i = 0; i < slots; ++i) {
    ids[i] = plan.route_expert[i];
    if (ids[i] >= -1 && ids[i] < shared_.config.experts) continue;
    record_bad_source(i);
    ids[i] = -1;
  }
  return ids;
}

void Lane::stage_rows() {
  const std::int64_t tokens = dispatch_.tokens.count, slots = tokens * shared_.config.top_k;
  std::byte* stage = dispatch_stage(shared_.me());
  const std::vector<std::int64_t> ids = own_ids();
  if (slots > 0) std::memcpy(stage, ids.data(), slots * 8);
  stage += shared_.stage.slots * 8;
  if (slots > 0 && dispatch_.weights != nullptr) std::memcpy(stage, dispatch_.weights, slots * 4);
  stage += shared_.stage.slots * 4;
  const auto row_bytes =
      oracle::input_row_bytes(dispatch_.format, dispatch_.tokens.type, shared_.config.hidden);
  for (std::size_t part = 0; part < row_bytes.size(); ++part) {
    const auto* from = static_cast<const std::byte*>(dispatch_.tokens.parts[part]);
    const std::int64_t stride =
        dispatch_.tokens.strides[part] > 0 ? dispatch_.tokens.strides[part] : row_bytes[part];
    for (std::int64_t token = 0; token < tokens; ++token, stage += row_bytes[part]) {
      std::memcpy(stage, from + token * stride, row_bytes[part]);
    }
  }
}

oracle::GlobalInputs Lane::read_global_inputs() {
  oracle::GlobalInputs global{.config = shared_.config,
                              .format = dispatch_.format,
                              .type = dispatch_.tokens.type,
                              .weighted = false,
                              .apply_weights = dispatch_.apply_weights,
                              .ranks = {}};
  const auto row_bytes =
      oracle::input_row_bytes(dispatch_.format, dispatch_.tokens.type, shared_.config.hidden);
  for (int peer = 0; peer < shared_.ranks(); ++peer) {
    oracle::RankInputs inputs;
    inputs.tokens = note_of(peer).count;
    global.weighted = global.weighted || note_of(peer).weighted == 1;
    const std::int64_t slots = inputs.tokens * shared_.config.top_k;
    const std::byte* stage = dispatch_stage(peer);
    inputs.ids.resize(slots);
    if (slots > 0) std::memcpy(inputs.ids.data(), stage, slots * 8);
    stage += shared_.stage.slots * 8;
    inputs.weights.resize(slots);
    if (slots > 0) std::memcpy(inputs.weights.data(), stage, slots * 4);
    stage += shared_.stage.slots * 4;
    for (std::size_t part = 0; part < row_bytes.size(); ++part) {
      const std::int64_t bytes = inputs.tokens * row_bytes[part];
      inputs.parts[part].assign(stage, stage + bytes);
      stage += bytes;
    }
    global.ranks.push_back(std::move(inputs));
  }
  return global;
}

DispatchResult Lane::dispatch_receive() {
  wait_all();
  fault_point(FaultPoint::dispatch_waited, shared_.me());
  require_alike("dispatch", "weights", &Note::weighted);
  const oracle::GlobalInputs global = read_global_inputs();
  const oracle::RowPositions positions = oracle::find_row_positions(global);
  received_ = {};
  if (dispatch_.plan.empty()) {
    finish_plan(global, positions, open_plan());
    const BadId& bad = positions.bad_ids[shared_.me()];
    if (bad.count > 0) findings.bad_id = bad;
    if (positions.overflow.dropped > 0) findings.overflow = positions.overflow;
    ++dispatches;
    for (std::size_t i = 0; i < positions.counts.size(); ++i)
      expert_load[i % expert_load.size()] += positions.counts[i];
  } else {
    received_.plan = dispatch_.plan;
  }
  write_received(global, positions);
  count_traffic(global, positions);
  fault_point(FaultPoint::dispatch_done, shared_.me());
  return received_;
}

PlanView Lane::open_plan() {
  const PlanShape shape = plan_shape(shared_.config);
  const std::int64_t bytes = view_plan(nullptr, shape).bytes;
  void* storage = dispatch_.memory.plan;
  if (storage == nullptr) {
    arrived_.plan.resize(bytes + 15);
    storage = arrived_.plan.data() + (16 - reinterpret_cast<std::uintptr_t>(arrived_.plan.data()) % 16) % 16;
  }
  received_.plan = Plan::over(storage, bytes);
  return view_plan(storage, shape);
}

void Lane::finish_plan(const oracle::GlobalInputs& global, const oracle::RowPositions& positions,
                       const PlanView& plan) {
  write_plan(global, positions, shared_.me(), plan);
  PlanHeader& header = *plan.header;
  header = {.magic = kPlanMagic,
            .config_hash = row_order_hash(shared_.config),
            .placement_version = shared_.config.placement.version(),
            .call = channel_.call(),
            .shape = plan_shape(shared_.config),
            .rank = shared_.me(),
            .tokens = static_cast<std::int32_t>(global.ranks[shared_.me()].tokens),
            .total = positions.ranks[shared_.me()].row_offsets.back(),
            .dropped = positions.overflow.dropped,
            .check = 0};
  header.check = header_check(header);
}

namespace {

// Never null, so that "nothing here" and "not asked for" differ.
template <class T>
T* data_of(std::vector<T>& values) {
  values.reserve(1);
  return values.data();
}

// Copies the entries that are defined: those of kept and padding rows.
template <class T>
void copy_defined(const std::vector<oracle::RowInfo>& rows, const std::vector<T>& from, std::int64_t per_row,
                  T* to) {
  for (std::size_t row = 0; row < rows.size(); ++row) {
    if (rows[row].state == oracle::RowState::untouched) continue;
    std::copy_n(from.begin() + row * per_row, per_row, to + row * per_row);
  }
}

}  // namespace

void Lane::write_received(const oracle::GlobalInputs& global, const oracle::RowPositions& positions) {
  const oracle::RankRows& here = positions.ranks[shared_.me()];
  const ReceiveBuffers& memory = dispatch_.memory;
  const bool by_source = shared_.config.layout == Layout::rank_major;
  const std::int64_t slots = by_source ? shared_.config.top_k : 1;
  arrived_.counts = here.counts;
  arrived_.row_offsets = here.row_offsets;
  arrived_.group_expert = here.group_expert;
  arrived_.notes = oracle::row_metadata(global, positions, shared_.me());
  arrived_.totals = {.call = channel_.call(), .total = here.row_offsets.back()};

  const std::vector<oracle::PartShape> shapes = oracle::arrived_shapes(global, positions, shared_.me());
  const std::int64_t capacity = row_capacity(shared_.config, shared_.me());
  for (std::size_t part = 0; part < shapes.size(); ++part) {
    auto* data = static_cast<std::byte*>(memory.parts[part]);
    if (data == nullptr) {
      arrived_.parts[part].resize(shapes[part].bytes_of(capacity));
      data = arrived_.parts[part].data();
    }
    oracle::write_part(global, positions, shared_.me(), static_cast<int>(part), data);
    received_.parts[part] = {.data = data,
                             .row_bytes = shapes[part].element_bytes,
                             .leading_dimension = shapes[part].leading_dimension};
  }
  received_.data = received_.parts[0].data;
  received_.groups = static_cast<int>(here.counts.size());
  received_.capacity = here.capacity;
  const auto placed = [](std::vector<std::int32_t>& own, std::int32_t* given) {
    return given != nullptr ? (std::copy(own.begin(), own.end(), given), given) : own.data();
  };
  received_.counts = placed(arrived_.counts, memory.counts);
  received_.row_offsets = placed(arrived_.row_offsets, memory.row_offsets);
  received_.total = received_.row_offsets + received_.groups;
  received_.group_expert = arrived_.group_expert.data();
  received_.source = received_.plan.sources().data();
  if (global.weighted) received_.weight = data_of(arrived_.notes.weight);
  if (global.weighted && memory.weight != nullptr) {
    copy_defined(here.rows, arrived_.notes.weight, slots, memory.weight);
    received_.weight = memory.weight;
  }
  if (by_source) received_.local_ids = data_of(arrived_.notes.local_ids);
  if (by_source && memory.local_ids != nullptr) {
    copy_defined(here.rows, arrived_.notes.local_ids, slots, memory.local_ids);
    received_.local_ids = memory.local_ids;
  }
  if (memory.group_of_row != nullptr) {
    copy_defined(here.rows, arrived_.notes.group_of_row, 1, memory.group_of_row);
    received_.group_of_row = memory.group_of_row;
  }
  if (dispatch_.dot_rows != nullptr) {
    arrived_.dots =
        oracle::row_dots(global, positions, shared_.me(), static_cast<const std::byte*>(dispatch_.dot_rows),
                         shared_.config.combine_type);
    received_.dots = data_of(arrived_.dots);
    if (memory.dots != nullptr) {
      copy_defined(here.rows, arrived_.dots, 1, memory.dots);
      received_.dots = memory.dots;
    }
  }
  received_.host = &arrived_.totals;
  received_.call = channel_.call();
}

void Lane::count_traffic(const oracle::GlobalInputs& global, const oracle::RowPositions& positions) {
  std::int64_t message = 8 + 8 * std::int64_t{positions.top_k};  // token and place, ids, weights
  for (const oracle::PartShape& shape : oracle::part_shapes(global.format, shared_.config.hidden, 0)) {
    message += oracle::round_up(shape.elements * shape.element_bytes, 16);
  }
  const std::int64_t messages = oracle::dispatch_messages(positions, shared_.me());
  wire.dispatch_messages += messages;
  wire.dispatch_bytes += messages * oracle::round_up(message, 16);
}

}  // namespace ferry::reference
