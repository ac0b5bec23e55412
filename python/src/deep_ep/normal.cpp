// The normal calls of ferry.deep_ep.
#include "deep_ep/normal.hpp"

#include <vector>

#include "base/text.hpp"
#include "cast.hpp"
#include "casters.hpp"
#include "combine.hpp"
#include "errors.hpp"
#include "ferry/error.hpp"
#include "host_parts.hpp"
#include "interpreter.hpp"

namespace ferry::python {

// The results of a dispatch, in new memory. The plan does not depend on the counts of rows, so it is
// allocated before the host waits for them.
struct NormalCalls::Received {
  explicit Received(NewArrays arrays_of) : arrays(arrays_of) {}

  void allocate_plan(const PyExchange& exchange) {
    const PartTimer timer(HostPart::allocation);
    plan = arrays.make(exchange.receive_sizes().plan, memory.plan);
  }

  // Memory for `rows` rows; with `fill` the ids of rows that are not received are -1.
  void allocate_rows(const Routes& routes, std::int64_t rows, bool fill) {
    const PartTimer timer(HostPart::allocation);
    memory.rows = std::max<std::int64_t>(rows, 1);
    for (std::size_t p = 0; p < static_cast<std::size_t>(routes.rows.parts); ++p) {
      parts[p] =
          arrays.make({routes.rows.elements[p], {memory.rows, routes.rows.columns[p]}}, memory.parts[p]);
    }
    if (!routes.has_ids()) return;
    const Shape of_slots = {memory.rows, routes.slots};
    weights = arrays.make({kFp32, of_slots}, memory.weight);
    ids = arrays.make({kInt32, of_slots}, memory.local_ids);
    if (fill) ids.attr(arrays.framework() == Framework::torch ? "fill_" : "fill")(-1);
  }

  std::vector<nb::object> all() const {
    std::vector<nb::object> all = {plan, parts[0]};
    for (const nb::object& array : {parts[1], weights, ids}) {
      if (array.is_valid()) all.push_back(array);
    }
    return all;
  }

  NewArrays arrays;
  std::array<nb::object, 2> parts{};
  nb::object weights, ids, plan;
  ReceiveBuffers memory;
};

namespace {

int sm_limit_of(const LaneCall& call, int num_sms) {
  return is_host(call.device()) ? 0 : num_sms;
}

// The ids as int64 if topk_idx is.
nb::object as_type_of_ids(const nb::object& ids, Framework framework, Element element) {
  if (element == kInt32) return ids;
  return framework == Framework::torch ? ids.attr("long")() : ids.attr("astype")("int64");
}

nb::list rounded_up(const std::vector<std::int32_t>& counts, std::int64_t alignment) {
  nb::list list = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(counts.size())));
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const std::int64_t rounded = (counts[i] + alignment - 1) / alignment * alignment;
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromLongLong(rounded));
  }
  return list;
}

DispatchCounts counts_of(LaneCall& call, const Routes& routes) {
  const PartTimer timer(HostPart::waiting);
  const GilRelease unlocked;
  return in_words(kNormalWords, [&] {
    return call.exchange().dispatch_counts(routes.in.ids, routes.in.tokens.count, call.options());
  });
}

}  // namespace

Place NormalCalls::place_of(const nb::object& like) const {
  if (current_.exchange != nullptr)
    return {current_.exchange->framework(), current_.exchange->state().device};
  const bool many = nb::isinstance<nb::tuple>(like) || nb::isinstance<nb::list>(like);
  const nb::object first = many && nb::len(like) > 0 ? nb::object(like[0]) : like;
  const Array found = inspect(first, "x");
  return {found.framework, found.device};
}

Stream NormalCalls::stream_of_exchange() const {
  const PyExchange* const exchange = current_.exchange;
  return exchange == nullptr ? Stream{}
                             : stream_of(nb::none(), exchange->framework(), exchange->state().device);
}

bool NormalCalls::fits(const NormalShape& shape, std::int64_t tokens) const {
  return current_.exchange != nullptr && current_.shape == shape &&
         tokens <= current_.exchange->config().max_tokens;
}

void NormalCalls::refuse(const std::string& reason, Stream stream, Operation operation) {
  LaneCall call(*current_.exchange, 0);
  call.set_stream(stream);
  const GilRelease unlocked;
  call.exchange().refuse(operation, UsageError(reason), call.options());
}

