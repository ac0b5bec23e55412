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

// Marks the lane as busy and makes the exchange's device current for its lifetime. Construction throws
// UsageError if another thread is inside a call of the lane.
class LaneCall {
 public:
  LaneCall(PyExchange& exchange, int lane);
  ~LaneCall();
  LaneCall(const LaneCall&) = delete;
  LaneCall& operator=(const LaneCall&) = delete;

  Exchange& exchange() const { return state_->exchange; }
  Device device() const { return state_->device; }

  // Runs `read`, which converts the arguments. If it throws, this rank refuses `operations`, so that the
  // peers' calls end with the same error at once instead of waiting for their deadline.
  template <class Read>
  auto read_or_refuse(std::initializer_list<Operation> operations, Read read) {
    return read_or([&](const Error& error) { refuse(operations, error); }, read);
  }

  // True if a dispatch that ends with `error` has delivered its rows all the same.
  static bool delivers_result(const Error& error);

  void set_stream(Stream stream);
  Stream stream() const { return stream_; }

 private:
  void refuse(std::initializer_list<Operation> operations, const Error& error) noexcept;

  SharedState state_;
  LaneStatus* lane_;
  int lane_index_;
  DeviceGuard guard_;
  Stream stream_{};
};

// Throws UsageError if there are `unknown` keywords, such as misspelt ones. `known`: those of the operation.
void require_known(const nb::kwargs& unknown, const char* operation, const char* known);

}  // namespace ferry::python
