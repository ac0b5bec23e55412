#include "tools/ferry/model/report.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "tools/ferry/common/files.hpp"
#include "tools/ferry/common/traces.hpp"
#include "tools/report/units.hpp"

namespace ferry::app {

namespace {

using Json = nlohmann::ordered_json;

Json head(const char* schema, const Model& model) {
  Json json = report_json(schema, 1);
  json["constants"] = model.source;
  json["push_bytes_per_second"] = best_push(model.limits, 0);
  json["flag_one_way_seconds"] = model.limits.flag_seconds;
  return json;
}

Json cost_json(const Cost& cost) {
  return {{"us", cost.total},           {"start_us", cost.start}, {"link_us", cost.link},
          {"network_us", cost.network}, {"sms_us", cost.sms},     {"memory_us", cost.memory}};
}

Json call_json(const ModelCall& call, const std::string& router) {
  return {{"work", to_string(call.call.work)},
          {"ranks", call.shape.ranks},
          {"nodes", call.shape.nodes},
          {"hops", to_string(call.hops)},
          {"tokens", call.shape.tokens},
          {"hidden", call.hidden},
          {"experts", call.shape.experts},
          {"top_k", call.shape.top_k},
          {"format", to_string(call.format)},
          {"layout", to_string(call.layout)},
          {"reduction", call.call.combines() ? Json(to_string(call.call.reduction)) : Json(nullptr)},
          {"router", router},
          {"sm_limit", call.call.sm_limit},
          {"form", call.call.in_phases ? "phases" : "fused"},
          {"launch", call.call.eager ? "eager" : "graph"}};
}

Json bytes_json(const LinkBytes& bytes) {
  return {{"between_nodes", bytes.between}, {"within_node", bytes.within}};
}

Json network_json(const Network& network) {
  return {{"name", network.name},
          {"bytes_per_second", network.bytes_per_second},
          {"latency_us", network.latency_us},
          {"messages_per_second", network.messages_per_second}};
}

std::string work_of(const ModelCall& call) {
  std::string text = call.call.work == Work::dispatch_plan ? "plan" : to_string(call.call.work);
  if (call.call.combines() && call.call.reduction != Reduction::partial)
    text += std::string(" ") + to_string(call.call.reduction);
  if (call.call.in_phases) text += ", phases";
  if (call.call.eager) text += ", eager";
  return text;
}

std::string sms_of(const ModelCall& call) {
  return call.call.sm_limit > 0 ? std::to_string(call.call.sm_limit) : "all";
}

std::string constants_line(const Model& model) {
  return fmt::format("Constants {}\nLimits    push {} out of a rank, flag {} one way, {} SMs\n", model.source,
                     report::in_bytes_per_second(best_push(model.limits, 0)),
                     report::in_time(model.limits.flag_seconds * 1e6), model.limits.push.back().first);
}

std::string network_line(const Network& network) {
  return fmt::format("Network   {}: {} a rank, {} one way, {:.0f} M messages/s a rank\n", network.name,
                     report::in_bytes_per_second(network.bytes_per_second),
                     report::in_time(network.latency_us), network.messages_per_second * 1e-6);
}

}  // namespace

// ---- times of given calls

std::string times_table(const Model& model, const Network* network, const std::vector<PredictedCall>& calls) {
  std::string text = constants_line(model);
  if (network != nullptr) text += network_line(*network);
  const PredictedCall& first = calls.front();
  const RoutingShape& shape = first.call.shape;
  text += fmt::format("Call      {} on {}; {}, E {}, K {}; {}, {}, hidden {}, {} SMs\n\n",
                      report::counted(shape.ranks, "rank"), report::counted(shape.nodes, "node"),
                      short_name(first.router), shape.experts, shape.top_k, to_string(first.call.format),
                      to_string(first.call.layout), first.call.hidden, sms_of(first.call));
  text +=
      "tokens call                   hops     time    start     link  network      SMs   memory  largest\n";
  for (const PredictedCall& one : calls) {
    const Cost& cost = one.cost;
    text += fmt::format("{:>6} {:<22} {:<4} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}  {}\n", one.call.shape.tokens,
                        work_of(one.call), one.call.shape.nodes > 1 ? to_string(one.call.hops) : "-",
                        report::in_time(cost.total), report::in_time(cost.start), report::in_time(cost.link),
                        one.call.shape.nodes > 1 ? report::in_time(cost.network) : "-",
                        report::in_time(cost.sms), report::in_time(cost.memory), cost.largest());
  }
  return text;
}

Json times_json(const Model& model, const Network* network, const std::vector<PredictedCall>& calls) {
  Json json = head("ferry.model.times", model);
  json["network"] = network != nullptr ? network_json(*network) : Json(nullptr);
  json["calls"] = Json::array();
  for (const PredictedCall& one : calls) {
    Json row = call_json(one.call, one.router);
    row.update(cost_json(one.cost));
    row["largest"] = one.cost.largest();
    row["bytes"] = bytes_json(one.bytes);
    json["calls"].push_back(row);
  }
  return json;
}

// ---- EP16 to EP1024

std::string scale_text(const Model& model, const std::vector<ScaleTable>& tables) {
  std::string text = constants_line(model);
  for (const ScaleTable& table : tables) {
    text += "\n" + network_line(table.network);
    text += fmt::format("Nodes     of {} ranks; {}\n", table.node_ranks, table.what);
    text +=
        "                         one hop: times, bytes between nodes  two hops\n"
        "   EP nodes    E tokens  dispatch  combine dispatch  combine  dispatch  combine dispatch  combine\n";
    for (const ScalePoint& at : table.points) {
      const auto times = [](const ScalePoint::Times& one) {
        return fmt::format("{:>9} {:>8} {:>8} {:>8}", report::in_time(one.dispatch.total),
                           report::in_time(one.combine.total), report::in_bytes(one.dispatched.between),
                           report::in_bytes(one.combined.between));
      };
      text += fmt::format("{:>5} {:>5} {:>4} {:>6} {} {}\n", at.ranks, at.nodes, at.experts, at.tokens,
                          times(at.one), times(at.two));
    }
  }
  return text;
}

Json scale_json(const Model& model, const std::vector<ScaleTable>& tables) {
  Json json = head("ferry.model.scale", model);
  json["tables"] = Json::array();
  for (const ScaleTable& table : tables) {
    Json one{{"network", network_json(table.network)},
             {"node_ranks", table.node_ranks},
             {"call", table.what},
             {"points", Json::array()}};
    for (const ScalePoint& at : table.points) {
      const auto times = [](const ScalePoint::Times& of) {
        Json dispatch = cost_json(of.dispatch), combine = cost_json(of.combine);
        dispatch["bytes"] = bytes_json(of.dispatched);
        combine["bytes"] = bytes_json(of.combined);
        return Json{{"dispatch", dispatch}, {"combine", combine}};
      };
      one["points"].push_back({{"ranks", at.ranks},
                               {"nodes", at.nodes},
                               {"experts", at.experts},
                               {"tokens", at.tokens},
                               {"one_hop", times(at.one)},
                               {"two_hops", times(at.two)}});
    }
    json["tables"].push_back(one);
  }
  return json;
}

// ---- constants and errors

std::string constants_table(const Model& model) {
  std::string text = constants_line(model) + "\n";
  for (const ConstantEntry& entry : constant_table()) {
    const bool kept = std::find(model.kept.begin(), model.kept.end(), entry.name) != model.kept.end();
    text += fmt::format("{:<14} {:>8.2f} {:<5} {}{}\n", entry.name, model.constants[entry.constant],
                        entry.unit, entry.meaning, kept ? " (no point: kept)" : "");
  }
  return text;
}

std::string check_table(const std::vector<CheckedRecord>& records) {
  std::string text;
  std::vector<PointError> all;
  for (const CheckedRecord& record : records) {
    if (record.errors.empty()) continue;
    text += record.path + "\n";
    text +=
        "call                    R     N format      layout        routing  SMs measured    model  error\n";
    for (const PointError& one : record.errors) {
      const ModelCall& call = one.point->call;
      std::string routing = short_name(one.point->router);
      if (routing.starts_with("synth:")) routing = routing.substr(6);
      text += fmt::format("{:<22} {:>2} {:>5} {:<11.11} {:<13} {:<8.8} {:>3} {:>8} {:>8} {:>+4.0f} %\n",
                          work_of(call), call.shape.ranks, call.shape.tokens, to_string(call.format),
                          to_string(call.layout), routing, sms_of(call), report::in_time(one.point->us),
                          report::in_time(one.us), one.error * 100);
    }
    text += "\n";
    all.insert(all.end(), record.errors.begin(), record.errors.end());
  }
  const auto line = [](const std::vector<PointError>& errors, const std::string& name) {
    const ErrorSummary summary = summary_of(errors);
    return fmt::format("{:>6} {:>5.1f} % {:>5.1f} %  {}\n", summary.points, summary.median * 100,
                       summary.worst * 100, name);
  };
  text += "points  median   worst\n";
  for (const CheckedRecord& record : records) {
    std::string name = record.path;
    if (record.calibrated > 0) name += fmt::format("; {} calibrated on", record.calibrated);
    if (record.left_out > 0) name += fmt::format("; {} not modelled", record.left_out);
    text += line(record.errors, name);
  }
  if (records.size() > 1) text += line(all, "all");
  return text;
}

Json check_json(const Model& model, const std::vector<CheckedRecord>& records) {
  Json json = head("ferry.model.check", model);
  json["records"] = Json::array();
  std::vector<PointError> all;
  for (const CheckedRecord& record : records) {
    Json one{{"path", record.path},
             {"calibrated", record.calibrated},
             {"not_modelled", record.left_out},
             {"points", Json::array()}};
    for (const PointError& error : record.errors) {
      Json point = call_json(error.point->call, error.point->router);
      point.update({{"measured_us", error.point->us}, {"us", error.us}, {"error", error.error}});
      one["points"].push_back(point);
    }
    json["records"].push_back(one);
    all.insert(all.end(), record.errors.begin(), record.errors.end());
  }
  const ErrorSummary summary = summary_of(all);
  json["points"] = summary.points;
  json["median_error"] = summary.median;
  json["worst_error"] = summary.worst;
  return json;
}

}  // namespace ferry::app
