#include "harness/dispatch_play.hpp"

#include <algorithm>
#include <cstring>

#include "harness/check.hpp"
#include "oracle/dispatch.hpp"
#include "oracle/encode.hpp"

namespace ferry::contract {

DispatchPlay::DispatchPlay(Exchange& exchange, const Case& c, const Step& step)
    : exchange_(exchange),
      case_(c),
      step_(step),
      rank_(exchange.rank().index()),
      mine_(step.world.ranks[rank_]),
      places_(step.places.ranks[rank_]) {
  const bool padded = c.config.layout == Layout::expert_padded;
  capacity_rows_ = places_.capacity * (padded ? static_cast<std::int64_t>(places_.counts.size()) : 1);
  make_inputs();
  options_.format = step.world.format;
  options_.lane = c.lane;
  options_.sm_limit = c.sm_limit;
  options_.weigh_rows = step.world.weigh_rows;
  if (c.caller_memory) make_memory();
  if (!c.dots) return;
  dot_values_ = make_dot_rows(c, step, rank_);
  dot_rows_ = strided_buffer(dot_values_, static_cast<std::int64_t>(places_.rows.size()),
                             c.config.hidden * bytes_of(c.config.wire), 0);
  options_.dot_rows = dot_rows_.data();
}

void DispatchPlay::make_inputs() {
  const auto row_bytes = oracle::input_row_bytes(step_.world.format, step_.world.type, case_.config.hidden);
  tokens_.count = mine_.tokens;
  tokens_.type = step_.world.type;
  for (std::size_t part = 0; part < row_bytes.size(); ++part) {
    const std::int64_t stride = case_.input_gap > 0 ? row_bytes[part] + case_.input_gap : 0;
    inputs_.push_back(strided_buffer(mine_.parts[part], mine_.tokens, row_bytes[part], stride));
    tokens_.parts[part] = inputs_.back().data();
    tokens_.strides[part] = stride;
  }
  ids_ = Buffer(static_cast<std::int64_t>(mine_.ids.size()) * bytes_of(case_.ids));
  for (std::size_t i = 0; i < mine_.ids.size(); ++i) {
    if (case_.ids == IdType::int64) ids_.as<std::int64_t>()[i] = mine_.ids[i];
    if (case_.ids == IdType::int32) ids_.as<std::int32_t>()[i] = static_cast<std::int32_t>(mine_.ids[i]);
  }
  weights_ = Buffer(static_cast<std::int64_t>(mine_.weights.size() * sizeof(float)));
  std::copy(mine_.weights.begin(), mine_.weights.end(), weights_.as<float>());
}

void DispatchPlay::make_memory() {
  const std::int64_t slots = case_.config.layout == Layout::rank_major ? case_.config.top_k : 1;
  for (const oracle::PartShape& shape : oracle::arrived_shapes(step_.world, step_.places, rank_)) {
    parts_.emplace_back(shape.bytes_of(capacity_rows_));
    options_.memory.parts[parts_.size() - 1] = parts_.back().data();
  }
  weight_ = Buffer(capacity_rows_ * slots * 4);
  local_ids_ = Buffer(capacity_rows_ * slots * 4);
  group_of_row_ = Buffer(capacity_rows_ * 4);
  plan_ = Buffer(plan_bytes(case_.config, case_.ranks));
  const auto groups = static_cast<std::int64_t>(places_.counts.size());
  counts_ = Buffer(groups * 4);
  row_offsets_ = Buffer((groups + 1) * 4);
  dots_ = Buffer(capacity_rows_ * 4);
  options_.memory.weight = weight_.as<float>();
  options_.memory.local_ids =
      case_.config.layout == Layout::rank_major ? local_ids_.as<std::int32_t>() : nullptr;
  options_.memory.group_of_row = group_of_row_.as<std::int32_t>();
  options_.memory.plan = plan_.data();
  options_.memory.counts = counts_.as<std::int32_t>();
  options_.memory.row_offsets = row_offsets_.as<std::int32_t>();
  options_.memory.dots = dots_.as<float>();
}

const float* DispatchPlay::weights() {
  return step_.world.weighted ? weights_.as<float>() : nullptr;
}

Ids DispatchPlay::ids() {
  return case_.ids == IdType::int64 ? Ids(ids_.as<std::int64_t>()) : Ids(ids_.as<std::int32_t>());
}

Arrivals DispatchPlay::call(const Plan& plan) {
  arrivals_ = plan.empty() ? exchange_.dispatch(tokens_, ids(), weights(), options_)
                           : exchange_.dispatch(tokens_, plan, weights(), options_);
  return arrivals_;
}

void DispatchPlay::send(const Plan& plan) {
  if (plan.empty()) {
    exchange_.dispatch_send(tokens_, ids(), weights(), options_);
  } else {
    exchange_.dispatch_send(tokens_, plan, weights(), options_);
  }
  compare_inputs();
  overwrite_inputs();
}

void DispatchPlay::overwrite_inputs() {
  for (Buffer& part : inputs_) part.fill(kNan);
  ids_.fill(std::byte{0});
  weights_.fill(kNan);
  inputs_overwritten_ = true;
}

void DispatchPlay::receive() {
  arrivals_ = exchange_.dispatch_receive(case_.lane);
}

void DispatchPlay::run() {
  if (case_.split) {
    send();
    receive();
  } else {
    call();
  }
  compare();
  if (!case_.config.check_calls) require_findings(exchange_, case_.lane, step_.places);
}

void DispatchPlay::run_by(const Plan& plan) {
  if (case_.split) {
    send(plan);
    receive();
  } else {
    call(plan);
  }
  compare();
  exchange_.check(case_.lane);  // what the ids led to was reported when the plan was made
}

void DispatchPlay::run_backward(const Plan& plan, float* d_weights) {
  DispatchOptions options = options_;
  options.weigh_rows = false;  // both are what the operation is about
  options.dot_rows = nullptr;
  arrivals_ = exchange_.combine_backward(tokens_, plan, weights(), {dot_rows_.data(), case_.config.wire},
                                         d_weights, options);
  compare();
}

void DispatchPlay::require_guards() const {
  for (const Buffer& part : parts_) part.require_guards("part");
  weight_.require_guards("weight");
  local_ids_.require_guards("local_ids");
  group_of_row_.require_guards("group_of_row");
  plan_.require_guards("plan");
  counts_.require_guards("counts");
  row_offsets_.require_guards("row_offsets");
  dots_.require_guards("dots");
}

void DispatchPlay::compare() {
  compare_groups();
  compare_notes();
  compare_plan();
  const auto parts = static_cast<int>(oracle::arrived_shapes(step_.world, step_.places, rank_).size());
  for (int part = 0; part < parts; ++part) compare_part(part);
  if (!inputs_overwritten_) compare_inputs();
}

const std::byte* DispatchPlay::row(int part, std::int64_t row) const {
  const ArrivedPart& arrived = arrivals_.parts[part];
  return static_cast<const std::byte*>(arrived.data) + row * arrived.row_bytes;
}

void DispatchPlay::compare_groups() const {
  const auto groups = static_cast<int>(places_.counts.size());
  require_equal(arrivals_.groups, groups, "groups");
  require_equal(arrivals_.capacity, places_.capacity, "capacity");
  require_equal(exchange_.capacity(), places_.capacity, "Exchange::capacity");
  if (case_.caller_memory) {
    const bool given = static_cast<const void*>(arrivals_.counts) == counts_.data() &&
                       static_cast<const void*>(arrivals_.row_offsets) == row_offsets_.data();
    require(given, "counts or row_offsets: not in the memory that was given");
  }
  require_equal_lists<std::int32_t>(arrivals_.counts, places_.counts, "counts");
  require_equal_lists<std::int32_t>(arrivals_.row_offsets, places_.row_offsets, "row_offsets");
  require_equal_lists<std::int32_t>(arrivals_.group_expert, places_.group_expert, "group_expert");
  require_equal(*arrivals_.total, places_.row_offsets.back(), "total");
  require(arrivals_.host != nullptr, "no host totals");
  require_equal(arrivals_.host->total, places_.row_offsets.back(), "host total");
  require_equal(arrivals_.host->call, arrivals_.call, "host call number");
}

// What memory holds where the call must not write: poison in the caller's own; the lane's may hold anything.
std::vector<std::byte> DispatchPlay::background(const void* memory, std::int64_t bytes) const {
  if (case_.caller_memory) return std::vector<std::byte>(bytes, kPoison);
  const auto* from = static_cast<const std::byte*>(memory);
  return {from, from + bytes};
}

namespace {

// Writes the values of rows that are defined into an image.
template <class T>
void overlay(const std::vector<oracle::PlacedRow>& rows, const std::vector<T>& values, std::int64_t per_row,
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

void compare_sources(const std::vector<oracle::PlacedRow>& rows, const Source* sources,
                     const std::string& what) {
  for (std::size_t row = 0; row < rows.size(); ++row) {
    if (rows[row].state == oracle::RowState::untouched) continue;
    if (sources[row] == rows[row].source) continue;
    throw Mismatch(
        str(what, "[", row, "]: got ", name_of(sources[row]), ", expected ", name_of(rows[row].source)));
  }
}

}  // namespace

void DispatchPlay::compare_notes() const {
  const std::int64_t slots = case_.config.layout == Layout::rank_major ? case_.config.top_k : 1;
  const oracle::RowNotes notes = oracle::row_notes(step_.world, step_.places, rank_);
  compare_sources(places_.rows, arrivals_.source, "source");

  const auto compare_note = [&](const char* what, const void* memory, const Buffer& mine, const auto& values,
                                std::int64_t per_row) {
    require(memory != nullptr, what, ": none arrived");
    require(!case_.caller_memory || memory == mine.data(), what, ": not in the memory that was given");
    const std::int64_t bytes =
        (case_.caller_memory ? capacity_rows_ * per_row * 4 : std::int64_t(values.size()) * 4);
    std::vector<std::byte> image = background(memory, bytes);
    overlay(places_.rows, values, per_row, image);
    require_equal_bytes({static_cast<const std::byte*>(memory), static_cast<std::size_t>(bytes)}, image, 4,
                        what);
    if (case_.caller_memory) mine.require_guards(what);
  };
  const bool anyone = std::any_of(step_.world.ranks.begin(), step_.world.ranks.end(),
                                  [](const oracle::RankInputs& inputs) { return inputs.tokens > 0; });
  if (step_.world.weighted && anyone) compare_note("weight", arrivals_.weight, weight_, notes.weight, slots);
  require(step_.world.weighted || arrivals_.weight == nullptr, "weights arrived that nobody gave");
  if (slots > 1 || case_.config.layout == Layout::rank_major) {
    compare_note("local_ids", arrivals_.local_ids, local_ids_, notes.local_ids, slots);
  }
  if (case_.caller_memory) {
    compare_note("group_of_row", arrivals_.group_of_row, group_of_row_, notes.group_of_row, 1);
    plan_.require_guards("plan");
    counts_.require_guards("counts");
    row_offsets_.require_guards("row_offsets");
    dots_.require_guards("dots");
  }
  if (!case_.dots) return;
  require(arrivals_.dots != nullptr, "no dots");
  require(!case_.caller_memory || static_cast<const void*>(arrivals_.dots) == dots_.data(),
          "dots: not in the memory that was given");
  const std::vector<float> dots =
      oracle::row_dots(step_.world, step_.places, rank_, dot_values_.data(), case_.config.wire);
  const std::size_t bytes = dots.size() * sizeof(float);
  const auto* got = reinterpret_cast<const std::byte*>(arrivals_.dots);
  std::vector<std::byte> image(got, got + bytes);
  overlay(places_.rows, dots, 1, image);
  require_equal_bytes({got, bytes}, image, 4, "dots");
}

void DispatchPlay::compare_part(int part) const {
  const std::string what = str("part ", part);
  const oracle::PartShape shape = oracle::arrived_shapes(step_.world, step_.places, rank_)[part];
  const ArrivedPart& arrived = arrivals_.parts[part];
  require_equal(arrived.row_bytes, shape.element_bytes, what, ": row_bytes");
  require_equal(arrived.leading_dimension, shape.leading_dimension, what, ": leading_dimension");
  require(part > 0 || arrived.data == arrivals_.data, "data is not part 0");
  const std::int64_t rows =
      case_.caller_memory ? capacity_rows_ : static_cast<std::int64_t>(places_.rows.size());
  const std::int64_t bytes = shape.bytes_of(rows);
  std::vector<std::byte> image = background(arrived.data, bytes);
  oracle::write_part(step_.world, step_.places, rank_, part, image.data());
  const auto unit = static_cast<std::size_t>(shape.element_bytes);
  if (!case_.caller_memory) {
    return require_equal_bytes({static_cast<const std::byte*>(arrived.data), static_cast<std::size_t>(bytes)},
                               image, unit, what);
  }
  require(arrived.data == parts_[part].data(), what, ": not in the memory that was given");
  parts_[part].require_image(image, unit, what);
}

void DispatchPlay::compare_plan() const {
  const Plan& plan = arrivals_.plan;
  const oracle::Places& all = step_.places;
  require_equal(plan.rank(), rank_, "plan rank");
  require_equal(plan.ranks(), case_.ranks, "plan ranks");
  require_equal(plan.tokens(), mine_.tokens, "plan tokens");
  require_equal(plan.total(), places_.row_offsets.back(), "plan total");
  require_equal(plan.dropped(), all.overflow.dropped, "plan dropped");
  require_equal(plan.placement_version(), step_.world.config.placement.version(), "plan placement version");
  require_equal_lists<std::int32_t>(plan.counts().data(), all.counts, "plan counts");
  require_equal_lists<std::int32_t>(plan.tokens_between().data(), all.tokens_between, "plan tokens_between");
  compare_sources(places_.rows, plan.sources().data(), "plan sources");
  for (int token = 0; token < mine_.tokens; ++token) {
    for (int slot = 0; slot < case_.config.top_k; ++slot) {
      const oracle::RoutePlace& route = all.route(rank_, token, slot);
      require_equal(plan.destination(token, slot), route.destination, "destination of token ", token,
                    " slot ", slot);
      require_equal(plan.row(token, slot), route.row, "row of token ", token, " slot ", slot);
    }
  }
}

void DispatchPlay::compare_inputs() const {
  for (std::size_t part = 0; part < inputs_.size(); ++part) {
    const std::int64_t row_bytes =
        oracle::input_row_bytes(step_.world.format, step_.world.type, case_.config.hidden)[part];
    const Buffer fresh = strided_buffer(mine_.parts[part], mine_.tokens, row_bytes, tokens_.strides[part]);
    require_equal_bytes(inputs_[part].span(), fresh.span(), 1, "the caller's tokens");
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

void require_findings(Exchange& exchange, int lane, const oracle::Places& places) {
  const BadId& bad = places.bad_ids[exchange.rank().index()];
  try {
    exchange.check(lane);
  } catch (const OverflowError& error) {
    return require_overflow(error.overflow, places.overflow);
  } catch (const BadIdError& error) {
    require(places.overflow.rank < 0, "check() reports a bad id instead of the overflow");
    return require_bad_id(error.bad, bad);
  }
  require(places.overflow.rank < 0, "check() reports no overflow, ", places.overflow.dropped,
          " were dropped");
  require(bad.count == 0, "check() reports no bad id, there are ", bad.count);
}

}  // namespace ferry::contract
