// A combine as Python gives it, and as the library takes it.
#pragma once

#include <optional>
#include <string>

#include "exchange.hpp"

namespace ferry::python {

struct CombineArguments {
  nb::object outputs, plan{}, row_weights = nb::none(), topk_weights = nb::none();
  std::optional<std::string> reduction{};
  nb::object row_values = nb::none(), result = nb::none();
  int lane = 0;
  int sm_limit = 0;
  nb::object stream = nb::none();
};

struct CombineInput {
  explicit CombineInput(Device where, Gradients gradients = Gradients::refused)
      : arguments(where, gradients) {}

  Arguments arguments;
  const PyPlan* plan = nullptr;
  int rank = 0;
  Outputs outputs;
  Result result;
  CombineOptions options;
  nb::object made, route_values;  // what is given back
};

void read_combine(PyExchange& self, InCall& call, const CombineArguments& given, CombineInput& in);

// The result alone, or with the route values in a pair.
nb::object given_back(const CombineInput& in);

}  // namespace ferry::python
