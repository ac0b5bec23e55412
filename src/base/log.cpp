#include "base/log.hpp"

#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <string_view>

#include "base/environment.hpp"

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define FERRY_HAS_NVTX 1
#endif

namespace ferry {
namespace {

iovec part_of(std::string_view text) {
  // writev() takes non-const pointers but only reads.
  return {const_cast<char*>(text.data()), text.size()};
}

}  // namespace

bool log_enabled() noexcept {
  static const bool enabled = Environment::says_yes(&Environment::log);
  return enabled;
}

void log_line(const std::string& line) noexcept {
  if (!log_enabled()) return;
  // One call: stdio may write a line in pieces, between which other processes write theirs.
  const std::array<iovec, 3> parts = {part_of("ferry: "), part_of(line), part_of("\n")};
  [[maybe_unused]] const ssize_t written = writev(STDERR_FILENO, parts.data(), parts.size());
}

namespace {

#ifdef FERRY_HAS_NVTX
bool ranges_wanted() noexcept {
  static const bool wanted = Environment::says_yes(&Environment::nvtx);
  return wanted;
}

// Never destroyed: a range may be open when the process ends.
nvtxDomainHandle_t nvtx_domain() noexcept {
  static const nvtxDomainHandle_t domain = nvtxDomainCreateA("ferry");
  return domain;
}

void push_range(const char* name) noexcept {
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name;
  nvtxDomainRangePushEx(nvtx_domain(), &attributes);
}

void pop_range() noexcept {
  nvtxDomainRangePop(nvtx_domain());
}
#else
bool ranges_wanted() noexcept {
  return false;
}
void push_range(const char*) noexcept {}
void pop_range() noexcept {}
#endif

}  // namespace

ProfilerRange::ProfilerRange(const char* name) noexcept : open_(ranges_wanted()) {
  if (open_) push_range(name);
}

ProfilerRange::~ProfilerRange() {
  if (open_) pop_range();
}

}  // namespace ferry
