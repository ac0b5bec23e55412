#include "contract/max_calls.hpp"

#include <algorithm>
#include <cstring>

#include "harness/device.hpp"
#include "harness/sync_exchange.hpp"
#include "oracle/encode.hpp"

namespace ferry::contract {

TestCase max_case(TestCase c, int ranks, int shared_experts, Reduction reduction) {
  c.ranks = ranks;
  c.config.experts = 8;
  c.config.top_k = 3;
  c.config.max_tokens = 9;
  c.config.hidden = 48;
  c.config.shared_experts = shared_experts;
  c.config.reduction = c.reduction = reduction;
  c.config.repeats = c.config.check_calls = true;
  if (on_device(c.config)) c.config.deadline = 4;
  c.masked = 0.2;
  c.masked_tokens = 0.1;
  c.weighted = false;
  c.weights_from = reduction == Reduction::exact ? WeightsFrom::topk_weights : WeightsFrom::none;
  c.shared_outputs = reduction == Reduction::unreduced;
  return c;
}

MaxArrays::MaxArrays(const max::DispatchResult& received)
    : output_tokens(received.output_tokens),
      parts(received.parts),
      tile_offsets(received.tile_offsets),
      row_offsets(received.row_offsets.begin(), received.row_offsets.end()),
      expert_ids(received.expert_ids.begin(), received.expert_ids.end()),
      expert_usage_stats{received.expert_usage_stats[0], received.expert_usage_stats[1]},
      src_info(received.src_info.begin(), received.src_info.end()),
      counts(received.counts.begin(), received.counts.end()) {}

MaxArrays::operator max::DispatchResult() const {
  max::DispatchResult result;
  result.output_tokens = output_tokens;
  result.row_offsets = row_offsets;
  result.src_info = src_info;
  result.counts = counts;
  return result;
}

struct MaxCalls::DeviceCall {
  std::int64_t tokens = 0;           // N of the last dispatch
  std::vector<GuardedBuffer> parts;  // of a dispatch, as the next two
  GuardedBuffer ids, global_scale, input_scales;
  Tokens input;
  Ids topk_ids;
  max::DispatchOptions options;
  std::vector<std::vector<std::byte>> received;  // parts
  std::vector<std::int32_t> tile_offsets;

