#include "harness/dispatch_run.hpp"

#include <algorithm>
#include <cstring>

#include "harness/check.hpp"
#include "oracle/dispatch.hpp"
#include "oracle/encode.hpp"
#include "oracle/indexed_rows.hpp"

namespace ferry::contract {

DispatchRun::DispatchRun(SyncExchange& exchange, const TestCase& c, const StepInputs& step)
    : exchange_(exchange),
      case_(c),
      step_(step),
      rank_(exchange.rank().index()),
      my_inputs_(step.inputs.ranks[rank_]),
      my_rows_(step.positions.ranks[rank_]) {
  const bool padded = c.config.layout == Layout::expert_padded;
  capacity_rows_ = my_rows_.capacity * (padded ? static_cast<std::int64_t>(my_rows_.counts.size()) : 1);
  allocate_inputs();
  if (!c.own_format) options_.format = step.inputs.format;
  options_.call = {.lane = c.lane, .sm_limit = c.sm_limit};
  options_.layer = c.layer;
  options_.apply_weights = step.inputs.apply_weights;
  const Format& format = step.inputs.format;
  const std::vector<float>& scales = step.inputs.input_scales;
  if (!scales.empty()) {
    input_scales_ = GuardedBuffer(static_cast<std::int64_t>(scales.size() * sizeof(float)));
    std::copy(scales.begin(), scales.end(), input_scales_.as<float>());
    options_.input_scales = {input_scales_.as<float>(), scales.size()};
  } else if (format.kind == FormatKind::nvfp4 && !format.nvfp4_options.per_token) {
    global_scale_ = GuardedBuffer(sizeof(float));
    *global_scale_.as<float>() = c.global_scale;
    options_.global_scale = global_scale_.as<float>();
  }
  if (c.caller_memory) allocate_outputs();
  options_.weighted = step.inputs.weighted && my_inputs_.tokens == 0 && rank_ % 2 == 1;
  if (!c.dots) return;
  dot_values_ = make_dot_rows(c, step, rank_);
  dot_rows_ = strided_buffer(dot_values_, static_cast<std::int64_t>(my_rows_.rows.size()),
                             c.config.hidden * bytes_of(c.config.combine_type), 0);
  options_.dot_rows = dot_rows_.data();
}

std::vector<DispatchRun::PassedPart> DispatchRun::passed_parts() const {
  const oracle::GlobalInputs& all = step_.inputs;
  if (case_.own_format)
    return {{step_.own_tokens[static_cast<std::size_t>(rank_)], case_.config.hidden * bytes_of(all.type)}};
  std::vector<PassedPart> parts;
  for (const std::int64_t bytes : oracle::input_row_bytes(all.format, all.type, case_.config.hidden))
    parts.push_back({my_inputs_.parts[parts.size()], bytes});
  return parts;
}

void DispatchRun::allocate_inputs() {
  const std::vector<PassedPart> passed = passed_parts();
  tokens_.count = my_inputs_.tokens;
  tokens_.type = step_.inputs.type;
  for (std::size_t part = 0; part < passed.size(); ++part) {
    const auto& [rows, row_bytes] = passed[part];
    const std::int64_t stride = case_.input_gap > 0 ? row_bytes + case_.input_gap : 0;
    inputs_.push_back(strided_buffer(rows, my_inputs_.tokens, row_bytes, stride));
    tokens_.parts[part] = inputs_.back().data();
    tokens_.strides[part] = stride;
  }
  ids_ = GuardedBuffer(static_cast<std::int64_t>(my_inputs_.ids.size()) * bytes_of(case_.ids));
  for (std::size_t i = 0; i < my_inputs_.ids.size(); ++i) {
    if (case_.ids == IdType::int64) ids_.as<std::int64_t>()[i] = my_inputs_.ids[i];
    if (case_.ids == IdType::int32) ids_.as<std::int32_t>()[i] = static_cast<std::int32_t>(my_inputs_.ids[i]);
  }
  weights_ = GuardedBuffer(static_cast<std::int64_t>(my_inputs_.weights.size() * sizeof(float)));
  std::copy(my_inputs_.weights.begin(), my_inputs_.weights.end(), weights_.as<float>());
}

// Rows that the memory of the parts has room for.
std::int64_t DispatchRun::part_rows() const {
  if (case_.config.layout != Layout::expert_indexed) return capacity_rows_;
  return oracle::indexed_rows(step_.inputs, step_.positions, rank_).capacity;
}

void DispatchRun::allocate_outputs() {
  const std::int64_t slots = case_.config.layout == Layout::rank_major ? case_.config.top_k : 1;
  for (const oracle::PartShape& shape : oracle::received_shapes(step_.inputs, step_.positions, rank_)) {
    parts_.emplace_back(shape.bytes_of(part_rows(), static_cast<std::int64_t>(my_rows_.counts.size())));
    options_.memory.parts[parts_.size() - 1] = parts_.back().data();
  }
  weight_ = GuardedBuffer(capacity_rows_ * slots * 4);
  local_ids_ = GuardedBuffer(capacity_rows_ * slots * 4);
  group_of_row_ = GuardedBuffer(capacity_rows_ * 4);
  plan_ = GuardedBuffer(plan_bytes(case_.config, case_.ranks));
  const auto groups = static_cast<std::int64_t>(my_rows_.counts.size());
  counts_ = GuardedBuffer(groups * 4);
  row_offsets_ = GuardedBuffer((groups + 1) * 4);
  dots_ = GuardedBuffer(capacity_rows_ * 4);
  count_sums_ = GuardedBuffer(groups * 4);
  options_.memory.weight = weight_.as<float>();
  options_.memory.local_ids =
      case_.config.layout == Layout::rank_major ? local_ids_.as<std::int32_t>() : nullptr;
  options_.memory.group_of_row = group_of_row_.as<std::int32_t>();
  options_.memory.plan = plan_.data();
  options_.memory.counts = counts_.as<std::int32_t>();
  options_.memory.row_offsets = row_offsets_.as<std::int32_t>();
  options_.memory.dots = dots_.as<float>();
  options_.memory.count_sums = count_sums_.as<std::int32_t>();
}

const float* DispatchRun::weights() {
  return step_.inputs.weighted && !options_.weighted ? weights_.as<float>() : nullptr;
}

Ids DispatchRun::ids() {
  return case_.ids == IdType::int64 ? Ids(ids_.as<std::int64_t>()) : Ids(ids_.as<std::int32_t>());
}

DispatchResult DispatchRun::call(const Plan& plan) {
  count_sums_.fill(kPoison);
  received_ = plan.empty() ? exchange_.dispatch(tokens_, ids(), weights(), options_)
                           : exchange_.dispatch(tokens_, plan, weights(), options_);
  return received_;
}

void DispatchRun::send(const Plan& plan) {
  count_sums_.fill(kPoison);
  if (plan.empty()) {
    exchange_.dispatch_send(tokens_, ids(), weights(), options_);
  } else {
    exchange_.dispatch_send(tokens_, plan, weights(), options_);
  }
  compare_inputs();
  overwrite_inputs();
}

void DispatchRun::overwrite_inputs() {
  for (GuardedBuffer& part : inputs_) part.fill(kNan);
  ids_.fill(std::byte{0});
  weights_.fill(kNan);
  input_scales_.fill(kNan);
  inputs_overwritten_ = true;
}

void DispatchRun::receive() {
  received_ = exchange_.dispatch_receive(case_.lane);
}

void DispatchRun::run() {
  if (case_.split_phases) {
    send();
    receive();
  } else {
    call();
  }
  compare();
  if (!case_.config.check_calls) require_diagnostics(exchange_, case_.lane, step_.positions);
}

void DispatchRun::run_with_plan(const Plan& plan) {
  if (case_.split_phases) {
    send(plan);
    receive();
  } else {
    call(plan);
  }
  compare();
  exchange_.check(case_.lane);  // bad ids were reported when the plan was made
}

void DispatchRun::run_backward(const Plan& plan, float* d_weights) {
  count_sums_.fill(kPoison);
  DispatchOptions options = options_;
  options.apply_weights = false;  // the operation itself applies weights and computes dots
  options.dot_rows = nullptr;
  received_ = exchange_.combine_backward(tokens_, plan, weights(),
                                         {dot_rows_.data(), case_.config.combine_type}, d_weights, options);
  compare();
}

void DispatchRun::require_guards() const {
  for (const GuardedBuffer& part : parts_) part.require_guards("part");
  weight_.require_guards("weight");
  local_ids_.require_guards("local_ids");
  group_of_row_.require_guards("group_of_row");
  plan_.require_guards("plan");
  counts_.require_guards("counts");
  row_offsets_.require_guards("row_offsets");
  dots_.require_guards("dots");
  count_sums_.require_guards("count_sums");
}

void DispatchRun::compare() {
  compare_groups();
  compare_metadata();
  compare_plan();
  const auto parts = static_cast<int>(oracle::received_shapes(step_.inputs, step_.positions, rank_).size());
  for (int part = 0; part < parts; ++part) compare_part(part);
  for (int part = parts; part < kMaxParts; ++part)
    require(received_.parts[part].data == nullptr, "part ", part, " of ", parts, " is there");
  if (!inputs_overwritten_) compare_inputs();
}

const std::byte* DispatchRun::row(int part, std::int64_t row) const {
  const ReceivedPart& received = received_.parts[part];
  return static_cast<const std::byte*>(received.data) + row * received.row_bytes;
}

void DispatchRun::compare_groups() const {
  const auto groups = static_cast<int>(my_rows_.counts.size());
  require_equal(received_.groups, groups, "groups");
  require_equal(received_.capacity, my_rows_.capacity, "capacity");
  require_equal(exchange_.capacity(), my_rows_.capacity, "Exchange::capacity");
  if (case_.caller_memory) {
    const bool given = static_cast<const void*>(received_.counts) == counts_.data() &&
                       static_cast<const void*>(received_.row_offsets) == row_offsets_.data();
    require(given, "counts or row_offsets: not in the memory of the caller");
  }
  require_equal_lists<std::int32_t>(received_.counts, my_rows_.counts, "counts");
  if (case_.caller_memory) compare_count_sums();
  require_equal_lists<std::int32_t>(received_.row_offsets, my_rows_.row_offsets, "row_offsets");
  require_equal_lists<std::int32_t>(received_.group_expert, my_rows_.group_expert, "group_expert");
  const std::vector<std::int32_t> tiles = oracle::group_tiles(step_.inputs, step_.positions, rank_);
  const bool has_tiles = step_.inputs.format.mx.tiles || step_.inputs.format.nvfp4_options.tiles;
  require((received_.tile_offsets != nullptr) == has_tiles, "tile_offsets: ", has_tiles ? "null" : "given");
  if (has_tiles) require_equal_lists<std::int32_t>(received_.tile_offsets, tiles, "tile_offsets");
  require_equal(*received_.total, my_rows_.row_offsets.back(), "total");
  require(received_.host != nullptr, "no host totals");
  require_equal(received_.host->total, my_rows_.row_offsets.back(), "host total");
  require_equal(received_.host->call, received_.call, "host call number");
}

// The call has added its counts to poison.
void DispatchRun::compare_count_sums() const {
  std::int32_t before = 0;
  std::memset(&before, static_cast<int>(kPoison), sizeof before);
  std::vector<std::int32_t> expected = my_rows_.counts;
  for (std::int32_t& sum : expected) sum += before;
  count_sums_.require_contents(bytes_of_values(expected), sizeof before, "count_sums");
}

// The expected content of bytes that the call must not write: poison in the caller's memory. Memory of the
// lane may hold anything, so its current content counts as expected.
std::vector<std::byte> DispatchRun::unwritten(const void* memory, std::int64_t bytes) const {
  if (case_.caller_memory) return std::vector<std::byte>(bytes, kPoison);
  const auto* from = static_cast<const std::byte*>(memory);
  return {from, from + bytes};
}

namespace {

// Copies the values of defined rows into `image`.
template <class T>
void overlay(const std::vector<oracle::RowInfo>& rows, const std::vector<T>& values, std::int64_t per_row,
             std::vector<std::byte>& image) {
  for (std::size_t row = 0; row < rows.size(); ++row) {
    if (rows[row].state == oracle::RowState::untouched) continue;
    const std::size_t first = row * static_cast<std::size_t>(per_row), bytes = per_row * sizeof(T);
    std::memcpy(image.data() + first * sizeof(T), values.data() + first, bytes);
  }
}

std::string name_of(const Source& s) {
  return str("{", s.rank, ", ", s.token, ", ", s.slot, "}");
}

void compare_sources(const std::vector<oracle::RowInfo>& rows, const Source* sources,
                     const std::string& what) {
  for (std::size_t row = 0; row < rows.size(); ++row) {
    if (rows[row].state == oracle::RowState::untouched) continue;
    if (sources[row] == rows[row].source) continue;
    throw Mismatch(
        str(what, "[", row, "]: got ", name_of(sources[row]), ", expected ", name_of(rows[row].source)));
  }
}

}  // namespace

// The sources of rows and, in expert_indexed, what says which row each position holds.
void DispatchRun::compare_index() const {
  if (case_.config.layout != Layout::expert_indexed) {
    require(received_.index == nullptr && received_.row_total == nullptr, "an index without expert_indexed");
    return compare_sources(my_rows_.rows, received_.source, "source");
  }
  const oracle::IndexedRows rows = oracle::indexed_rows(step_.inputs, step_.positions, rank_);
  require_equal(received_.row_capacity, rows.capacity, "row_capacity");
  require_equal_lists<std::int32_t>(received_.index, rows.index, "index");
  require_equal_lists<std::int32_t>(received_.slot, rows.slot, "slot");
  require_equal_lists<std::int32_t>(received_.block_group, rows.block_group, "block_group");
  require_equal_lists<std::int32_t>(received_.source_offsets, rows.source_offsets, "source_offsets");
  require_equal(*received_.row_total, rows.source_offsets.back(), "row_total");
  for (std::size_t row = 0; row < rows.source.size(); ++row) {
    require(received_.source[row] == rows.source[row], "source[", row, "]: got ",
            name_of(received_.source[row]), ", expected ", name_of(rows.source[row]));
  }
}

void DispatchRun::compare_metadata() const {
  const std::int64_t slots = case_.config.layout == Layout::rank_major ? case_.config.top_k : 1;
  const oracle::RowMetadata metadata = oracle::row_metadata(step_.inputs, step_.positions, rank_);
  compare_index();

  const auto compare_array = [&](const char* what, const void* memory, const GuardedBuffer& mine,
                                 const auto& values, std::int64_t per_row) {
    require(memory != nullptr, what, ": null pointer");
    require(!case_.caller_memory || memory == mine.data(), what, ": not in the memory of the caller");
    const std::int64_t bytes =
        (case_.caller_memory ? capacity_rows_ * per_row * 4 : std::int64_t(values.size()) * 4);
    std::vector<std::byte> image = unwritten(memory, bytes);
    overlay(my_rows_.rows, values, per_row, image);
    require_equal_bytes({static_cast<const std::byte*>(memory), static_cast<std::size_t>(bytes)}, image, 4,
                        what);
    if (case_.caller_memory) mine.require_guards(what);
  };
  if (step_.inputs.weighted) compare_array("weight", received_.weight, weight_, metadata.weight, slots);
  require(step_.inputs.weighted || received_.weight == nullptr, "weights received that no rank gave");
  if (slots > 1 || case_.config.layout == Layout::rank_major) {
    compare_array("local_ids", received_.local_ids, local_ids_, metadata.local_ids, slots);
  }
  if (case_.caller_memory) {
    compare_array("group_of_row", received_.group_of_row, group_of_row_, metadata.group_of_row, 1);
    plan_.require_guards("plan");
    counts_.require_guards("counts");
    row_offsets_.require_guards("row_offsets");
    dots_.require_guards("dots");
    count_sums_.require_guards("count_sums");
  }
  if (!case_.dots) return;
  require(received_.dots != nullptr, "no dots");
  require(!case_.caller_memory || static_cast<const void*>(received_.dots) == dots_.data(),
          "dots: not in the memory of the caller");
  const std::vector<float> dots =
      oracle::row_dots(step_.inputs, step_.positions, rank_, dot_values_.data(), case_.config.combine_type);
  const std::size_t bytes = dots.size() * sizeof(float);
  const auto* got = reinterpret_cast<const std::byte*>(received_.dots);
  std::vector<std::byte> image(got, got + bytes);
  overlay(my_rows_.rows, dots, 1, image);
  require_equal_bytes({got, bytes}, image, 4, "dots");
}

void DispatchRun::compare_part(int part) const {
  const std::string what = str("part ", part);
  const oracle::PartShape shape = oracle::received_shapes(step_.inputs, step_.positions, rank_)[part];
  const ReceivedPart& received = received_.parts[part];
  require_equal(received.row_bytes, shape.row_bytes(), what, ": row_bytes");
  require_equal(received.leading_dimension, shape.leading_dimension, what, ": leading_dimension");
  require(part > 0 || received.data == received_.data, "data is not part 0");
  const std::int64_t rows = case_.caller_memory || shape.tile_blocks > 0 ? part_rows()
                            : received_.row_total != nullptr
                                ? std::int64_t{*received_.row_total}
                                : static_cast<std::int64_t>(my_rows_.rows.size());
  const std::int64_t bytes = shape.bytes_of(rows, static_cast<std::int64_t>(my_rows_.counts.size()));
  std::vector<std::byte> image = unwritten(received.data, bytes);
  oracle::write_part(step_.inputs, step_.positions, rank_, part, image.data());
  const auto element_bytes = static_cast<std::size_t>(shape.element_bytes);
  if (!case_.caller_memory) {
    return require_equal_bytes(
        {static_cast<const std::byte*>(received.data), static_cast<std::size_t>(bytes)}, image, element_bytes,
        what);
  }
  require(received.data == parts_[part].data(), what, ": not in the memory of the caller");
  parts_[part].require_contents(image, element_bytes, what);
}

void DispatchRun::compare_plan() const {
  const Plan& plan = received_.plan;
  const oracle::RowPositions& all = step_.positions;
  require_equal(plan.rank(), rank_, "plan rank");
  require_equal(plan.ranks(), case_.ranks, "plan ranks");
  require_equal(plan.tokens(), my_inputs_.tokens, "plan tokens");
  require_equal(plan.total(), my_rows_.row_offsets.back(), "plan total");
  require_equal(plan.dropped(), all.overflow.dropped, "plan dropped");
  require_equal(plan.placement_version(), step_.inputs.config.placement.version(), "plan placement version");
  require_equal_lists<std::int32_t>(plan.counts().data(), all.counts, "plan counts");
  require_equal_lists<std::int32_t>(plan.tokens_between().data(), all.tokens_between, "plan tokens_between");
  compare_sources(my_rows_.rows, plan.sources().data(), "plan sources");
  for (int token = 0; token < my_inputs_.tokens; ++token) {
    for (int slot = 0; slot < case_.config.top_k; ++slot) {
      const oracle::RouteTarget& route = all.route(rank_, token, slot);
      require_equal(plan.destination(token, slot), route.destination, "destination of token ", token,
                    " slot ", slot);
      require_equal(plan.row(token, slot), route.row, "row of token ", token, " slot ", slot);
    }
  }
}

void DispatchRun::compare_inputs() const {
  const std::vector<PassedPart> passed = passed_parts();
  for (std::size_t part = 0; part < passed.size(); ++part) {
    const GuardedBuffer expected =
        strided_buffer(passed[part].rows, my_inputs_.tokens, passed[part].row_bytes, tokens_.strides[part]);
    require_equal_bytes(inputs_[part].span(), expected.span(), 1, "the caller's tokens");
  }
}

namespace {

void require_overflow(const Overflow& got, const Overflow& expected) {
  require_equal(got.rank, expected.rank, "overflow: rank");
  require_equal(got.capacity, expected.capacity, "overflow: capacity");
  require_equal(got.needed, expected.needed, "overflow: needed");
  require_equal(got.dropped, expected.dropped, "overflow: dropped");
}

void require_bad_id(const BadId& got, const BadId& expected) {
  require_equal(got.rank, expected.rank, "bad id: rank");
  require_equal(got.token, expected.token, "bad id: token");
  require_equal(got.slot, expected.slot, "bad id: slot");
  require_equal(got.id, expected.id, "bad id: id");
  require_equal(got.count, expected.count, "bad id: count");
}

}  // namespace

void require_diagnostics(SyncExchange& exchange, int lane, const oracle::RowPositions& positions) {
  const BadId& bad = positions.bad_ids[exchange.rank().index()];
  try {
    exchange.check(lane);
  } catch (const OverflowError& error) {
    return require_overflow(error.overflow, positions.overflow);
  } catch (const BadIdError& error) {
    require(positions.overflow.rank < 0, "check() reports a bad id instead of the overflow");
    return require_bad_id(error.bad, bad);
  }
  require(positions.overflow.rank < 0, "check() reports no overflow, ", positions.overflow.dropped,
          " were dropped");
  require(bad.count == 0, "check() reports no bad id, there are ", bad.count);
}

}  // namespace ferry::contract
