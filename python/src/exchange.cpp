// Constructs a Python Exchange and binds its methods, dispatch and combine excepted.
#include "exchange.hpp"

#include <algorithm>
#include <cstring>

#include "arrays/framework.hpp"
#include "base/errors.hpp"
#include "base/text.hpp"
#include "bindings.hpp"
#include "call_binding.hpp"
#include "cast.hpp"
#include "casters.hpp"
#include "config.hpp"
#include "dispatch.hpp"
#include "exchange/configuration.hpp"
#include "group.hpp"
#include "interpreter.hpp"
#include "lane_call.hpp"
#include "process_owner.hpp"
#include "setting_values.hpp"

namespace ferry::python {

using namespace nb::literals;

nb::object owner_of(const SharedState& state) {
  return nb::capsule(new SharedState(state),
                     [](void* shared) noexcept { delete static_cast<SharedState*>(shared); });
}

namespace {

ReceiveSizes receive_sizes_of(const Exchange& exchange) {
  const Config& config = exchange.config();
  const int rank = exchange.rank().index();
  const std::int64_t rows = row_capacity(config, rank), groups = groups_of(config, rank);
  const std::int64_t bytes = plan_bytes(config, config.placement.ranks());
  const bool padded = config.layout == Layout::expert_padded;
  return {.shape = padded ? Shape{groups, exchange.capacity(), config.hidden} : Shape{rows, config.hidden},
          .rows = rows,
          .groups = groups,
          .plan_bytes = bytes,
          .part_rows = row_room(config, rank).rows,
          .group_rows = padded ? exchange.capacity() : 0,
          .plan_shape = plan_shape(inner_config(config)),
          .weight = {kFp32, {rows}},
          .counts = {kInt32, {groups}},
          .row_offsets = {kInt32, {groups + 1}},
          .plan = {kByte, {bytes}}};
}

}  // namespace

PyExchange::PyExchange(SharedState state)
    : process_(this_process()),
      state_(std::move(state)),
      state_owner_(owner_of(state_)),
      sizes_(receive_sizes_of(state_->exchange)),
      lanes_(state_->lanes.size()) {}

ExchangeState& PyExchange::state() const {
  if (!state_) throw UsageError("exchange: used after destroy()");
  require_own_process("exchange", process_);
  return *state_;
}

void PyExchange::destroy() {
  state_.reset();
  state_owner_.reset();
  lanes_.clear();
  placeholder_.reset();
}

std::size_t PyExchange::checked_lane(int lane) const {
  const int lanes = config().lanes;
  if (lane < 0 || lane >= lanes) throw UsageError(str("lane = ", lane, ", must be 0 to ", lanes - 1));
  return static_cast<std::size_t>(lane);
}

PyDispatchResult PyExchange::make_result(int lane, const DispatchResult& received) const {
  const DispatchContext& context = lanes_[checked_lane(lane)].context;
  PyDispatchResult result{.received = received,
                          .context = context,
                          .state = state_,
                          .state_owner = state_owner_,
                          .plan = context.plan};
  if (!context.plan.is_none()) return result;
  const bool in_lane = context.memory.plan.is_none();
  PyPlan plan{.plan = received.plan,
              .owner = in_lane ? state_owner_ : context.memory.plan,
              .framework = context.framework,
              .device = context.device,
              .shape = sizes_.plan_shape,
              .tokens = context.tokens,
              .storage_writes = write_count(received.plan.storage())};
  if (config().placement.tp() > 1) {
    plan.all_tokens = plan.tokens;
    const int me = state_->exchange.rank().index(), tp = config().placement.tp();
    plan.tokens = TokenSlice::of(plan.all_tokens, me % tp, tp).count;
    if (is_host(context.device)) {
      plan.gathered_total = *received.total;
    } else {
      plan.row_bound = received.capacity;  // until the host has read the total
    }
  }
  if (in_lane) {
    plan.state = state_;
    plan.lane = lane;
    plan.plan_version = state_->lanes[static_cast<std::size_t>(lane)].plan_version;
    if (is_host(context.device))
      plan.header_check = view_plan(received.plan.storage(), plan.shape).header->check;
  }
  result.plan = nb::cast(std::move(plan));
  return result;
}

void* PyExchange::address_of(const Array& array) {
  alignas(16) static float on_host[4] = {};
  if (array.data != nullptr) return array.data;
  if (is_host(state().device)) return on_host;
  if (!placeholder_.is_valid()) placeholder_ = new_array(array.framework, kFp32, {4}, state().device);
  return inspect(placeholder_, "placeholder").data;
}

PyPlan plan_over(const PyExchange& self, const nb::object& storage, std::optional<std::int64_t> tokens) {
  ExchangeState& state = self.state();
  if (self.config().placement.tp() > 1) {
    throw UnsupportedError(
        "plan_over: experts in slices do not have it, because their plans do not hold all tokens: keep "
        "plan.copy()");
  }
  Arguments arguments(state.device);
  const Array& array = arguments.dense(storage, "storage", kByte, {-1});
  PyPlan result{.plan = Plan::over(array.data, static_cast<std::size_t>(array.shape[0])),
                .owner = array.owner,
                .framework = array.framework,
                .device = state.device,
                .shape = self.receive_sizes().plan_shape,
                .storage_writes = write_count(array.data)};
  const Plan& plan = result.plan;
  const auto needed = static_cast<std::size_t>(view_plan(nullptr, result.shape).bytes);
  if (plan.bytes() < needed)
    throw UsageError(
        str("storage: expected ", counted(needed, "byte"), " or more (plan_bytes), got ", plan.bytes()));
  const bool host = is_host(state.device);
  if (host && !is_complete(*static_cast<const PlanHeader*>(array.data)))
    throw UsageError("storage: does not hold a complete plan");
  if (!host && !tokens)
    throw UsageError("tokens: needed, because the host cannot read N from a plan in device memory");
  result.tokens = tokens.value_or(host ? plan.tokens() : 0);
  if (result.tokens < 0 || result.tokens > self.config().max_tokens)
    throw UsageError(str("tokens = ", result.tokens, ", must be 0 to ", self.config().max_tokens));
  if (host && result.tokens != plan.tokens())
    throw UsageError(str("tokens = ", result.tokens, ", but the plan has ", counted(plan.tokens(), "token")));
  return result;
}

namespace {

Rank rank_of(const nb::object& group_or_rank) {
  if (const PyRank* rank = cast_or_null<PyRank>(group_or_rank)) return rank->checked();
  return cast_argument<PyGroup>(group_or_rank, "exchange", "a Group or a Rank").join().checked();
}

MemoryKind default_memory(const nb::object& group_or_rank) {
  const PyGroup* group = cast_or_null<PyGroup>(group_or_rank);
  return group != nullptr ? group->default_memory() : MemoryKind::host;
}

Config config_from(const nb::object& given, const nb::kwargs& settings) {
  if (given.is_none()) return config_of(settings);
  if (nb::len(nb::handle(settings)) > 0)
    throw UsageError("exchange: expected a Config or settings, got both");
  return cast_argument<Config>(given, "exchange", "a Config");
}

// For code above this module, whose own arguments may be wrong.
void refuse_construction(const nb::object& group, const std::string& reason) {
  const Rank rank = rank_of(group);
  const GilRelease unlocked;
  refuse_configuration(rank, UsageError(reason));
}

bool on_device(const Config& config) {
  return chosen_memory(config) == MemoryKind::device;
}

Device device_or_refuse(const Rank& rank, const Config& config, std::optional<int> device) {
  if (!on_device(config)) return kHost;
  return or_refuse([&](const Error& error) { refuse_configuration(rank, error); },
                   [&]() -> Device {
                     // current_device() also reports a missing backend, driver or GPU, so ask it even if
                     // `device` is given.
                     return {nb::device::cuda::value, device.value_or(current_device())};
                   });
}

// Construction compares configurations across ranks. A rank without a usable one refuses, so that the other
// ranks get the same error and do not wait.
void construct(PyExchange* self, const nb::object& group, const nb::object& config, const nb::args& surplus,
               const nb::object& given_device, const nb::kwargs& settings) {
  const Rank rank = rank_of(group);
  Config checked;
  std::optional<int> device;
  const auto refuse = [&](const Error& error) {
    const GilRelease unlocked;
    refuse_configuration(rank, error);
  };
  read_or(refuse, [&] {
    if (const std::size_t more = nb::len(nb::handle(surplus)); more != 0) {
      throw UsageError(str("exchange: there is no place for ", counted(more, "more positional argument"),
                           ": pass settings by name"));
    }
    checked = config_from(config, settings);
    const bool open = checked.backend == BackendKind::automatic && checked.engine != EngineKind::nccl;
    if (open && checked.memory == MemoryKind::automatic) checked.memory = default_memory(group);
    if (!given_device.is_none()) device = int_of("device", given_device);
    // This module links its own CUDA runtime. Each runtime has its own current device of a
    // thread, so ask PyTorch's.
    if (!device && on_device(checked)) device = current_torch_device();
  });
  SharedState state;
  {
    const GilRelease unlocked;
    const Device where = device_or_refuse(rank, checked, device);
    const DeviceGuard guard(where);
    state = make_process_owned<ExchangeState>(rank, checked, where);
  }
  new (self) PyExchange(std::move(state));
}

nb::object counts_array(const std::vector<std::int64_t>& counts, std::int64_t layers = 0) {
  const auto size = static_cast<std::int64_t>(counts.size());
  const Shape shape = layers > 0 ? Shape{layers, size / layers} : Shape{size};
  nb::object array = new_array(Framework::numpy, kInt64, shape, kHost);
  std::copy(counts.begin(), counts.end(), static_cast<std::int64_t*>(inspect(array, "counts").data));
  return array;
}

nb::object load_counts(const PyExchange& self) {
  ExchangeState& state = self.state();
  LoadCounts counts;
  {
    const GilRelease unlocked;
    const DeviceGuard guard(state.device);
    counts = state.exchange.load_counts();
  }
  return nb::module_::import_("ferry._counts")
      .attr("LoadCounts")(counts_array(counts.experts),
                          counts_array(counts.layers, state.exchange.config().layers),
                          counts_array(counts.ranks), counts.dispatches);
}

nb::object wire_counts(const PyExchange& self) {
  ExchangeState& state = self.state();
  WireCounts counts;
  {
    const GilRelease unlocked;
    const DeviceGuard guard(state.device);
    counts = state.exchange.wire_counts();
  }
  const WireCounts::BetweenNodes& between = counts.between_nodes;
  return nb::module_::import_("ferry._counts")
      .attr("WireCounts")(counts.dispatch_bytes, counts.dispatch_messages, counts.combine_bytes,
                          counts.combine_messages, between.dispatch_bytes, between.dispatch_messages,
                          between.combine_bytes, between.combine_messages);
}

nb::object wait_times(const PyExchange& self) {
  const WaitTimes times = self.state().exchange.wait_times();
  return nb::module_::import_("ferry._counts")
      .attr("WaitTimes")(counts_array(times.dispatch), counts_array(times.combine));
}

struct MetadataArguments {
  nb::object count, stream, out;
};

nb::object metadata(PyExchange& self, const GivenBesides& besides, const MetadataArguments& given) {
  const auto& [count, stream, out] = given;
  LaneCall call(self, {Operation::metadata}, besides);
  Arguments arguments(call.device());
  std::int32_t number = 0;
  const std::int32_t* on_device = nullptr;
  StepMetadata* into = nullptr;
  call.read_or_refuse({Operation::metadata}, [&] {
    // Arrays of one element convert to an index too, so ask for __dlpack__ as well.
    if (PyIndex_Check(count.ptr()) != 0 && !attribute_of(count, "__dlpack__").is_valid()) {
      if (!nb::try_cast(count, number) || number < 0) {
        clear_error();
        throw UsageError("count: " + nb::cast<std::string>(nb::str(count)) + ", must be 0 to 2147483647");
      }
    } else {
      const auto* at = static_cast<const std::int32_t*>(arguments.dense(count, "count", kInt32, {1}).data);
      if (is_host(call.device())) {
        std::memcpy(&number, at, sizeof number);
      } else {
        on_device = at;
      }
    }
    if (!out.is_none()) {
      const Array array = arguments.dense(out, "out", kInt32, {3});
      require_writable(array, "out");
      into = static_cast<StepMetadata*>(array.data);
    }
    if (arguments.any()) self.set_framework(arguments.framework());
    call.set_stream(stream_of(stream, self.framework(), call.device()));
  });
  const StepMetadata* found = nullptr;
  {
    const GilRelease unlocked;
    const Count counted = on_device != nullptr ? Count(on_device) : Count(number);
    found = call.exchange().metadata(counted, call.options(), into);
  }
  if (into != nullptr) return out;
  return view_of(self.framework(), const_cast<StepMetadata*>(found), kInt32, {3}, {}, call.device(),
                 owner_of(self.shared()));
}

struct CountsArguments {
  nb::object ids, stream;
};

nb::tuple dispatch_counts(PyExchange& self, const GivenBesides& besides, const CountsArguments& given) {
  LaneCall call(self, {Operation::dispatch_counts}, besides);
  Arguments arguments(call.device());
  Ids read;
  std::int64_t tokens = 0;
  call.read_or_refuse({Operation::dispatch_counts}, [&] {
    arguments.set_stream(given.stream);
    const Array& array = arguments.add_numbers(given.ids, "ids");
    call.set_stream(stream_of(given.stream, arguments.framework(), call.device()));
    tokens = array.shape.empty() ? 0 : array.shape[0];
    read = ids_of(array, tokens, self.config().top_k);
    self.set_framework(arguments.framework());
  });
  DispatchCounts counts;
  {
    const GilRelease unlocked;
    counts = call.exchange().dispatch_counts(read, tokens, call.options());
  }
  const auto list_of = [](std::span<const std::int32_t> numbers) {
    nb::list list = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(numbers.size())));
    for (std::size_t i = 0; i < numbers.size(); ++i)
      PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromLong(numbers[i]));
    return list;
  };
  return nb::make_tuple(counts.total, list_of(counts.routes), list_of(counts.tokens));
}

