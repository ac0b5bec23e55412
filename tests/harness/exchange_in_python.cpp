// The operations of ferry::Exchange, called through the Python package: arguments are NumPy arrays over the
// caller's memory, results are the addresses of the arrays that a call returns, and exceptions become those
// of C++ again. Host memory only.

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "arrays/arguments.hpp"
#include "base/process.hpp"
#include "exchange/configuration.hpp"
#include "format/parts.hpp"
#include "group.hpp"
#include "harness/foreign_exchange.hpp"
#include "interpreter.hpp"

namespace ferry::contract {
namespace {

namespace nb = nanobind;
using namespace nb::literals;
using python::Element;
using python::Shape;

// The enumerator that Python names.
template <class E>
E named(const nb::object& name) {
  const auto text = nb::cast<std::string>(name);
  int number = 0;
  while (to_string(static_cast<E>(number)) != text) ++number;
  return static_cast<E>(number);
}

template <class T>
T field(const nb::object& record, const char* name) {
  return nb::cast<T>(record.attr(name));
}

WaitRecord wait_of(const nb::object& record) {
  return {.operation = named<Operation>(record.attr("operation")),
          .call = field<std::uint64_t>(record, "call"),
          .rank = field<int>(record, "rank"),
          .peer = field<int>(record, "peer"),
          .expected = field<std::uint64_t>(record, "expected"),
          .observed = field<std::uint64_t>(record, "observed"),
          .via = field<int>(record, "via"),
          .role = named<WaitRole>(record.attr("role")),
          .node = field<int>(record, "node")};
}

[[noreturn]] void throw_in_cpp(nb::python_error& raised) {
  const nb::object error = nb::borrow(raised.value());
  const auto text = nb::cast<std::string>(nb::str(error)),
             type = nb::cast<std::string>(nb::type_name(error.type()));
  const nb::object record = nb::getattr(error, "record", nb::none());
  const auto is = [&](const char* name) { return type == std::string("ferry.error.") + name; };
  if (is("BadIdError")) {
    throw BadIdError(text,
                     {field<int>(record, "rank"), field<int>(record, "token"), field<int>(record, "slot"),
                      field<std::int64_t>(record, "id"), field<std::int64_t>(record, "count")});
  }
  if (is("BadSourceError")) {
    throw BadSourceError(text, {field<int>(record, "rank"), field<std::int64_t>(record, "index"),
                                field<std::int64_t>(record, "count")});
  }
  if (is("OverflowError")) {
    throw OverflowError(text,
                        {field<int>(record, "rank"), field<std::int64_t>(record, "capacity"),
                         field<std::int64_t>(record, "needed"), field<std::int64_t>(record, "dropped")});
  }
  if (is("TimeoutError")) throw TimeoutError(text, wait_of(record));
  if (is("PeerLostError")) throw PeerLostError(text, wait_of(record));
  if (is("SystemError")) throw SystemError(text, field<int>(error, "error_number"));
  if (is("UnsupportedError")) throw UnsupportedError(text);
  if (is("UsageError")) throw UsageError(text);
  throw std::runtime_error(type + ": " + text);
}

// Calls `use` with the interpreter's lock. Throws what Python raises as C++ does.
template <class Use>
decltype(auto) in_python(const Use& use) {
  const python::GilAcquire lock;
  try {
    return use();
  } catch (nb::python_error& error) {
    throw_in_cpp(error);
  }
}

// `strides` in bytes. A null pointer in place of elements becomes the number 0, which no call takes for an
// array.
nb::object array_of(const void* data, Element element, const Shape& shape, Shape strides = {}) {
  if (data == nullptr && std::ranges::find(shape, 0) == shape.end()) return nb::int_(0);
  for (std::int64_t& stride : strides) stride /= element.bits / 8;
  return python::view_of(python::Framework::numpy, const_cast<void*>(data), element, shape, strides,
                         python::kHost, nb::none());
}

// None for a null pointer.
nb::object array_or_none(const void* data, Element element, const Shape& shape) {
  return data == nullptr ? nb::none() : array_of(data, element, shape);
}

// Rows `stride` bytes apart, 0: dense.
nb::object rows_of(const void* data, Element element, std::int64_t rows, std::int64_t columns,
                   std::int64_t stride) {
  const std::int64_t bytes = element.bits / 8;
  return array_of(data, element, {rows, columns}, {stride > 0 ? stride : columns * bytes, bytes});
}

bool is_empty(const python::Array& array) {
  return std::ranges::find(array.shape, 0) != array.shape.end();
}

// Null for None. `given`: the caller's memory for it, where an array without elements lies: NumPy has no
// address for it.
template <class T>
T* address_of(const nb::object& array, T* given = nullptr) {
  if (array.is_none()) return nullptr;
  const python::Array found = python::inspect(array, "result");
  return given != nullptr && is_empty(found) ? given : static_cast<T*>(found.data);
}

void copy_floats(const nb::object& array, std::int64_t count, float* to) {
  const auto* from = address_of<float>(array);
  std::copy(from, from + count, to);
}

ReceivedPart part_of(const nb::object& part, void* given) {
  python::Array array = python::inspect(part, "part");
  array.data = address_of(part, given);
  const std::int64_t bytes = array.element_bytes(), columns = array.shape.back();
  if (array.shape.size() == 5) return {array.data, array.shape[1] * kTileBytes, 0};
  if (!is_empty(array) && array.strides.back() != 1) return {array.data, bytes, array.strides.back()};
  return {array.data, columns * bytes, 0};
}

class ExchangeInPython : public ForeignExchange {
 public:
  ExchangeInPython(const Rank& rank, const Config& config) {
    in_python([&] {
      const nb::object settings = nb::cast(config).attr("__getstate__")();
      exchange_ = nb::module_::import_("ferry").attr("Exchange")(
          nb::cast(python::PyRank{rank, this_process()}), **nb::borrow<nb::dict>(settings));
      config_ = nb::cast<Config>(exchange_.attr("config"));
      groups_ = groups_of(config_, rank.index());
      rows_ = row_capacity(config_, rank.index());
      lanes_.resize(static_cast<std::size_t>(config_.lanes));
    });
  }

