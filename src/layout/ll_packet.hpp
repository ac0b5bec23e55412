// What is stored by one access of 16 bytes between GPUs: a call's number and a word beside it.
#pragma once

#include <cstdint>

namespace ferry {

// A reader that finds the call's number has the word as well.
struct alignas(16) LLPacket {
  std::uint64_t call;
  std::uint64_t word;
};

}  // namespace ferry
