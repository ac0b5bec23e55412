#include "cuda/device_run.hpp"

#include <algorithm>
#include <cstring>

#include "format/parts.hpp"
#include "harness/check.hpp"
#include "oracle/combine.hpp"
#include "oracle/dispatch.hpp"

namespace ferry::contract {
namespace {

std::int64_t rows_of_all_groups(const ferry::Exchange& exchange) {
  const Config& config = exchange.config();
  const bool padded = config.layout == Layout::expert_padded;
  return exchange.capacity() * (padded ? config.placement.local_experts(exchange.rank().index()) : 1);
}

std::vector<std::byte> narrow_ids(const std::vector<std::int64_t>& ids) {
  return bytes_of_values(std::vector<std::int32_t>(ids.begin(), ids.end()));
}

}  // namespace

DeviceRun::DeviceRun(ferry::Exchange& exchange, const TestCase& c)
    : exchange_(exchange),
      case_(c),
      rank_(exchange.rank().index()),
      capacity_rows_(rows_of_all_groups(exchange)),
      token_bytes_(c.config.hidden * bytes_of(c.type)),
      row_bytes_(parts_of(c.config.format, c.config.hidden).part[0].row_bytes),
      output_bytes_(c.config.hidden * bytes_of(c.outputs)),
      result_bytes_(c.config.hidden * bytes_of(c.result)),
      tokens_memory_(c.config.max_tokens * token_bytes_),
      ids_(std::int64_t{c.config.max_tokens} * c.config.top_k * 4),
      weights_(std::int64_t{c.config.max_tokens} * c.config.top_k * 4),
      count_(16),
      rows_(capacity_rows_ * row_bytes_ + 16),
      weight_(capacity_rows_ * 4 + 16),
      plan_(plan_bytes(exchange.config(), c.ranks)),
      outputs_memory_(capacity_rows_ * output_bytes_ + 16),
      result_(c.config.max_tokens * result_bytes_),
      tokens_(Tokens::rows(tokens_memory_.data(), c.config.max_tokens, c.type)),
      outputs_{outputs_memory_.data(), c.outputs} {
  tokens_.device_count = count();
  dispatch_options_.lane = combine_options_.lane = c.lane;
  dispatch_options_.memory.parts[0] = rows_.data();
  dispatch_options_.memory.weight = weight_.as<float>();
  dispatch_options_.memory.plan = plan_.data();
  combine_options_.reduction = c.reduction;
}

int DeviceRun::add_inputs(const StepInputs& step, const oracle::ExpertOutputs& expert_outputs) {
  const oracle::RankInputs& my_inputs = step.inputs.ranks[rank_];
  const std::vector<std::int32_t> count(4, static_cast<std::int32_t>(my_inputs.tokens));
  sets_.push_back(std::unique_ptr<InputSet>(
      new InputSet{step, expert_outputs, DeviceBytes(my_inputs.parts[0]),
                   DeviceBytes(narrow_ids(my_inputs.ids)), DeviceBytes(bytes_of_values(my_inputs.weights)),
                   DeviceBytes(bytes_of_values(count)), DeviceBytes(expert_outputs.ranks[rank_].rows)}));
  return static_cast<int>(sets_.size()) - 1;
}

void DeviceRun::load(int set, cudaStream_t stream) const {
  const InputSet& from = *sets_[static_cast<std::size_t>(set)];
  tokens_memory_.copy_from(from.tokens, stream);
  ids_.copy_from(from.ids, stream);
  weights_.copy_from(from.weights, stream);
  count_.copy_from(from.count, stream);
  outputs_memory_.copy_from(from.outputs, stream);
}

void DeviceRun::poison_outputs(cudaStream_t stream) const {
  rows_.poison(stream);
  weight_.poison(stream);
  result_.poison(stream);
}

void DeviceRun::dispatch(cudaStream_t stream) {
  received_ = exchange_.dispatch(tokens_, ids(), weights_.as<float>(), dispatch_options_, {stream});
}

void DeviceRun::combine(cudaStream_t stream) {
  CombineOptions options = combine_options_;
  options.row_weights = received_.weight;
  exchange_.combine(outputs_, received_.plan, {result_.data(), case_.result}, options, {stream});
}

void DeviceRun::run_and_compare(int set, cudaStream_t stream) {
  load(set, stream);
  poison_outputs(stream);
  dispatch(stream);
  combine(stream);
  compare(set, stream);
}

void DeviceRun::compare(int set, cudaStream_t stream) {
  exchange_.synchronize(case_.lane, {stream});
  const InputSet& expected = *sets_[static_cast<std::size_t>(set)];
  compare_received(expected.step);
  compare_result(expected);
}

void DeviceRun::compare_received(const StepInputs& step) {
  const oracle::RankRows& positions = step.positions.ranks[rank_];
  const DispatchResult rows =
      mirror_.to_host(received_, exchange_.config(), case_.config.format, capacity_rows_);
  require_equal_lists<std::int32_t>(rows.counts, positions.counts, "counts");
  require_equal_lists<std::int32_t>(rows.row_offsets, positions.row_offsets, "row_offsets");
  require_equal(*rows.total, positions.row_offsets.back(), "total");
  require_equal(rows.host->total, positions.row_offsets.back(), "host total");
  const oracle::RowMetadata metadata = oracle::row_metadata(step.inputs, step.positions, rank_);
  for (std::size_t row = 0; row < positions.rows.size(); ++row) {
    if (positions.rows[row].state == oracle::RowState::untouched) continue;
    require(rows.source[row] == positions.rows[row].source, "source of row ", row);
    require(std::memcmp(&rows.weight[row], &metadata.weight[row], 4) == 0, "weight of row ", row);
  }
  std::vector<std::byte> image(static_cast<std::size_t>(rows_.bytes()), kPoison);
  oracle::write_part(step.inputs, step.positions, rank_, 0, image.data());
  require_equal_bytes(rows_.to_host(), image, static_cast<std::size_t>(row_bytes_), "rows");
}

void DeviceRun::compare_result(const InputSet& set) const {
  std::vector<std::byte> image(static_cast<std::size_t>(result_.bytes()), kPoison);
  const std::vector<std::byte> sums =
      oracle::combined(case_.config, set.step.positions, set.expert_outputs, rank_);
  std::copy(sums.begin(), sums.end(), image.begin());
  require_equal_bytes(result_.to_host(), image, static_cast<std::size_t>(bytes_of(case_.result)), "result");
}

}  // namespace ferry::contract