  ~ExchangeInPython() override {
    const python::GilAcquire lock;
    exchange_.attr("destroy")();
    exchange_.reset();
    plans_.clear();
    lanes_.clear();
  }

  DispatchResult dispatch(const Tokens& tokens, const Routes& routes, const float* weights,
                          const DispatchOptions& options) override {
    return in_python([&] {
      return received(options.call.lane, call_dispatch("dispatch", tokens, routes, weights, options));
    });
  }

  void dispatch_send(const Tokens& tokens, const Routes& routes, const float* weights,
                     const DispatchOptions& options) override {
    in_python([&] { call_dispatch("dispatch_send", tokens, routes, weights, options); });
  }

  DispatchResult dispatch_receive(const CallOptions& call) override {
    return in_python(
        [&] { return received(call.lane, exchange_.attr("dispatch_receive")("lane"_a = call.lane)); });
  }

  void combine(const Outputs& outputs, const Plan& plan, const Result& result,
               const CombineOptions& options) override {
    in_python([&] {
      const Values values = values_of(plan, options);
      finish_combine(values, call_combine("combine", outputs, plan, result, options));
    });
  }

  void combine_send(const Outputs& outputs, const Plan& plan, const Result& result,
                    const CombineOptions& options) override {
    in_python([&] {
      call_combine("combine_send", outputs, plan, result, options);
      lane(options.call.lane).values = values_of(plan, options);
    });
  }

  void combine_receive(const CallOptions& call) override {
    in_python([&] {
      const nb::object returned = exchange_.attr("combine_receive")("lane"_a = call.lane);
      finish_combine(lane(call.lane).values, returned);
    });
  }

  void route_values(const float* values, const Plan& plan, float* row_values,
                    const CallOptions& call) override {
    in_python([&] {
      const UsedPlan used = plan_of(plan);
      const nb::object returned = exchange_.attr("route_values")(
          array_of(values, python::kFp32, {used.tokens, config_.top_k}), used.plan, "lane"_a = call.lane);
      copy_floats(returned, used.total, row_values);
    });
  }

