// Reads input files of the program.
#pragma once

#include <string>

namespace ferry::app {

// A whole file. @throws SystemError  it cannot be read; the message begins with `name`
std::string read_file(const std::string& path, const std::string& name);

}  // namespace ferry::app
