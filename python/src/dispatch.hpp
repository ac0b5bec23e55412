// A dispatch as Python gives it, and as the library takes it.
#pragma once

#include <optional>
#include <string>

#include "exchange.hpp"

namespace ferry::python {

struct DispatchArguments {
  nb::object tokens, ids{}, weights = nb::none();
  std::optional<std::string> format{};
  int lane = 0;
  int sm_limit = 0;
  nb::object memory = nb::none();
  bool apply_weights = false;
  nb::object dot_rows = nb::none(), count = nb::none(), stream = nb::none();
};

struct DispatchInput {
  explicit DispatchInput(Device where, Gradients gradients = Gradients::refused)
      : arguments(where, gradients) {}

  Arguments arguments;
  int rank = 0;
  Format format;
  std::array<Element, kMaxParts> elements{};
  Tokens tokens;
  Ids ids;
  Plan plan;
  const float* weights = nullptr;
  DispatchOptions options;
  DispatchContext context;
};

void read_dispatch(PyExchange& self, InCall& call, const DispatchArguments& given, DispatchInput& in);
void begin_dispatch(PyExchange& self, const DispatchInput& in);

// Throws UsageError unless `count` rows are all that calls with the plan (None: any) may touch.
void require_rows(const nb::object& plan, std::int64_t count, const char* name, const Config& config,
                  int rank);

std::optional<DType> value_type_of(Element element);

}  // namespace ferry::python
