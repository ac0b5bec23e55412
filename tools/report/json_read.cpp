#include <algorithm>
#include <charconv>
#include <string>
#include <vector>

#include "ferry/error.hpp"
#include "tools/report/json.hpp"

namespace ferry::report {
namespace {

using Json = nlohmann::ordered_json;

template <class T>
void read(const Json& json, const char* name, T& value) {
  json.at(name).get_to(value);
}

template <class T>
void read(const Json& json, const char* name, std::optional<T>& value) {
  const Json& field = json.at(name);
  value = field.is_null() ? std::nullopt : std::optional<T>(field.get<T>());
}

// Fields that had another name in version 1.
struct RenamedField {
  const char* old_path;
  const char* path;
};
constexpr RenamedField kRenamedFields[] = {
    {"/played", "/workload"},
    {"/configuration/wire", "/configuration/combine_type"},
};

// Gives the fields of a version 1 report their present names.
Json upgraded(Json json) {
  for (const auto& [old_path, path] : kRenamedFields) {
    const Json::json_pointer from(old_path), to(path);
    if (!json.contains(from)) continue;
    json[to] = json[from];
    json[from.parent_pointer()].erase(from.back());
  }
  return json;
}

std::optional<std::uint64_t> seed_of(const Json& field) {
  if (field.is_null()) return std::nullopt;
  const auto text = field.get<std::string>();
  std::uint64_t seed = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seed);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw UsageError("run report: the seed '" + text + "' is not a 64-bit number");
  }
  return seed;
}

void read_workload(const Json& json, TraceUse& workload) {
  read(json, "trace", workload.trace);
  read(json, "synthesised", workload.synthesised);
  read(json, "description", workload.description);
  read(json, "recipe", workload.recipe);
  workload.seed = seed_of(json.at("seed"));
  read(json, "layers", workload.layers);
  read(json, "tokens", workload.tokens);
  read(json, "tokens_per_rank", workload.tokens_per_rank);
  read(json, "steps", workload.steps);
}

// Reports without these fields are of one node.
void read_nodes(const Json& json, Configuration& configuration) {
  configuration.nodes = json.value("nodes", 1);
  configuration.simulated_nodes = json.value("simulated_nodes", false);
  const std::vector<int> one_node(static_cast<std::size_t>(std::max(configuration.ranks, 0)));
  configuration.node_of_rank = json.value("node_of_rank", one_node);
  configuration.hops = json.value("hops", "one");
}

void read_configuration(const Json& json, Configuration& configuration) {
  read(json, "backend", configuration.backend);
  read(json, "ranks", configuration.ranks);
  read(json, "group", configuration.group);
  read_nodes(json, configuration);
  read(json, "experts", configuration.experts);
  configuration.shared_experts = json.value("shared_experts", 0);
  configuration.input = json.value("input", "own");
  read(json, "top_k", configuration.top_k);
  read(json, "hidden", configuration.hidden);
  read(json, "max_tokens", configuration.max_tokens);
  read(json, "layout", configuration.layout);
  read(json, "format", configuration.format);
  read(json, "reduction", configuration.reduction);
  configuration.reduction_level = json.value("reduction_level", "rank");
  read(json, "combine_type", configuration.combine_type);
  read(json, "expert_function", configuration.expert_function);
}

void read_machine(const Json& json, Machine& machine) {
  read(json, "cpu", machine.cpu);
  read(json, "cores", machine.cores);
  read(json, "memory_bytes", machine.memory_bytes);
  read(json, "memcpy_threads", machine.memcpy_threads);
  read(json, "memcpy_bytes_per_second", machine.memcpy_bytes_per_second);
}

void read_checks(const Json& json, std::vector<Check>& checks) {
  for (const Json& entry : json.at("list")) {
    Check& check = checks.emplace_back();
    read(entry, "name", check.name);
    read(entry, "passed", check.passed);
    read(entry, "compared", check.compared);
    read(entry, "wrong", check.wrong);
    read(entry, "error", check.error);
    read(entry, "tolerance", check.tolerance);
    read(entry, "detail", check.detail);
  }
}

void read_traffic(const Json& json, Traffic& traffic) {
  for (const Json& row : json.at("traffic_bytes")) {
    for (const Json& bytes : row) traffic.traffic_bytes.push_back(bytes.get<std::int64_t>());
  }
  read(json, "wire_bytes", traffic.wire_bytes);
  read(json, "messages", traffic.messages);
  read(json, "moved_bytes", traffic.moved_bytes);
}

void read_load(const Json& json, Load& load) {
  read(json, "dropped_routes", load.dropped_routes);
  read(json, "rows_per_rank", load.rows_per_rank);
  load.shared_rows_per_rank = json.value("shared_rows_per_rank", std::int64_t{0});
  read(json, "routes_per_expert", load.routes_per_expert);
  read(json, "rank_of_expert", load.rank_of_expert);
}

void read_times(const Json& timeline, int steps, std::vector<StepTimes>& times) {
  const int shown = timeline.at("steps").get<int>();
  if (shown != steps) {
    throw UsageError("run report: the timeline holds only the first " + std::to_string(shown) + " of " +
                     std::to_string(steps) + " steps");
  }
  for (const Json& step : timeline.at("spans_us")) {
    for (const Json& rank : step) {
      StepTimes& at = times.emplace_back();
      for (const StepStage stage : kStages) {
        const Json& span = rank.at(static_cast<std::size_t>(stage));
        at[stage] = {.begin_us = span.at(0).get<double>(), .end_us = span.at(1).get<double>()};
      }
    }
  }
}

int version_of(const Json& json) {
  const auto schema = json.at("schema").get<std::string>();
  const int version = json.at("schema_version").get<int>();
  if (schema == kSchemaName && (version == 1 || version == kSchemaVersion)) return version;
  throw UsageError("run report: schema " + schema + " version " + std::to_string(version) + ", expected " +
                   kSchemaName + " version 1 or " + std::to_string(kSchemaVersion));
}

RunReport read_run(const Json& written) {
  const Json json = version_of(written) == kSchemaVersion ? written : upgraded(written);
  RunReport run;
  read(json, "ferry_version", run.ferry_version);
  read(json, "command", run.command);
  read(json, "started_at", run.started_at);
  read_workload(json.at("workload"), run.workload);
  read_configuration(json.at("configuration"), run.configuration);
  read_machine(json.at("machine"), run.machine);
  read_checks(json.at("checks"), run.checks);
  read_traffic(json.at("dispatch"), run.dispatch);
  read_traffic(json.at("combine"), run.combine);
  read_load(json.at("load"), run.load);
  read_times(json.at("timeline"), run.workload.steps, run.times);
  validate(run);
  return run;
}

}  // namespace

RunReport from_json(const Json& json) {
  try {
    return read_run(json);
  } catch (const Json::exception& error) {
    throw UsageError(std::string("run report: ") + error.what());
  }
}

}  // namespace ferry::report
