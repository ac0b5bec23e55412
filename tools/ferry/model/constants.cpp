#include "tools/ferry/model/constants.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "ferry/error.hpp"
#include "tools/ferry/common/files.hpp"
#include "tools/ferry/model/records.hpp"

namespace ferry::app {

namespace {

constexpr const char* kSchema = "ferry.model.constants";
constexpr int kSchemaVersion = 1;
constexpr const char* kRemedy = "write one with ferry model --calibrate LIMITS.json BENCH.json -o FILE";

// The values are what `ferry model --calibrate` finds from bench/results/2026-11-22-4xh200-limits.json and
// the records in bench/results/model; a test compares them.
// clang-format off
constexpr std::array<ConstantEntry, kConstants> kTable = {{
    {Constant::dispatch_few, "dispatch_few", 8.576, "us", "start of a dispatch of fewer than 256 tokens"},
    {Constant::dispatch_many, "dispatch_many", 22.61, "us", "start of a dispatch of 256 tokens or more"},
    {Constant::combine_ll, "combine_ll", 5.425, "us", "start of a combine whose sums are LL packets"},
    {Constant::combine_few, "combine_few", 9.035, "us", "start of a combine of fewer than 256 tokens"},
    {Constant::combine_many, "combine_many", 19.83, "us", "start of a combine of 256 tokens or more, rows of 7,168 bf16"},
    {Constant::doubling, "doubling", 0.6003, "us", "added to a start for each doubling of the ranks"},
    {Constant::plan, "plan", 2.52, "us", "added by a dispatch with an existing plan"},
    {Constant::phases, "phases", 10.49, "us", "added by a call in two phases"},
    {Constant::eager, "eager", 1.364, "us", "added for each kernel launched without a graph"},
    {Constant::store, "store", 47.69, "GB/s", "dispatch: an SM stores"},
    {Constant::read, "read", 64.2, "GB/s", "combine: an SM reads and adds expert rows"},
    {Constant::sum, "sum", 44.83, "GB/s", "combine: an SM sends sums and adds them at home"},
    {Constant::row, "row", 36.49, "GB/s", "exact, unreduced: an SM sends and adds rows"},
    {Constant::fp8, "fp8", 0.5853, "us", "an SM quantises 7,168 values to fp8 or mxfp8"},
    {Constant::mxfp4, "mxfp4", 2.453, "us", "an SM quantises 7,168 values to mxfp4"},
    {Constant::nvfp4, "nvfp4", 2.876, "us", "an SM quantises 7,168 values to nvfp4"},
    {Constant::nvfp4_token, "nvfp4_token", 3.365, "us", "an SM quantises 7,168 values to nvfp4-token"},
    {Constant::memory, "memory", 3685, "GB/s", "a GPU reads and writes its memory"},
}};
// clang-format on

constexpr bool in_order() {
  for (std::size_t i = 0; i < kConstants; ++i)
    if (kTable[i].constant != static_cast<Constant>(i)) return false;
  return true;
}
static_assert(in_order(), "the table lists the constants in the order of Constant");

}  // namespace

const std::array<ConstantEntry, kConstants>& constant_table() {
  return kTable;
}

Constants::Constants() : values_{} {
  for (std::size_t i = 0; i < kConstants; ++i) values_[i] = kTable[i].value;
}

Model built_in_model() {
  Model model;
  // bench/results/2026-11-22-4xh200-limits.json
  model.limits.gpus.assign(4, "NVIDIA H200");
  model.limits.ranks = 4;
  model.limits.push = {{1, 45.20e9},   {2, 90.73e9},   {4, 176.48e9},  {8, 337.00e9},  {16, 329.90e9},
                       {24, 319.33e9}, {32, 333.57e9}, {64, 347.29e9}, {132, 331.60e9}};
  model.limits.flag_seconds = 1.293e-6;
  model.limits.barrier_seconds = 1.448e-6;
  model.limits.launch = {{1, 0.676e-6}, {16, 0.684e-6}, {132, 0.745e-6}};
  model.source = "built in: 19 points on 4, 2 and 1 x NVIDIA H200";
  // The lines in bench/results/model.
  model.calibrated = {{"dispatch", 4, 1, 9.92479995},    {"combine", 4, 1, 6.90080002},
                      {"combine", 4, 64, 19.0160006},    {"dispatch", 4, 512, 81.0720026},
                      {"combine", 4, 512, 79.668802},    {"dispatch", 4, 2048, 147.403204},
                      {"dispatch", 4, 4096, 691.656017}, {"combine", 4, 4096, 806.26564},
                      {"combine", 4, 4096, 1155.09119},  {"combine", 4, 4096, 604.395199},
                      {"dispatch", 4, 4096, 500.379181}, {"dispatch", 4, 1, 11.2896003},
                      {"dispatch", 4, 128, 37.3167992},  {"dispatch_plan", 4, 128, 29.3487996},
                      {"dispatch", 2, 1, 9.23840031},    {"dispatch", 4, 4096, 496.604776},
                      {"dispatch", 2, 4096, 123.182404}, {"dispatch", 2, 4096, 136.673605},
                      {"dispatch", 2, 4096, 150.884795}};
  return model;
}

nlohmann::ordered_json json_of(const Model& model) {
  nlohmann::ordered_json json = report_json(kSchema, kSchemaVersion);
  json["source"] = model.source;
  for (const ConstantEntry& entry : constant_table())
    json["constants"][entry.name] = {
        {"value", model.constants[entry.constant]}, {"unit", entry.unit}, {"meaning", entry.meaning}};
  json["kept"] = model.kept;
  json["calibrated"] = nlohmann::ordered_json::array();
  for (const CalibratedPoint& one : model.calibrated)
    json["calibrated"].push_back(
        {{"work", one.work}, {"ranks", one.ranks}, {"tokens", one.tokens}, {"us", one.us}});
  json["limits"] = json_of(model.limits);
  return json;
}

Model read_model(const std::string& path) {
  return read_json_file(path, path, kRemedy, [](const nlohmann::ordered_json& document) {
    const report::JsonField json(document);
    require_schema(json, kSchema);
    Model model;
    model.source = json.at("source").as<std::string>();
    for (const ConstantEntry& entry : constant_table()) {
      const report::JsonField value = json.at("constants").at(entry.name).at("value");
      if (!(value.as<double>() > 0)) value.refuse("a positive number");
      model.constants[entry.constant] = value.as<double>();
    }
    model.kept = json.at("kept").as<std::vector<std::string>>();
    const report::JsonField points = json.at("calibrated");
    for (std::size_t i = 0; i < points.size(); ++i)
      model.calibrated.push_back({points[i].at("work").as<std::string>(), points[i].at("ranks").as<int>(),
                                  points[i].at("tokens").as<int>(), points[i].at("us").as<double>()});
    model.limits = limits_from(json.at("limits"));
    return model;
  });
}

}  // namespace ferry::app
