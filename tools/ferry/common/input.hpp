// Reads input files of the program.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace ferry::app {

// A whole file. Devices, pipes and sockets are refused: they may have no end, or not begin. The message of an
// error begins with `name`.
// @throws UsageError   it is no regular file
// @throws SystemError  it cannot be read
std::string read_file(const std::string& path, const std::string& name);

// The JSON in a file (report::parse_json). `remedy`: ends the message if it is none.
nlohmann::ordered_json read_json_file(const std::string& path, const std::string& name,
                                      const std::string& remedy);

}  // namespace ferry::app
