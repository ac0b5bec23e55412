#include "exchange.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arrays/framework.hpp"
#include "base/text.hpp"
#include "bindings.hpp"
#include "config.hpp"
#include "exchange/configuration.hpp"
#include "group.hpp"
#include "process_owner.hpp"

namespace ferry::python {

using namespace nb::literals;

nb::object keeper_of(const SharedState& state) {
  return nb::capsule(new SharedState(state),
                     [](void* kept) noexcept { delete static_cast<SharedState*>(kept); });
}

namespace {

RowSizes sizes_of(const Exchange& exchange) {
  const Config& config = exchange.config();
  const int rank = exchange.rank().index();
  const std::int64_t rows = row_capacity(config, rank), groups = groups_of(config, rank);
  const bool padded = config.layout == Layout::expert_padded;
  return {.shape = padded ? Shape{groups, exchange.capacity(), config.hidden} : Shape{rows, config.hidden},
          .rows = rows,
          .groups = groups,
          .plan_bytes = plan_bytes(config, config.placement.ranks())};
}

}  // namespace

PyExchange::PyExchange(SharedState state)
    : process_(this_process()),
      state_(std::move(state)),
      keeper_(keeper_of(state_)),
      sizes_(sizes_of(state_->exchange)),
      lanes_(state_->lanes.size()) {}

ExchangeState& PyExchange::state() const {
  if (!state_) throw UsageError("exchange: used after destroy()");
  require_own_process("exchange", process_);
  return *state_;
}

void PyExchange::destroy() {
  state_.reset();
  keeper_.reset();
  lanes_.clear();
  spare_.reset();
}

std::size_t PyExchange::checked(int lane) const {
  const int lanes = config().lanes;
  if (lane < 0 || lane >= lanes) throw UsageError(str("lane = ", lane, ", must be 0 to ", lanes - 1));
  return static_cast<std::size_t>(lane);
}

PyDispatchResult PyExchange::received(int lane, const DispatchResult& received) const {
  const DispatchContext& context = lanes_[checked(lane)].context;
  PyDispatchResult made{
      .received = received, .context = context, .state = state_, .keeper = keeper_, .plan = context.plan};
  if (!context.plan.is_none()) return made;
  const bool own = context.memory.plan.is_none();
  PyPlan plan{.plan = received.plan,
              .owner = own ? keeper_ : context.memory.plan,
              .framework = context.framework,
              .device = context.device,
              .shape = plan_shape(config()),
              .tokens = context.tokens,
              .writes = writes_to(received.plan.storage())};
  if (own) {
    plan.state = state_;
    plan.lane = lane;
    plan.parity = state_->lanes[static_cast<std::size_t>(lane)].parity;
  }
  made.plan = nb::cast(std::move(plan));
  return made;
}

float* PyExchange::spare(Framework framework) {
  static float on_host[4] = {};
  if (is_host(state().where)) return on_host;
  if (!spare_.is_valid()) spare_ = new_array(framework, kFp32, {4}, state().where);
  return static_cast<float*>(look_at(spare_, "memory").data);
}

InCall::InCall(PyExchange& exchange, int lane)
    : state_((exchange.state(), exchange.shared())),
      lane_((exchange.pending(lane), &state_->lanes[static_cast<std::size_t>(lane)])),
      number_(lane),
      device_(is_host(state_->where) ? -1 : state_->where.device_id) {
  if (lane_->busy.exchange(true)) {
    throw UsageError(
        str("lane ", lane, " is in use by another thread: calls of a lane come one after the other"));
  }
}

InCall::~InCall() {
  lane_->busy = false;
}

void InCall::use(Stream stream) {
  stream_ = stream;
  if (!is_host(where()) && !state_->captured) state_->captured = is_capturing(stream.handle);
}

bool InCall::leaves_result(const Error& error) {
  return dynamic_cast<const BadIdError*>(&error) != nullptr ||
         dynamic_cast<const BadSourceError*>(&error) != nullptr ||
         dynamic_cast<const OverflowError*>(&error) != nullptr;
}

void InCall::refuse(std::initializer_list<Operation> operations, const Error& error) noexcept {
  const nb::gil_scoped_release unlocked;
  for (const Operation operation : operations) state_->exchange.refuse(operation, number_, error, stream_);
}

namespace {

Rank rank_of(const nb::object& group_or_rank) {
  PyRank* rank = nullptr;
  if (nb::try_cast(group_or_rank, rank) && rank != nullptr) return rank->own();
  PyErr_Clear();
  PyGroup* group = nullptr;
  if (nb::try_cast(group_or_rank, group) && group != nullptr) return group->join().own();
  PyErr_Clear();
  throw UsageError(str("exchange: expected a Group or a Rank, got ",
                       nb::cast<std::string>(nb::type_name(group_or_rank.type()))));
}

BackendKind default_backend(const nb::object& group_or_rank) {
  PyGroup* group = nullptr;
  if (nb::try_cast(group_or_rank, group) && group != nullptr) return group->default_backend();
  PyErr_Clear();
  return BackendKind::cpu;
}

Config config_or_refuse(const Rank& rank, const nb::object& given, const nb::kwargs& settings,
                        BackendKind backend) {
  try {
    if (given.is_none()) return config_of(settings, backend);
    if (nb::len(nb::handle(settings)) > 0)
      throw UsageError("exchange: a Config and settings exclude each other");
    Config* config = nullptr;
    if (nb::try_cast(given, config) && config != nullptr) return *config;
    PyErr_Clear();
    throw UsageError(
        str("exchange: expected a Config, got ", nb::cast<std::string>(nb::type_name(given.type()))));
  } catch (const Error& error) {
    const nb::gil_scoped_release unlocked;
    refuse_configuration(rank, error);
    throw;
  }
}

void construct(PyExchange* self, const nb::object& group, const nb::object& config, std::optional<int> device,
               const nb::kwargs& settings) {
  const Rank rank = rank_of(group);
  const Config checked = config_or_refuse(rank, config, settings, default_backend(group));
  // PyTorch's runtime is another one than this module's: each keeps the thread's device for itself.
  if (!device && checked.backend == BackendKind::cuda) device = device_of_torch();
  const nb::gil_scoped_release unlocked;
  Device where = kHost;
  if (checked.backend == BackendKind::cuda) {
    // Every rank finds out by itself what its machine has: nobody is left waiting.
    try {
      where = {nb::device::cuda::value, device.value_or(current_device())};
    } catch (const Error& error) {
      refuse_configuration(rank, error);
      throw;
    }
  }
  const OnDevice current(is_host(where) ? -1 : where.device_id);
  SharedState state = make_owned<ExchangeState>(rank, checked, where);
  const nb::gil_scoped_acquire locked;
  new (self) PyExchange(std::move(state));
}

nb::object counts_array(std::span<const std::int64_t> counts) {
  const Shape shape = {static_cast<std::int64_t>(counts.size())};
  nb::object array = new_array(Framework::numpy, kInt64, shape, kHost);
  std::copy(counts.begin(), counts.end(), static_cast<std::int64_t*>(look_at(array, "counts").data));
  return array;
}

nb::object load(const PyExchange& self) {
  ExchangeState& state = self.state();
  std::vector<std::int64_t> experts, ranks;
  std::int64_t dispatches = 0;
  {
    const nb::gil_scoped_release unlocked;
    const OnDevice device(is_host(state.where) ? -1 : state.where.device_id);
    const std::lock_guard counting(state.counting);
    const LoadCounts counts = state.exchange.load();
    experts.assign(counts.experts.begin(), counts.experts.end());
    ranks.assign(counts.ranks.begin(), counts.ranks.end());
    dispatches = counts.dispatches;
  }
  return nb::module_::import_("ferry._counts")
      .attr("LoadCounts")(counts_array(experts), counts_array(ranks), dispatches);
}

nb::object wire_counts(const PyExchange& self) {
  ExchangeState& state = self.state();
  WireCounts w;
  {
    const nb::gil_scoped_release unlocked;
    const OnDevice device(is_host(state.where) ? -1 : state.where.device_id);
    w = state.exchange.wire_counts();
  }
  return nb::module_::import_("ferry._counts")
      .attr("WireCounts")(w.dispatch_bytes, w.dispatch_messages, w.combine_bytes, w.combine_messages);
}

}  // namespace

PyPlan plan_over(const PyExchange& self, const nb::object& storage, std::optional<std::int64_t> tokens) {
  ExchangeState& state = self.state();
  Arguments arguments(state.where);
  const Array& array = arguments.dense(storage, "storage", kByte, {-1});
  PyPlan made{.plan = Plan::over(array.data, static_cast<std::size_t>(array.shape[0])),
              .owner = array.owner,
              .framework = array.framework,
              .device = state.where,
              .shape = plan_shape(self.config()),
              .writes = writes_to(array.data)};
  const auto needed = static_cast<std::size_t>(view_plan(nullptr, made.shape).bytes);
  if (made.plan.bytes() < needed) {
    throw UsageError(str("storage: ", made.plan.bytes(), " bytes, this exchange's plans take ", needed));
  }
  const bool host = is_host(state.where);
  if (host && static_cast<const PlanHeader*>(array.data)->magic != kPlanMagic) {
    throw UsageError("storage: holds no finished plan");
  }
  if (!host && !tokens)
    throw UsageError("tokens: a plan in device memory does not tell the host its N: give it");
  made.tokens = tokens.value_or(host ? made.plan.tokens() : 0);
  if (made.tokens < 0 || made.tokens > self.config().max_tokens) {
    throw UsageError(str("tokens = ", made.tokens, ", must be 0 to ", self.config().max_tokens));
  }
  if (host && made.tokens != made.plan.tokens())
    throw UsageError(str("tokens = ", made.tokens, ", the plan is one of ", made.plan.tokens()));
  return made;
}

namespace {

nb::object metadata(PyExchange& self, const nb::object& count, int lane, const nb::object& stream) {
  InCall call(self, lane);
  Arguments arguments(call.where());
  std::int32_t number = 0;
  const std::int32_t* on_device = nullptr;
  call.or_refuse({Operation::metadata}, [&] {
    // Arrays of one element have an index too.
    if (PyIndex_Check(count.ptr()) != 0 && !nb::hasattr(count, "__dlpack__")) {
      if (!nb::try_cast(count, number)) {
        PyErr_Clear();
        throw UsageError("count: a number that 32 bits do not hold");
      }
    } else {
      on_device = static_cast<const std::int32_t*>(arguments.dense(count, "count", kInt32, {1}).data);
    }
    if (arguments.any()) self.set_framework(arguments.framework());
    call.use(stream_of(stream, self.framework(), call.where()));
  });
  const StepMetadata* found = nullptr;
  {
    const nb::gil_scoped_release unlocked;
    found = on_device != nullptr ? call.exchange().metadata(on_device, lane, call.stream())
                                 : call.exchange().metadata(number, lane, call.stream());
  }
  return view_of(self.framework(), const_cast<StepMetadata*>(found), kInt32, {3}, {}, call.where(),
                 keeper_of(self.shared()));
}

template <class Call>
void on_lane(PyExchange& self, int lane, const nb::object& stream, Call call) {
  ExchangeState& state = self.state();
  self.pending(lane);
  const Stream where = stream_of(stream, self.framework(), state.where);
  const SharedState kept = self.shared();
  const nb::gil_scoped_release unlocked;
  const OnDevice device(is_host(state.where) ? -1 : state.where.device_id);
  call(state.exchange, where);
}

}  // namespace

void bind_exchange(nb::module_& module) {
  nb::class_<PyExchange> exchange(module, "Exchange", nb::is_weak_referenceable(),
                                  R"(The buffers of one configuration on one rank.

Exchange(group, experts=E, top_k=K, hidden=H, max_tokens=T, ...) with the settings of Config, or Exchange(group, config).
`group` is a Group, which is joined, or the Rank that Group.run() hands out. Construction and every operation are
collective: all ranks call the same operations of a lane in the same order. UsageError and OverflowError leave the
exchange usable; TimeoutError and PeerLostError are final for the group.

With the backends 'cpu' and 'reference' a call blocks until the peers have come, for `deadline` seconds at most,
without the interpreter's lock. Ctrl-C in the main thread ends such a wait with KeyboardInterrupt; that too is final
for the group, and the peers get PeerLostError. With 'cuda' it is seen when a call returns. What a rank finds wrong
with its arguments ends the peers' call as well, except a `lane` that does not exist and a keyword that is misspelt:
then the peers wait for the deadline.

With the backend 'cuda' the rank's device is the thread's current one, or `device`; work goes to the current stream of
the arrays' framework, or to `stream`.)");
  exchange
      .def("__init__", &construct, "group"_a.none(), "config"_a = nb::none(), nb::kw_only(),
           "device"_a = nb::none(), "settings"_a,
           nb::sig(str("def __init__(self, group: Group | Rank, config: Config | None = None, *, "
                       "device: int | None = None, experts: int = ..., top_k: int = ..., hidden: int = ..., "
                       "max_tokens: int = ..., ",
                       kOptionalSettings, ") -> None")
                       .c_str()))
      .def_prop_ro(
          "config", [](const PyExchange& self) { return self.config(); }, "with every default filled in")
      .def_prop_ro(
          "rank", [](const PyExchange& self) { return self.state().exchange.rank().index(); },
          "this rank's number")
      .def_prop_ro(
          "ranks", [](const PyExchange& self) { return self.state().exchange.rank().size(); }, "R")
      .def_prop_ro(
          "sizes", [](const PyExchange& self) { return self.state().exchange.sizes(); },
          "Sizes: what it has mapped")
      .def_prop_ro(
          "capacity", [](const PyExchange& self) { return self.state().exchange.capacity(); },
          "rows this rank can receive (expert_padded: rows of one expert)")
      .def("plan_over", &plan_over, "storage"_a.none(), "tokens"_a = nb::none(),
           "A Plan over its storage, uint8 [plan_bytes(config, ranks)]. `tokens`: its N, needed for device "
           "memory.",
           nb::sig("def plan_over(self, storage: typing.Any, tokens: int | None = None) -> Plan"))
      .def("metadata", &metadata, "count"_a.none(), nb::kw_only(), "lane"_a = 0, "stream"_a = nb::none(),
           "int32 [3]: sum of all ranks' counts, of those of lower ranks, largest. At a fixed place of the "
           "lane.\n"
           "`count` is a number, or with the backend 'cuda' an int32 [1] that is read when the call runs.",
           nb::sig(
               "def metadata(self, count: typing.Any, *, lane: int = 0, stream: typing.Any | None = None) -> "
               "typing.Any"))
      .def(
          "check",
          [](PyExchange& self, int lane) {
            on_lane(self, lane, nb::none(), [lane](Exchange& e, Stream) { e.check(lane); });
          },
          "lane"_a = 0,
          "Raises what the lane's calls have found: BadIdError, OverflowError, BadSourceError; on devices "
          "also what\n"
          "has ended one.")
      .def(
          "synchronize",
          [](PyExchange& self, int lane, const nb::object& stream) {
            on_lane(self, lane, stream, [lane](Exchange& e, Stream where) { e.synchronize(lane, where); });
          },
          "lane"_a = 0, "stream"_a = nb::none(),
          "Waits until the stream has done its work and raises what ended a call of the lane on the device.",
          nb::sig("def synchronize(self, lane: int = 0, stream: typing.Any | None = None) -> None"))
      .def(
          "last_dispatch_result",
          [](PyExchange& self, int lane) {
            self.pending(lane);
            if (!self.state().lanes[static_cast<std::size_t>(lane)].came) {
              throw UsageError(str("last_dispatch_result: no dispatch of lane ", lane,
                                   " has brought any: none was called, ",
                                   "the last one was refused, or its receive half is to come"));
            }
            return self.received(lane, self.state().exchange.last_dispatch_result(lane));
          },
          "lane"_a = 0,
          "The DispatchResult of the lane's last dispatch, also where it raised OverflowError or "
          "BadIdError.\n"
          "UsageError where it brought none.")
      .def("load", &load, "LoadCounts: routes to every expert and rank so far, on every rank alike.",
           nb::sig("def load(self) -> ferry._counts.LoadCounts"))
      .def("wire_counts", &wire_counts, "WireCounts: bytes and messages this rank has written to others.",
           nb::sig("def wire_counts(self) -> ferry._counts.WireCounts"))
      .def("destroy", &PyExchange::destroy,
           "Gives the buffers back as soon as no array points into them. Later calls raise UsageError.")
      .def(
          "__enter__", [](const nb::object& self) { return self; },
          nb::sig("def __enter__(self) -> Exchange"))
      .def(
          "__exit__", [](PyExchange& self, const nb::args&) { self.destroy(); },
          nb::sig("def __exit__(self, *exception: object) -> None"));
  exchange.def("__repr__", [](const PyExchange& self) {
    if (!self.shared()) return std::string("Exchange(destroyed)");
    const Rank& rank = self.shared()->exchange.rank();
    const Config& config = self.shared()->exchange.config();
    return str("Exchange(rank ", rank.index(), " of ", rank.size(), ", backend='", to_string(config.backend),
               "', experts=", config.experts, ", top_k=", config.top_k, ", hidden=", config.hidden,
               ", max_tokens=", config.max_tokens, ")");
  });
  bind_dispatch(exchange);
  bind_combine(exchange);
}

}  // namespace ferry::python