const NormalHandle& NormalCalls::handle_of(const nb::object& object, Operation operation) {
  try {
    return cast_argument<NormalHandle>(object, "handle", "a handle of dispatch");
  } catch (const UsageError& error) {
    if (current_.exchange != nullptr) refuse(error.what(), stream_of_exchange(), operation);
    throw;
  }
}

void NormalCalls::require_rdma_bytes(const CallSettings& settings, std::int64_t row_bytes,
                                     std::int64_t scales, std::int64_t slots) const {
  if (topology_.nodes() == 1) return;
  const auto needed = nb::cast<std::int64_t>(
      python_.attr("rdma_bytes")(settings.config, settings.default_sms, row_bytes, scales, slots));
  const auto given = nb::cast<std::int64_t>(python_.attr("num_rdma_bytes"));
  if (given >= needed) return;
  throw UsageError(str("Buffer: num_rdma_bytes = ", given, ", but a call between nodes with rows of ",
                       counted(row_bytes, "byte"), " takes ", needed,
                       " with this config: pass what config.get_rdma_buffer_size_hint returns"));
}

void NormalCalls::agree(const nb::object& error, const Routes* routes, std::int64_t tokens) {
  const bool on_device = routes != nullptr && !is_host(routes->in.arguments.device());
  nb::object settings = nb::none();
  if (routes != nullptr)
    settings = nb::make_tuple(routes->shape.hidden, routes->shape.experts, routes->shape.top_k);
  nb::object owner = python_.attr("agree")(on_device, error, settings, tokens);
  auto& exchange = nb::cast<PyExchange&>(owner);
  const Framework framework = routes->in.arguments.framework();
  exchange.set_framework(framework);
  current_ = {std::move(owner), &exchange, routes->shape};
  const Device mine = exchange.state().device, theirs = routes->in.arguments.device();
  if (mine.device_id == theirs.device_id) return;
  const UsageError wrong(str("x: expected an array on ", name_of(mine),
                             ", the exchange's device, got one on ", name_of(theirs)));
  refuse(wrong.what(), stream_of(nb::none(), framework, mine));
  throw wrong;
}

void NormalCalls::make_room(const nb::object& error, const Routes* routes, std::int64_t worst,
                            Stream stream) {
  const std::int64_t most = (worst + ranks_ - 1) / ranks_;
  const std::int64_t tokens = routes == nullptr ? 0 : std::max(most, routes->in.tokens.count);
  if (current_.exchange == nullptr) return agree(error, routes, tokens);
  if (routes == nullptr) {
    refuse(text_of(error), stream);
    raise(error);
  }
  if (fits(routes->shape, most)) return;  // the exchange refuses more tokens than it has room for
  refuse(kMustAgree, stream);
  agree(nb::none(), routes, tokens);
}

std::optional<DispatchCounts> NormalCalls::count(LaneCall& call, const Routes& routes) {
  try {
    return counts_of(call, routes);
  } catch (const UsageError& refusal) {
    if (!must_agree(refusal)) throw;
    return std::nullopt;
  }
}

nb::tuple NormalCalls::dispatch(const NormalDispatch& arguments) {
  const auto& [given, settings] = arguments;
  std::optional<PartTimer> timer(std::in_place, HostPart::arguments);
  require_open();
  Place place;
  std::optional<StreamedCall> streamed;
  std::optional<Routes> routes;
  nb::object error = nb::none();
  int num_sms = 0;
  try {
    place = place_of(given.x);
    timer.emplace(HostPart::streams);
    streamed.emplace(streams(), place.framework, place.device, event_of(settings.previous_event),
                     settings.is_async());
    timer.emplace(HostPart::arguments);
    num_sms = settings.checked();
    routes.emplace(given, place, topology_);
    require_rdma_bytes(settings, routes->rows.row_bytes(), routes->rows.scale_columns, routes->shape.top_k);
  } catch (const std::exception&) {
    error = exception_object(std::current_exception());
    routes.reset();
  }
  const Stream stream = streamed ? streamed->stream() : stream_of_exchange();
  Routes* const read = routes ? &*routes : nullptr;
  const std::int64_t tokens = routes ? routes->in.tokens.count : 0;
  const Framework framework = routes ? routes->in.arguments.framework() : Framework::numpy;
  timer.reset();
  if (const std::optional<std::int64_t> worst = given.worst_rows()) {
    make_room(error, read, *worst, stream);
    Received received(NewArrays(framework, place.device));
    LaneCall call(*current_.exchange, 0);
    call.set_stream(stream);
    return deliver(call, *routes, received, nullptr, given, *streamed, num_sms);
  }
  if (routes && fits(routes->shape, tokens)) {
    Received received(NewArrays(framework, place.device));
    LaneCall call(*current_.exchange, 0);
    call.set_stream(stream);
    call.read_or_refuse({Operation::dispatch_counts}, [&] { received.allocate_plan(*current_.exchange); });
    if (const std::optional<DispatchCounts> counts = count(call, *routes))
      return deliver(call, *routes, received, &*counts, given, *streamed, num_sms);
  } else if (current_.exchange != nullptr) {
    refuse(kMustAgree, stream);
  }
  agree(error, read, tokens);
  Received received(NewArrays(framework, place.device));
  LaneCall call(*current_.exchange, 0);
  call.set_stream(stream);
  const DispatchCounts counts = counts_of(call, *routes);
  return deliver(call, *routes, received, &counts, given, *streamed, num_sms);
}

