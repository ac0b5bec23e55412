#include "lane_call.hpp"

#include "base/text.hpp"
#include "interpreter.hpp"

namespace ferry::python {

// state() and pending() check the exchange and the lane before anything is taken from them.
LaneCall::LaneCall(PyExchange& exchange, int lane)
    : state_((exchange.state(), exchange.shared())),
      lane_((exchange.pending(lane), &state_->lanes[static_cast<std::size_t>(lane)])),
      lane_index_(lane),
      guard_(state_->device) {
  if (lane_->busy.exchange(true))
    throw UsageError(str("lane ", lane, " is in use by another thread: a lane runs one call at a time"));
}

LaneCall::~LaneCall() {
  lane_->busy = false;
}

void LaneCall::set_stream(Stream stream) {
  stream_ = stream;
  if (!is_host(device()) && !state_->captured) state_->captured = is_capturing(stream.handle);
}

bool LaneCall::delivers_result(const Error& error) {
  return dynamic_cast<const BadIdError*>(&error) != nullptr ||
         dynamic_cast<const BadSourceError*>(&error) != nullptr ||
         dynamic_cast<const OverflowError*>(&error) != nullptr;
}

void LaneCall::refuse(std::initializer_list<Operation> operations, const Error& error) noexcept {
  const GilRelease unlocked;
  for (const Operation operation : operations)
    state_->exchange.refuse(operation, lane_index_, error, stream_);
}

void require_known(const nb::kwargs& unknown, const char* operation, const char* known) {
  if (!unknown.is_valid() || nb::len(nb::handle(unknown)) == 0) return;
  const auto first = nb::cast<std::string>(nb::handle((*unknown.begin()).first));
  throw UsageError(str(operation, ": there is no argument '", first, "'; the arguments are: ", known));
}

}  // namespace ferry::python