  void return_values(const float* row_values, const Plan& plan, float* route_values,
                     const CallOptions& call) override {
    in_python([&] {
      const UsedPlan used = plan_of(plan);
      const nb::object returned = exchange_.attr("return_values")(
          array_of(row_values, python::kFp32, {used.total}), used.plan, "lane"_a = call.lane);
      copy_floats(returned, used.tokens * config_.top_k, route_values);
    });
  }

  DispatchResult combine_backward(const Tokens& d_result, const Plan& plan, const float* topk_weights,
                                  const Outputs& outputs, float* d_weights,
                                  const DispatchOptions& options) override {
    return in_python([&] {
      remember(options.call.lane, d_result, plan, options.memory);
      const UsedPlan used = plan_of(plan);
      const Shape slots{d_result.count, config_.top_k};
      const nb::tuple returned(exchange_.attr("combine_backward")(
          tokens_of(d_result, options), used.plan, array_or_none(topk_weights, python::kFp32, slots),
          outputs_of(outputs, used), "lane"_a = options.call.lane, "sm_limit"_a = options.call.sm_limit,
          "format"_a = format_of(options), "memory"_a = memory_of(options)));
      copy_floats(returned[1], d_result.count * config_.top_k, d_weights);
      return received(options.call.lane, returned[0]);
    });
  }

  void all_gather_v(const AllGather& given, const CallOptions& call) override {
    in_python([&] {
      exchange_.attr("all_gather_v")(
          array_of(given.rows, python::kByte, {given.count, given.row_bytes}),
          array_of(given.gathered, python::kByte, {given.capacity, given.row_bytes}), "lane"_a = call.lane);
    });
  }

  void reduce_scatter_v(const ReduceScatter& given, const CallOptions& call) override {
    in_python([&] {
      const Element element = python::element_of(given.type);
      exchange_.attr("reduce_scatter_v")(array_of(given.rows, element, {given.total, config_.hidden}),
                                         array_of(given.sums, element, {given.count, config_.hidden}),
                                         "lane"_a = call.lane);
    });
  }

  DispatchCounts dispatch_counts(const Ids& ids, std::int64_t tokens, const CallOptions& call) override {
    return in_python([&]() -> DispatchCounts {
      const nb::tuple counts(exchange_.attr("dispatch_counts")(ids_of(ids, tokens), "lane"_a = call.lane));
      Lane& mine = lane(call.lane);
      mine.routes = nb::cast<std::vector<std::int32_t>>(counts[1]);
      mine.tokens = nb::cast<std::vector<std::int32_t>>(counts[2]);
      return {nb::cast<std::int64_t>(counts[0]), mine.routes, mine.tokens};
    });
  }

  const StepMetadata* metadata(std::int32_t count, const CallOptions& call, StepMetadata* into) override {
    return in_python([&] {
      return address_of<const StepMetadata>(exchange_.attr("metadata")(
          count, "lane"_a = call.lane, "out"_a = array_or_none(into, python::kInt32, {3})));
    });
  }

  void check(int lane) override {
    in_python([&] { exchange_.attr("check")(lane); });
  }

  const DispatchResult& last_dispatch_result(int index) override {
    return in_python([&]() -> const DispatchResult& {
      return lane(index).last = received(index, exchange_.attr("last_dispatch_result")(index));
    });
  }

  LoadCounts load_counts() override {
    return in_python([&]() -> LoadCounts {
      const nb::object counts = exchange_.attr("load_counts")();
      const auto list = [&](const char* name) {
        return nb::cast<std::vector<std::int64_t>>(counts.attr(name).attr("tolist")());
      };
      const auto layers =
          nb::cast<std::vector<std::int64_t>>(counts.attr("layers").attr("ravel")().attr("tolist")());
      return {list("experts"), layers, list("ranks"), field<std::int64_t>(counts, "dispatches")};
    });
  }

  WireCounts wire_counts() override {
    return in_python([&]() -> WireCounts {
      const nb::object counts = exchange_.attr("wire_counts")();
      const auto number = [&](const char* name) { return field<std::int64_t>(counts, name); };
      return {number("dispatch_bytes"),
              number("dispatch_messages"),
              number("combine_bytes"),
              number("combine_messages"),
              {number("dispatch_bytes_between_nodes"), number("dispatch_messages_between_nodes"),
               number("combine_bytes_between_nodes"), number("combine_messages_between_nodes")}};
    });
  }

