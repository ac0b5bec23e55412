#include <algorithm>
#include <charconv>
#include <string>
#include <vector>

#include "ferry/error.hpp"
#include "tools/report/forms.hpp"
#include "tools/report/json_field.hpp"

namespace ferry::report {
namespace {

using Json = nlohmann::ordered_json;

template <class T>
void read(const JsonField& json, const char* name, T& value) {
  value = json.at(name).as<T>();
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

std::optional<std::uint64_t> seed_of(const JsonField& field) {
  if (field.is_null()) return std::nullopt;
  const auto text = field.as<std::string>();
  std::uint64_t seed = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seed);
  if (error != std::errc() || end != text.data() + text.size()) field.refuse("a 64-bit number as a text");
  return seed;
}

void read_workload(const JsonField& json, TraceUse& workload) {
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

// Reports without these fields are of one node. `ranks`: as many as the report has figures of.
void read_nodes(const JsonField& json, std::size_t ranks, Configuration& configuration) {
  configuration.nodes = json.value("nodes", 1);
  configuration.simulated_nodes = json.value("simulated_nodes", false);
  if (json.has("node_of_rank"))
    read(json, "node_of_rank", configuration.node_of_rank);
  else
    configuration.node_of_rank.assign(ranks, 0);
  configuration.hops = json.value("hops", std::string("one"));
}

void read_configuration(const JsonField& json, Configuration& configuration) {
  read(json, "backend", configuration.backend);
  read(json, "ranks", configuration.ranks);
  read(json, "group", configuration.group);
  read(json, "experts", configuration.experts);
  configuration.shared_experts = json.value("shared_experts", 0);
  configuration.input = json.value("input", std::string("own"));
  read(json, "top_k", configuration.top_k);
  read(json, "hidden", configuration.hidden);
  read(json, "max_tokens", configuration.max_tokens);
  read(json, "layout", configuration.layout);
  read(json, "format", configuration.format);
  read(json, "reduction", configuration.reduction);
  configuration.reduction_level = json.value("reduction_level", std::string("rank"));
  read(json, "combine_type", configuration.combine_type);
  read(json, "expert_function", configuration.expert_function);
}

void read_machine(const JsonField& json, Machine& machine) {
  read(json, "cpu", machine.cpu);
  read(json, "cores", machine.cores);
  read(json, "memory_bytes", machine.memory_bytes);
  read(json, "memcpy_threads", machine.memcpy_threads);
  read(json, "memcpy_bytes_per_second", machine.memcpy_bytes_per_second);
}

void read_checks(const JsonField& json, std::vector<Check>& checks) {
  const JsonField list = json.at("list");
  for (std::size_t i = 0; i < list.size(); ++i) {
    const JsonField entry = list[i];
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

void read_traffic(const JsonField& json, Traffic& traffic) {
  const JsonField rows = json.at("traffic_bytes");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const JsonField row = rows[i];
    for (std::size_t j = 0; j < row.size(); ++j) traffic.traffic_bytes.push_back(row[j].as<std::int64_t>());
  }
  read(json, "wire_bytes", traffic.wire_bytes);
  read(json, "messages", traffic.messages);
  read(json, "moved_bytes", traffic.moved_bytes);
}

void read_load(const JsonField& json, Load& load) {
  read(json, "dropped_routes", load.dropped_routes);
  read(json, "rows_per_rank", load.rows_per_rank);
  load.shared_rows_per_rank = json.value("shared_rows_per_rank", std::int64_t{0});
  read(json, "routes_per_expert", load.routes_per_expert);
  read(json, "rank_of_expert", load.rank_of_expert);
}

void read_times(const JsonField& timeline, int steps, std::vector<StepTimes>& times) {
  const JsonField shown = timeline.at("steps");
  if (shown.as<int>() != steps)
    shown.refuse("all " + std::to_string(steps) + " steps of the run: the timeline holds only the first");
  const JsonField spans = timeline.at("spans_us");
  for (std::size_t step = 0; step < spans.size(); ++step) {
    const JsonField ranks = spans[step];
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      const JsonField stages = ranks[rank];
      StepTimes& at = times.emplace_back();
      for (const StepStage stage : kStages) {
        const JsonField span = stages[static_cast<std::size_t>(stage)];
        at[stage] = {.begin_us = span[0].as<double>(), .end_us = span[1].as<double>()};
      }
    }
  }
}

int version_of(const JsonField& json) {
  const auto schema = json.at("schema").as<std::string>();
  const int version = json.at("schema_version").as<int>();
  if (schema == kSchemaName && (version == 1 || version == kSchemaVersion)) return version;
  throw UsageError("run report: schema " + schema + " version " + std::to_string(version) + ", expected " +
                   kSchemaName + " version 1 or " + std::to_string(kSchemaVersion));
}

RunReport read_run(const JsonField& json) {
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
  read_nodes(json.at("configuration"), run.load.rows_per_rank.size(), run.configuration);
  read_times(json.at("timeline"), run.workload.steps, run.times);
  validate(run);
  return run;
}

}  // namespace

RunReport from_json(const Json& json) {
  if (version_of(JsonField(json)) == kSchemaVersion) return read_run(JsonField(json));
  const Json present = upgraded(json);
  return read_run(JsonField(present));
}

}  // namespace ferry::report
