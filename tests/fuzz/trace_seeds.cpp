// Writes the initial corpus of the trace fuzzer into a folder: valid traces of every type, and some invalid
// ones.
#include <filesystem>
#include <fstream>
#include <iostream>
#include <vector>

#include "fuzz/trace_input.hpp"
#include "trace/files.hpp"

namespace {

using trace_fuzz::pack;
using trace_test::header;
using trace_test::npy;
using trace_test::raw;

template <class T>
std::string ids_of(const std::string& descr, int major) {
  return npy(header(descr, "(2, 2, 3)"), raw(std::vector<T>{0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0}), major);
}

std::vector<std::string> seeds() {
  const std::string half = npy(header("<f2", "(2, 2, 3)"), raw(std::vector<std::uint16_t>(12, 0x3400)));
  const std::string single = npy(header("<f4", "(2, 2, 3)"), raw(std::vector<float>(12, 0.5f)));
  const std::string lengths = npy(header("<i4", "(2,)"), raw<std::int32_t>({1, 1}));
  const std::string bytes = ids_of<std::uint8_t>("|u1", 1);
  return {
      pack(6, bytes, half, lengths),
      pack(0, ids_of<std::int8_t>("|i1", 1), single, ""),
      pack(6, ids_of<std::uint16_t>("<u2", 2), "", lengths),
      pack(6, ids_of<std::int16_t>("<i2", 3), "", ""),
      pack(6, ids_of<std::uint32_t>("<u4", 1), "", ""),
      pack(0, ids_of<std::int32_t>("<i4", 1), half, ""),
      pack(6, ids_of<std::uint64_t>("<u8", 1), "", ""),
      pack(0, ids_of<std::int64_t>("<i8", 1), "", lengths),
      pack(0, npy(header("<i4", "(2, 2)"), raw<std::int32_t>({0, -1, 7, 255})), "", ""),
      pack(5, bytes, "", ""),                                // an id outside the experts
      pack(6, bytes.substr(0, bytes.size() - 1), half, ""),  // truncated
      pack(6, single, half, ""),                             // ids of a wrong type
      pack(6, npy(header(">i4", "(2, 2, 3)"), ""), "", ""),  // big-endian
      pack(6, npy(header("<i4", "(4294967296, 4294967296, 8)"), ""), "", ""),
      pack(6, npy("{'descr': [('a', '<i4')], 'fortran_order': True, 'shape': (-1,)}", ""), "", ""),
  };
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: trace_seeds folder\n";
    return 2;
  }
  const std::filesystem::path folder = argv[1];
  std::filesystem::create_directories(folder);
  int number = 0;
  for (const std::string& seed : seeds()) {
    std::ofstream out(folder / ("seed" + std::to_string(number++)), std::ios::binary);
    out << seed;
    out.close();
    if (!out) {
      std::cerr << "cannot write to " << folder << '\n';
      return 1;
    }
  }
}
