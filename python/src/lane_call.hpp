// One call of an exchange's lane, from reading its Python arguments to its end.
#pragma once

#include <initializer_list>
#include <string>

#include "device.hpp"
#include "errors.hpp"
#include "exchange.hpp"

namespace ferry::python {

// Runs `read`, which converts arguments. If it throws, calls `refuse` with the error for the peers, and
// throws.
template <class Refuse, class Read>
auto read_or(Refuse refuse, Read read) {
  try {
    return read();
  } catch (const Error& error) {
    refuse(error);
    throw;
  } catch (nb::python_error& error) {
    refuse(UsageError(text_of(error)));
    throw;
  } catch (const std::exception& error) {  // mostly values that nanobind could not convert
    const UsageError refused(std::string("arguments that cannot be read: ") + error.what());
    refuse(refused);
    throw refused;
  }
}

// What a method of Exchange was given besides the arguments it reads itself. nanobind converts none of it and
// finds nothing missing or superfluous, because of what it refuses itself the peers would not learn.
struct GivenBesides {
  const char* method;
  const nb::object& lane;
  const nb::args& surplus;    // positional arguments that the method does not have
  const nb::kwargs& unknown;  // and keywords, such as misspelt ones
  bool receives = false;      // it is a receive phase

  GivenBesides of_receive_phase() const { return {method, lane, surplus, unknown, true}; }
};

// The arguments of a receive phase.
struct ReceiveArguments {
  nb::object stream;
};

// Marks the lane as busy and makes the exchange's device current for its lifetime. Construction throws
// UsageError if another thread is inside a call of the lane.
class LaneCall {
 public:
  LaneCall(PyExchange& exchange, int lane);
  // A collective call from Python: if the lane does not exist, this rank refuses `operations`. With several
  // lanes it cannot, because it does not know which one the peers are in.
  LaneCall(PyExchange& exchange, std::initializer_list<Operation> operations, const nb::object& lane,
           bool receives = false);
  // It also refuses them if `given` holds arguments that the method does not have.
  LaneCall(PyExchange& exchange, std::initializer_list<Operation> operations, const GivenBesides& given);
  ~LaneCall();
  LaneCall(const LaneCall&) = delete;
  LaneCall& operator=(const LaneCall&) = delete;

  Exchange& exchange() const { return state_->exchange; }
  Device device() const { return state_->device; }
  int lane() const { return options_.lane; }

  // Runs `read`, which converts the arguments. If it throws, this rank refuses `operations`, so that the
  // peers' calls end with the same error at once instead of waiting for their deadline. A receive phase is
  // carried out instead.
  template <class Read>
  auto read_or_refuse(std::initializer_list<Operation> operations, Read read) {
    return read_or([&](const Error& error) { refuse(operations, error); }, read);
  }

  // True if a dispatch that ends with `error` has delivered its rows all the same.
  static bool delivers_result(const Error& error);

  void set_stream(Stream stream);
  Stream stream() const { return options_.stream; }
  // Options of a call on this lane and stream.
  CallOptions options(int sm_limit = 0) const {
    return {.lane = options_.lane, .stream = options_.stream, .sm_limit = sm_limit};
  }

 private:
  static int lane_or_refuse(PyExchange& exchange, std::initializer_list<Operation> operations,
                            const nb::object& given, bool receives);
  void refuse(std::initializer_list<Operation> operations, const Error& error);
  // Instead of refusing a receive phase, which the peers have no part in: they have this rank's rows, and
  // meet it in the lane's next call.
  void receive(Operation operation);

  PyExchange& python_;
  SharedState state_;
  LaneStatus* lane_;
  CallOptions options_;
  DeviceGuard guard_;
  bool receives_ = false;
};

}  // namespace ferry::python
