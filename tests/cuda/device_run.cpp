#include "cuda/device_run.hpp"

#include <algorithm>
#include <cstring>

#include "format/encoding.hpp"
#include "harness/check.hpp"
#include "oracle/combine.hpp"
#include "oracle/dispatch.hpp"

namespace ferry::contract {
namespace {

constexpr std::int64_t kBeyond = 16;  // bytes after an output, which keep their poison

std::int64_t groups_of_experts(const ferry::Exchange& exchange) {
  const Config& config = exchange.config();
  return config.shared_experts + config.placement.local_experts(exchange.rank().index());
}

std::int64_t rows_of_all_groups(const ferry::Exchange& exchange) {
  const bool padded = exchange.config().layout == Layout::expert_padded;
  return exchange.capacity() * (padded ? groups_of_experts(exchange) : 1);
}

std::vector<oracle::PartShape> shapes_of(const TestCase& c, const ferry::Exchange& exchange) {
  const bool padded = c.config.layout == Layout::expert_padded;
  std::vector<oracle::PartShape> shapes = oracle::part_shapes(
      c.config.format, c.config.hidden, rows_of_all_groups(exchange), padded ? exchange.capacity() : 0);
  if (c.input_scales && c.config.format.kind == FormatKind::fp8_e4m3) shapes.resize(1);
  return shapes;
}

std::vector<std::byte> narrow_ids(const std::vector<std::int64_t>& ids) {
  return bytes_of_values(std::vector<std::int32_t>(ids.begin(), ids.end()));
}

}  // namespace

DeviceRun::DeviceRun(ferry::Exchange& exchange, const TestCase& c, ForeignExchange* calls)
    : exchange_(exchange),
      calls_(calls),
      case_(c),
      rank_(exchange.rank().index()),
      capacity_rows_(rows_of_all_groups(exchange)),
      slots_(c.config.layout == Layout::rank_major ? c.config.top_k : 1),
      shapes_(shapes_of(c, exchange)),
      ids_(std::int64_t{c.config.max_tokens} * c.config.top_k * 4),
      weights_(std::int64_t{c.config.max_tokens} * c.config.top_k * 4),
      count_(16),
      global_scale_(16),
      input_scales_(c.input_scales ? 4 * (std::int64_t{c.config.experts} + c.config.shared_experts) : 0),
      weight_(capacity_rows_ * slots_ * 4 + kBeyond),
      plan_(plan_bytes(exchange.config(), c.ranks)),
      outputs_memory_(capacity_rows_ * c.config.hidden * bytes_of(c.outputs) + kBeyond),
      result_(std::int64_t{c.config.max_tokens} * (c.reduction == Reduction::unreduced ? c.config.top_k : 1) *
              c.config.hidden * bytes_of(c.result)),
      shared_outputs_(std::int64_t{c.config.shared_experts} * c.config.max_tokens * c.config.hidden *
                          bytes_of(c.result) +
                      kBeyond),
      outputs_{outputs_memory_.data(), c.outputs} {
  tokens_.count = c.config.max_tokens;
  tokens_.type = c.type;
  tokens_.device_count = count();
  for (const std::int64_t bytes : oracle::input_row_bytes(c.config.format, c.type, c.config.hidden)) {
    tokens_memory_.emplace_back(c.config.max_tokens * bytes);
    tokens_.parts[tokens_memory_.size() - 1] = tokens_memory_.back().data();
  }
  for (const oracle::PartShape& shape : shapes_) {
    rows_.emplace_back(shape.bytes_of(capacity_rows_, groups_of_experts(exchange)) + kBeyond);
    dispatch_options_.memory.parts[rows_.size() - 1] = rows_.back().data();
  }
  dispatch_options_.format = c.config.format;
  if (c.input_scales) {
    dispatch_options_.input_scales = {input_scales_.as<float>(),
                                      static_cast<std::size_t>(input_scales_.bytes()) / sizeof(float)};
  } else if (encoding_of(c.config.format).takes_global_scale()) {
    dispatch_options_.global_scale = global_scale_.as<float>();
  }
  dispatch_options_.call = combine_options_.call = {.lane = c.lane, .sm_limit = c.sm_limit};
  dispatch_options_.memory.weight = weight_.as<float>();
  dispatch_options_.memory.plan = plan_.data();
  combine_options_.reduction = c.reduction;
  if (c.shared_outputs) combine_options_.shared_outputs = shared_outputs_.data();
}

int DeviceRun::add_inputs(const StepInputs& step, const oracle::ExpertOutputs& expert_outputs) {
  const oracle::RankInputs& my_inputs = step.inputs.ranks[rank_];
  const std::vector<std::int32_t> count(4, static_cast<std::int32_t>(my_inputs.tokens));
  std::vector<DeviceBytes> tokens;
  for (std::size_t part = 0; part < tokens_memory_.size(); ++part) tokens.emplace_back(my_inputs.parts[part]);
  sets_.push_back(std::unique_ptr<InputSet>(
      new InputSet{step, expert_outputs, std::move(tokens), DeviceBytes(narrow_ids(my_inputs.ids)),
                   DeviceBytes(bytes_of_values(my_inputs.weights)), DeviceBytes(bytes_of_values(count)),
                   DeviceBytes(bytes_of_values(std::vector<float>(4, step.inputs.global_scale))),
                   DeviceBytes(bytes_of_values(step.inputs.input_scales)),
                   DeviceBytes(expert_outputs.ranks[rank_].rows), nullptr}));
  return static_cast<int>(sets_.size()) - 1;
}

void DeviceRun::set_epilogue(float scale, bool adds_residual) {
  Random random(case_.seed + static_cast<std::uint64_t>(rank_));
  residual_values_ =
      random_rows(random, case_.result, std::int64_t{case_.config.max_tokens} * case_.config.hidden, false);
  residual_.emplace(residual_values_);
  combine_options_.epilogue = {.residual = adds_residual ? residual_->data() : nullptr, .scale = scale};
}

void DeviceRun::load(int set, cudaStream_t stream) const {
  const InputSet& from = *sets_[static_cast<std::size_t>(set)];
  ArrayPairs pairs;
  const auto add = [&](const DeviceBytes& to, const DeviceBytes& source) {
    pairs.add(to.data(), source.data(), source.bytes());
  };
  for (std::size_t part = 0; part < tokens_memory_.size(); ++part)
    add(tokens_memory_[part], from.tokens[part]);
  add(ids_, from.ids);
  add(weights_, from.weights);
  add(count_, from.count);
  add(global_scale_, from.global_scale);
  add(input_scales_, from.input_scales);
  add(outputs_memory_, from.outputs);
  copy_arrays(pairs, stream);
}

void DeviceRun::poison_outputs(cudaStream_t stream) const {
  ArrayPairs pairs;
  for (const DeviceBytes& rows : rows_) pairs.add(rows.data(), nullptr, rows.bytes());
  pairs.add(weight_.data(), nullptr, weight_.bytes());
  pairs.add(result_.data(), nullptr, result_.bytes());
  pairs.add(shared_outputs_.data(), nullptr, shared_outputs_.bytes());
  copy_arrays(pairs, stream);
}

namespace {

template <class Options>
Options on_stream(Options options, cudaStream_t stream) {
  options.call.stream = {stream};
  return options;
}

}  // namespace

void DeviceRun::dispatch(cudaStream_t stream) {
  if (case_.split_phases) {
    dispatch_send(stream);
    return dispatch_receive(stream);
  }
  received_ = called([&](auto& exchange) {
    return exchange.dispatch(tokens_, Ids(ids()), weights_.as<float>(), on_stream(dispatch_options_, stream));
  });
}

void DeviceRun::dispatch_send(cudaStream_t stream) {
  called([&](auto& exchange) {
    exchange.dispatch_send(tokens_, Ids(ids()), weights_.as<float>(), on_stream(dispatch_options_, stream));
  });
}

void DeviceRun::dispatch_receive(cudaStream_t stream) {
  received_ = called(
      [&](auto& exchange) { return exchange.dispatch_receive({.lane = case_.lane, .stream = {stream}}); });
}

CombineOptions DeviceRun::current_combine_options() const {
  CombineOptions options = combine_options_;
  if (case_.weights_from == WeightsFrom::row_weights) options.row_weights = received_.weight;
  return options;
}

void DeviceRun::combine(cudaStream_t stream) {
  if (case_.split_phases) {
    combine_send(stream);
    return combine_receive(stream);
  }
  called([&](auto& exchange) {
    exchange.combine(outputs_, received_.plan, {result_.data(), case_.result},
                     on_stream(current_combine_options(), stream));
  });
}

void DeviceRun::combine_send(cudaStream_t stream) {
  called([&](auto& exchange) {
    exchange.combine_send(outputs_, received_.plan, {result_.data(), case_.result},
                          on_stream(current_combine_options(), stream));
  });
}

void DeviceRun::combine_receive(cudaStream_t stream) {
  called([&](auto& exchange) { exchange.combine_receive({.lane = case_.lane, .stream = {stream}}); });
}

void DeviceRun::run_and_compare(int set, cudaStream_t stream) {
  load(set, stream);
  poison_outputs(stream);
  dispatch(stream);
  combine(stream);
  compare(set, stream);
}

void DeviceRun::compare(int set, cudaStream_t stream) {
  exchange_.synchronize({.lane = case_.lane, .stream = {stream}});
  const InputSet& expected = *sets_[static_cast<std::size_t>(set)];
  compare_received(expected.step);
  compare_result(expected);
}

void DeviceRun::compare_received(const StepInputs& step) {
  const oracle::RankRows& positions = step.positions.ranks[rank_];
  const Format& format = case_.config.format;
  const std::int64_t hidden = case_.config.hidden;
  const DispatchResult rows = mirror_.to_host(
      received_, exchange_.config(),
      case_.input_scales ? parts_by_expert(format, hidden) : parts_of(format, hidden), capacity_rows_);
  require_equal_lists<std::int32_t>(rows.counts, positions.counts, "counts");
  require_equal_lists<std::int32_t>(rows.row_offsets, positions.row_offsets, "row_offsets");
  require_equal(*rows.total, positions.row_offsets.back(), "total");
  require_equal(rows.host->total, positions.row_offsets.back(), "host total");
  for (std::size_t row = 0; row < positions.rows.size(); ++row) {
    if (positions.rows[row].state == oracle::RowState::untouched) continue;
    require(rows.source[row] == positions.rows[row].source, "source of row ", row);
  }
  require_equal_bytes(weight_.to_host(), weight_image(step), 4, "weight");
  for (std::size_t part = 0; part < rows_.size(); ++part) {
    require_equal_bytes(rows_[part].to_host(), rows_image(step, static_cast<int>(part)),
                        static_cast<std::size_t>(shapes_[part].element_bytes), str("part ", part));
  }
}

void DeviceRun::compare_result(const InputSet& set) const {
  require_equal_bytes(result_.to_host(), result_image(set), static_cast<std::size_t>(bytes_of(case_.result)),
                      "result");
  require_equal_bytes(shared_outputs_.to_host(), shared_outputs_image(set),
                      static_cast<std::size_t>(bytes_of(case_.result)), "shared_outputs");
}

void DeviceRun::compare_on_device(int set, std::int64_t call, cudaStream_t stream) {
  const Expected& wanted = *sets_[static_cast<std::size_t>(set)]->expected;
  ArrayPairs pairs;
  const auto add = [&](const void* got, const DeviceBytes& expected) {
    pairs.add(const_cast<void*>(got), expected.data(), expected.bytes());
  };
  for (std::size_t part = 0; part < rows_.size(); ++part) add(rows_[part].data(), wanted.rows[part]);
  add(weight_.data(), wanted.weight);
  add(received_.counts, wanted.counts);
  add(received_.row_offsets, wanted.row_offsets);
  add(received_.source, wanted.source);
  add(result_.data(), wanted.result);
  add(shared_outputs_.data(), wanted.shared_outputs);
  comparison_.compare(pairs, call, stream);
}

void DeviceRun::require_no_difference(cudaStream_t stream) const {
  std::vector<std::string> names;
  for (std::size_t part = 0; part < rows_.size(); ++part) names.push_back(str("part ", part));
  names.insert(names.end(), {"weight", "counts", "row_offsets", "source", "result", "shared_outputs"});
  comparison_.require_no_difference(stream, names);
}

void DeviceRun::prepare_comparisons() {
  for (const std::unique_ptr<InputSet>& set : sets_) {
    if (set->expected != nullptr) continue;
    const oracle::RankRows& positions = set->step.positions.ranks[rank_];
    std::vector<Source> source;
    // In expert_padded, the entries between an expert's rows and the next expert's are undefined.
    if (case_.config.layout != Layout::expert_padded)
      for (const oracle::RowInfo& row : positions.rows) source.push_back(row.source);
    std::vector<DeviceBytes> rows;
    for (std::size_t part = 0; part < rows_.size(); ++part)
      rows.emplace_back(rows_image(set->step, static_cast<int>(part)));
    set->expected.reset(new Expected{
        std::move(rows), DeviceBytes(weight_image(set->step)), DeviceBytes(bytes_of_values(positions.counts)),
        DeviceBytes(bytes_of_values(positions.row_offsets)), DeviceBytes(bytes_of_values(source)),
        DeviceBytes(result_image(*set)), DeviceBytes(shared_outputs_image(*set))});
  }
}

// Rows that a call must not write keep the poison.
std::vector<std::byte> DeviceRun::rows_image(const StepInputs& step, int part) const {
  std::vector<std::byte> image(static_cast<std::size_t>(rows_[static_cast<std::size_t>(part)].bytes()),
                               kPoison);
  oracle::write_part(step.inputs, step.positions, rank_, part, image.data());
  return image;
}

std::vector<std::byte> DeviceRun::weight_image(const StepInputs& step) const {
  std::vector<std::byte> image(static_cast<std::size_t>(weight_.bytes()), kPoison);
  const oracle::RowMetadata metadata = oracle::row_metadata(step.inputs, step.positions, rank_);
  const std::vector<oracle::RowInfo>& rows = step.positions.ranks[rank_].rows;
  const auto of_row = static_cast<std::size_t>(slots_);
  for (std::size_t row = 0; row < rows.size(); ++row) {
    if (rows[row].state == oracle::RowState::untouched) continue;
    std::memcpy(image.data() + row * of_row * 4, metadata.weight.data() + row * of_row, of_row * 4);
  }
  return image;
}

std::vector<std::byte> DeviceRun::shared_outputs_image(const InputSet& set) const {
  std::vector<std::byte> image(static_cast<std::size_t>(shared_outputs_.bytes()), kPoison);
  if (!case_.shared_outputs) return image;
  const std::vector<std::byte> rows =
      oracle::returned_shared_rows(case_.config, set.step.positions, set.expert_outputs, rank_);
  std::copy(rows.begin(), rows.end(), image.begin());
  return image;
}

std::vector<std::byte> DeviceRun::result_image(const InputSet& set) const {
  std::vector<std::byte> image(static_cast<std::size_t>(result_.bytes()), kPoison);
  std::vector<std::byte> sums = oracle::combined(case_.config, set.step.positions, set.expert_outputs,
                                                 exchange_.rank().topology(), rank_);
  const Epilogue& epilogue = combine_options_.epilogue;
  if (!epilogue.empty()) {
    sums = oracle::with_epilogue(case_.result, std::move(sums), epilogue.scale,
                                 epilogue.residual != nullptr ? residual_values_.data() : nullptr);
  }
  std::copy(sums.begin(), sums.end(), image.begin());
  return image;
}

}  // namespace ferry::contract