Operation refusable(const std::string& name) {
  constexpr Operation kRefusable[] = {Operation::dispatch,         Operation::combine,
                                      Operation::metadata,         Operation::route_values,
                                      Operation::dispatch_counts,  Operation::all_gather_v,
                                      Operation::reduce_scatter_v, Operation::return_values};
  for (const Operation operation : kRefusable)
    if (name == to_string(operation)) return operation;
  throw UsageError(str("refuse: operation is '", name,
                       "', expected 'dispatch', 'combine', 'metadata', 'route_values', 'dispatch_counts', "
                       "'all_gather_v', 'reduce_scatter_v' or 'return_values'"));
}

// Refuses this rank's next call: the peers get the reason instead.
void refuse(PyExchange& self, const std::string& reason, int lane, const nb::object& stream,
            const std::string& name) {
  const Operation refused = refusable(name);
  LaneCall call(self, lane);
  call.set_stream(stream_of(stream, self.framework(), call.device()));
  const GilRelease unlocked;
  call.exchange().refuse(refused, UsageError(reason), call.options());
}

// Runs an operation of a lane that takes no arrays.
template <class Call>
void on_lane(PyExchange& self, int lane, const nb::object& given, Call call) {
  ExchangeState& state = self.state();
  self.pending(lane);  // checks the lane
  const Stream stream = stream_of(given, self.framework(), state.device);
  const SharedState kept_alive = self.shared();
  const GilRelease unlocked;
  const DeviceGuard guard(state.device);
  call(state.exchange, CallOptions{.lane = lane, .stream = stream});
}

