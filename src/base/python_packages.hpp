// Files that Python packages bring, such as shared libraries.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ferry {

// Existing paths SITE/`file`, for every place where a Python installation may keep packages: those of
// VIRTUAL_ENV, PYTHONPATH and PATH first. Relative paths in these variables are left out.
std::vector<std::string> files_of_python_packages(std::string_view file);

}  // namespace ferry
