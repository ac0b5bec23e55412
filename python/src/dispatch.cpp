// Arguments of dispatch, in both forms.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "base/text.hpp"
#include "dispatch.hpp"
#include "exchange.hpp"
#include "exchange/configuration.hpp"
#include "ferry/error.hpp"
#include "format/parts.hpp"

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

// Raw parts: [N, anything], as many bytes a row as the format says; without a format they say it
// themselves.
void read_parts(const std::vector<nb::object>& items, DispatchInput& in) {
  if (items.size() > static_cast<std::size_t>(kMaxParts)) {
    throw UsageError(str("tokens: ", items.size(), " parts, at most ", kMaxParts));
  }
  if (in.format.kind != FormatKind::raw) in.format = {.kind = FormatKind::raw};
  const bool given = in.format.part_bytes[0] != 0;
  for (std::size_t p = 0; p < items.size(); ++p) {
    const std::string name = str("tokens[", p, "]");
    const Array& part = in.arguments.take(items[p], name.c_str());
    if (part.shape.size() < 2)
      throw UsageError(str(name, ": expected rows, got shape ", text_of(part.shape)));
    const std::int64_t bytes = bytes_of_row(part);
    if (given && in.format.part_bytes[p] != bytes) {
      throw UsageError(str(name, ": expected rows of ", in.format.part_bytes[p], " bytes, got ", bytes));
    }
    in.format.part_bytes[p] = bytes;
    const RowsOf rows = rows_of(part, name.c_str(), part.shape.size() - 1);
    if (p > 0 && rows.count != in.tokens.count) {
      throw UsageError(str(name, ": ", rows.count, " rows, tokens[0] has ", in.tokens.count));
    }
    in.tokens.count = rows.count;
    in.tokens.parts[p] = part.data;
    in.tokens.strides[p] = rows.stride;
    in.elements[p] = part.element;
  }
  const auto count = static_cast<std::size_t>(parts_of(in.format, 0).count);
  if (count != items.size()) {
    throw UsageError(
        str("tokens: expected ", count, " parts as ", to_string(in.format), " has, got ", items.size()));
  }
}

void read_values(const nb::object& tokens, const Config& config, DispatchInput& in) {
  const Array& array = in.arguments.rows(tokens, "tokens", config.hidden, {kBf16, kFp16, kFp32});
  const RowsOf rows = rows_of(array, "tokens");
  in.tokens = Tokens::rows(array.data, rows.count, *value_type_of(array.element), rows.stride);
  const bool quantised = in.format.kind == FormatKind::fp8_e4m3;
  in.elements = {quantised ? kFp8 : array.element, in.format.fp8.packed ? kInt32 : kFp32};
}

void read_ids(const nb::object& ids, const Config& config, DispatchInput& in) {
  PyPlan* plan = nullptr;
  if (nb::try_cast(ids, plan) && plan != nullptr) {
    in.plan = plan->usable();
    in.context.plan = ids;
    return;
  }
  PyErr_Clear();
  const Array& array = in.arguments.take(ids, "ids");
  if (array.element != kInt32 && array.element != kInt64) {
    throw UsageError(str("ids: expected int32 or int64, got ", name_of(array.element)));
  }
  if (array.shape != Shape{in.tokens.count, config.top_k}) {
    throw UsageError(str("ids: expected an array of shape [N, K] = ",
                         text_of({in.tokens.count, config.top_k}), ", got ", text_of(array.shape)));
  }
  require_dense(array, "ids");
  in.ids = array.element == kInt32 ? Ids(static_cast<const std::int32_t*>(array.data))
                                   : Ids(static_cast<const std::int64_t*>(array.data));
}

void* output(Arguments& arguments, const nb::object& object, const char* name, Element element,
             const Shape& least) {
  if (object.is_none()) return nullptr;
  Shape expected = least;
  expected[0] = -1;
  const Array& array = arguments.dense(object, name, element, expected);
  require_writable(array, name);
  if (array.shape[0] >= least[0]) return array.data;
  throw UsageError(str(name, ": expected room for ", least[0], ", got shape ", text_of(array.shape)));
}

