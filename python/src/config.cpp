#include "config.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <limits>

#include "base/text.hpp"
#include "bindings.hpp"
#include "exchange/configuration.hpp"
#include "ferry/error.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferry::python {
namespace {

// The value whose name the library itself prints.
template <class Enumeration, std::size_t count>
Enumeration named(const char* what, const std::string& name, const std::array<Enumeration, count>& values) {
  std::string names;
  for (const Enumeration value : values) {
    if (name == to_string(value)) return value;
    names += str(names.empty() ? "" : ", ", to_string(value));
  }
  throw UsageError(str(what, ": '", name, "' is none of ", names));
}

[[noreturn]] void refuse(const std::string& key, const std::string& expected, nb::handle value) {
  PyErr_Clear();
  throw UsageError(
      str(key, ": expected ", expected, ", got ", nb::cast<std::string>(nb::repr(nb::borrow(value)))));
}

template <class T>
T value_of(const std::string& key, nb::handle value, const char* expected) {
  T read{};
  if (nb::try_cast(nb::borrow(value), read, false)) return read;
  refuse(key, expected, value);
}

// NumPy's are no int, but tell their value as one.
template <class T>
T whole_of(const std::string& key, nb::handle value) {
  if (PyBool_Check(value.ptr()) || PyIndex_Check(value.ptr()) == 0) refuse(key, "a whole number", value);
  const nb::object index = nb::steal(PyNumber_Index(value.ptr()));
  if (!index.is_valid()) refuse(key, "a whole number", value);
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  constexpr auto kLeast = std::numeric_limits<T>::min(), kMost = std::numeric_limits<T>::max();
  if (overflow != 0 || number < kLeast || number > kMost) {
    refuse(key, str("a whole number of ", kLeast, " to ", kMost), value);
  }
  return static_cast<T>(number);
}

int int_of(const std::string& key, nb::handle value) {
  return whole_of<int>(key, value);
}
bool bool_of(const std::string& key, nb::handle value) {
  return value_of<bool>(key, value, "True or False");
}
std::string text_value(const std::string& key, nb::handle value) {
  return value_of<std::string>(key, value, "a string");
}

double seconds_of(const std::string& key, nb::handle value) {
  constexpr const char* kExpected = "a number of seconds";
  if (PyBool_Check(value.ptr()) || PyNumber_Check(value.ptr()) == 0) refuse(key, kExpected, value);
  const double seconds = PyFloat_AsDouble(value.ptr());
  if (PyErr_Occurred() != nullptr) refuse(key, kExpected, value);
  return seconds;
}

using Set = void (*)(Config&, const std::string& key, nb::handle value);

struct Setting {
  const char* name;
  Set set;
};

constexpr Setting kSettings[] = {
    {"experts", [](Config& c, const std::string& k, nb::handle v) { c.experts = int_of(k, v); }},
    {"top_k", [](Config& c, const std::string& k, nb::handle v) { c.top_k = int_of(k, v); }},
    {"hidden", [](Config& c, const std::string& k, nb::handle v) { c.hidden = int_of(k, v); }},
    {"max_tokens", [](Config& c, const std::string& k, nb::handle v) { c.max_tokens = int_of(k, v); }},
    {"backend",
     [](Config& c, const std::string& k, nb::handle v) { c.backend = backend_named(text_value(k, v)); }},
    {"placement", [](Config& c, const std::string& k,
                     nb::handle v) { c.placement = value_of<Placement>(k, v, "a Placement"); }},
    {"layout",
     [](Config& c, const std::string& k, nb::handle v) {
       c.layout = named(k.c_str(), text_value(k, v),
                        std::array{Layout::expert_major, Layout::expert_padded, Layout::rank_major});
     }},
    {"alignment", [](Config& c, const std::string& k, nb::handle v) { c.alignment = int_of(k, v); }},
    {"capacity",
     [](Config& c, const std::string& k, nb::handle v) { c.capacity = whole_of<std::int64_t>(k, v); }},
    {"repeats", [](Config& c, const std::string& k, nb::handle v) { c.repeats = bool_of(k, v); }},
    {"zero_padding", [](Config& c, const std::string& k, nb::handle v) { c.zero_padding = bool_of(k, v); }},
    {"format",
     [](Config& c, const std::string& k, nb::handle v) { c.format = parse_format(text_value(k, v)); }},
    {"combine_type",
     [](Config& c, const std::string& k, nb::handle v) {
       c.combine_type = named(k.c_str(), text_value(k, v), std::array{DType::bf16, DType::fp16, DType::fp32});
     }},
    {"reduction",
     [](Config& c, const std::string& k, nb::handle v) { c.reduction = reduction_named(text_value(k, v)); }},
    {"lanes", [](Config& c, const std::string& k, nb::handle v) { c.lanes = int_of(k, v); }},
    {"deadline", [](Config& c, const std::string& k, nb::handle v) { c.deadline = seconds_of(k, v); }},
    {"own_receive_buffers",
     [](Config& c, const std::string& k, nb::handle v) { c.own_receive_buffers = bool_of(k, v); }},
    {"check_calls", [](Config& c, const std::string& k, nb::handle v) { c.check_calls = bool_of(k, v); }},
};

const Setting& setting_named(const std::string& name) {
  std::string names;
  for (const Setting& setting : kSettings) {
    if (name == setting.name) return setting;
    names += str(names.empty() ? "" : ", ", setting.name);
  }
  throw UsageError(str("configuration: no setting is named '", name, "'; there are: ", names));
}

void require_sizes(const nb::kwargs& settings) {
  std::string missing;
  for (const char* name : {"experts", "top_k", "hidden", "max_tokens"}) {
    if (!settings.contains(name)) missing += str(missing.empty() ? "" : ", ", name);
  }
  if (!missing.empty()) throw UsageError(str("configuration: missing: ", missing));
}

std::string describe(const Config& c) {
  return str("Config(experts=", c.experts, ", top_k=", c.top_k, ", hidden=", c.hidden,
             ", max_tokens=", c.max_tokens, ", backend='", to_string(c.backend), "', layout='",
             to_string(c.layout), "', alignment=", c.alignment, ", capacity=", c.capacity, ", format='",
             to_string(c.format), "', combine_type='", to_string(c.combine_type), "', reduction='",
             to_string(c.reduction), "', lanes=", c.lanes, ", deadline=", c.deadline, ")");
}

void bind_sizes(nb::module_& module) {
  nb::class_<Sizes>(module, "Sizes", "Bytes of one rank's exchange, by what they are for.")
      .def_ro("dispatch_staging", &Sizes::dispatch_staging, "symmetric: 2 * lanes * R*T messages")
      .def_ro("combine_staging", &Sizes::combine_staging, "symmetric: 2 * lanes * T*K or T*min(K,R) rows")
      .def_ro("signals", &Sizes::signals, "symmetric: flags, counts, refusals")
      .def_ro("results", &Sizes::results, "owned outputs of all lanes")
      .def_ro("plans", &Sizes::plans, "plans and working memory of the lanes")
      .def_prop_ro("total", &Sizes::total, "the sum")
      .def("__repr__", [](const Sizes& s) {
        return str("Sizes(dispatch_staging=", s.dispatch_staging, ", combine_staging=", s.combine_staging,
                   ", signals=", s.signals, ", results=", s.results, ", plans=", s.plans,
                   ", total=", s.total(), ")");
      });
  module.def(
      "size_of", [](const Config& config, int ranks, int rank) { return size_of(config, ranks, rank); },
      "config"_a, "ranks"_a, "rank"_a = 0,
      "Exactly what an exchange of this configuration maps on one rank of `ranks`. Allocates nothing.");
  module.def("capacity_of", &capacity_of, "config"_a, "ranks"_a, "rank"_a = 0,
             "Rows a rank can receive (expert_padded: rows of one expert).");
  module.def("plan_bytes", &plan_bytes, "config"_a, "ranks"_a, "Bytes of a plan's storage, on every rank.");
}

void bind_placement(nb::module_& module) {
  nb::class_<Placement>(module, "Placement", "Which rank holds which expert. Immutable.")
      .def_static("blocks", &Placement::blocks, "experts"_a, "ranks"_a,
                  "Blocks of neighbouring experts; the first experts % ranks ranks hold one more.")
      .def_static(
          "table",
          [](const std::vector<std::pair<int, int>>& places, int ranks, std::uint64_t version) {
            std::vector<ExpertLocation> table;
            for (const auto& [rank, local] : places) table.push_back({rank, local});
            return Placement::table(std::move(table), ranks, version);
          },
          "places"_a, "ranks"_a, "version"_a = 0,
          "Any table: (rank, local expert) of every expert. UsageError for holes and double places.")
      .def_prop_ro("experts", &Placement::experts, "how many experts it places")
      .def_prop_ro("ranks", &Placement::ranks, "on how many ranks")
      .def_prop_ro("version", &Placement::version, "the number given with the table")
      .def(
          "place",
          [](const Placement& self, int expert) {
            if (expert < 0 || expert >= self.experts()) {
              throw UsageError(str("expert = ", expert, ", must be 0 to ", self.experts() - 1));
            }
            return std::pair(self.place(expert).rank, self.place(expert).local);
          },
          "expert"_a, "(rank, local expert) of an expert.")
      .def(
          "experts_of",
          [](const Placement& self, int rank) {
            if (rank < 0 || rank >= self.ranks()) {
              throw UsageError(str("rank = ", rank, ", must be 0 to ", self.ranks() - 1));
            }
            return self.experts_of(rank);
          },
          "rank"_a, "The global ids of a rank's experts, in local order.")
      .def("__repr__", [](const Placement& self) {
        return str("Placement(", self.experts(), " experts on ", self.ranks(), " ranks, version ",
                   self.version(), ")");
      });
}

}  // namespace

