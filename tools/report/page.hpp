// The files of page/, embedded at configuration time.
#pragma once

#include <string_view>

namespace ferry::report {

extern const std::string_view kPageHtml;  // with the marks {{css}}, {{js}} and {{json}}
extern const std::string_view kPageCss;
extern const std::string_view kPageJs;

}  // namespace ferry::report
