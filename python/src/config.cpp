#include "config.hpp"
#include "casters.hpp"

#include <string>
#include <type_traits>
#include <vector>

#include "base/enumerators.hpp"
#include "base/nearest.hpp"
#include "base/text.hpp"
#include "bindings.hpp"
#include "exchange/config_fields.hpp"
#include "exchange/configuration.hpp"
#include "ferry/encoder.hpp"
#include "ferry/error.hpp"
#include "interpreter.hpp"
#include "setting_values.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferry::python {
namespace {

const std::vector<std::string>& setting_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    const Config config;
    visit_fields([&](const char* name, const auto&) { all.emplace_back(name); }, config);
    return all;
  }();
  return names;
}

template <class Field>
void set_value(Field& field, const std::string& key, nb::handle value) {
  if constexpr (std::is_same_v<Field, bool>) {
    field = bool_of(key, value);
  } else if constexpr (std::is_integral_v<Field>) {
    field = integer_of<Field>(key, value);
  } else if constexpr (std::is_same_v<Field, double>) {
    field = seconds_of(key, value);
  } else if constexpr (std::is_same_v<Field, Format>) {
    field = parse_format(text_value(key, value));
  } else if constexpr (std::is_same_v<Field, Placement>) {
    field = value_of<Placement>(key, value, "a Placement");
  } else {
    field = enumerator_named<Field>(key.c_str(), text_value(key, value));
  }
}

void set_field(Config& config, const std::string& key, nb::handle value) {
  bool found = false;
  const auto try_field = [&](const char* name, auto& field) {
    if (key != name) return;
    set_value(field, key, value);
    found = true;
  };
  visit_fields(try_field, config);
  if (found) return;
  std::string names;
  for (const std::string& name : setting_names()) names += str(names.empty() ? "" : ", ", name);
  throw UsageError(str("configuration: there is no setting '", key, "'", did_you_mean(key, setting_names()),
                       "; the settings are: ", names));
}

void require_sizes(const nb::kwargs& settings) {
  std::string missing;
  for (const char* name : {"experts", "top_k", "hidden", "max_tokens"}) {
    if (!settings.contains(name)) missing += str(missing.empty() ? "" : ", ", name);
  }
  if (!missing.empty()) throw UsageError(str("configuration: missing: ", missing));
}

// The pickled state of a Config: its settings by name, as Config() takes them.
nb::dict settings_of(const nb::handle& config) {
  nb::dict settings;
  for (const std::string& name : setting_names()) settings[name.c_str()] = config.attr(name.c_str());
  return settings;
}

// As Config() takes it: the sizes, and the settings that are not the default.
std::string describe(const nb::handle& config) {
  const nb::dict defaults = settings_of(nb::cast(Config()));
  std::string settings;
  for (const std::string& name : setting_names()) {
    const nb::object value = config.attr(name.c_str());
    if (value.equal(defaults[name.c_str()])) continue;
    settings += str(settings.empty() ? "" : ", ", name, "=", nb::cast<std::string>(nb::repr(value)));
  }
  return str("Config(", settings, ")");
}

template <auto field>
std::string name_in(const Config& config) {
  return to_string(config.*field);
}