 private:
  // Where the values that a combine returns are wanted.
  struct Values {
    float* to = nullptr;
    std::int64_t count = 0;
  };
  struct UsedPlan {
    nb::object plan;
    std::int64_t tokens = 0, total = 0;  // of a combine: with experts in slices, of all tokens
  };
  struct Lane {
    std::int64_t tokens_given = 0;
    Plan plan;              // by which its last dispatch went; empty: by ids
    ReceiveBuffers memory;  // of that dispatch
    Values values;          // of the combine whose receive phase has not been called
    DispatchResult last;
    HostTotals totals;
    std::int32_t total = 0;
    std::vector<std::int32_t> routes, tokens;
  };

  // Clamps the index: the call itself refuses a lane that does not exist.
  Lane& lane(int index) { return lanes_[static_cast<std::size_t>(std::clamp(index, 0, config_.lanes - 1))]; }

  // The plan that a dispatch has returned, or one over memory of the caller.
  UsedPlan plan_of(const Plan& plan) const {
    if (plan.empty()) return {nb::none()};
    const auto found = plans_.find({plan.storage(), plan.call()});
    if (found != plans_.end()) return found->second;
    const nb::object over = exchange_.attr("plan_over")(
        array_of(plan.storage(), python::kByte, {static_cast<std::int64_t>(plan.bytes())}));
    return {over, field<std::int64_t>(over, "tokens"), field<std::int64_t>(over, "total")};
  }

  Format format_in(const DispatchOptions& options) const { return options.format.value_or(config_.format); }

  PartList parts_in(const DispatchOptions& options) const {
    const Format format = format_in(options);
    const bool by_expert = !options.input_scales.empty() && encoding_of(format).quantises();
    return by_expert ? parts_by_expert(format, config_.hidden) : parts_of(format, config_.hidden);
  }

  static nb::object format_of(const DispatchOptions& options) {
    return options.format ? nb::cast(to_string(*options.format)) : nb::none();
  }

  nb::object tokens_of(const Tokens& tokens, const DispatchOptions& options) const {
    const Format format = format_in(options);
    if (!format.is_raw())
      return rows_of(tokens.parts[0], python::element_of(tokens.type), tokens.count, config_.hidden,
                     tokens.strides[0]);
    nb::list parts;
    const PartList layouts = parts_of(format, config_.hidden);
    for (int p = 0; p < layouts.count; ++p) {
      const auto index = static_cast<std::size_t>(p);
      parts.append(rows_of(tokens.parts[index], python::kByte, tokens.count, layouts.part[p].row_bytes,
                           tokens.strides[index]));
    }
    return nb::tuple(parts);
  }

  nb::object ids_of(const Ids& ids, std::int64_t tokens) const {
    return array_of(ids.data, ids.type == IdType::int32 ? python::kInt32 : python::kInt64,
                    {tokens, config_.top_k});
  }

  nb::object outputs_of(const Outputs& outputs, const UsedPlan& plan) const {
    return rows_of(outputs.data, python::element_of(outputs.type),
                   outputs.rows > 0 ? outputs.rows : plan.total, config_.hidden, outputs.stride);
  }