nb::tuple NormalCalls::deliver(LaneCall& call, Routes& routes, Received& received,
                               const DispatchCounts* counts, const NewRoutes& given, StreamedCall& streamed,
                               int num_sms) {
  const Current current = current_;  // kept while this thread runs without the GIL
  PyExchange& exchange = *current.exchange;
  const std::int64_t rows = counts != nullptr ? counts->total : *given.worst_rows();
  DispatchInput& in = routes.in;
  call.read_or_refuse({Operation::dispatch}, [&] {
    if (const std::int64_t most = exchange.config().max_tokens; in.tokens.count > most) {
      throw UsageError(str("x: ", counted(in.tokens.count, "token"), ", but num_worst_tokens = ", rows,
                           " has room for ", most,
                           " of each rank: pass the ranks times the most tokens of one"));
    }
    if (!received.plan.is_valid()) received.allocate_plan(exchange);
    received.allocate_rows(routes, rows, counts == nullptr);
  });
  in.options.memory = received.memory;
  in.options.weighted = routes.has_ids();
  in.options.call = call.options(sm_limit_of(call, num_sms));
  std::optional<PartTimer> timer(std::in_place, HostPart::exchange);
  nb::object node_routes = nb::none();
  const auto exchange_node_routes = [&] {
    if (topology_.nodes() > 1)
      node_routes =
          python_.attr("node_routes")(current.owner, given.is_token_in_rank, sm_limit_of(call, num_sms));
  };
  try {
    run("a dispatch with num_worst_tokens of the last one's shape and size",
        [&] { call.exchange().dispatch(in.tokens, in.ids, in.weights, in.options); });
  } catch (const Error& error) {
    if (LaneCall::delivers_result(error)) exchange_node_routes();  // the peers' calls go on
    if (const auto* overflow = dynamic_cast<const OverflowError*>(&error))
      throw OverflowError(
          str("dispatch: num_worst_tokens = ", overflow->overflow.capacity, ", but rank ",
              overflow->overflow.rank, " is sent ", counted(overflow->overflow.needed, "row")),
          overflow->overflow);
    throw;
  }
  exchange_node_routes();
  timer.emplace(HostPart::results);
  const ReceiveSizes& sizes = exchange.receive_sizes();
  PyPlan plan{.plan = Plan::over(received.memory.plan, static_cast<std::size_t>(sizes.plan_bytes)),
              .owner = received.plan,
              .framework = in.arguments.framework(),
              .device = call.device(),
              .shape = sizes.plan_shape,
              .tokens = in.tokens.count,
              .row_bound = std::min(rows, sizes.rows),
              .storage_writes = write_count(received.memory.plan)};
  nb::list list;
  NormalHandle handle{.owner = current.owner,
                      .exchange = &exchange,
                      .plan = std::move(plan),
                      .rows = rows,
                      .is_token_in_rank = given.is_token_in_rank,
                      .tokens_of_ranks = {},
                      .channels = std::max(1, num_sms / 2),
                      .topology = topology_,
                      .node_routes = node_routes};
  if (counts != nullptr) {
    handle.tokens_of_ranks.assign(counts->tokens.begin(), counts->tokens.end());
    list = rounded_up(routes.has_ids() ? std::vector(counts->routes.begin(), counts->routes.end())
                                       : nb::cast<std::vector<std::int32_t>>(
                                             python_.attr("expert_counts")(given.routes_per_expert)),
                      routes.alignment);
  }
  nb::object ids = nb::none(), weights = nb::none();
  std::vector<nb::object> outputs = received.all();
  if (routes.has_ids()) {
    ids = as_type_of_ids(first_rows(received.ids, rows), in.arguments.framework(), routes.id_element);
    weights = first_rows(received.weights, rows);
    outputs.push_back(ids);
  }
  nb::object recv_x = recv_x_of(routes.rows, received.parts, rows);
  timer.emplace(HostPart::streams);
  std::vector<nb::object> inputs = in.arguments.owners();
  if (!node_routes.is_none()) {
    inputs.push_back(given.is_token_in_rank);
    outputs.push_back(node_routes);
  }
  nb::object event = streamed.finish(std::move(inputs), outputs);
  return nb::make_tuple(std::move(recv_x), std::move(ids), std::move(weights), std::move(list),
                        nb::cast(std::move(handle)), std::move(event));
}

