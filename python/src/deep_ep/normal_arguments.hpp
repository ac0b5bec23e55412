// Reads the arguments of normal mode's calls.
#pragma once

#include <optional>

#include "deep_ep/arguments.hpp"
#include "deep_ep/streams.hpp"
#include "dispatch.hpp"

namespace ferry::python {

struct Place {
  Framework framework = Framework::numpy;
  Device device = kHost;
};

// The arguments that every call but a layout has, unread.
struct CallSettings {
  const nb::object &config, &default_sms, &previous_event, &async_finish, &allocate_on_comm_stream;

  // The number of SMs. Throws UsageError for wrong settings.
  int checked() const;
  bool is_async() const;
};

// The arguments of a dispatch with new routes, unread.
struct NewRoutes {
  const nb::object &x, &tokens_per_rank, &tokens_per_node, &is_token_in_rank, &routes_per_expert, &topk_idx,
      &topk_weights, &alignment, &worst;

  // num_worst_tokens, if that is an integer above 0.
  std::optional<std::int64_t> worst_rows() const;
};

// The sizes of a dispatch with new routes, the same on all ranks. top_k 0: without ids, where each rank is
// one expert; `experts` are those of the caller.
struct NormalShape {
  std::int64_t hidden = 0, experts = 0, top_k = 0;

  bool operator==(const NormalShape&) const = default;
};

// The rows that a dispatch sends: a bfloat16 array, or values and their scales as raw parts.
struct InputRows {
  int parts = 1;
  std::array<Element, 2> elements{};
  std::array<std::int64_t, 2> columns{};
  std::int64_t scale_columns = 0;  // of the caller; those of the part are a multiple of 16 bytes

  std::int64_t row_bytes() const { return columns[0] * (parts == 1 ? 2 : 1); }
};

// Reads x. Copies what is not dense.
InputRows read_rows(const nb::object& x, DispatchInput& in);

// The first `rows` rows that were received in `parts`, in the form that the interface returns.
nb::object recv_x_of(const InputRows& rows, const std::array<nb::object, 2>& parts, std::int64_t count);
// The first `count` rows of an array that has max(count, 1).
nb::object first_rows(const nb::object& array, std::int64_t count);

// The checked arguments of a dispatch with new routes.
struct Routes {
  Routes(const NewRoutes& given, const Place& place, const Topology& topology);

  bool has_ids() const { return shape.top_k > 0; }

  DispatchInput in;
  InputRows rows;
  NormalShape shape;
  int slots = 0;         // K, or without ids the most ranks that a token goes to
  Element id_element{};  // of topk_idx
  int alignment = 1;
};

}  // namespace ferry::python