  nb::object memory_of(const DispatchOptions& options) const {
    const ReceiveBuffers& memory = options.memory;
    const std::int64_t rows = memory.rows > 0 ? std::min(memory.rows, rows_) : rows_;
    const bool indexed = config_.layout == Layout::expert_indexed;
    const std::int64_t part_rows =
        indexed ? std::int64_t{config_.placement.ranks()} * config_.max_tokens : rows_;
    const Shape slots = config_.layout == Layout::rank_major ? Shape{rows, config_.top_k} : Shape{rows};
    nb::object parts = nb::none();
    // Of all parts, or of none.
    const PartList layouts = parts_in(options);
    if (std::all_of(memory.parts.begin(), memory.parts.begin() + layouts.count,
                    [](const void* part) { return part != nullptr; })) {
      nb::list list;
      const bool padded = config_.layout == Layout::expert_padded;
      for (int p = 0; p < layouts.count; ++p) {
        const PartLayout& layout = layouts.part[p];
        Shape shape{indexed ? part_rows : rows, layout.row_bytes};
        if (layout.tiles) shape = {(rows_ + 127) / 128 + groups_, elements_of(layout), 32, 4, 4};
        if (layout.columns)
          shape = {part_bytes_total(layout, {part_rows, groups_, padded ? rows_ / groups_ : 0})};
        list.append(array_of(memory.parts[static_cast<std::size_t>(p)], python::kByte, shape));
      }
      parts = nb::tuple(list);
    }
    const auto plan_bytes = field<std::int64_t>(exchange_, "plan_bytes");
    return nb::module_::import_("ferry").attr("ReceiveBuffers")(
        parts, "weight"_a = array_or_none(memory.weight, python::kFp32, slots),
        "local_ids"_a = array_or_none(memory.local_ids, python::kInt32, slots),
        "group_of_row"_a = array_or_none(memory.group_of_row, python::kInt32, {rows}),
        "plan"_a = array_or_none(memory.plan, python::kByte, {plan_bytes}),
        "counts"_a = array_or_none(memory.counts, python::kInt32, {groups_}),
        "row_offsets"_a = array_or_none(memory.row_offsets, python::kInt32, {groups_ + 1}),
        "dots"_a = array_or_none(memory.dots, python::kFp32, {rows}),
        "count_sums"_a = array_or_none(memory.count_sums, python::kInt32, {groups_}), "rows"_a = memory.rows,
        "allow_truncation"_a = memory.allow_truncation);
  }

  void remember(int index, const Tokens& tokens, const Plan& plan, const ReceiveBuffers& memory) {
    lane(index).tokens_given = tokens.count;
    lane(index).plan = plan;
    lane(index).memory = memory;
  }

  nb::object call_dispatch(const char* method, const Tokens& tokens, const Routes& routes,
                           const float* weights, const DispatchOptions& options) {
    remember(options.call.lane, tokens, routes.plan, options.memory);
    const Shape slots{tokens.count, config_.top_k};
    const bool weighted = weights != nullptr || options.weighted;
    return exchange_.attr(method)(
        tokens_of(tokens, options),
        routes.plan.empty() ? ids_of(routes.ids, tokens.count) : plan_of(routes.plan).plan,
        weighted ? array_of(weights, python::kFp32, slots) : nb::none(), "lane"_a = options.call.lane,
        "sm_limit"_a = options.call.sm_limit, "format"_a = format_of(options),
        "memory"_a = memory_of(options), "apply_weights"_a = options.apply_weights, "layer"_a = options.layer,
        "dot_rows"_a = options.dot_rows == nullptr
                           ? nb::none()
                           : rows_of(options.dot_rows, python::element_of(config_.combine_type), rows_,
                                     config_.hidden, 0),
        "global_scale"_a = array_or_none(options.global_scale, python::kFp32, {1}),
        "input_scales"_a = array_or_none(options.input_scales.data(), python::kFp32,
                                         {static_cast<std::int64_t>(options.input_scales.size())}));
  }

