#include "group/host_identity.hpp"

#include <sys/stat.h>

#include <fstream>

namespace ferry {

namespace {

// `path` names a namespace of this process, such as /proc/self/ns/pid.
std::uint64_t namespace_number(const char* path) {
  struct stat status{};
  return stat(path, &status) == 0 ? status.st_ino : 0;
}

// FNV-1a, so that hosts with different builds of Ferry agree. Never 0 for a text.
std::uint64_t hash_of(const std::string& text) {
  if (text.empty()) return 0;
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash | 1;
}

}  // namespace

HostIdentity HostIdentity::of_this_process(const std::string& host_id) {
  HostIdentity identity;
  identity.pid_namespace = namespace_number("/proc/self/ns/pid");
  identity.ipc_namespace = namespace_number("/proc/self/ns/ipc");
  identity.network_namespace = namespace_number("/proc/self/ns/net");
  identity.simulated = hash_of(host_id);
  std::ifstream("/proc/sys/kernel/random/boot_id").get(identity.boot_id, sizeof identity.boot_id);
  return identity;
}

}  // namespace ferry