// Rows are written as far as there are any. Columns lie a whole capacity apart.
std::int64_t rows_written(const PartLayout& part, const Config& config, const DispatchInput& in) {
  const std::int64_t capacity = row_capacity(config, in.rank);
  if (part.columns || in.context.plan.is_none()) return capacity;
  return std::min(capacity, rows_touched(nb::cast<PyPlan&>(in.context.plan)));
}

void read_memory_of_parts(const Config& config, DispatchInput& in, const nb::object& given) {
  if (given.is_none()) return;
  const std::vector<nb::object> items = list_of(given);
  const PartList parts = parts_of(in.format, config.hidden);
  if (items.size() != static_cast<std::size_t>(parts.count)) {
    throw UsageError(str("memory.parts: expected ", parts.count, " as ", to_string(in.format), " has, got ",
                         items.size()));
  }
  for (std::size_t p = 0; p < items.size(); ++p) {
    const std::string name = str("memory.parts[", p, "]");
    const Array& array = in.arguments.take(items[p], name.c_str());
    require_writable(array, name.c_str());
    require_dense(array, name.c_str());
    std::int64_t bytes = array.element_bytes();
    for (const std::int64_t length : array.shape) bytes *= length;
    const std::int64_t needed = part_bytes_total(parts.part[p], rows_written(parts.part[p], config, in));
    if (bytes < needed) throw UsageError(str(name, ": expected ", needed, " bytes, got ", bytes));
    in.options.memory.parts[p] = array.data;
  }
}

void read_memory(const Config& config, int rank, std::int64_t groups, DispatchInput& in) {
  const PyMemory& given = in.context.memory;
  const std::int64_t rows = row_capacity(config, rank);
  const bool rank_major = config.layout == Layout::rank_major;
  const Shape slots = rank_major ? Shape{rows, config.top_k} : Shape{rows};
  ReceiveBuffers& memory = in.options.memory;
  read_memory_of_parts(config, in, given.parts);
  memory.weight = static_cast<float*>(output(in.arguments, given.weight, "memory.weight", kFp32, slots));
  memory.local_ids =
      static_cast<std::int32_t*>(output(in.arguments, given.local_ids, "memory.local_ids", kInt32, slots));
  memory.group_of_row = static_cast<std::int32_t*>(
      output(in.arguments, given.group_of_row, "memory.group_of_row", kInt32, {rows}));
  memory.plan =
      output(in.arguments, given.plan, "memory.plan", kByte, {plan_bytes(config, config.placement.ranks())});
  memory.dots = static_cast<float*>(output(in.arguments, given.dots, "memory.dots", kFp32, {rows}));
  memory.counts =
      static_cast<std::int32_t*>(output(in.arguments, given.counts, "memory.counts", kInt32, {groups}));
  memory.row_offsets = static_cast<std::int32_t*>(
      output(in.arguments, given.row_offsets, "memory.row_offsets", kInt32, {groups + 1}));
}

void read_dot_rows(const Config& config, const nb::object& dot_rows, DispatchInput& in) {
  if (dot_rows.is_none()) return;
  const Array& array =
      in.arguments.rows(dot_rows, "dot_rows", config.hidden, {element_of(config.combine_type)});
  require_dense(array, "dot_rows");
  require_rows(in.context.plan, rows_of(array, "dot_rows").count, "dot_rows", config, in.rank);
  in.options.dot_rows = array.data;
}

PyMemory memory_of(const nb::object& given) {
  PyMemory* memory = nullptr;
  if (nb::try_cast(given, memory) && memory != nullptr) return *memory;
  PyErr_Clear();
  throw UsageError(
      str("memory: expected an ReceiveBuffers, got ", nb::cast<std::string>(nb::type_name(given.type()))));
}

}  // namespace

void require_rows(const nb::object& plan, std::int64_t count, const char* name, const Config& config,
                  int rank) {
  std::int64_t needed = row_capacity(config, rank);
  if (!plan.is_none()) needed = std::min(needed, rows_touched(nb::cast<PyPlan&>(plan)));
  if (count >= needed) return;
  throw UsageError(str(name, ": expected ", needed, " rows or more, got ", count));
}

