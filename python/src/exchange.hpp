// The Python class Exchange: the C++ exchange with what Python calls need between them.
#pragma once

#include <optional>

#include "arrays/arguments.hpp"
#include "arrays/framework.hpp"
#include "dispatch_result.hpp"

namespace ferry::python {

// Split form: what a lane holds from the send phase to the receive phase.
struct PendingCall {
  std::vector<nb::object> owners;  // keep the call's arrays alive: the receive phase still uses them
  nb::object result;               // what the receive phase returns
};

// Sizes of what a dispatch of the exchange returns, computed once, because that takes as long as a call.
struct ReceiveSizes {
  Shape shape{};  // shape of the rows: [capacity, H]; expert_padded [G, capacity, H]
  std::int64_t rows = 0, groups = 0, plan_bytes = 0;
  std::int64_t part_rows = 0;   // RowRoom::rows
  std::int64_t group_rows = 0;  // RowRoom::group_rows
  PlanShape plan_shape{};
  // The arrays, apart from the rows, that an operator returns.
  TensorShape weight, counts, row_offsets, plan;
};

class PyExchange {
 public:
  explicit PyExchange(SharedState state);

  // Throws UsageError after destroy() and in a forked process.
  ExchangeState& state() const;
  const SharedState& shared() const { return state_; }
  const Config& config() const { return state().exchange.config(); }
  const ReceiveSizes& receive_sizes() const { return sizes_; }
  void destroy();

  // Throw UsageError for a lane that does not exist.
  PendingCall& pending(int lane) { return lanes_[checked_lane(lane)].pending; }
  DispatchContext& context(int lane) { return lanes_[checked_lane(lane)].context; }

  // The Python result of the lane's last dispatch.
  PyDispatchResult make_result(int lane, const DispatchResult& received) const;

  // Where the array is; a valid address also for an empty one, whose own may be null: a null pointer of
  // dot_rows tells the library that no dots are wanted.
  void* address_of(const Array& array);

  Framework framework() const { return framework_; }
  void set_framework(Framework framework) { framework_ = framework; }

 private:
  struct LaneCalls {
    PendingCall pending;
    DispatchContext context;
  };

  std::size_t checked_lane(int lane) const;

  int process_;
  SharedState state_;
  nb::object state_owner_;
  ReceiveSizes sizes_;
  std::vector<LaneCalls> lanes_;
  Framework framework_ = Framework::numpy;  // framework of the last call's arrays
  nb::object placeholder_;
};

// A plan over `storage`, a uint8 array. Throws UsageError if it cannot hold a plan of this exchange.
PyPlan plan_over(const PyExchange& self, const nb::object& storage, std::optional<std::int64_t> tokens);

void bind_dispatch(nb::class_<PyExchange>& exchange);
void bind_combine(nb::class_<PyExchange>& exchange);
void bind_gather(nb::class_<PyExchange>& exchange);

}  // namespace ferry::python
