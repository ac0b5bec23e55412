// Combine as Python calls it, and as the library takes it.
#pragma once

#include <optional>
#include <string>

#include "exchange.hpp"
#include "lane_call.hpp"

namespace ferry::python {

// The arguments of Exchange.combine, unread, in their order.
struct PyCombineArguments {
  nb::object outputs, plan{}, row_weights = nb::none(), topk_weights = nb::none(), reduction = nb::none(),
                              row_values = nb::none(), result = nb::none(), shared_outputs = nb::none(),
                              residual = nb::none(), scale = nb::float_(1), sm_limit = nb::int_(0),
                              stream = nb::none();
};

// The same, checked and converted.
struct CombineInput {
  explicit CombineInput(Device device, Gradients gradients = Gradients::refused)
      : arguments(device, gradients) {}

  Arguments arguments;
  const PyPlan* plan = nullptr;
  std::int64_t capacity = 0;  // rows of this rank
  Outputs outputs;
  Result result;
  CombineOptions options;
  nb::object result_array, route_values_array;  // what combine returns
};

// Throws UsageError for arguments that do not fit.
// `plan` stays valid as long as `in`; `given.plan` is not read.
void read_combine(PyExchange& self, LaneCall& call, const PyCombineArguments& given, const PyPlan& plan,
                  CombineInput& in);

// Reads in.result_array, of this shape, as where to write. `name`: what the caller calls it.
void read_result(const Shape& shape, const char* name, CombineInput& in);

// The result, or with row_values the pair (result, route_values).
nb::object combine_return_value(const CombineInput& in);

}  // namespace ferry::python
