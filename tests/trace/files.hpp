// NPY files made by hand, independently of the writer under test, and a folder to put them in.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "seed.hpp"

namespace trace_test {

using Bytes = std::vector<std::byte>;

inline Bytes to_bytes(const std::string& text) {
  const auto* data = reinterpret_cast<const std::byte*>(text.data());
  return Bytes(data, data + text.size());
}

template <class T>
std::string raw(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// A file of version `major`.0: magic, length of `header`, `header` unchanged, then `data`.
inline std::string npy(const std::string& header, const std::string& data, int major = 1) {
  std::string file = "\x93NUMPY";
  file += static_cast<char>(major);
  file += '\0';
  for (int byte = 0; byte < (major == 1 ? 2 : 4); ++byte)
    file += static_cast<char>(header.size() >> (8 * byte));
  return file + header + data;
}

inline std::string header(const std::string& descr, const std::string& shape) {
  return "{'descr': '" + descr + "', 'fortran_order': False, 'shape': " + shape + ", }   \n";
}

class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "ferry-trace-XXXXXX").string();
    if (!mkdtemp(pattern.data())) throw std::runtime_error("cannot make a folder like " + pattern);
    path_ = pattern;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

  std::string write(const std::string& name, const std::string& content) const {
    const std::string path = *this / name;
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << content;
    return path;
  }

 private:
  std::filesystem::path path_;
};

using ferry::test::seed;

}  // namespace trace_test

// Expects `statement` to throw `type` with a message that holds `part`.
#define EXPECT_THROWS(statement, type, part)                                            \
  try {                                                                                 \
    statement;                                                                          \
    ADD_FAILURE() << "no " #type " thrown";                                             \
  } catch (const type& error) {                                                         \
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what(); \
  }