nb::tuple NormalCalls::dispatch_by_handle(const NormalDispatchByHandle& given) {
  const CallSettings& settings = given.settings;
  std::optional<PartTimer> timer(std::in_place, HostPart::arguments);
  require_open();
  const NormalHandle& handle = handle_of(given.handle, Operation::dispatch);
  LaneCall call(*handle.exchange, 0);
  call.set_stream(stream_of(nb::none(), handle.plan.framework, call.device()));
  std::optional<StreamedCall> streamed;
  DispatchInput in(call.device(), Gradients::recorded);
  InputRows rows;
  std::array<nb::object, 2> parts{};
  call.read_or_refuse({Operation::dispatch}, [&] {
    timer.emplace(HostPart::streams);
    streamed.emplace(streams(), handle.plan.framework, call.device(), event_of(settings.previous_event),
                     settings.is_async());
    call.set_stream(streamed->stream());
    timer.emplace(HostPart::arguments);
    in.options.call = call.options(sm_limit_of(call, settings.checked()));
    if (is_true(given.with_ids)) throw UsageError("dispatch: a handle excludes topk_idx and topk_weights");
    rows = read_rows(given.x, in);
    const std::int64_t hidden = handle.exchange->config().hidden;
    if (in.tokens.count != handle.plan.tokens || rows.columns[0] != hidden) {
      throw UsageError(str("x: expected shape ", shape_text({handle.plan.tokens, hidden}),
                           " as in the dispatch that returned the handle, got ",
                           shape_text({in.tokens.count, rows.columns[0]})));
    }
    require_rdma_bytes(settings, rows.row_bytes(), rows.scale_columns, 0);
    const PartTimer allocating(HostPart::allocation);
    const NewArrays arrays(in.arguments.framework(), call.device());
    const std::int64_t room = std::max<std::int64_t>(handle.rows, 1);
    for (std::size_t p = 0; p < static_cast<std::size_t>(rows.parts); ++p)
      parts[p] = arrays.make({rows.elements[p], {room, rows.columns[p]}}, in.options.memory.parts[p]);
  });
  timer.emplace(HostPart::exchange);
  run("a dispatch with a handle",
      [&] { call.exchange().dispatch(in.tokens, handle.plan.plan, nullptr, in.options); });
  timer.emplace(HostPart::results);
  nb::object recv_x = recv_x_of(rows, parts, handle.rows);
  std::vector<nb::object> inputs = in.arguments.owners(), outputs = {parts[0]};
  inputs.push_back(handle.plan.owner);
  if (rows.parts == 2) outputs.push_back(parts[1]);
  timer.emplace(HostPart::streams);
  nb::object event = streamed->finish(std::move(inputs), outputs);
  return nb::make_tuple(std::move(recv_x), nb::none(), nb::none(), nb::none(), nb::none(), std::move(event));
}

