#include <cstring>

#include "harness/device.hpp"

namespace ferry::contract::device {

bool is_built() {
  return false;
}
int count() {
  return 0;
}

std::string skip_reason() {
  return "this build has no device code";
}
bool driver_started() {
  return false;
}
RankScope::RankScope(int) {}
RankScope::~RankScope() = default;
bool rank_is_active() {
  return false;
}
Stream stream(int) {
  return {};
}
void make_stream(int) {}
Stream new_stream(int) {
  return {};
}
void wait(Stream) {}

void delay(Stream, std::int64_t) {}
std::byte* allocate(std::int64_t) {
  return nullptr;
}
void release(std::byte*) {}
std::string memory_kind() {
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
std::int64_t memory_in_use() {
  return 0;
}

}  // namespace ferry::contract::device