  // For a combine.
  GuardedBuffer outputs, src_info, row_offsets, counts, weights, result, shared;
  max::CombineInput combine;
  max::CombineOutput output;
  void *caller_result = nullptr, *caller_shared = nullptr;
};

namespace {

GuardedBuffer copy_of(const void* from, std::int64_t bytes) {
  GuardedBuffer copy(bytes);
  if (bytes > 0 && from != nullptr) std::memcpy(copy.data(), from, static_cast<std::size_t>(bytes));
  return copy;
}

template <class T>
std::vector<T> downloaded(const T* from, std::int64_t count) {
  std::vector<T> to(static_cast<std::size_t>(count));
  if (count > 0) device::copy(to.data(), from, count * static_cast<std::int64_t>(sizeof(T)));
  return to;
}

}  // namespace

MaxCalls::MaxCalls(const Rank& rank, const Config& config) : exchange_(rank, config) {
  if (!on_device(config)) return;
  for (int lane = 0; lane < exchange_.config().lanes; ++lane)
    calls_.push_back(std::make_unique<DeviceCall>());
}

MaxCalls::~MaxCalls() = default;

Stream MaxCalls::stream() const {
  return device::stream(device_number(rank(), config().backend));
}

void MaxCalls::upload_dispatch(const Tokens& tokens, const Ids& topk_ids, const max::DispatchOptions& options,
                               DeviceCall& call) const {
  call.tokens = tokens.count;
  call.options = options;
  call.options.call.stream = stream();
  call.options.format = options.format.value_or(config().format);
  call.input = tokens;
  call.parts.clear();
  for (const std::int64_t bytes :
       oracle::input_row_bytes(*call.options.format, tokens.type, config().hidden)) {
    const std::size_t part = call.parts.size();
    call.parts.push_back(copy_of(tokens.parts[part], tokens.count * bytes));
    call.input.parts[part] = call.parts.back().data();
  }
  if (options.global_scale != nullptr) {
    call.global_scale = copy_of(options.global_scale, sizeof(float));
    call.options.global_scale = call.global_scale.as<float>();
  }
  if (!options.input_scales.empty()) {
    call.input_scales =
        copy_of(options.input_scales.data(), static_cast<std::int64_t>(options.input_scales.size_bytes()));
    call.options.input_scales = {call.input_scales.as<float>(), options.input_scales.size()};
  }
  call.ids = copy_of(topk_ids.data, tokens.count * config().top_k * bytes_of(topk_ids.type));
  call.topk_ids = topk_ids;
  if (topk_ids.data != nullptr) call.topk_ids.data = call.ids.data();
}

MaxArrays MaxCalls::download(const max::DispatchResult& received, int index) {
  exchange_.synchronize(call_of(index));
  exchange_.check(index);
  DeviceCall& call = lane(index);
  MaxArrays result;
  const auto stats = downloaded(received.expert_usage_stats, 2);
  result.expert_usage_stats = {stats[0], stats[1]};
  const auto number = static_cast<std::int64_t>(stats[1]);
  result.expert_ids = downloaded(received.expert_ids.data(), number);
  result.row_offsets = downloaded(received.row_offsets.data(), number + 1);
  const auto rows = static_cast<std::int64_t>(result.row_offsets.back());
  result.src_info = downloaded(received.src_info.data(), 2 * rows);
  result.counts = downloaded(received.counts.data(), std::ssize(received.counts));
  if (received.tile_offsets != nullptr) {
    call.tile_offsets = downloaded(received.tile_offsets, received.groups + 1);
    result.tile_offsets = call.tile_offsets.data();
  }
  const auto shapes =
      oracle::part_shapes(*call.options.format, config().hidden, received.capacity, /*group_rows=*/0);
  call.received.clear();
  for (std::size_t p = 0; p < received.parts.size() && received.parts[p].row_bytes > 0; ++p) {
    call.received.push_back(downloaded(static_cast<const std::byte*>(received.parts[p].data),
                                       shapes[p].bytes_of(received.capacity, received.groups)));
    result.parts[p] = received.parts[p];
    result.parts[p].data = call.received.back().data();
  }
  result.output_tokens = result.parts[0].data;
  return result;
}

void MaxCalls::ep_dispatch_async(const Tokens& tokens, const Ids& topk_ids,
                                 const max::DispatchOptions& options) {
  if (calls_.empty()) return exchange_.ep_dispatch_async(tokens, topk_ids, options);
  DeviceCall& call = lane(options.call.lane);
  upload_dispatch(tokens, topk_ids, options, call);
  exchange_.ep_dispatch_async(call.input, call.topk_ids, call.options);
  device::wait(stream());
  for (GuardedBuffer& part : call.parts) part.fill(kNan);  // may be reused after the send phase
  for (GuardedBuffer* buffer : {&call.ids, &call.global_scale, &call.input_scales}) buffer->fill(kNan);
}

MaxArrays MaxCalls::ep_dispatch_wait(int index) {
  if (calls_.empty()) return exchange_.ep_dispatch_wait({.lane = index});
  return download(exchange_.ep_dispatch_wait(call_of(index)), index);
}

MaxArrays MaxCalls::ep_fused_dispatch(const Tokens& tokens, const Ids& topk_ids,
                                      const max::DispatchOptions& options) {
  if (calls_.empty()) return exchange_.ep_fused_dispatch(tokens, topk_ids, options);
  DeviceCall& call = lane(options.call.lane);
  upload_dispatch(tokens, topk_ids, options, call);
  return download(exchange_.ep_fused_dispatch(call.input, call.topk_ids, call.options), options.call.lane);
}

void MaxCalls::upload_combine(const max::CombineInput& input, const max::CombineOutput& output,
                              DeviceCall& call) const {
  const std::int64_t hidden = config().hidden, tokens = input.tokens >= 0 ? input.tokens : call.tokens;
  const std::int64_t slots = config().reduction == Reduction::unreduced ? config().top_k : 1;
  const std::int64_t result_row = hidden * bytes_of(output.output_tokens.type);
  const auto rows = static_cast<std::int64_t>(input.src_info.size() / 2);
  call.outputs = copy_of(input.input_tokens.data, rows * hidden * bytes_of(input.input_tokens.type));
  call.src_info = GuardedBuffer::of(std::vector(input.src_info.begin(), input.src_info.end()));
  call.row_offsets = GuardedBuffer::of(std::vector(input.row_offsets.begin(), input.row_offsets.end()));
  call.counts = GuardedBuffer::of(std::vector(input.counts.begin(), input.counts.end()));
  call.combine = {};
  call.combine.input_tokens = {.data = rows > 0 ? call.outputs.data() : nullptr,
                               .type = input.input_tokens.type};
  call.combine.src_info = {call.src_info.as<std::int32_t>(), input.src_info.size()};
  call.combine.row_offsets = {call.row_offsets.as<std::uint32_t>(), input.row_offsets.size()};
  call.combine.counts = {call.counts.as<std::int32_t>(), input.counts.size()};
  call.combine.tokens = input.tokens;
  if (input.topk_ids.data != nullptr) {
    call.ids = copy_of(input.topk_ids.data, tokens * config().top_k * bytes_of(input.topk_ids.type));
    call.combine.topk_ids = input.topk_ids;
    call.combine.topk_ids.data = call.ids.data();
  }
  call.output = output;
  call.caller_result = output.output_tokens.data;
  call.caller_shared = output.shared_outputs;
  call.result = GuardedBuffer(tokens * slots * result_row);
  if (output.output_tokens.data != nullptr) call.output.output_tokens.data = call.result.data();
  if (output.router_weights != nullptr) {
    call.weights = copy_of(output.router_weights, tokens * config().top_k * 4);
    call.output.router_weights = call.weights.as<float>();
  }
  call.shared = GuardedBuffer(config().shared_experts * tokens * result_row);
  if (output.shared_outputs != nullptr) call.output.shared_outputs = call.shared.data();
}

void MaxCalls::download_results(int index) {
  exchange_.synchronize(call_of(index));
  exchange_.check(index);
  DeviceCall& call = lane(index);
  const auto copy_back = [](GuardedBuffer& from, void* to) {
    from.require_guards("an output of a combine by source");
    if (to != nullptr) std::memcpy(to, from.data(), static_cast<std::size_t>(from.bytes()));
  };
  copy_back(call.result, call.caller_result);
  copy_back(call.shared, call.caller_shared);
}

void MaxCalls::ep_combine_async(const max::CombineInput& input, const max::CombineOutput& output, int index) {
  if (calls_.empty()) return exchange_.ep_combine_async(input, output, {.lane = index});
  DeviceCall& call = lane(index);
  upload_combine(input, output, call);
  exchange_.ep_combine_async(call.combine, call.output, call_of(index));
  device::wait(stream());  // an error of the call is thrown when it has ended
  for (GuardedBuffer* buffer : {&call.outputs, &call.src_info, &call.row_offsets, &call.counts, &call.ids})
    buffer->fill(kNan);
}

void MaxCalls::ep_combine_wait(int index) {
  if (calls_.empty()) return exchange_.ep_combine_wait({.lane = index});
  exchange_.ep_combine_wait(call_of(index));
  download_results(index);
}

void MaxCalls::ep_fused_combine(const max::CombineInput& input, const max::CombineOutput& output, int index) {
  if (calls_.empty()) return exchange_.ep_fused_combine(input, output, {.lane = index});
  DeviceCall& call = lane(index);
  upload_combine(input, output, call);
  exchange_.ep_fused_combine(call.combine, call.output, call_of(index));
  download_results(index);
}

}  // namespace ferry::contract
