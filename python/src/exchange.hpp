// An exchange as Python sees it.
#pragma once

#include <optional>

#include "arrays/arguments.hpp"
#include "device.hpp"
#include "dispatch_result.hpp"

namespace ferry::python {

// What a lane of the split form keeps from the send half to the receive half: memory that is still used, and
// what the receive half gives back.
struct Pending {
  std::vector<nb::object> owners;
  nb::object result;
};

// Of what a dispatch of an exchange hands out.
struct RowSizes {
  Shape shape{};  // of the rows: [R, H], or [L, capacity, H] in the padded layout
  std::int64_t rows = 0, groups = 0, plan_bytes = 0;
};

class PyExchange {
 public:
  explicit PyExchange(SharedState state);

  // Throws UsageError after destroy() and in a forked process.
  ExchangeState& state() const;
  const SharedState& shared() const { return state_; }
  const Config& config() const { return state().exchange.config(); }
  const RowSizes& sizes_of_rows() const { return sizes_; }
  void destroy();

  // Throws UsageError for a lane that does not exist.
  Pending& pending(int lane) { return lanes_[checked(lane)].pending; }
  DispatchContext& context(int lane) { return lanes_[checked(lane)].context; }

  // The arrivals of the lane's last dispatch.
  PyDispatchResult received(int lane, const DispatchResult& received) const;

  // Something to point at where memory must be given and nothing is read from it.
  float* spare(Framework framework);

  Framework framework() const { return framework_; }
  void set_framework(Framework framework) { framework_ = framework; }

 private:
  struct Lane {
    Pending pending;
    DispatchContext context;
  };

  std::size_t checked(int lane) const;

  int process_;
  SharedState state_;
  nb::object keeper_;
  RowSizes sizes_;
  std::vector<Lane> lanes_;
  Framework framework_ = Framework::numpy;  // of the last call's arrays
  nb::object spare_;
};

// A thread inside a call of a lane. Throws UsageError while another one is.
class InCall {
 public:
  InCall(PyExchange& exchange, int lane);
  ~InCall();
  InCall(const InCall&) = delete;
  InCall& operator=(const InCall&) = delete;

  Exchange& exchange() const { return state_->exchange; }
  Device where() const { return state_->where; }

  // Runs `read`; what it finds wrong with the arguments ends the peers' call too.
  template <class Read>
  auto or_refuse(std::initializer_list<Operation> operations, Read read) {
    try {
      return read();
    } catch (const Error& error) {
      refuse(operations, error);
      throw;
    } catch (nb::python_error& error) {
      refuse(operations, UsageError(error.what()));
      throw;
    } catch (const std::exception& error) {  // a value that nanobind could not cast, above all
      const UsageError refused(std::string("arguments that cannot be read: ") + error.what());
      refuse(operations, refused);
      throw refused;
    }
  }

  // Runs a call, without the interpreter's lock, that returns arrivals. What it has found wrong in them does
  // not keep them from coming.
  template <class Call>
  DispatchResult bring(Call call) {
    try {
      const DispatchResult received = call();
      lane_->came = true;
      return received;
    } catch (const Error& error) {
      lane_->came = leaves_result(error);
      throw;
    }
  }

  void use(Stream stream);
  Stream stream() const { return stream_; }

 private:
  void refuse(std::initializer_list<Operation> operations, const Error& error) noexcept;
  static bool leaves_result(const Error& error);

  SharedState state_;
  LaneState* lane_;
  int number_;
  OnDevice device_;
  Stream stream_{};
};

// A plan over its storage, an array. Throws UsageError for one that cannot be an exchange's plan.
PyPlan plan_over(const PyExchange& self, const nb::object& storage, std::optional<std::int64_t> tokens);

void bind_dispatch(nb::class_<PyExchange>& exchange);
void bind_combine(nb::class_<PyExchange>& exchange);

}  // namespace ferry::python