void check(PyExchange& self, int lane) {
  // Host backends write what check() reads during their calls. Device calls end on the device.
  std::optional<LaneCall> call;
  if (is_host(self.state().device)) call.emplace(self, lane);
  on_lane(self, lane, nb::none(),
          [](Exchange& exchange, const CallOptions& options) { exchange.check(options.lane); });
}

void synchronize(PyExchange& self, int lane, const nb::object& stream) {
  on_lane(self, lane, stream,
          [](Exchange& exchange, const CallOptions& options) { exchange.synchronize(options); });
}

PyDispatchResult last_dispatch_result(PyExchange& self, int lane) {
  const LaneCall call(self, lane);
  const DispatchResult& last = call.exchange().last_dispatch_result(lane);
  if (last.plan.empty()) {
    throw UsageError(
        str("last_dispatch_result: lane ", lane,
            " has none: it ran no dispatch, its last dispatch was refused, or only the send phase "
            "of it has run"));
  }
  return self.make_result(lane, last);
}

std::string describe_exchange(const PyExchange& self) {
  if (!self.shared()) return "Exchange(destroyed)";
  const Rank& rank = self.shared()->exchange.rank();
  const Config& config = self.shared()->exchange.config();
  return str("Exchange(rank ", rank.index(), " of ", rank.size(), ", backend='", to_string(config.backend),
             "', experts=", config.experts, ", top_k=", config.top_k, ", hidden=", config.hidden,
             ", max_tokens=", config.max_tokens, ")");
}

