#include "lane_call.hpp"

#include "base/nearest.hpp"
#include "base/text.hpp"
#include "interpreter.hpp"
#include "setting_values.hpp"

namespace ferry::python {

namespace {

void require_fit(const GivenBesides& given) {
  const std::size_t surplus = nb::len(nb::handle(given.surplus)),
                    unknown = nb::len(nb::handle(given.unknown));
  if (surplus == 0 && unknown == 0) return;
  const nb::object signature =
      nb::module_::import_("inspect").attr("signature")(nb::type<PyExchange>().attr(given.method));
  std::vector<std::string> names;
  for (const nb::handle name : nb::object(signature.attr("parameters"))) {
    names.push_back(nb::cast<std::string>(name));
  }
  std::erase(names, "self");
  std::string known;
  for (const std::string& name : names) known += str(known.empty() ? "" : ", ", name);
  std::string wrong = str("there is no place for ", counted(surplus, "more positional argument"));
  if (unknown != 0) {
    const auto misspelt = nb::cast<std::string>((*given.unknown.begin()).first);
    wrong = str("there is no argument '", misspelt, "'", did_you_mean(misspelt, names));
  }
  throw UsageError(str(given.method, ": ", wrong, "; the arguments are: ", known));
}

}  // namespace

// state() and pending() check the exchange and the lane before anything is taken from them.
LaneCall::LaneCall(PyExchange& exchange, int lane)
    : python_(exchange),
      state_((exchange.state(), exchange.shared())),
      lane_((exchange.pending(lane), &state_->lanes[static_cast<std::size_t>(lane)])),
      options_{.lane = lane},
      guard_(state_->device) {
  if (lane_->busy.exchange(true))
    throw UsageError(str("lane ", lane, " is in use by another thread: a lane runs one call at a time"));
}

LaneCall::LaneCall(PyExchange& exchange, std::initializer_list<Operation> operations, const nb::object& lane,
                   bool receives)
    : LaneCall(exchange, lane_or_refuse(exchange, operations, lane, receives)) {
  receives_ = receives;
}

LaneCall::LaneCall(PyExchange& exchange, std::initializer_list<Operation> operations,
                   const GivenBesides& given)
    : LaneCall(exchange, operations, given.lane, given.receives) {
  read_or_refuse(operations, [&] { require_fit(given); });
}

int LaneCall::lane_or_refuse(PyExchange& exchange, std::initializer_list<Operation> operations,
                             const nb::object& given, bool receives) {
  const auto refuse = [&](const Error& error) {
    if (exchange.config().lanes > 1) return;
    LaneCall call(exchange, 0);
    call.receives_ = receives;
    call.refuse(operations, error);
  };
  return read_or(refuse, [&] {
    const int lane = int_of("lane", given);
    exchange.pending(lane);  // checks it
    return lane;
  });
}

LaneCall::~LaneCall() {
  lane_->busy = false;
}

void LaneCall::set_stream(Stream stream) {
  options_.stream = stream;
  if (!is_host(device()) && !state_->captured) state_->captured = is_capturing(stream.handle);
}

bool LaneCall::delivers_result(const Error& error) {
  return dynamic_cast<const BadIdError*>(&error) != nullptr ||
         dynamic_cast<const BadSourceError*>(&error) != nullptr ||
         dynamic_cast<const OverflowError*>(&error) != nullptr;
}

void LaneCall::refuse(std::initializer_list<Operation> operations, const Error& error) {
  if (receives_) return receive(*operations.begin());
  const GilRelease unlocked;
  for (const Operation operation : operations) state_->exchange.refuse(operation, error, options_);
}

void LaneCall::receive(Operation operation) {
  try {
    set_stream(stream_of(nb::none(), python_.framework(), device()));
    {
      const GilRelease unlocked;
      if (operation == Operation::dispatch) {
        state_->exchange.dispatch_receive(options_);
      } else {
        state_->exchange.combine_receive(options_);
      }
    }
    python_.pending(lane()) = {};
  } catch (const Error&) {
    return;  // what the caller passed is raised; nothing was sent, or the lane's next call fails too
  }
}

}  // namespace ferry::python