void read_dispatch(PyExchange& self, InCall& call, const DispatchArguments& given, DispatchInput& in) {
  const Config& config = self.config();
  in.rank = call.exchange().rank().index();
  in.format = given.format ? parse_format(*given.format) : config.format;
  if (!given.memory.is_none()) in.context.memory = memory_of(given.memory);
  // A list may lose what arrivals go on pointing into.
  if (nb::isinstance<nb::list>(in.context.memory.parts))
    in.context.memory.parts = nb::tuple(in.context.memory.parts);

  const bool several = nb::isinstance<nb::tuple>(given.tokens) || nb::isinstance<nb::list>(given.tokens);
  if (several && given.format && in.format.kind != FormatKind::raw) {
    throw UsageError(str("tokens: format ", to_string(in.format), " takes one array, got several"));
  }
  if (several || in.format.kind == FormatKind::raw) {
    read_parts(list_of(given.tokens), in);
  } else {
    read_values(given.tokens, config, in);
  }
  // From here on a refusal can go where the call would have gone.
  call.use(stream_of(given.stream, in.arguments.framework(), call.where()));
  read_ids(given.ids, config, in);
  if (!given.weights.is_none()) {
    const Array& weights =
        in.arguments.dense(given.weights, "weights", kFp32, {in.tokens.count, config.top_k});
    in.weights = weights.data != nullptr ? static_cast<const float*>(weights.data)
                                         : self.spare(in.arguments.framework());
  }
  if (!given.count.is_none()) {
    in.tokens.device_count =
        static_cast<const std::int32_t*>(in.arguments.dense(given.count, "count", kInt32, {1}).data);
  }
  in.options.apply_weights = given.apply_weights;
  in.options.lane = given.lane;
  in.options.sm_limit = given.sm_limit;
  in.options.format = in.format;
  read_memory(config, in.rank, groups_of(config, in.rank), in);
  read_dot_rows(config, given.dot_rows, in);
  in.context.framework = in.arguments.framework();
  in.context.device = call.where();
  in.context.format = in.format;
  in.context.elements = in.elements;
  in.context.tokens = in.tokens.count;
  in.context.lane = given.lane;
}

// Notes what the call writes to, before it does.
void begin_dispatch(PyExchange& self, const DispatchInput& in) {
  const int lane = in.context.lane;
  self.set_framework(in.context.framework);
  self.context(lane) = in.context;
  LaneState& state = self.state().lanes[static_cast<std::size_t>(lane)];
  state.came = false;
  if (!in.plan.empty()) return;
  if (in.context.memory.plan.is_none()) {
    ++state.parity;
  } else {
    count_write_to(in.options.memory.plan);
  }
}