  DispatchResult received(int index, const nb::object& result) {
    Lane& mine = lane(index);
    DispatchResult found;
    const nb::tuple parts(result.attr("parts"));
    for (std::size_t p = 0; p < nb::len(parts); ++p) found.parts[p] = part_of(parts[p], mine.memory.parts[p]);
    found.data = found.parts[0].data;
    found.groups = field<int>(result, "groups");
    found.capacity = field<std::int64_t>(result, "capacity");
    found.counts = address_of(result.attr("counts"), mine.memory.counts);
    found.row_offsets = address_of(result.attr("row_offsets"), mine.memory.row_offsets);
    mine.total = field<std::int32_t>(result, "total");
    found.total = &mine.total;
    found.group_expert = address_of<std::int32_t>(result.attr("group_expert"));
    found.source = address_of<Source>(result.attr("source"));
    found.weight = address_of(result.attr("weight"), mine.memory.weight);
    found.local_ids = address_of(result.attr("local_ids"), mine.memory.local_ids);
    found.group_of_row = address_of(result.attr("group_of_row"), mine.memory.group_of_row);
    found.dots = address_of(result.attr("dots"), mine.memory.dots);
    found.tile_offsets = address_of<std::int32_t>(result.attr("tile_offsets"));
    found.index = address_of<std::int32_t>(result.attr("index"));
    found.slot = address_of<std::int32_t>(result.attr("slot"));
    found.block_group = address_of<std::int32_t>(result.attr("block_group"));
    found.source_offsets = address_of<std::int32_t>(result.attr("source_offsets"));
    if (found.source_offsets != nullptr) {
      found.row_total = found.source_offsets + config_.placement.ranks();
      found.row_capacity = static_cast<std::int64_t>(nb::len(nb::object(result.attr("data"))));
    }
    found.call = field<std::uint64_t>(result, "call");
    mine.totals = {found.call, nb::cast<std::int64_t>(result.attr("wait_total")())};
    found.host = &mine.totals;
    const nb::object plan = result.attr("plan");
    const python::Array storage = python::inspect(plan.attr("storage"), "storage");
    const std::uint64_t call = mine.plan.empty() ? found.call : mine.plan.call();
    found.plan = Plan::over(storage.data, static_cast<std::size_t>(storage.shape[0]), call);
    if (mine.plan.empty()) plans_[{storage.data, call}] = {plan, mine.tokens_given, found.host->total};
    return found;
  }

  Values values_of(const Plan& plan, const CombineOptions& options) const {
    if (options.route_values == nullptr) return {};
    return {options.route_values, plan_of(plan).tokens * config_.top_k};
  }

  nb::object call_combine(const char* method, const Outputs& outputs, const Plan& plan, const Result& result,
                          const CombineOptions& options) const {
    const UsedPlan used = plan_of(plan);
    const std::int64_t tokens = used.tokens, hidden = config_.hidden;
    const Element type = python::element_of(result.type);
    const std::int64_t step = result.stride > 0 ? result.stride : hidden * bytes_of(result.type);
    const bool values = options.row_values != nullptr || options.route_values != nullptr;
    const bool unreduced = options.reduction.value_or(config_.reduction) == Reduction::unreduced;
    const nb::object to = unreduced ? array_of(result.data, type, {tokens, config_.top_k, hidden},
                                               {config_.top_k * step, step, bytes_of(result.type)})
                                    : rows_of(result.data, type, tokens, hidden, step);
    const bool topk_weighted = options.topk_weights != nullptr || options.topk_weighted;
    const void* residual = options.epilogue.residual;
    return exchange_.attr(method)(
        outputs_of(outputs, used), used.plan,
        "row_weights"_a = array_or_none(options.row_weights, python::kFp32, {used.total}),
        "topk_weights"_a = topk_weighted
                               ? array_of(options.topk_weights, python::kFp32, {tokens, config_.top_k})
                               : nb::none(),
        "reduction"_a = options.reduction ? nb::cast(to_string(*options.reduction)) : nb::none(),
        "row_values"_a = values ? array_of(options.row_values, python::kFp32, {used.total}) : nb::none(),
        "result"_a = to,
        "shared_outputs"_a =
            array_or_none(options.shared_outputs, type, {config_.shared_experts, tokens, hidden}),
        "residual"_a = residual == nullptr ? nb::none()
                                           : rows_of(residual, type, tokens, hidden, options.epilogue.stride),
        "scale"_a = options.epilogue.scale, "lane"_a = options.call.lane,
        "sm_limit"_a = options.call.sm_limit);
  }

  static void finish_combine(const Values& values, const nb::object& returned) {
    if (values.to != nullptr) copy_floats(returned[1], values.count, values.to);
  }

  nb::object exchange_;
  Config config_;                                                    // with every default filled in
  std::int64_t groups_ = 0, rows_ = 0;                               // most rows that this rank receives
  std::map<std::pair<const void*, std::uint64_t>, UsedPlan> plans_;  // by storage and call
  std::vector<Lane> lanes_;
};

}  // namespace

const Language kPython{"Python",
                       [](const Rank& rank, const Config& config) -> std::unique_ptr<ForeignExchange> {
                         return std::make_unique<ExchangeInPython>(rank, config);
                       }};

}  // namespace ferry::contract
