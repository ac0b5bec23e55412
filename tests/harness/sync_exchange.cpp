#include "harness/sync_exchange.hpp"

#include <algorithm>

#include "harness/device.hpp"
#include "harness/jitter.hpp"

namespace ferry::contract {

Exchange::Exchange(Rank rank, const Config& config) : ferry::Exchange(std::move(rank), config) {
  lanes_.resize(static_cast<std::size_t>(this->config().lanes));
  for (Lane& each : lanes_) each.memory = CallMemory(on_device());
}

Stream Exchange::stream() const {
  return on_device() ? device::stream(rank().topology().local_rank_of(rank().index())) : Stream{};
}

// The call itself refuses a lane that does not exist.
Exchange::Lane& Exchange::lane(int index) {
  return lanes_[static_cast<std::size_t>(std::clamp(index, 0, config().lanes - 1))];
}

// A call between two halves is refused and leaves them alone.
CallMemory& Exchange::begin(int index) {
  Lane& mine = lane(index);
  if (!mine.sent) mine.memory.begin();
  if (on_device()) Jitter::stall(stream(), rank().index());
  return mine.memory;
}

CallMemory& Exchange::begin(const DispatchOptions& options) {
  Lane& mine = lane(options.lane);
  if (!mine.sent) mine.format = options.format.value_or(config().format);
  return begin(options.lane);
}

void Exchange::sent(int index) {
  lane(index).sent = true;
  wait(index);
}

void Exchange::receive(int index) {
  lane(index).memory.refresh();
  lane(index).sent = false;
}

// Until the call has ended; throws what ended it.
void Exchange::wait(int index) {
  if (!on_device()) return;
  synchronize(index, stream());
  lane(index).memory.bring_back();
}

// The same, and what it has found.
void Exchange::finish(int index) {
  if (!on_device()) return;
  wait(index);
  if (config().check_calls) check(index);
}

DispatchResult Exchange::finish(int index, const DispatchResult& received) {
  if (!on_device()) return received;
  wait(index);
  Lane& mine = lane(index);
  const bool padded = config().layout == Layout::expert_padded;
  const std::int64_t rows = received.capacity * (padded ? received.groups : 1);
  mine.received = mine.memory.on_host(received, config(), mine.format, rows);
  if (config().check_calls) check(index);
  return mine.received;
}

DispatchResult Exchange::dispatch(const Tokens& tokens, const Ids& ids, const float* weights,
                                  const DispatchOptions& options) {
  CallMemory& memory = begin(options);
  return finish(options.lane,
                ferry::Exchange::dispatch(memory.given(tokens), memory.given(ids), memory.given(weights),
                                          memory.given(options), stream()));
}

DispatchResult Exchange::dispatch(const Tokens& tokens, const Plan& plan, const float* weights,
                                  const DispatchOptions& options) {
  CallMemory& memory = begin(options);
  return finish(options.lane,
                ferry::Exchange::dispatch(memory.given(tokens), memory.given(plan), memory.given(weights),
                                          memory.given(options), stream()));
}

void Exchange::dispatch_send(const Tokens& tokens, const Ids& ids, const float* weights,
                             const DispatchOptions& options) {
  CallMemory& memory = begin(options);
  ferry::Exchange::dispatch_send(memory.given(tokens), memory.given(ids), memory.given(weights),
                                 memory.given(options), stream());
  sent(options.lane);
}

void Exchange::dispatch_send(const Tokens& tokens, const Plan& plan, const float* weights,
                             const DispatchOptions& options) {
  CallMemory& memory = begin(options);
  ferry::Exchange::dispatch_send(memory.given(tokens), memory.given(plan), memory.given(weights),
                                 memory.given(options), stream());
  sent(options.lane);
}

DispatchResult Exchange::dispatch_receive(int index) {
  receive(index);
  return finish(index, ferry::Exchange::dispatch_receive(index, stream()));
}

void Exchange::combine(const Outputs& outputs, const Plan& plan, const Result& result,
                       const CombineOptions& options) {
  CallMemory& memory = begin(options.lane);
  ferry::Exchange::combine(memory.given(outputs), memory.given(plan), memory.given(result),
                           memory.given(options), stream());
  finish(options.lane);
}

void Exchange::combine_send(const Outputs& outputs, const Plan& plan, const Result& result,
                            const CombineOptions& options) {
  CallMemory& memory = begin(options.lane);
  ferry::Exchange::combine_send(memory.given(outputs), memory.given(plan), memory.given(result),
                                memory.given(options), stream());
  sent(options.lane);
}

void Exchange::combine_receive(int index) {
  receive(index);
  ferry::Exchange::combine_receive(index, stream());
  finish(index);
}

void Exchange::route_values(const float* values, const Plan& plan, float* row_values, int index) {
  CallMemory& memory = begin(index);
  ferry::Exchange::route_values(memory.given(values), memory.given(plan), memory.given(row_values), index,
                                stream());
  finish(index);
}

DispatchResult Exchange::combine_backward(const Tokens& d_result, const Plan& plan, const float* topk_weights,
                                          const Outputs& outputs, float* d_weights,
                                          const DispatchOptions& options) {
  CallMemory& memory = begin(options);
  return finish(options.lane,
                ferry::Exchange::combine_backward(memory.given(d_result), memory.given(plan),
                                                  memory.given(topk_weights), memory.given(outputs),
                                                  memory.given(d_weights), memory.given(options), stream()));
}

const StepMetadata* Exchange::metadata(std::int32_t count, int index) {
  begin(index);
  const StepMetadata* at = ferry::Exchange::metadata(count, index, stream());
  if (!on_device()) return at;
  wait(index);
  StepMetadata& copy = lane(index).metadata[at];
  device::copy(&copy, at, sizeof copy);
  return &copy;
}

const DispatchResult& Exchange::last_dispatch_result(int index) const {
  if (!on_device()) return ferry::Exchange::last_dispatch_result(index);
  return lanes_[static_cast<std::size_t>(index)].received;
}

}  // namespace ferry::contract
