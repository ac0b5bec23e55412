// Dispatch as Python calls it, and as the library takes it.
#pragma once

#include <optional>
#include <string>

#include "exchange.hpp"
#include "interpreter.hpp"
#include "lane_call.hpp"

namespace ferry::python {

// The arguments of Exchange.dispatch, unread, in their order.
struct PyDispatchArguments {
  nb::object tokens, ids{}, weights = nb::none(), format = nb::none(), sm_limit = nb::int_(0),
                            memory = nb::none(), apply_weights = nb::bool_(false), dot_rows = nb::none(),
                            count = nb::none(), global_scale = nb::none(), input_scales = nb::none(),
                            layer = nb::int_(0), stream = nb::none();
};

// What the caller calls some of them.
struct DispatchNames {
  const char *tokens = "tokens", *weights = "weights";
};

// The same, checked and converted. Either `ids` or `plan` is set.
struct DispatchInput {
  explicit DispatchInput(Device device, Gradients gradients = Gradients::refused)
      : arguments(device, gradients) {}

  Arguments arguments;
  std::int64_t capacity = 0;  // rows of this rank
  Format format;
  PartList parts{};  // of received rows
  std::array<Element, kMaxParts> elements{};
  Tokens tokens;
  Ids ids;
  Plan plan;
  const float* weights = nullptr;
  DispatchOptions options;
  float global_scale = 1;  // given as a number
  DispatchContext context;
};

// The ids in an array, [tokens, top_k]. Throws UsageError if it is of another type or shape, or not dense.
Ids ids_of(const Array& array, std::int64_t tokens, int top_k, const char* name = "ids");

// Throws UsageError for arguments that do not fit.
void read_dispatch(PyExchange& self, LaneCall& call, const PyDispatchArguments& given, DispatchInput& in,
                   const DispatchNames& names = {});

// Records a dispatch that has written its results: what make_result() returns, and which plan it overwrote.
void record_dispatch(PyExchange& self, const DispatchInput& in);

// Call number of the lane's last dispatch; 0 if that delivered nothing.
inline std::uint64_t last_call(const LaneCall& call, int lane) {
  return call.exchange().last_dispatch_result(lane).call;
}

// Runs `run`, a dispatch of the library, without the GIL, and records it, also where it ends with an error
// after it has delivered its rows. A call that fails before it has written anything leaves the lane's last
// result and plan as they are.
template <class Run>
DispatchResult run_dispatch(PyExchange& self, const LaneCall& call, const DispatchInput& in, Run run) {
  const int lane = in.context.lane;
  const std::uint64_t before = last_call(call, lane);
  DispatchResult received;
  try {
    const GilRelease unlocked;
    received = run();
  } catch (const Error&) {
    const std::uint64_t delivered = last_call(call, lane);
    if (delivered != 0 && delivered != before) record_dispatch(self, in);
    throw;
  }
  record_dispatch(self, in);
  return received;
}

// Throws UsageError if `count` rows are fewer than a call with the plan (null: any plan, up to `capacity`)
// may touch.
void require_rows(const PyPlan* plan, std::int64_t count, const char* name, std::int64_t capacity);

// The number in `given`, a real number of Python or NumPy; nothing for another object, such as an array.
// Throws UsageError for True and False, and for numbers beyond float32.
std::optional<double> number_in(const nb::object& given, const char* name);

// The value type of elements that are bfloat16, float16 or float32.
std::optional<DType> value_type_of(Element element);

}  // namespace ferry::python
