#include "tools/ferry/run/earlier_run.hpp"

#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "ferry/error.hpp"
#include "tools/ferry/common/input.hpp"
#include "tools/report/json.hpp"

namespace ferry::app {

std::shared_ptr<const report::RunReport> read_earlier_run(const std::string& path) {
  if (path.empty()) return nullptr;
  const std::string name = "--compare " + path, remedy = "it takes what ferry run --json FILE has written";
  const auto json = read_json_file(path, name, remedy);
  try {
    return std::make_shared<const report::RunReport>(report::from_json(json));
  } catch (const UsageError& error) {
    throw UsageError(fmt::format("{}: {}; {}", name, error.what(), remedy));
  }
}

}  // namespace ferry::app
