#include <cstring>

#include "harness/device.hpp"

namespace ferry::contract::device {

bool built() {
  return false;
}
std::string why_not() {
  return "this build has no device code";
}
bool started() {
  return false;
}
Work::Work(int) {}
Work::~Work() = default;
bool at_work() {
  return false;
}
Stream stream(int) {
  return {};
}
void stall(Stream, std::int64_t) {}
std::byte* allocate(std::int64_t) {
  return nullptr;
}
void release(std::byte*) {}
std::string memory_name() {
  return "host";
}
Block block_of(const void*) {
  return {};
}
void* host_of(const void*) {
  return nullptr;
}
bool in_device_memory(const void*) {
  return false;
}
void copy(void* to, const void* from, std::int64_t bytes) {
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}
std::int64_t bytes_held() {
  return 0;
}

}  // namespace ferry::contract::device