namespace {

PyDispatchResult dispatch(PyExchange& self, const DispatchArguments& given) {
  InCall call(self, given.lane);
  DispatchInput in(call.where());
  call.or_refuse({Operation::dispatch}, [&] { read_dispatch(self, call, given, in); });
  begin_dispatch(self, in);
  DispatchResult received;
  {
    const nb::gil_scoped_release unlocked;
    received = call.bring([&] {
      return in.plan.empty()
                 ? call.exchange().dispatch(in.tokens, in.ids, in.weights, in.options, call.stream())
                 : call.exchange().dispatch(in.tokens, in.plan, in.weights, in.options, call.stream());
    });
  }
  return self.received(given.lane, received);
}

void dispatch_send(PyExchange& self, const DispatchArguments& given) {
  InCall call(self, given.lane);
  DispatchInput in(call.where());
  call.or_refuse({Operation::dispatch}, [&] { read_dispatch(self, call, given, in); });
  {
    const nb::gil_scoped_release unlocked;
    if (in.plan.empty()) {
      call.exchange().dispatch_send(in.tokens, in.ids, in.weights, in.options, call.stream());
    } else {
      call.exchange().dispatch_send(in.tokens, in.plan, in.weights, in.options, call.stream());
    }
  }
  begin_dispatch(self, in);
  self.pending(given.lane).owners = in.arguments.owners();
}

PyDispatchResult dispatch_receive(PyExchange& self, int lane, const nb::object& stream) {
  InCall call(self, lane);
  call.use(stream_of(stream, self.context(lane).framework, call.where()));
  DispatchResult received;
  {
    const nb::gil_scoped_release unlocked;
    received = call.bring([&] { return call.exchange().dispatch_receive(lane, call.stream()); });
  }
  self.pending(lane) = {};
  return self.received(lane, received);
}

constexpr const char* kDispatchDoc =
    R"(Sends every token to the ranks of its experts and lays the arrivals out.

tokens       [N, H] of bfloat16, float16 or float32; rows may lie apart, H elements or more and a multiple of 16 bytes. For
             raw formats a tuple of up to four arrays [N, ...], which arrive as they are
ids          int32 or int64 [N, K], C-contiguous, -1 masks a slot; or a Plan: the same routes again, no ids are read
weights      float32 [N, K], C-contiguous: they travel with the rows
format       of this call, see Config; default the exchange's
memory       ReceiveBuffers for what comes out; default the lane's own
apply_weights   values arrive multiplied by their weight
dot_rows     rows [rows, H] of combine_type: arrivals.dots[row] = dot(token, row), before weighing
count        backend 'cuda': int32 [1] in device memory, the N to use when the call runs; tokens' rows are the bound
sm_limit     backend 'cuda': most blocks at once, 0 for no limit
stream       backend 'cuda': default the current stream of the arrays' framework

On the host it blocks until the peers have come, for the exchange's `deadline` at most, without the interpreter's lock.
UsageError: an argument that does not fit (the peers' call ends with it too, but for a bad `lane` or a misspelt keyword),
bad ids (BadIdError, after the call).
OverflowError: rows past the capacity were dropped. Both leave what came in last_dispatch_result().)";

constexpr const char* kDispatchParameters =
    "(self, tokens: typing.Any, ids: typing.Any, weights: typing.Any | None = None, *, "
    "format: str | None = None, lane: int = 0, sm_limit: int = 0, memory: ReceiveBuffers | None = None, "
    "apply_weights: bool = False, dot_rows: typing.Any | None = None, count: typing.Any | None = None, "
    "stream: typing.Any | None = None) -> ";

template <class Function>
void define_dispatch(nb::class_<PyExchange>& exchange, const char* name, const char* returned,
                     const char* doc, const Function& function) {
  exchange.def(
      name,
      [function](PyExchange& self, nb::object tokens, nb::object ids, nb::object weights,
                 std::optional<std::string> format, int lane, int sm_limit, nb::object memory,
                 bool apply_weights, nb::object dot_rows, nb::object count, nb::object stream) {
        return function(self, {.tokens = std::move(tokens),
                               .ids = std::move(ids),
                               .weights = std::move(weights),
                               .format = std::move(format),
                               .lane = lane,
                               .sm_limit = sm_limit,
                               .memory = std::move(memory),
                               .apply_weights = apply_weights,
                               .dot_rows = std::move(dot_rows),
                               .count = std::move(count),
                               .stream = std::move(stream)});
      },
      "tokens"_a.none(), "ids"_a.none(), "weights"_a = nb::none(), nb::kw_only(), "format"_a = nb::none(),
      "lane"_a = 0, "sm_limit"_a = 0, "memory"_a = nb::none(), "apply_weights"_a = false,
      "dot_rows"_a = nb::none(), "count"_a = nb::none(), "stream"_a = nb::none(), doc,
      nb::sig(str("def ", name, kDispatchParameters, returned).c_str()));
}

}  // namespace

void bind_dispatch(nb::class_<PyExchange>& exchange) {
  define_dispatch(exchange, "dispatch", "DispatchResult", kDispatchDoc, dispatch);
  define_dispatch(
      exchange, "dispatch_send", "None",
      "The send half of dispatch, with its arguments. Waits for no peer; they may be reused after it.",
      dispatch_send);
  exchange.def("dispatch_receive", &dispatch_receive, nb::kw_only(), "lane"_a = 0, "stream"_a = nb::none(),
               "The receive half of dispatch; may be called from another thread or stream.",
               nb::sig("def dispatch_receive(self, *, lane: int = 0, stream: typing.Any | None = None) -> "
                       "DispatchResult"));
}

}  // namespace ferry::python
