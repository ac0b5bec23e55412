#include "tools/ferry/common/traces.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <system_error>

#include "base/environment.hpp"
#include "tools/ferry/common/files.hpp"

namespace ferry::app {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kIdsEnding = ".ids.npy";
constexpr std::string_view kSetsEnding = ".exact_top8.npy";

void add_if_trace(const fs::path& file, std::vector<RecordedTrace>& found) {
  const std::string name = file.filename().string();
  for (const std::string_view ending : {kIdsEnding, kSetsEnding}) {
    if (!name.ends_with(ending)) continue;
    const std::string stem = name.substr(0, name.size() - ending.size());
    found.push_back(
        {.name = (file.parent_path().filename() / stem).string(),
         .weights = ending == kIdsEnding && fs::exists(file.parent_path() / (stem + ".weights.npy"))});
  }
}

}  // namespace

std::vector<RecordedTrace> recorded_traces() {
  std::vector<RecordedTrace> found;
  std::error_code ignored;  // a folder that cannot be read counts as empty
  for (const fs::directory_entry& folder : fs::directory_iterator(Environment::read().traces, ignored)) {
    if (!folder.is_directory(ignored)) continue;
    for (const fs::directory_entry& file : fs::directory_iterator(folder, ignored)) add_if_trace(file, found);
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return found;
}

std::string why_no_traces() {
  const std::string folder = Environment::read().traces;
  if (folder.empty()) return "FERRY_TRACES is not set";
  std::error_code failed;
  const fs::directory_iterator first(folder, failed);
  if (failed) return fmt::format("FERRY_TRACES names '{}': {}", folder, failed.message());
  return fmt::format("FERRY_TRACES names '{}', which holds no <folder>/<name>{}", folder, kIdsEnding);
}

std::string how_to_get_traces() {
  return fmt::format("{} says how to get recorded traces; set FERRY_TRACES to the folder that holds them.",
                     document("docs/traces.md"));
}

std::string short_name(const std::string& trace) {
  return trace.starts_with("synth:") ? trace.substr(0, trace.find(':', 6)) : trace;
}

void warn_of_missing_traces() {
  if (Environment::read().traces.empty() || !recorded_traces().empty()) return;
  fmt::print(stderr, "ferry: note: {}; using synthesised traces\n", why_no_traces());
}

std::string default_recorded_trace() {
  const std::vector<RecordedTrace> traces = recorded_traces();
  if (traces.empty()) return "";
  const auto weighted = std::find_if(traces.begin(), traces.end(), [](const auto& t) { return t.weights; });
  return (weighted == traces.end() ? traces.begin() : weighted)->name;
}

}  // namespace ferry::app
