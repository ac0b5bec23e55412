// The files of page/, as they were when this was built.
#pragma once

#include <string_view>

namespace ferry::report {

extern const std::string_view kPageHtml;  // with the marks {{css}}, {{js}} and {{json}}, in this order
extern const std::string_view kPageCss;
extern const std::string_view kPageJs;

}  // namespace ferry::report