constexpr const char* kExchangeDoc =
    R"(Dispatches tokens to experts and combines their outputs, for one configuration.

Exchange(group, experts=E, top_k=K, hidden=H, max_tokens=T, ...) takes the settings of Config; Exchange(group, config)
takes a Config. `group` is a Group, which is joined, or the Rank that Group.run() passes to its function.

Collective: every rank of the group constructs the exchange and issues the same operations on a lane in the same order.
Blocking: with the backend 'cpu' a call blocks, without the GIL, until the peers have taken part, for
`deadline` seconds at most. With 'cuda' a call enqueues its work and returns.
Device and stream: with 'cuda' the rank works on the thread's current GPU, or on `device`; a call works on the current
stream of its arrays' framework, or on `stream`.
Threads: different lanes may be used from different threads; one lane runs one call at a time.
Overlap: an array that a call writes may share no byte with another array of the call; every rank raises UsageError. A
dispatch writes the lane's own received rows and their arrays. What works in place: see combine, all_gather_v and
reduce_scatter_v.

Raises UsageError and OverflowError, which leave the exchange usable; TimeoutError and PeerLostError are final for the
group. If one rank's arguments are wrong, its peers' calls end with a UsageError too. A `lane` that does not exist is
an exception where the exchange has several: the rank cannot tell which lane its peers are in, and alone gets an error.
Ctrl-C in the main thread ends a wait with KeyboardInterrupt, which is final for the group: the peers get PeerLostError.
With 'cuda', Python sees the signal when the call returns.)";

}  // namespace