void bind_sizes(nb::module_& module) {
  nb::class_<Sizes>(module, "Sizes", "Memory of one rank's exchange by purpose, in bytes.")
      .def_ro("dispatch_staging", &Sizes::dispatch_staging, "Symmetric memory: 2 * lanes * R*T messages.")
      .def_ro("combine_staging", &Sizes::combine_staging,
              "Symmetric memory: 2 * lanes * T*K rows ('exact', 'unreduced'), T*min(K,R) rows "
              "('partial') or T*R rows (transfer 'gather').")
      .def_ro("signals", &Sizes::signals, "Symmetric memory: flags, counts, refusals.")
      .def_ro("results", &Sizes::results, "The lanes' own receive buffers.")
      .def_ro("plans", &Sizes::plans, "The lanes' plans and working memory.")
      .def_ro(
          "messages", &Sizes::messages,
          "'collective'; 'cpu', 'cuda' and 'nvshmem' in two hops: what a rank packs, forwards and receives "
          "in memory of its own.")
      .def_prop_ro("total", &Sizes::total, "The sum.")
      .def("__repr__", [](const Sizes& s) {
        return str("Sizes(dispatch_staging=", s.dispatch_staging, ", combine_staging=", s.combine_staging,
                   ", signals=", s.signals, ", results=", s.results, ", plans=", s.plans,
                   ", messages=", s.messages, ", total=", s.total(), ")");
      });
  module.def(
      "size_of",
      [](const Config& config, const std::variant<int, Topology>& ranks, int rank) {
        return std::visit([&](const auto& given) { return size_of(config, given, rank); }, ranks);
      },
      "config"_a, "ranks"_a, "rank"_a = 0,
      "Sizes: exactly what an exchange of this configuration maps on one rank of `ranks`, or of a Topology "
      "for ranks "
      "on several nodes. Needs no group and allocates nothing.");
  module.def("capacity_of", &capacity_of, "config"_a, "ranks"_a, "rank"_a = 0,
             "Rows a rank can receive under this configuration (expert_padded: rows of one expert).");
  module.def("plan_bytes", &plan_bytes, "config"_a, "ranks"_a,
             "Bytes of a plan's storage, the same on every rank.");
}

}  // namespace

const char* const kOptionalSettings =
    "backend: typing.Literal['automatic', 'cpu', 'cuda', 'collective', 'nvshmem'] = 'automatic', "
    "engine: typing.Literal['automatic', 'mpi', 'custom', 'nccl'] = 'automatic', "
    "memory: typing.Literal['automatic', 'host', 'device'] = 'automatic', "
    "hops: typing.Literal['automatic', 'one', 'two'] = 'automatic', window: int = 0, "
    "shared_experts: int = 0, input: typing.Literal['own', 'replicated'] = 'own', shared_split: int = 0, "
    "transfer: typing.Literal['routed', 'gather'] = 'routed', "
    "placement: Placement = ..., local_slots: int = 0, "
    "layout: typing.Literal['expert_major', 'expert_padded', 'rank_major', 'expert_indexed'] = "
    "'expert_major', "
    "alignment: int = 1, capacity: int = 0, repeats: bool = False, zero_padding: bool = False, "
    "format: str = 'bf16', combine_type: typing.Literal['bf16', 'fp16', 'fp32'] = 'bf16', "
    "reduction: typing.Literal['partial', 'exact', 'unreduced'] = 'partial', "
    "reduction_level: typing.Literal['automatic', 'rank', 'node'] = 'automatic', layers: int = 1, lanes: int "
    "= 1, "
    "deadline: float = 30.0, own_receive_buffers: bool = True, check_calls: bool = True, count_waits: bool = "
    "False";

Config config_of(const nb::kwargs& settings) {
  Config config;
  for (const auto& [key, value] : settings) set_field(config, nb::cast<std::string>(key), value);
  require_sizes(settings);
  if (config.placement.empty()) {
    check_alone(config);
  } else {
    complete_config(config, config.placement.ranks());
  }
  return config;
}

void bind_formats(nb::module_& module) {
  module.def(
      "load_formats",
      [](nb::handle path) {
        const nb::object text = nb::steal(PyOS_FSPath(path.ptr()));
        if (!text.is_valid()) refuse_value("path", "a path", path);
        const auto file = value_of<std::string>("path", text, "a path of characters");
        std::vector<std::string> names;
        const GilRelease unlocked;  // the library's function may need it
        for (const Format& format : load_formats(file)) names.push_back(to_string(format));
        return names;
      },
      "path"_a, nb::sig("def load_formats(path: str | os.PathLike[str]) -> list[str]"),
      R"(Opens a shared library and registers the formats that it has; returns their names, for Config(format=...).

docs/guides/own_format.md says how to build one. Every rank loads it. If one of its formats cannot be registered, none
is. A library that is loaded already is not asked again.)");
}

