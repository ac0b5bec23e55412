#include "harness/sync_exchange.hpp"

#include <algorithm>

#include "harness/device.hpp"
#include "harness/jitter.hpp"

namespace ferry::contract {

namespace {

const Language* under_test = nullptr;

}  // namespace

int device_number(const Rank& rank, BackendKind backend) {
  const Topology& topology = rank.topology();
  if (backend != BackendKind::nvshmem) return topology.local_rank_of(rank.index());
  return device::count() >= rank.size() ? rank.index() : topology.node_of(rank.index());
}

SyncExchange::SyncExchange(Rank rank, const Config& config) : ferry::Exchange(std::move(rank), config) {
  lanes_.resize(static_cast<std::size_t>(this->config().lanes));
  for (Lane& each : lanes_) each.memory = DeviceMirror(on_device());
  if (under_test != nullptr) foreign_ = under_test->make_exchange(this->rank(), config);
}

void SyncExchange::call_through(const Language* language) {
  under_test = language;
}

Stream SyncExchange::stream() const {
  return on_device() ? device::stream(device_number(rank(), config().backend)) : Stream{};
}

// Clamps the index: the call itself refuses a lane that does not exist.
SyncExchange::Lane& SyncExchange::lane(int index) {
  return lanes_[static_cast<std::size_t>(std::clamp(index, 0, config().lanes - 1))];
}

// A call between two phases is refused, and must not disturb what they use.
DeviceMirror& SyncExchange::begin(int index) {
  Lane& mine = lane(index);
  if (!mine.awaits_receive) mine.memory.begin();
  if (on_device()) Jitter::delay_stream(stream(), rank().index());
  return mine.memory;
}

DeviceMirror& SyncExchange::begin(const DispatchOptions& options) {
  Lane& mine = lane(options.call.lane);
  if (!mine.awaits_receive) {
    mine.format = options.format.value_or(config().format);
    mine.by_expert = !options.input_scales.empty();
  }
  return begin(options.call.lane);
}

void SyncExchange::finish_send(int index) {
  lane(index).awaits_receive = true;
  wait(index);
}

void SyncExchange::begin_receive(int index) {
  lane(index).memory.upload();
  lane(index).awaits_receive = false;
}

// Waits until the call ended; throws what ended it.
void SyncExchange::wait(int index) {
  if (!on_device()) return;
  synchronize(call_of(index));
  lane(index).memory.download();
}

// The same; with check_calls also throws what the call diagnosed.
void SyncExchange::finish(int index) {
  if (!on_device()) return;
  wait(index);
  if (config().check_calls) check(index);
}

DispatchResult SyncExchange::finish(int index, const DispatchResult& received) {
  if (!on_device()) return received;
  wait(index);
  Lane& mine = lane(index);
  const bool padded = config().layout == Layout::expert_padded;
  const std::int64_t rows = received.capacity * (padded ? received.groups : 1);
  const PartList parts =
      mine.by_expert ? parts_by_expert(mine.format, config().hidden) : parts_of(mine.format, config().hidden);
  mine.received = mine.memory.to_host(received, config(), parts, rows);
  if (config().check_calls) check(index);
  return mine.received;
}

DispatchResult SyncExchange::dispatch(const Tokens& tokens, const Ids& ids, const float* weights,
                                      const DispatchOptions& options) {
  DeviceMirror& memory = begin(options);
  return finish(options.call.lane, called([&](auto& exchange) {
                  return exchange.dispatch(memory.translate(tokens), memory.translate(ids),
                                           memory.translate(weights), on_stream(memory.translate(options)));
                }));
}

DispatchResult SyncExchange::dispatch(const Tokens& tokens, const Plan& plan, const float* weights,
                                      const DispatchOptions& options) {
  DeviceMirror& memory = begin(options);
  return finish(options.call.lane, called([&](auto& exchange) {
                  return exchange.dispatch(memory.translate(tokens), memory.translate(plan),
                                           memory.translate(weights), on_stream(memory.translate(options)));
                }));
}

void SyncExchange::dispatch_send(const Tokens& tokens, const Ids& ids, const float* weights,
                                 const DispatchOptions& options) {
  DeviceMirror& memory = begin(options);
  called([&](auto& exchange) {
    exchange.dispatch_send(memory.translate(tokens), memory.translate(ids), memory.translate(weights),
                           on_stream(memory.translate(options)));
  });
  finish_send(options.call.lane);
}

void SyncExchange::dispatch_send(const Tokens& tokens, const Plan& plan, const float* weights,
                                 const DispatchOptions& options) {
  DeviceMirror& memory = begin(options);
  called([&](auto& exchange) {
    exchange.dispatch_send(memory.translate(tokens), memory.translate(plan), memory.translate(weights),
                           on_stream(memory.translate(options)));
  });
  finish_send(options.call.lane);
}

DispatchResult SyncExchange::dispatch_receive(int index) {
  begin_receive(index);
  return finish(index, called([&](auto& exchange) { return exchange.dispatch_receive(call_of(index)); }));
}

void SyncExchange::combine(const Outputs& outputs, const Plan& plan, const Result& result,
                           const CombineOptions& options) {
  DeviceMirror& memory = begin(options.call.lane);
  called([&](auto& exchange) {
    exchange.combine(memory.translate(outputs), memory.translate(plan), memory.translate(result),
                     on_stream(memory.translate(options)));
  });
  finish(options.call.lane);
}

void SyncExchange::combine_send(const Outputs& outputs, const Plan& plan, const Result& result,
                                const CombineOptions& options) {
  DeviceMirror& memory = begin(options.call.lane);
  called([&](auto& exchange) {
    exchange.combine_send(memory.translate(outputs), memory.translate(plan), memory.translate(result),
                          on_stream(memory.translate(options)));
  });
  finish_send(options.call.lane);
}

void SyncExchange::combine_receive(int index) {
  begin_receive(index);
  called([&](auto& exchange) { exchange.combine_receive(call_of(index)); });
  finish(index);
}

void SyncExchange::route_values(const float* values, const Plan& plan, float* row_values, int index) {
  DeviceMirror& memory = begin(index);
  called([&](auto& exchange) {
    exchange.route_values(memory.translate(values), memory.translate(plan), memory.translate(row_values),
                          call_of(index));
  });
  finish(index);
}

void SyncExchange::return_values(const float* row_values, const Plan& plan, float* route_values, int index) {
  DeviceMirror& memory = begin(index);
  called([&](auto& exchange) {
    exchange.return_values(memory.translate(row_values), memory.translate(plan),
                           memory.translate(route_values), call_of(index));
  });
  finish(index);
}

DispatchResult SyncExchange::combine_backward(const Tokens& d_result, const Plan& plan,
                                              const float* topk_weights, const Outputs& outputs,
                                              float* d_weights, const DispatchOptions& options) {
  DeviceMirror& memory = begin(options);
  return finish(options.call.lane, called([&](auto& exchange) {
                  return exchange.combine_backward(memory.translate(d_result), memory.translate(plan),
                                                   memory.translate(topk_weights), memory.translate(outputs),
                                                   memory.translate(d_weights),
                                                   on_stream(memory.translate(options)));
                }));
}

void SyncExchange::all_gather_v(const void* rows, std::int64_t count, std::int64_t row_bytes, void* gathered,
                                std::int64_t capacity, int index) {
  DeviceMirror& memory = begin(index);
  called([&](auto& exchange) {
    exchange.all_gather_v({.rows = memory.translate(rows),
                           .count = count,
                           .row_bytes = row_bytes,
                           .gathered = memory.translate(gathered),
                           .capacity = capacity},
                          call_of(index));
  });
  wait(index);
}

void SyncExchange::reduce_scatter_v(const void* rows, std::int64_t total, DType type, void* sums,
                                    std::int64_t count, int index) {
  DeviceMirror& memory = begin(index);
  called([&](auto& exchange) {
    exchange.reduce_scatter_v({.rows = memory.translate(rows),
                               .total = total,
                               .type = type,
                               .sums = memory.translate(sums),
                               .count = count},
                              call_of(index));
  });
  wait(index);
}

DispatchCounts SyncExchange::dispatch_counts(const Ids& ids, std::int64_t tokens, int index) {
  return called([&](auto& exchange) {
    return exchange.dispatch_counts(begin(index).translate(ids), tokens, call_of(index));
  });
}

const StepMetadata* SyncExchange::metadata(std::int32_t count, int index, StepMetadata* into) {
  begin(index);
  const StepMetadata* at =
      called([&](auto& exchange) { return exchange.metadata(count, call_of(index), into); });
  if (!on_device()) return at;
  wait(index);
  StepMetadata& copy = lane(index).metadata[at];
  device::copy(&copy, at, sizeof copy);
  return &copy;
}

void SyncExchange::check(int index) {
  called([&](auto& exchange) { exchange.check(index); });
}

LoadCounts SyncExchange::load_counts() const {
  return foreign_ ? foreign_->load_counts() : ferry::Exchange::load_counts();
}

WireCounts SyncExchange::wire_counts() const {
  return foreign_ ? foreign_->wire_counts() : ferry::Exchange::wire_counts();
}

const DispatchResult& SyncExchange::last_dispatch_result(int index) const {
  if (on_device()) return lanes_[static_cast<std::size_t>(index)].received;
  return foreign_ ? foreign_->last_dispatch_result(index) : ferry::Exchange::last_dispatch_result(index);
}

}  // namespace ferry::contract