namespace {

std::vector<nb::object> biases_of(const nb::object& bias) {
  std::vector<nb::object> biases;
  if (nb::isinstance<nb::tuple>(bias) || nb::isinstance<nb::list>(bias)) {
    for (const nb::handle term : bias) {
      if (!term.is_none()) biases.push_back(nb::borrow(term));
    }
  } else if (!bias.is_none()) {
    biases.push_back(bias);
  }
  if (biases.size() > 2) throw UsageError(str("bias: expected at most two arrays, got ", biases.size()));
  return biases;
}

// Throws UsageError unless `count` is the number of rows that the dispatch of the handle has returned; with
// num_worst_tokens it may leave out some that were not received.
void check_count(const char* name, std::int64_t count, const NormalHandle& handle) {
  const std::int64_t needed = max_rows_touched(handle.plan);
  if (count >= needed && count <= handle.rows) return;
  throw UsageError(
      str(name, ": expected the ", counted(handle.rows, "row"), " that the dispatch of the handle returned",
          needed < handle.rows ? str(", or of these the first ", needed, " or more") : "", ", got ", count));
}

void read_rows(const nb::object& x, const NormalHandle& handle, std::int64_t hidden, CombineInput& in) {
  const Array& array = in.arguments.rows(x, "x", hidden, {kBf16});
  const StridedRows rows = strided_rows(array, "x");
  check_count("x", rows.count, handle);
  in.outputs = {array.data, DType::bf16, rows.stride, rows.count};
}

// Arrays that PyTorch or NumPy reads: shape and type alone matter.
const Array& check_operand(const nb::object& object, const std::string& name, Element element,
                           const Shape& shape, CombineInput& in) {
  const Array& array = in.arguments.add(object, name.c_str());
  bool same = array.shape.size() == shape.size();
  for (std::size_t i = 0; same && i < shape.size(); ++i) same = shape[i] < 0 || shape[i] == array.shape[i];
  if (array.element == element && same) return array;
  const std::string wanted = shape[0] < 0 ? str("[any, ", shape[1], "]") : shape_text(shape);
  throw UsageError(str(name, ": expected ", name_of(element), " of shape ", wanted, ", got ",
                       name_of(array.element), " of shape ", shape_text(array.shape)));
}

}  // namespace

nb::tuple NormalCalls::combine(const NormalCombine& given) {
  const auto& [x, object, topk_weights, bias, settings] = given;
  std::optional<PartTimer> timer(std::in_place, HostPart::arguments);
  require_open();
  const NormalHandle& handle = handle_of(object, Operation::combine);
  const Config& config = handle.exchange->config();
  const Framework framework = handle.plan.framework;
  std::optional<StreamedCall> streamed;
  CombineInput in(handle.plan.device, Gradients::recorded);
  std::vector<nb::object> biases;
  {
    LaneCall call(*handle.exchange, 0);
    call.set_stream(stream_of(nb::none(), framework, call.device()));
    call.read_or_refuse({Operation::combine}, [&] {
      timer.emplace(HostPart::streams);
      streamed.emplace(streams(), framework, handle.plan.device, event_of(settings.previous_event),
                       settings.is_async());
      call.set_stream(streamed->stream());
      timer.emplace(HostPart::arguments);
      const int num_sms = settings.checked();
      in.options.call = call.options(is_host(call.device()) ? 0 : num_sms);
      read_rows(x, handle, config.hidden, in);
      require_rdma_bytes(settings, 2 * std::int64_t{config.hidden}, 0,
                         topk_weights.is_none() ? 0 : config.top_k);
      const Shape shape = {handle.plan.tokens, config.hidden};
      biases = biases_of(bias);
      for (std::size_t i = 0; i < biases.size(); ++i)
        check_operand(biases[i], str("bias[", i, "]"), kBf16, shape, in);
      if (!topk_weights.is_none()) {
        check_count("topk_weights",
                    check_operand(topk_weights, "topk_weights", kFp32, {-1, config.top_k}, in).shape[0],
                    handle);
      }
      const PartTimer allocating(HostPart::allocation);
      in.result_array = new_array(framework, biases.empty() ? kBf16 : kFp32, shape, call.device());
      read_result(shape, "result", in);
    });
    timer.emplace(HostPart::exchange);
    try {
      run("a combine", [&] { call.exchange().combine(in.outputs, handle.plan.plan, in.result, in.options); });
    } catch (const Error& error) {
      // The peers' calls go on.
      if (LaneCall::delivers_result(error) && !topk_weights.is_none())
        python_.attr("combined_weights")(object, topk_weights);
      throw;
    }
  }
  timer.emplace(HostPart::results);
  nb::object result = in.result_array, weights = nb::none();
  std::vector<nb::object> inputs = in.arguments.owners(), outputs = {in.result_array};
  inputs.push_back(handle.plan.owner);
  if (!topk_weights.is_none()) {  // before what may raise on this rank alone: the peers make this call too
    weights = python_.attr("combined_weights")(object, topk_weights);
    outputs.push_back(weights);
  }
  if (!biases.empty()) {
    static CachedAttribute with_biases;
    result = with_biases.get("ferry.deep_ep._normal", "with_biases")(result, biases);
    outputs.push_back(result);
  }
  timer.emplace(HostPart::streams);
  nb::object event = streamed->finish(std::move(inputs), outputs);
  return nb::make_tuple(std::move(result), std::move(weights), std::move(event));
}

}  // namespace ferry::python
