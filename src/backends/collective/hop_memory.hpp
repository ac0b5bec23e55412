// Memory for the messages of a lane's calls while they travel: of the host, or of a device.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/mapping.hpp"

namespace ferry::collective {

class HopMemory {
 public:
  // What a rank sends and receives in each hop.
  enum class Part { first_outbox, first_inbox, second_outbox, second_inbox };

  virtual ~HopMemory() = default;
  virtual bool on_device() const = 0;
  // Makes sure that a part has at least `bytes`. A part grows only for data of damaged plans, and loses its
  // contents then.
  virtual std::byte* room(Part part, std::int64_t bytes) = 0;
  // Copies between parts. The copy is done when finish() has returned.
  virtual void copy(std::byte* to, const std::byte* from, std::int64_t bytes) = 0;
  virtual void finish() = 0;
};

class HostHopMemory final : public HopMemory {
 public:
  // Bytes of each part, in the order of Part.
  explicit HostHopMemory(const std::array<std::int64_t, 4>& bytes) {
    for (std::size_t part = 0; part < parts_.size(); ++part) parts_[part] = LocalMemory(bytes[part]);
  }

  bool on_device() const override { return false; }
  std::byte* room(Part part, std::int64_t bytes) override {
    LocalMemory& memory = parts_[static_cast<std::size_t>(part)];
    if (memory.bytes() < bytes) memory = LocalMemory(bytes);
    return memory.data();
  }
  void copy(std::byte* to, const std::byte* from, std::int64_t bytes) override {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
  void finish() override {}

 private:
  std::array<LocalMemory, 4> parts_;
};

// The blocks of HopBlocks begin at a multiple of it, in bytes.
inline constexpr std::int64_t kPairAlign = 64;

// What a rank sends or receives in a hop: a block for each rank.
struct HopBlocks {
  std::byte* base = nullptr;
  std::vector<std::int64_t> bytes, offsets;  // [R]

  explicit HopBlocks(int ranks)
      : bytes(static_cast<std::size_t>(ranks), 0), offsets(static_cast<std::size_t>(ranks), 0) {}
  std::byte* block(int rank) const { return base + offsets[static_cast<std::size_t>(rank)]; }
  // Places the blocks one after another in a part of the memory.
  void place(HopMemory& memory, HopMemory::Part part) {
    std::int64_t end = 0;
    for (std::size_t rank = 0; rank < bytes.size(); ++rank) {
      offsets[rank] = end;
      end += (bytes[rank] + kPairAlign - 1) / kPairAlign * kPairAlign;
    }
    base = memory.room(part, end);
  }
};

}  // namespace ferry::collective
