#include "deep_ep/normal_arguments.hpp"
#include "casters.hpp"

#include <limits>

#include "base/text.hpp"
#include "cast.hpp"
#include "ferry/error.hpp"

namespace ferry::python {

using namespace nb::literals;

namespace {

std::string type_of(const nb::object& object) {
  return nb::cast<std::string>(nb::type_name(object.type()));
}

nb::object python_function(CachedAttribute& cached, const char* name) {
  return nb::borrow(cached.get("ferry.deep_ep._normal", name));
}

// An array of the call's framework and kind of device.
Array inspect_like(const nb::object& object, const char* name, std::size_t dimensions, const Place& place) {
  const auto refuse = [&] {
    throw UsageError(
        str(name, ": expected an array of the framework and device of x, got ", type_of(object)));
  };
  if (object.is_none()) refuse();
  Array found = inspect(object, name);
  if (found.framework != place.framework || is_host(found.device) != is_host(place.device)) refuse();
  if (found.shape.size() != dimensions)
    throw UsageError(
        str(name, ": expected ", dimensions, " dimensions, got shape ", shape_text(found.shape)));
  return found;
}

void require_shape(const Array& array, const char* name, const Shape& expected) {
  if (array.shape == expected) return;
  throw UsageError(str(name, ": expected shape ", shape_text(expected), ", got ", shape_text(array.shape)));
}

void require_integers(const Array& array, const char* name) {
  if (array.element != kInt32 && array.element != kInt64)
    throw UsageError(str(name, ": expected int32 or int64, got ", name_of(array.element)));
}

InputRows read_bf16(const nb::object& x, DispatchInput& in) {
  const Array found = inspect_matrix(x, "x");
  if (found.element != kBf16) {
    throw UsageError(str("x: expected bfloat16, or (float8_e4m3fn, scales), got ", name_of(found.element)));
  }
  require_whole_rows(found, "x");
  const Array& rows = in.arguments.add(dense_array(x, found, in.arguments), "x");
  in.tokens = Tokens::rows(rows.data, rows.shape[0]);
  return {.elements = {kBf16}, .columns = {rows.shape[1]}};
}

InputRows read_quantised(const nb::object& x, DispatchInput& in) {
  const std::size_t count = nb::len(x);
  if (count != 2) throw UsageError(str("x: expected (float8_e4m3fn, scales), got ", counted(count, "array")));
  const nb::object values = x[0];
  nb::object scales = x[1];
  const Array rows = inspect_matrix(values, "x[0]");
  Array of_rows = inspect_matrix(scales, "x[1]");
  require_shape(of_rows, "x[1]", {rows.shape[0], of_rows.shape[1]});
  if (rows.element != kFp8 || (of_rows.element != kFp32 && of_rows.element != kInt32)) {
    throw UsageError(str("x: expected (float8_e4m3fn, float32 or int32 scales), got (", name_of(rows.element),
                         ", ", name_of(of_rows.element), ")"));
  }
  require_whole_rows(rows, "x[0]");
  const std::int64_t columns = of_rows.shape[1], padded = (columns + 3) / 4 * 4;
  if (padded * 4 > rows.shape[1]) {  // a row has room for as many bytes as in bfloat16
    throw UsageError(str("x[1]: expected at most ", rows.shape[1] / 16 * 4, " scales a row of ",
                         rows.shape[1], " values, got ", columns));
  }
  if (padded != columns) {
    static CachedAttribute padded_columns;
    in.arguments.keep_original(scales);
    scales = python_function(padded_columns, "padded_columns")(scales, padded);
    of_rows = inspect_matrix(scales, "x[1]");
  }
  const Array& first = in.arguments.add(dense_array(values, rows, in.arguments), "x[0]");
  const Array& second = in.arguments.add(dense_array(scales, of_rows, in.arguments), "x[1]");
  in.tokens = {.parts = {first.data, second.data}, .count = first.shape[0]};
  in.options.format = {.kind = FormatKind::raw, .part_bytes = {first.shape[1], padded * 4}};
  return {.parts = 2,
          .elements = {kFp8, second.element},
          .columns = {first.shape[1], padded},
          .scale_columns = columns};
}

}  // namespace

int CallSettings::checked() const {
  static CachedAttribute config_type;
  constexpr const char* kModule = "ferry.deep_ep._config";
  int sms = 0;
  if (config.is_none()) {
    sms = nb::cast<int>(default_sms);
  } else {
    if (!nb::isinstance(config, config_type.get(kModule, "Config")))
      throw UsageError(str("config: expected a Config, got ", type_of(config)));
    sms = integer_from(0, config.attr("num_sms"), "config.num_sms");
  }
  if (sms % 2 != 0)
    throw UsageError(
        str(config.is_none() ? "Buffer.num_sms" : "config.num_sms", " = ", sms, ", must be even"));
  if (!previous_event.is_none() && !is_event_overlap(previous_event))
    throw UsageError(str("previous_event: expected an EventOverlap, got ", type_of(previous_event)));
  if (is_true(allocate_on_comm_stream) && (previous_event.is_none() || !is_async()))
    throw UsageError("allocate_on_comm_stream needs previous_event and async_finish");
  return sms;
}

bool CallSettings::is_async() const {
  return is_true(async_finish);
}

std::optional<std::int64_t> NewRoutes::worst_rows() const {
  if (PyLong_Check(worst.ptr()) == 0) return std::nullopt;
  int overflow = 0;
  const long long rows = PyLong_AsLongLongAndOverflow(worst.ptr(), &overflow);
  if (overflow > 0) return std::numeric_limits<std::int32_t>::max();  // Routes refuses it
  return rows > 0 ? std::optional<std::int64_t>(rows) : std::nullopt;
}

InputRows read_rows(const nb::object& x, DispatchInput& in) {
  in.options.format = Format::bf16();
  const bool many = nb::isinstance<nb::tuple>(x) || nb::isinstance<nb::list>(x);
  InputRows rows = many ? read_quantised(x, in) : read_bf16(x, in);
  require_torch_or_numpy(in.arguments.framework(), "x");
  return rows;
}

nb::object first_rows(const nb::object& array, std::int64_t count) {
  return count > 0 ? array : nb::object(array[nb::slice(nb::int_(0), nb::int_(0), nb::none())]);
}

nb::object recv_x_of(const InputRows& rows, const std::array<nb::object, 2>& parts, std::int64_t count) {
  nb::object values = first_rows(parts[0], count);
  if (rows.parts == 1) return values;
  const nb::object scales = first_rows(parts[1], count);
  if (rows.scale_columns == rows.columns[1]) return nb::make_tuple(values, scales);
  static CachedAttribute first_columns;
  return nb::make_tuple(values, python_function(first_columns, "first_columns")(scales, rows.scale_columns));
}

Routes::Routes(const NewRoutes& given, const Place& place, const Topology& topology)
    : in(place.device, Gradients::recorded) {
  const int ranks = topology.ranks(), nodes = topology.nodes();
  if (given.tokens_per_rank.is_none() || given.is_token_in_rank.is_none() ||
      given.routes_per_expert.is_none()) {
    throw UsageError(
        "dispatch: without a handle num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert are "
        "needed");
  }
  if (nodes > 1 && given.tokens_per_node.is_none()) {
    throw UsageError(str("dispatch: between ", nodes,
                         " nodes num_tokens_per_rdma_rank is needed: pass what get_dispatch_layout returns"));
  }
  if (given.topk_idx.is_none() != given.topk_weights.is_none())
    throw UsageError("dispatch: topk_idx and topk_weights go together");
  const bool with_ids = !given.topk_idx.is_none();
  if (integer_from(0, given.worst, "num_worst_tokens", kMostTokens) > 0 && !with_ids)
    throw UsageError("dispatch: num_worst_tokens needs topk_idx and topk_weights");
  alignment = integer_from(1, given.alignment, "expert_alignment");

  rows = read_rows(given.x, in);
  const std::int64_t tokens = in.tokens.count;
  const Place of_x{in.arguments.framework(), place.device};
  const Array in_rank = inspect_like(given.is_token_in_rank, "is_token_in_rank", 2, of_x);
  if (in_rank.element != kBool)
    throw UsageError(str("is_token_in_rank: expected bool, got ", name_of(in_rank.element)));
  require_shape(in_rank, "is_token_in_rank", {tokens, ranks});
  if (nodes > 1) {
    const Array per_node = inspect_like(given.tokens_per_node, "num_tokens_per_rdma_rank", 1, of_x);
    require_integers(per_node, "num_tokens_per_rdma_rank");
    require_shape(per_node, "num_tokens_per_rdma_rank", {nodes});
  }
  const Array per_expert = inspect_like(given.routes_per_expert, "num_tokens_per_expert", 1, of_x);
  require_integers(per_expert, "num_tokens_per_expert");
  shape = {.hidden = rows.columns[0], .experts = per_expert.shape[0], .top_k = 0};
  slots = std::min(ranks, kMaxTopK);
  nb::object ids = given.topk_idx;
  if (!with_ids) {
    static CachedAttribute ids_from_ranks;
    ids = python_function(ids_from_ranks, "ids_from_ranks")(given.is_token_in_rank);
  }
  const Array found = inspect_like(ids, "topk_idx", 2, of_x);
  id_element = found.element;
  if (with_ids) {
    require_slots(found);
    shape.top_k = found.shape[1];
    slots = static_cast<int>(shape.top_k);
  }
  in.ids =
      ids_of(in.arguments.add(dense_array(ids, found, in.arguments), "topk_idx"), tokens, slots, "topk_idx");
  if (!with_ids) return;
  const Array weights = inspect_like(given.topk_weights, "topk_weights", 2, of_x);
  in.weights = static_cast<const float*>(in.arguments
                                             .dense(dense_array(given.topk_weights, weights, in.arguments),
                                                    "topk_weights", kFp32, {tokens, slots})
                                             .data);
}

}  // namespace ferry::python
