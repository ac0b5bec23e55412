// Reads the arguments of dispatch, runs it, fused and in two phases, and binds it.
#include "dispatch.hpp"

#include <cmath>
#include <limits>

#include "base/text.hpp"
#include "call_binding.hpp"
#include "cast.hpp"
#include "casters.hpp"
#include "exchange/configuration.hpp"
#include "format/encoding.hpp"
#include "format/parts.hpp"
#include "host_parts.hpp"
#include "interpreter.hpp"
#include "setting_values.hpp"

namespace ferry::python {

using namespace nb::literals;

std::optional<DType> value_type_of(Element element) {
  for (const DType type : {DType::bf16, DType::fp16, DType::fp32}) {
    if (element_of(type) == element) return type;
  }
  return std::nullopt;
}

namespace {

std::vector<nb::object> list_of(const nb::object& one_or_many) {
  std::vector<nb::object> items;
  if (!nb::isinstance<nb::tuple>(one_or_many) && !nb::isinstance<nb::list>(one_or_many)) return {one_or_many};
  for (nb::handle item : one_or_many) items.push_back(nb::borrow(item));
  return items;
}

std::int64_t bytes_of_row(const Array& array) {
  std::int64_t bytes = array.element_bytes();
  for (std::size_t i = 1; i < array.shape.size(); ++i) bytes *= array.shape[i];
  return bytes;
}

// Raw parts, [N, ...] each. Their bytes a row must match the format; without a raw format they define it.
void read_parts(const std::vector<nb::object>& items, const char* tokens, DispatchInput& in) {
  if (items.size() > static_cast<std::size_t>(kMaxParts)) {
    throw UsageError(str(tokens, ": expected at most ", kMaxParts, " parts, got ", items.size()));
  }
  if (!in.format.is_raw()) in.format = {.kind = FormatKind::raw};
  const bool sizes_given = in.format.part_bytes[0] != 0;
  for (std::size_t p = 0; p < items.size(); ++p) {
    const std::string name = str(tokens, "[", p, "]");
    const Array& part = in.arguments.add(items[p], name.c_str());
    if (part.shape.size() < 2)
      throw UsageError(str(name, ": expected rows, got shape ", shape_text(part.shape)));
    const std::int64_t bytes = bytes_of_row(part);
    if (sizes_given && in.format.part_bytes[p] != bytes) {
      throw UsageError(
          str(name, ": expected rows of ", counted(in.format.part_bytes[p], "byte"), ", got ", bytes));
    }
    in.format.part_bytes[p] = bytes;
    const StridedRows rows = strided_rows(part, name.c_str(), part.shape.size() - 1);
    if (p > 0 && rows.count != in.tokens.count) {
      throw UsageError(str(name, ": expected ", counted(in.tokens.count, "row"), " as ", tokens,
                           "[0] has, got ", rows.count));
    }
    in.tokens.count = rows.count;
    in.tokens.parts[p] = part.data;
    in.tokens.strides[p] = rows.stride;
    in.elements[p] = part.element;
  }
  const auto count = static_cast<std::size_t>(parts_of(in.format, 0).count);
  if (count != items.size()) {
    throw UsageError(str(tokens, ": expected ", count, " parts for format ", to_string(in.format), ", got ",
                         items.size()));
  }
}

// The element types of received parts. e2m1, which arrays have no type for, is shown as bytes, and so is what
// an encoder of the caller's writes.
std::array<Element, kMaxParts> elements_of(const Encoding& encoding, Element tokens) {
  if (encoding.by_caller) return {kByte, kByte, kByte, kByte};
  if (!encoding.quantises()) return {tokens};
  const Element value = encoding.element == ElementType::e4m3 ? kFp8 : kByte;
  if (!encoding.packs_scales()) return {value, kFp32};
  if (encoding.scale_columns) return {value, kInt32, kFp32};
  if (!encoding.is_microscaled()) return {value, kInt32};
  return {value, encoding.scale_type == ScaleType::e4m3 ? kFp8 : kByte, kFp32};
}

void read_values(const nb::object& tokens, const char* name, const Config& config, DispatchInput& in) {
  const Array& array = in.arguments.rows(tokens, name, config.hidden, {kBf16, kFp16, kFp32});
  const StridedRows rows = strided_rows(array, name);
  in.tokens = Tokens::rows(array.data, rows.count, *value_type_of(array.element), rows.stride);
  in.elements = elements_of(encoding_of(in.format), array.element);
}

void read_ids(const nb::object& ids, const Config& config, DispatchInput& in) {
  if (const PyPlan* plan = cast_or_null<PyPlan>(ids)) {
    in.plan = plan->checked();
    in.context.plan = ids;
    return;
  }
  in.ids = ids_of(in.arguments.add_numbers(ids, "ids"), in.tokens.count, config.top_k);
}

// An array to write to, of at least `least` elements along its first dimension. Null for None.
template <class T>
T* output(Arguments& arguments, const nb::object& object, const char* name, Element element,
          const Shape& least) {
  if (object.is_none()) return nullptr;
  Shape expected = least;
  expected[0] = -1;
  const Array& array = arguments.dense(object, name, element, expected);
  require_writable(array, name);
  if (array.shape[0] >= least[0]) return static_cast<T*>(array.data);
  throw UsageError(
      str(name, ": expected a length of ", least[0], " or more, got shape ", shape_text(array.shape)));
}

// Rows of the part that the dispatch may write. Scales in columns take the whole capacity, which is
// the distance between columns; expert_indexed takes `part_rows`, since a plan does not tell the number of
// its rows.
std::int64_t rows_written(const PartLayout& part, bool indexed, std::int64_t part_rows,
                          const DispatchInput& in) {
  const std::int64_t rows = in.options.memory.rows;
  if (part.columns || indexed) return part_rows;
  if (in.context.plan.is_none()) return rows > 0 ? std::min(rows, in.capacity) : in.capacity;
  return std::min(in.capacity, max_rows_touched(nb::cast<PyPlan&>(in.context.plan)));
}

// Whether the array has the shape and the strides that DispatchResult.parts gives scales in columns: [rows,
// n], with expert_padded [G, rows, n].
bool is_in_columns(const Array& array, const PartLayout& part, const RowRoom& room) {
  const bool by_group = room.group_rows > 0;
  const std::int64_t leading = column_length(room), columns = elements_of(part);
  const std::size_t dimensions = by_group ? 3 : 2;
  if (array.shape.size() != dimensions || array.element_bytes() != part.element_bytes) return false;
  const Shape shape{room.groups, by_group ? room.group_rows : room.rows, columns};
  const Shape strides{columns * leading, 1, leading};
  for (std::size_t i = 0; i < dimensions; ++i) {
    const std::size_t of = i + 3 - dimensions;
    if (array.shape[i] != shape[of] || (shape[of] > 1 && array.strides[i] != strides[of])) return false;
  }
  return true;
}

void read_part_buffers(RowRoom room, bool indexed, DispatchInput& in, const nb::object& given) {
  const std::int64_t part_rows = room.rows;
  if (given.is_none()) return;
  const std::vector<nb::object> items = list_of(given);
  const PartList& parts = in.parts;
  if (items.size() != static_cast<std::size_t>(parts.count)) {
    throw UsageError(str("memory.parts: expected ", parts.count, " parts for format ", to_string(in.format),
                         ", got ", items.size()));
  }
  for (std::size_t p = 0; p < items.size(); ++p) {
    const std::string name = str("memory.parts[", p, "]");
    const Array& array = in.arguments.add(items[p], name.c_str());
    require_writable(array, name.c_str());
    const PartLayout& part = parts.part[p];
    room.rows = rows_written(part, indexed, part_rows, in);
    in.options.memory.parts[p] = array.data;
    if (part.columns && is_in_columns(array, part, room)) continue;
    require_dense(array, name.c_str());
    std::int64_t bytes = array.element_bytes();
    for (const std::int64_t length : array.shape) bytes *= length;
    const std::int64_t needed = part_bytes_total(part, room);
    if (bytes < needed) {
      throw UsageError(str(
          name, ": expected ", counted(needed, "byte"), " or more for ", counted(room.rows, "row"),
          part.columns ? str(" in columns of ", column_length(room), " rows") : "",
          part.tiles ? str(" in tiles of 128 rows, with one more for each of ", room.groups, " groups") : "",
          ", got ", bytes, ": pass a larger array"));
    }
  }
}

void read_receive_buffers(const Config& config, const ReceiveSizes& sizes, DispatchInput& in) {
  const PyReceiveBuffers& given = in.context.memory;
  const std::int64_t groups = sizes.groups;
  in.options.memory.rows = given.rows;
  in.options.memory.allow_truncation = given.allow_truncation;
  std::int64_t rows = sizes.rows;
  if (given.rows > 0 && in.context.plan.is_none()) rows = std::min(rows, given.rows);
  const bool rank_major = config.layout == Layout::rank_major;
  const Shape slots = rank_major ? Shape{rows, config.top_k} : Shape{rows};
  ReceiveBuffers& memory = in.options.memory;
  read_part_buffers({sizes.part_rows, groups, sizes.group_rows}, config.layout == Layout::expert_indexed, in,
                    given.parts);
  memory.weight = output<float>(in.arguments, given.weight, "memory.weight", kFp32, slots);
  memory.local_ids = output<std::int32_t>(in.arguments, given.local_ids, "memory.local_ids", kInt32, slots);
  memory.group_of_row =
      output<std::int32_t>(in.arguments, given.group_of_row, "memory.group_of_row", kInt32, {rows});
  memory.plan = output<void>(in.arguments, given.plan, "memory.plan", kByte, {sizes.plan_bytes});
  memory.dots = output<float>(in.arguments, given.dots, "memory.dots", kFp32, {rows});
  memory.counts = output<std::int32_t>(in.arguments, given.counts, "memory.counts", kInt32, {groups});
  memory.count_sums =
      output<std::int32_t>(in.arguments, given.count_sums, "memory.count_sums", kInt32, {groups});
  memory.row_offsets =
      output<std::int32_t>(in.arguments, given.row_offsets, "memory.row_offsets", kInt32, {groups + 1});
}

void read_dot_rows(PyExchange& self, const nb::object& dot_rows, DispatchInput& in) {
  if (dot_rows.is_none()) return;
  const Config& config = self.config();
  const Array& array =
      in.arguments.rows(dot_rows, "dot_rows", config.hidden, {element_of(config.combine_type)});
  require_dense(array, "dot_rows");
  const PyPlan* const plan = in.context.plan.is_none() ? nullptr : &nb::cast<PyPlan&>(in.context.plan);
  require_rows(plan, strided_rows(array, "dot_rows").count, "dot_rows", in.capacity);
  in.options.dot_rows = self.address_of(array);
}

void read_global_scale(const nb::object& given, DispatchInput& in) {
  if (given.is_none()) return;
  if (const std::optional<double> number = number_in(given, "global_scale")) {
    if (!is_host(in.arguments.device())) {
      throw UsageError(
          "global_scale: expected a float32 array of one element on the device, got a number: kernels read "
          "it while they run");
    }
    in.global_scale = static_cast<float>(*number);
    in.options.global_scale = &in.global_scale;
    return;
  }
  const Array& array = in.arguments.one(given, "global_scale", kFp32);
  in.options.global_scale = static_cast<const float*>(array.data);
}

void read_input_scales(const Config& config, const nb::object& given, DispatchInput& in) {
  if (given.is_none()) return;
  const std::int64_t experts = std::int64_t{config.experts} + config.shared_experts;
  const Array& array = in.arguments.numbers(given, "input_scales", kFp32, {experts});
  in.options.input_scales = {static_cast<const float*>(array.data), static_cast<std::size_t>(experts)};
  if (encoding_of(in.format).quantises()) in.parts = parts_by_expert(in.format, config.hidden);
}

}  // namespace

std::optional<double> number_in(const nb::object& given, const char* name) {
  if (PyBool_Check(given.ptr()) != 0) refuse_type(name, "a number or float32 values", given);
  if (PyFloat_Check(given.ptr()) == 0 && PyLong_Check(given.ptr()) == 0 &&
      !nb::isinstance(given, nb::module_::import_("numbers").attr("Real")))
    return std::nullopt;
  const double number = PyFloat_AsDouble(given.ptr());
  const bool too_large = PyErr_Occurred() != nullptr;
  clear_error();
  constexpr double kMost = std::numeric_limits<float>::max();
  constexpr double kRoundsToZero = std::numeric_limits<float>::denorm_min() / 2.0;
  const bool fits = number == 0 || (std::abs(number) > kRoundsToZero && std::abs(number) <= kMost);
  if (too_large || (!fits && std::isfinite(number)))
    throw UsageError(str(name, " = ", nb::repr(given).c_str(), ": beyond the range of float32"));
  return number;
}

Ids ids_of(const Array& array, std::int64_t tokens, int top_k, const char* name) {
  require_element(array, name, {kInt32, kInt64});
  if (array.shape != Shape{tokens, top_k}) {
    throw UsageError(str(name, ": expected an array of shape [N, K] = ", shape_text({tokens, top_k}),
                         ", got ", shape_text(array.shape)));
  }
  require_dense(array, name);
  return array.element == kInt32 ? Ids(static_cast<const std::int32_t*>(array.data))
                                 : Ids(static_cast<const std::int64_t*>(array.data));
}

void require_rows(const PyPlan* plan, std::int64_t count, const char* name, std::int64_t capacity) {
  std::int64_t needed = capacity;
  if (plan != nullptr) needed = std::min(needed, max_rows_touched(*plan));
  if (count >= needed) return;
  throw UsageError(str(name, ": expected ", counted(needed, "row"), " or more, got ", count));
}

void read_dispatch(PyExchange& self, LaneCall& call, const PyDispatchArguments& given, DispatchInput& in,
                   const DispatchNames& names) {
  const Config& config = self.config();
  in.capacity = self.receive_sizes().rows;
  in.arguments.set_stream(given.stream);
  const std::optional<std::string> format = text_in(given.format, "format");
  in.format = format ? parse_format(*format) : config.format;
  if (!given.memory.is_none())
    in.context.memory = cast_argument<PyReceiveBuffers>(given.memory, "memory", "a ReceiveBuffers");
  // The caller could empty a list while the result still needs its arrays.
  if (nb::isinstance<nb::list>(in.context.memory.parts))
    in.context.memory.parts = nb::tuple(in.context.memory.parts);

  const bool many = nb::isinstance<nb::tuple>(given.tokens) || nb::isinstance<nb::list>(given.tokens);
  if (many && format && !in.format.is_raw()) {
    throw UsageError(
        str(names.tokens, ": expected one array for format ", to_string(in.format), ", got several"));
  }
  if (many || in.format.is_raw()) {
    read_parts(list_of(given.tokens), names.tokens, in);
  } else {
    read_values(given.tokens, names.tokens, config, in);
  }
  // Set the stream as soon as the framework is known: a refusal then goes to the stream the call would use.
  call.set_stream(stream_of(given.stream, in.arguments.framework(), call.device()));
  read_ids(given.ids, config, in);
  if (!given.weights.is_none()) {
    const Array& weights =
        in.arguments.numbers(given.weights, names.weights, kFp32, {in.tokens.count, config.top_k});
    in.weights = static_cast<const float*>(weights.data);
    in.options.weighted = true;  // an empty array may have a null pointer
  }
  if (!given.count.is_none()) {
    if (PyLong_Check(given.count.ptr()) != 0) {
      throw UsageError(
          "count: expected an int32 array [1] in device memory, got a number: N is the number of rows of "
          "tokens, so pass tokens[:count]");
    }
    if (is_host(call.device())) {
      throw UnsupportedError(
          "count: the exchange has host memory, where N is the number of rows of tokens: pass "
          "tokens[:count]");
    }
    in.tokens.device_count =
        static_cast<const std::int32_t*>(in.arguments.dense(given.count, "count", kInt32, {1}).data);
  }
  read_global_scale(given.global_scale, in);
  in.parts = parts_of(in.format, config.hidden);
  read_input_scales(config, given.input_scales, in);
  in.options.apply_weights = bool_of("apply_weights", given.apply_weights);
  in.options.layer = int_of("layer", given.layer);
  in.options.call = call.options(int_of("sm_limit", given.sm_limit));
  in.options.format = in.format;
  if (!given.memory.is_none()) read_receive_buffers(config, self.receive_sizes(), in);
  read_dot_rows(self, given.dot_rows, in);
  in.context.framework = in.arguments.framework();
  in.context.device = call.device();
  in.context.format = in.format;
  in.context.elements = in.elements;
  in.context.parts = in.parts;
  in.context.tokens = in.tokens.count;
  in.context.lane = call.lane();
}

void record_dispatch(PyExchange& self, const DispatchInput& in) {
  const int lane = in.context.lane;
  self.set_framework(in.context.framework);
  self.context(lane) = in.context;
  if (!in.plan.empty()) return;
  if (in.context.memory.plan.is_none()) {
    ++self.state().lanes[static_cast<std::size_t>(lane)].plan_version;
  } else {
    count_write(in.options.memory.plan);
  }
}

namespace {

PyDispatchResult dispatch(PyExchange& self, const GivenBesides& besides, const PyDispatchArguments& given) {
  LaneCall call(self, {Operation::dispatch}, besides);
  std::optional<PartTimer> timer(std::in_place, HostPart::arguments);
  DispatchInput in(call.device());
  call.read_or_refuse({Operation::dispatch}, [&] { read_dispatch(self, call, given, in); });
  timer.emplace(HostPart::exchange);
  const DispatchResult received = run_dispatch(self, call, in, [&] {
    return in.plan.empty() ? call.exchange().dispatch(in.tokens, in.ids, in.weights, in.options)
                           : call.exchange().dispatch(in.tokens, in.plan, in.weights, in.options);
  });
  timer.emplace(HostPart::results);
  return self.make_result(call.lane(), received);
}

void dispatch_send(PyExchange& self, const GivenBesides& besides, const PyDispatchArguments& given) {
  LaneCall call(self, {Operation::dispatch}, besides);
  DispatchInput in(call.device());
  call.read_or_refuse({Operation::dispatch}, [&] { read_dispatch(self, call, given, in); });
  run_dispatch(self, call, in, [&] {
    if (in.plan.empty()) {
      call.exchange().dispatch_send(in.tokens, in.ids, in.weights, in.options);
    } else {
      call.exchange().dispatch_send(in.tokens, in.plan, in.weights, in.options);
    }
    return DispatchResult{};
  });
  self.pending(call.lane()).owners = in.arguments.owners();
}

PyDispatchResult dispatch_receive(PyExchange& self, const GivenBesides& besides,
                                  const ReceiveArguments& given) {
  LaneCall call(self, {Operation::dispatch}, besides.of_receive_phase());
  const int lane = call.lane();
  call.read_or_refuse({Operation::dispatch}, [&] {
    call.set_stream(stream_of(given.stream, self.context(lane).framework, call.device()));
  });
  DispatchResult received;
  {
    const GilRelease unlocked;
    received = call.exchange().dispatch_receive(call.options());
  }
  self.pending(lane) = {};
  return self.make_result(lane, received);
}

constexpr const char* kDispatchDoc =
    R"(Sends every token to the ranks of its experts; returns the received rows, grouped by expert. Collective.

tokens         [N, H] of bfloat16, float16 or float32. The step from row to row may be larger than H, in multiples of
               16 bytes. For raw formats a tuple of up to four arrays [N, ...], whose bytes are moved unchanged
ids            int32 or int64 [N, K]; -1 masks a slot. Or a Plan: its routes are used again. Ids and weights that are not
               C-contiguous are copied; on GPUs that takes PyTorch's tensors, on its current stream
weights        float32 [N, K]: router weights, sent with the rows; on every rank or on none, also with N = 0
format         of this call, see Config; default: the exchange's
memory         ReceiveBuffers for the result; default: the lane's own memory
apply_weights  multiply the received values by their weight
global_scale   format 'nvfp4': g, a number or float32 [1], the same on all ranks; on GPUs an array there; default
               1. Values are element * scale * g
input_scales   formats 'fp8', 'mxfp8' and 'nvfp4': float32 [E + S] where the tokens lie, a scale of each expert, shared
               ones last. Tokens travel as they are; each rank encodes the rows it receives with its experts' scales
layer          where load_counts() counts the routes: 0 to Config.layers - 1, the same on all ranks
dot_rows       [rows, H] of combine_type: result.dots[row] = dot(token, dot_rows[row]), before apply_weights
count          'cuda': int32 [1] in device memory, N as read when the call runs; the rows of `tokens` bound it
sm_limit       'cuda': the most blocks the call uses at once; 0: the share of its lane
stream         'cuda': default the current stream of the arrays' framework

Host backends block, without the GIL, until the peers have taken part, for `deadline` seconds at most; 'cuda' does not
block.
Raises UsageError for arguments that do not fit; the peers' calls end with it too, unless the mistake is a bad
`lane` of an exchange with several, or a `global_scale` or a scale of `input_scales` with which a block cannot be encoded. Raises BadIdError for
ids out of range and OverflowError for rows past the capacity, which are dropped: both after the call, whose result
last_dispatch_result() then returns.)";

constexpr const char* kDispatchParameters =
    "(self, tokens: ferry._typing.Array | Sequence[ferry._typing.Array], ids: ferry._typing.Array | Plan, "
    "weights: ferry._typing.Array | None = None, *, "
    "format: str | None = None, lane: int = 0, sm_limit: int = 0, memory: ReceiveBuffers | None = None, "
    "apply_weights: bool = False, dot_rows: ferry._typing.Array | None = None, count: ferry._typing.Array | "
    "None = None, global_scale: float | ferry._typing.Array | None = None, "
    "input_scales: ferry._typing.Array | None = None, layer: int = 0, "
    "stream: typing.Any | None = None) -> ";

}  // namespace

void bind_dispatch(nb::class_<PyExchange>& exchange) {
  const std::string parameters = kDispatchParameters;
  define_call<PyDispatchArguments, 3>(exchange, "dispatch", parameters + "DispatchResult", kDispatchDoc,
                                      dispatch);
  define_call<PyDispatchArguments, 3>(exchange, "dispatch_send", parameters + "None",
                                      "The send phase of dispatch, with its arguments, which may be reused "
                                      "when it returns. Does not wait for peers.",
                                      dispatch_send);
  define_call<ReceiveArguments, 0>(
      exchange, "dispatch_receive",
      "(self, *, lane: int = 0, stream: typing.Any | None = None) -> DispatchResult",
      R"(The receive phase of dispatch: returns its result. May run in another thread or on another stream.

Arguments that do not fit raise UsageError after the phase; last_dispatch_result() then returns its result.)",
      dispatch_receive);
}

}  // namespace ferry::python
