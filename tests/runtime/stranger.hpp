// Another user of the host, who attacks the local sockets of Ferry.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <random>
#include <string>

#include "base/descriptors.hpp"
#include "runtime/support.hpp"
#include "seed.hpp"

namespace ferry::test {

// Sends random bytes with `files` duplicates of a file. False if they could not be sent.
inline bool send_files(int socket, const sockaddr_un& to, socklen_t to_bytes, const std::string& bytes,
                       int file, int files) {
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  constexpr int kMostFiles = 8;
  alignas(cmsghdr) char control[CMSG_SPACE(kMostFiles * sizeof file)] = {};
  msghdr message{};
  message.msg_name = const_cast<sockaddr_un*>(&to);
  message.msg_namelen = to_bytes;
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (files > 0) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(static_cast<std::size_t>(files) * sizeof file);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(static_cast<std::size_t>(files) * sizeof file);
    for (int i = 0; i < files; ++i)
      std::memcpy(CMSG_DATA(header) + static_cast<std::size_t>(i) * sizeof file, &file, sizeof file);
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
}

// From construction to destruction a process of user 65534, or of this one where only root may change it,
// sends messages of random bytes and up to 8 files to every abstract socket whose name begins as those of
// Ferry.
class Stranger {
 public:
  Stranger() {
    const std::uint64_t first = seed();
    process_ = fork();
    if (process_ == 0) attack(first);
  }
  ~Stranger() {
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
  }
  Stranger(const Stranger&) = delete;
  Stranger& operator=(const Stranger&) = delete;

  long messages() const { return *messages_; }  // sent

 private:
  [[noreturn]] void attack(std::uint64_t first) const {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    constexpr uid_t kNobody = 65534;
    if (getuid() == 0 && setuid(kNobody) != 0) _exit(1);
    Random random(first);
    const FileDescriptor own(socket(AF_UNIX, SOCK_DGRAM, 0)), file(memfd_create("stranger", 0));
    while (true) {
      std::ifstream table("/proc/net/unix");
      for (std::string line; std::getline(table, line);) {
        const std::size_t at = line.find("@ferry-");
        sockaddr_un to{};
        if (at == std::string::npos || line.size() - at > sizeof to.sun_path) continue;
        to.sun_family = AF_UNIX;
        std::memcpy(to.sun_path + 1, line.data() + at + 1, line.size() - at - 1);
        constexpr int kMessages = 20, kSizeOfARanks = 24;
        for (int i = 0; i < kMessages; ++i) {
          std::string bytes(
              static_cast<std::size_t>(below(random, 2) == 0 ? kSizeOfARanks : below(random, 100)), 0);
          std::ranges::generate(bytes, [&] { return static_cast<char>(random()); });
          const auto to_bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + line.size() - at);
          if (send_files(own.number(), to, to_bytes, bytes, file.number(), below(random, 9))) ++*messages_;
        }
      }
    }
  }

  SharedValue<std::atomic<long>> messages_;
  pid_t process_;
};

}  // namespace ferry::test
