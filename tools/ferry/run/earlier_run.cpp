#include "tools/ferry/run/earlier_run.hpp"

#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "ferry/error.hpp"
#include "tools/ferry/common/input.hpp"
#include "tools/report/json.hpp"

namespace ferry::app {

std::shared_ptr<const report::RunReport> read_earlier_run(const std::string& path) {
  if (path.empty()) return nullptr;
  const std::string text = read_file(path, "--compare " + path);
  const auto json = nlohmann::ordered_json::parse(text, nullptr, false);
  const auto refuse = [&](const std::string& why) {
    throw UsageError(
        fmt::format("--compare {}: {}; it takes what ferry run --json FILE has written", path, why));
  };
  if (json.is_discarded()) refuse("not JSON");
  try {
    return std::make_shared<const report::RunReport>(report::from_json(json));
  } catch (const UsageError& error) {
    refuse(error.what());
  }
  return nullptr;
}

}  // namespace ferry::app
