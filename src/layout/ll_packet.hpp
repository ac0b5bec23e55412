// LL packets (as NCCL's LL protocol): a flag and eight bytes of data in one 16-byte store, so that data needs
// no fence and no flag of its own.
#pragma once

#include <cstdint>

namespace ferry {

// A reader that sees the call number has the word as well.
struct alignas(16) LLPacket {
  std::uint64_t call;  // the flag: a call number, above other bits in slot metadata
  std::uint64_t word;
};

}  // namespace ferry
