// Constructs a Python Exchange and binds its methods, dispatch and combine excepted.

#include <cstring>

#include "arrays/framework.hpp"
#include "base/errors.hpp"
#include "base/text.hpp"
#include "bindings.hpp"
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

nb::object counts_array(const std::vector<std::int64_t>& counts) {
  const Shape shape = {static_cast<std::int64_t>(counts.size())};
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
      .attr("LoadCounts")(counts_array(counts.experts), counts_array(counts.ranks), counts.dispatches);
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

nb::object metadata(PyExchange& self, const nb::object& count, const nb::args& surplus,
                    const nb::object& lane, const nb::object& stream, const nb::object& out,
                    const nb::kwargs& unknown) {
  LaneCall call(self, {Operation::metadata}, {"metadata", lane, surplus, unknown});
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
    found = on_device != nullptr ? call.exchange().metadata(on_device, call.lane(), call.stream(), into)
                                 : call.exchange().metadata(number, call.lane(), call.stream(), into);
  }
  if (into != nullptr) return out;
  return view_of(self.framework(), const_cast<StepMetadata*>(found), kInt32, {3}, {}, call.device(),
                 owner_of(self.shared()));
}

nb::tuple dispatch_counts(PyExchange& self, const nb::object& ids, const nb::args& surplus,
                          const nb::object& lane, const nb::object& stream, const nb::kwargs& unknown) {
  LaneCall call(self, {Operation::dispatch_counts}, {"dispatch_counts", lane, surplus, unknown});
  Arguments arguments(call.device());
  Ids read;
  std::int64_t tokens = 0;
  call.read_or_refuse({Operation::dispatch_counts}, [&] {
    const Array& array = arguments.add(ids, "ids");
    call.set_stream(stream_of(stream, arguments.framework(), call.device()));
    tokens = array.shape.empty() ? 0 : array.shape[0];
    read = ids_of(array, tokens, self.config().top_k);
    self.set_framework(arguments.framework());
  });
  DispatchCounts counts;
  {
    const GilRelease unlocked;
    counts = call.exchange().dispatch_counts(read, tokens, call.lane(), call.stream());
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
  constexpr Operation kRefusable[] = {Operation::dispatch,        Operation::combine,
                                      Operation::metadata,        Operation::route_values,
                                      Operation::dispatch_counts, Operation::all_gather_v,
                                      Operation::reduce_scatter_v};
  for (const Operation operation : kRefusable)
    if (name == to_string(operation)) return operation;
  throw UsageError(str("refuse: operation is '", name,
                       "', expected 'dispatch', 'combine', 'metadata', 'route_values', 'dispatch_counts', "
                       "'all_gather_v' or 'reduce_scatter_v'"));
}

// Refuses this rank's next call: the peers get the reason instead.
void refuse(PyExchange& self, const std::string& reason, int lane, const nb::object& stream,
            const std::string& name) {
  const Operation refused = refusable(name);
  LaneCall call(self, lane);
  call.set_stream(stream_of(stream, self.framework(), call.device()));
  const GilRelease unlocked;
  call.exchange().refuse(refused, lane, UsageError(reason), call.stream());
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
  call(state.exchange, stream);
}

void check(PyExchange& self, int lane) {
  // Host backends write what check() reads during their calls. Device calls end on the device.
  std::optional<LaneCall> call;
  if (is_host(self.state().device)) call.emplace(self, lane);
  on_lane(self, lane, nb::none(), [lane](Exchange& exchange, Stream) { exchange.check(lane); });
}

void synchronize(PyExchange& self, int lane, const nb::object& stream) {
  on_lane(self, lane, stream,
          [lane](Exchange& exchange, Stream given) { exchange.synchronize(lane, given); });
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
          "metadata", &metadata, "count"_a = nb::none(), "surplus"_a, nb::arg("lane").none() = 0,
          "stream"_a = nb::none(), "out"_a = nb::none(), "unknown"_a,
          R"([sum, prefix, maximum] of the ranks' counts, int32 [3]; prefix is the sum over lower ranks. Collective.

`count` is a number or an int32 [1] in the exchange's memory, on GPUs read when the call runs. They are written to `out`,
int32 [3], which is returned; without it to an array whose address is fixed for the lane.)",
          nb::sig("def metadata(self, count: int | ferry._typing.Array, *, lane: int = 0, stream: typing.Any "
                  "| None = None, out: ferry._typing.Array | None = None) -> typing.Any"))
      .def("dispatch_counts", &dispatch_counts, "ids"_a = nb::none(), "surplus"_a, nb::arg("lane").none() = 0,
           "stream"_a = nb::none(), "unknown"_a,
           R"((total, routes, tokens) of a dispatch of these ids, without sending rows. Collective. Blocks.

total: rows that the dispatch delivers here; routes: to each expert of this rank, from all ranks; tokens: N of every
rank. For ReceiveBuffers(rows=total). With 'cuda' it waits for the work before it on `stream`, and cannot be captured.)",
           nb::sig("def dispatch_counts(self, ids: ferry._typing.Array, *, lane: int = 0, stream: typing.Any "
                   "| None = "
                   "None) "
                   "-> tuple[int, list[int], list[int]]"))
      .def(
          "refuse", &refuse, "reason"_a, nb::kw_only(), "lane"_a = 0, "stream"_a = nb::none(),
          "operation"_a = "dispatch",
          R"(Takes part in the lane's next call by refusing it: the peers' call ends with a UsageError that says `reason`.

`operation` is what the peers call. For code between its caller and the exchange that finds out that it cannot make the
call.)",
          nb::sig("def refuse(self, reason: str, *, lane: int = 0, stream: typing.Any | None = None, "
                  "operation: typing.Literal['dispatch', 'combine', 'metadata', 'route_values', "
                  "'dispatch_counts', 'all_gather_v', 'reduce_scatter_v'] = 'dispatch') -> None"))
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
  share_between_copies(exchange, "Exchange");
  module.def("_refuse_construction", &refuse_construction, "group"_a, "reason"_a);
  bind_dispatch(exchange);
  bind_combine(exchange);
  bind_gather(exchange);
}

}  // namespace ferry::python