Reduction reduction_named(const std::string& name) {
  return named("reduction", name, std::array{Reduction::partial, Reduction::exact, Reduction::unreduced});
}

BackendKind backend_named(const std::string& name) {
  return named("backend", name, std::array{BackendKind::reference, BackendKind::cpu, BackendKind::cuda});
}

const char* const kOptionalSettings =
    "backend: str = ..., placement: Placement = ..., layout: str = 'expert_major', alignment: int = 1, "
    "capacity: int = 0, repeats: bool = False, zero_padding: bool = False, format: str = 'bf16', "
    "combine_type: str = 'bf16', reduction: str = 'partial', lanes: int = 1, deadline: float = 30.0, "
    "own_receive_buffers: bool = True, check_calls: bool = True";

Config config_of(const nb::kwargs& settings, BackendKind fallback) {
  Config config;
  config.backend = fallback;
  for (const auto& [key, value] : settings) {
    const auto name = nb::cast<std::string>(key);
    setting_named(name).set(config, name, value);
  }
  require_sizes(settings);
  if (config.placement.empty()) {
    check_alone(config);
  } else {
    complete_config(config, config.placement.ranks());
  }
  return config;
}

void bind_config(nb::module_& module) {
  bind_placement(module);
  nb::class_<Config>(module, "Config", R"(The configuration of an exchange, the same on every rank.

Config(experts=E, top_k=K, hidden=H, max_tokens=T, ...), with at least these four. The others:

backend        'cpu', 'cuda' or 'reference'; in a group whose torch.distributed backend is NCCL 'cuda', else 'cpu'
placement      a Placement; default: Placement.blocks(experts, ranks)
layout         'expert_major', 'expert_padded' or 'rank_major'
alignment      experts start at multiples of it; default 1
capacity       rows a rank can receive (expert_padded: rows an expert); default 0: any routing fits
repeats        the default capacity also holds tokens that list an expert more than once
zero_padding   padding rows become zero
format         'bf16', 'fp16', 'fp32', 'fp8' with any of -columns, -pow2, -packed, or 'raw:BYTES+BYTES...'
combine_type   'bf16', 'fp16' or 'fp32': type of the experts' rows that combine carries
reduction      'partial', 'exact' or 'unreduced': the largest combine
lanes          how many calls may be in flight; default 1
deadline       seconds a wait may last; default 30
own_receive_buffers   False: every dispatch brings memory for its arrivals
check_calls    host backends call check() at the end of every call; default True

UsageError names a setting that is missing, does not exist or does not fit. What depends on the number of ranks is
checked when an exchange is made or its size is asked for.)")
      .def(
          "__init__",
          [](Config* self, const nb::kwargs& settings) { new (self) Config(config_of(settings)); },
          nb::sig(str("def __init__(self, *, experts: int, top_k: int, hidden: int, max_tokens: int, ",
                      kOptionalSettings, ") -> None")
                      .c_str()))
      .def_ro("experts", &Config::experts, "E")
      .def_ro("top_k", &Config::top_k, "K, 1 to 32")
      .def_ro("hidden", &Config::hidden, "H, columns of a token")
      .def_ro("max_tokens", &Config::max_tokens, "T, most tokens a rank may have in a call")
      .def_ro("placement", &Config::placement, "which rank holds which expert")
      .def_ro("alignment", &Config::alignment, "experts start at multiples of it")
      .def_ro("capacity", &Config::capacity, "rows as configured; 0: any routing fits")
      .def_ro("repeats", &Config::repeats, "see the class")
      .def_ro("zero_padding", &Config::zero_padding, "see the class")
      .def_ro("lanes", &Config::lanes, "independent channels")
      .def_ro("deadline", &Config::deadline, "seconds a wait may last")
      .def_ro("own_receive_buffers", &Config::own_receive_buffers, "see the class")
      .def_ro("check_calls", &Config::check_calls, "see the class")
      .def_prop_ro(
          "backend", [](const Config& c) { return std::string(to_string(c.backend)); }, "see the class")
      .def_prop_ro(
          "layout", [](const Config& c) { return std::string(to_string(c.layout)); }, "see the class")
      .def_prop_ro(
          "format", [](const Config& c) { return to_string(c.format); }, "see the class")
      .def_prop_ro(
          "combine_type", [](const Config& c) { return std::string(to_string(c.combine_type)); },
          "see the class")
      .def_prop_ro(
          "reduction", [](const Config& c) { return std::string(to_string(c.reduction)); }, "see the class")
      .def("__repr__", &describe);
  bind_sizes(module);
}

}  // namespace ferry::python
