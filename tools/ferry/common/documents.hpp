// Finds the documents that were installed with the program, for messages that refer to them.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace ferry::app {

// The folder that holds README.md and docs: of the Python package, or of the prefix of a tarball. Empty if
// there is none, as in a checkout.
std::filesystem::path documents_folder();

// The path of an installed document such as "docs/traces.md"; where documents are not installed, the name
// itself.
std::string document(std::string_view name);

}  // namespace ferry::app