void bind_config(nb::module_& module) {
  nb::class_<Config>(module, "Config", R"(The configuration of an exchange, the same on every rank.

Config(experts=E, top_k=K, hidden=H, max_tokens=T, ...). These four are required. The others:

backend              'cpu', 'cuda', 'collective' or 'nvshmem'; default 'automatic'. On host memory that is 'cpu' on one host and
                     'collective' on several; on device memory 'cuda' on one host, and on several 'nvshmem' if every rank can
                     load it, else 'collective' with the engine 'nccl'. Exchange.config says which it is
engine               'nccl': NCCL, on device memory; 'mpi' or 'custom': the engine that the group must have brought; default
                     'automatic', any that it has brought. A named engine makes the backend 'automatic' 'collective'
memory               'host' or 'device': where all arrays lie; default 'automatic', 'device' with 'cuda', 'nvshmem' and 'nccl'. With the
                     backend 'automatic': 'device' in a Group.torch() that uses NCCL, else 'host'. Only 'collective' has both
hops                 'one' or 'two': whether a token goes straight to each rank of another node, or once to the node, to a
                     relay; default 'automatic', two where 'collective' on host memory has several nodes and one has
                     several ranks, and where 'nvshmem' has several nodes and max_tokens x hidden is above 14,336
window               bounds what a rank has on its way to another one. 'collective': messages of a round; default 0, no bound.
                     'cpu', 'cuda' and 'nvshmem' in two hops: staging, in messages for each pair of ranks; default 0, 4 MiB a rank and lane,
                     on GPUs up to 24 MiB for each hop
shared_experts       experts that every rank holds and every token goes to: their rows are groups 0 to shared_experts - 1, and
                     combine adds their outputs; at most 16; default 0
input                'own', or 'replicated': every rank passes the same tokens and keeps the routes to its own experts; nothing
                     travels, and combine gives each rank its own sum. 'partial' only; default 'own'
shared_split         with replicated input: how many ranks share the tokens' rows of shared experts among them; default 0,
                     every rank takes all
transfer             'routed', or 'gather': dispatch sends every token to every rank, and each rank returns one sum for it, for
                     few tokens with many experts. The same rows and results; 'partial' at level 'rank' only, expert layouts,
                     not 'nvshmem'; default 'routed'
placement            a Placement; default: Placement.blocks(experts, ranks)
local_slots          places for experts on every rank, at least the most that a rank has: they fix groups, capacities and sizes
                     whatever the placement. Groups without an expert come last and are empty, their group_expert is -1;
                     default 0, as many as the rank has experts
layout               'expert_major', 'expert_padded', 'rank_major' or, on host memory, 'expert_indexed'; default
                     'expert_major'
alignment            each expert's first row is a multiple of it; default 1
capacity             rows a rank can receive (expert_padded: each expert), padding included, a multiple of alignment;
                     default 0: room for any routing in which no token lists an expert more than once
repeats              the default capacity also has room for tokens that list an expert more than once; default False
zero_padding         padding rows are set to zero; default False
format               'bf16', 'fp16', 'fp32', 'fp8' with any of -columns, -pow2, -packed, 'mxfp8' and
                     'mxfp4' with any of -up or -ocp, -columns or -tiles, 'nvfp4' with any of -token,
                     -columns or -tiles, or
                     'raw:BYTES+BYTES...', or the name of a registered format, see load_formats(). A dispatch may use another one
                     whose rows are no larger; default 'bf16'
combine_type         'bf16', 'fp16' or 'fp32': type of the rows that combine sends; default 'bf16'
reduction            'partial', 'exact' or 'unreduced'; a combine may use another one that needs no more staging; default
                     'partial'
reduction_level      'rank' or 'node': 'partial' adds the sums of single ranks, or first those of each node; default
                     'automatic', 'node' in a group of several nodes. 'cuda' in one hop has only 'rank'
layers               layers of a model that share the exchange, whose dispatches load_counts() counts apart; default 1
lanes                independent sequences of calls, which may overlap; default 1
deadline             seconds a wait may last; default 30
own_receive_buffers  the lanes have receive buffers; with False every dispatch needs ReceiveBuffers; default True
check_calls          host backends call check() at the end of every call; default True
count_waits          wait_times() adds up the waits for every peer; on host memory; default False

Raises UsageError for a setting that is missing, unknown or invalid. Constraints that depend on the number of ranks are
checked by Exchange, size_of and capacity_of.)")
      .def(
          "__init__",
          [](Config* self, const nb::kwargs& settings) { new (self) Config(config_of(settings)); },
          nb::sig(str("def __init__(self, *, experts: int, top_k: int, hidden: int, max_tokens: int, ",
                      kOptionalSettings, ") -> None")
                      .c_str()))
      .def_ro("experts", &Config::experts, "E, the number of experts.")
      .def_ro("top_k", &Config::top_k, "K, experts of a token: 1 to 32.")
      .def_ro("hidden", &Config::hidden, "H, columns of a token.")
      .def_ro("max_tokens", &Config::max_tokens, "T, the most tokens of a rank in a call.")
      .def_ro("shared_experts", &Config::shared_experts, "Experts that every rank holds.")
      .def_prop_ro("input", &name_in<&Config::input>, "'own' or 'replicated'.")
      .def_ro("shared_split", &Config::shared_split,
              "Ranks that share the rows of shared experts among them; 0: every rank takes all tokens.")
      .def_prop_ro("transfer", &name_in<&Config::transfer>, "'routed' or 'gather'.")
      .def_ro("placement", &Config::placement, "Which rank holds which expert.")
      .def_ro("local_slots", &Config::local_slots,
              "Places for experts on every rank; 0: as many as it has experts.")
      .def_ro("alignment", &Config::alignment, "Each expert's first row is a multiple of it.")
      .def_ro("capacity", &Config::capacity,
              "Rows as configured; 0: the default, which capacity_of() returns.")
      .def_ro("repeats", &Config::repeats, "Whether the default capacity has room for repeated experts.")
      .def_ro("zero_padding", &Config::zero_padding, "Whether padding rows are set to zero.")
      .def_ro("layers", &Config::layers, "Layers whose dispatches load_counts() counts apart.")
      .def_ro("lanes", &Config::lanes, "Independent sequences of calls, which may overlap.")
      .def_ro("deadline", &Config::deadline, "Seconds a wait may last.")
      .def_ro("own_receive_buffers", &Config::own_receive_buffers, "Whether the lanes have receive buffers.")
      .def_ro("check_calls", &Config::check_calls, "Whether host backends check every call.")
      .def_ro("count_waits", &Config::count_waits, "Whether wait_times() adds up waits.")
      .def_prop_ro("backend", &name_in<&Config::backend>,
                   "'cpu', 'cuda', 'collective' or 'nvshmem'; of a configuration that no exchange has taken "
                   "also 'automatic'.")
      .def_prop_ro("engine", &name_in<&Config::engine>,
                   "'nccl'; 'mpi' or 'custom', which the group must have brought; or 'automatic'.")
      .def_prop_ro("memory", &name_in<&Config::memory>,
                   "'host' or 'device'; of a configuration that no exchange has taken also 'automatic'.")
      .def_prop_ro("hops", &name_in<&Config::hops>,
                   "'one' or 'two'; of a configuration that no exchange has taken also 'automatic'.")
      .def_ro("window", &Config::window,
              "Most messages on their way from a rank to another; 0: the backend's default.")
      .def_prop_ro("layout", &name_in<&Config::layout>,
                   "'expert_major', 'expert_padded', 'rank_major' or 'expert_indexed'.")
      .def_prop_ro("format", &name_in<&Config::format>,
                   "Format of a dispatch that names none; others must have rows no larger.")
      .def_prop_ro("combine_type", &name_in<&Config::combine_type>, "Type of the rows that combine sends.")
      .def_prop_ro("reduction", &name_in<&Config::reduction>,
                   "Reduction of a combine that names none; others must need no more staging.")
      .def_prop_ro("reduction_level", &name_in<&Config::reduction_level>,
                   "'rank' or 'node'; 'automatic' before an Exchange has chosen.")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__",
           [](const nb::handle& self) { return nb::hash(nb::tuple(settings_of(self).attr("values")())); })
      .def("__getstate__", &settings_of, nb::sig("def __getstate__(self) -> dict[str, typing.Any]"))
      .def(
          "__setstate__",
          [](Config* self, const nb::dict& settings) {
            new (self) Config(config_of(nb::borrow<nb::kwargs>(settings)));
          },
          nb::sig("def __setstate__(self, state: dict[str, typing.Any], /) -> None"))
      .def("__repr__", &describe);
  bind_sizes(module);
}

}  // namespace ferry::python
