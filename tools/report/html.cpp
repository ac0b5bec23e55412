#include "tools/report/html.hpp"

#include <algorithm>
#include <string_view>

#include "tools/report/json.hpp"
#include "tools/report/json_parts.hpp"
#include "tools/report/page.hpp"

namespace ferry::report {
namespace {

// Each is three rectangles; more would make the page slow to open on a phone.
constexpr int kMostRankSteps = 2048;

int most_steps(int ranks) {
  return std::max(1, kMostRankSteps / std::max(1, ranks));
}

void put(std::string& page, std::string_view mark, std::string_view text) {
  page.replace(page.find(mark), mark.size(), text);
}

}  // namespace

// Escapes "<", which could end the script element. In JSON it occurs only in strings, where \u003c means the
// same.
std::string for_script(std::string json) {
  for (std::size_t at = 0; (at = json.find('<', at)) != std::string::npos;) json.replace(at, 1, "\\u003c");
  return json;
}

std::string to_html(const RunReport& run) {
  const nlohmann::ordered_json json = to_json(run, most_steps(run.configuration.ranks));
  std::string page(kPageHtml);
  put(page, "{{css}}", kPageCss);
  put(page, "{{js}}", kPageJs);
  // Last, because its text may contain the other marks.
  put(page, "{{json}}", for_script(json.dump()));
  return page;
}

}  // namespace ferry::report