void bind_exchange(nb::module_& module) {
  nb::class_<PyExchange> exchange(module, "Exchange", nb::is_weak_referenceable(), kExchangeDoc);
  exchange
      .def("__init__", &construct, "group"_a.none(), "config"_a = nb::none(), "surplus"_a,
           "device"_a = nb::none(), "settings"_a,
           nb::sig(str("def __init__(self, group: Group | Rank, config: Config | None = None, *, "
                       "device: int | None = None, experts: int = ..., top_k: int = ..., hidden: int = ..., "
                       "max_tokens: int = ..., ",
                       kOptionalSettings, ") -> None")
                       .c_str()))
      .def_prop_ro(
          "config", [](const PyExchange& self) { return self.config(); },
          "The Config, with every default filled in.")
      .def_prop_ro(
          "rank", [](const PyExchange& self) { return self.state().exchange.rank().index(); },
          "This rank's number, 0 to ranks - 1.")
      .def_prop_ro(
          "ranks", [](const PyExchange& self) { return self.state().exchange.rank().size(); },
          "R, the number of ranks.")
      .def_prop_ro(
          "sizes", [](const PyExchange& self) { return self.state().exchange.sizes(); },
          "Sizes of the memory that this rank has mapped.")
      .def_prop_ro(
          "capacity", [](const PyExchange& self) { return self.state().exchange.capacity(); },
          "Rows this rank can receive (expert_padded: rows of one expert).")
      .def_prop_ro(
          "plan_bytes", [](const PyExchange& self) { return self.receive_sizes().plan_bytes; },
          "Bytes of a plan's storage.")
      .def("plan_over", &plan_over, "storage"_a.none(), "tokens"_a = nb::none(),
           R"(A Plan over storage that holds one: uint8 [plan_bytes(config, ranks)]. Not collective.

`tokens` is its N, needed where the storage is device memory.)",
           nb::sig("def plan_over(self, storage: ferry._typing.Array, tokens: int | None = None) -> Plan"))
      .def(
          "refuse", &refuse, "reason"_a, nb::kw_only(), "lane"_a = 0, "stream"_a = nb::none(),
          "operation"_a = "dispatch",
          R"(Takes part in the lane's next call by refusing it: the peers' call ends with a UsageError that says `reason`.

`operation` is what the peers call. For code between its caller and the exchange that finds out that it cannot make the
call.)",
          nb::sig("def refuse(self, reason: str, *, lane: int = 0, stream: typing.Any | None = None, "
                  "operation: typing.Literal['dispatch', 'combine', 'metadata', 'route_values', "
                  "'dispatch_counts', 'all_gather_v', 'reduce_scatter_v', 'return_values'] = 'dispatch') -> "
                  "None"))
      .def(
          "check", &check, "lane"_a = 0,
          R"(Raises what the lane's calls found since the last check, the first of: OverflowError, BadIdError, BadSourceError,
UsageError for a scale with which a block could not be encoded.

With 'cuda' also what ended a call. Not collective; does not wait for the device.)")
      .def("synchronize", &synchronize, "lane"_a = 0, "stream"_a = nb::none(),
           "Blocks until the stream's work is done; raises what ended a call of the lane on the device.",
           nb::sig("def synchronize(self, lane: int = 0, stream: typing.Any | None = None) -> None"))
      .def(
          "last_dispatch_result", &last_dispatch_result, "lane"_a = 0,
          R"(The DispatchResult of the lane's last dispatch, also after it raised OverflowError or BadIdError.

Raises UsageError if that dispatch delivered none.)")
      .def("load_counts", &load_counts,
           "LoadCounts: routes to every expert and rank so far, the same on every rank.",
           nb::sig("def load_counts(self) -> ferry._counts.LoadCounts"))
      .def("wire_counts", &wire_counts,
           "WireCounts: bytes and messages that this rank has written to other ranks.",
           nb::sig("def wire_counts(self) -> ferry._counts.WireCounts"))
      .def("wait_times", &wait_times,
           "WaitTimes: nanoseconds that this rank has waited for each peer. Needs count_waits.",
           nb::sig("def wait_times(self) -> ferry._counts.WaitTimes"))
      .def("destroy", &PyExchange::destroy,
           R"(Frees the buffers, as soon as no array points into them. Not collective.

Later calls raise UsageError.)")
      .def(
          "__enter__", [](const nb::object& self) { return self; },
          nb::sig("def __enter__(self) -> Exchange"))
      .def(
          "__exit__", [](PyExchange& self, const nb::args&) { self.destroy(); },
          nb::sig("def __exit__(self, *exception: object) -> None"))
      .def("__repr__", &describe_exchange);
  define_call<MetadataArguments, 1>(
      exchange, "metadata",
      "(self, count: int | ferry._typing.Array, *, lane: int = 0, stream: typing.Any | None = None, "
      "out: ferry._typing.Array | None = None) -> typing.Any",
      R"([sum, prefix, maximum] of the ranks' counts, int32 [3]; prefix is the sum over lower ranks. Collective.

`count` is a number or an int32 [1] in the exchange's memory, on GPUs read when the call runs. They are written to `out`,
int32 [3], which is returned; without it to an array whose address is fixed for the lane.)",
      metadata);
  define_call<CountsArguments, 1>(
      exchange, "dispatch_counts",
      "(self, ids: ferry._typing.Array, *, lane: int = 0, stream: typing.Any | None = None) "
      "-> tuple[int, list[int], list[int]]",
      R"((total, routes, tokens) of a dispatch of these ids, without sending rows. Collective. Blocks.

total: rows that the dispatch delivers here; routes: to each expert of this rank, from all ranks; tokens: N of every
rank. For ReceiveBuffers(rows=total). With 'cuda' it waits for the work before it on `stream`, and cannot be captured.)",
      dispatch_counts);
  share_between_copies(exchange, "Exchange");
  module.def("_refuse_construction", &refuse_construction, "group"_a, "reason"_a);
  bind_dispatch(exchange);
  bind_combine(exchange);
  bind_gather(exchange);
}

}  // namespace ferry::python
