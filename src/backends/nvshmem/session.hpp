// NVSHMEM in this process: the module with the kernels that put through it, opened at run time, and the
// session of a group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/nvshmem/module/module.hpp"
#include "ferry/group.hpp"

namespace ferry::nvshmem {

// Opened once in a process, and never closed. Any thread.
//
// The module is searched for at FERRY_NVSHMEM_MODULE, beside Ferry's library, beside the program, and by the
// loader. The library: the one that the process has loaded already, FERRY_NVSHMEM_LIBRARY, the loader's, and
// those of Python installations.
// @throws UnsupportedError  not found, or of another version of Ferry
const Module& load_module();

// As load_module(), but looks again in every call.
Module open_module();

// The path of NVSHMEM's library, which has its plug-ins beside it. Call after load_module().
// @throws UnsupportedError  the library is not loaded
std::string library_path();

// Symmetric memory: the same number of bytes on every rank. Zeroed.
//
// When the object is destroyed, the memory is kept for later exchanges: NVSHMEM's own release is collective
// and has no deadline. It is used again once every rank has destroyed its object.
class HeapMemory {
 public:
  std::byte* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }
  // Where this process reaches a rank's memory by loads and stores, or null.
  std::byte* mapped(int rank) const { return mapped_[static_cast<std::size_t>(rank)]; }

 private:
  friend class Session;
  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
  std::vector<std::byte*> mapped_;
  std::shared_ptr<void> use_;
};

// A group's ranks in NVSHMEM. A process is one PE, hence it has one Session at a time.
//
// NVSHMEM that Ferry has started runs until the process ends: finalising it is collective, without a
// deadline, and ends the process on an error. If the program has started it, Ferry takes part: the group must
// then have all PEs, and the program must not finalise before the last exchange is destroyed.
//
// After a failure of the group Ferry calls no collective function of NVSHMEM in this process any more: it is
// neither finalised nor started again. Other backends stay usable.
class Session {
 public:
  // Collective. Call it with the rank's device current. `deadline`: seconds.
  // @throws UnsupportedError  no module, no NVSHMEM, ranks that are threads of one process, or an earlier
  //                           failure in this process
  // @throws UsageError        the program has started NVSHMEM on some ranks only, or with other PEs
  // @throws TimeoutError      a rank does not arrive; final for the group
  Session(const Rank& rank, double deadline);

  const Module& module() const { return *module_; }
  bool started_by_program() const { return started_by_program_; }
  int pe_of(int rank) const { return pes_[static_cast<std::size_t>(rank)]; }
  const std::vector<std::int32_t>& pes() const { return pes_; }

  // Collective. All ranks request the same number of bytes.
  // @throws SystemError  there is no memory on the heap: NVSHMEM_SYMMETRIC_SIZE bounds it
  HeapMemory allocate(std::int64_t bytes);

  // Local. The module, if this process can use it.
  // @throws UnsupportedError  it was not found, or a group over NVSHMEM has failed in this process
  static const Module& usable_module();

  // Local. Call it when the group has failed, before objects of the session are destroyed.
  static void note_failure() noexcept;

 private:
  void start();
  void find_pes();
  // Calls a function of NVSHMEM, which may block, on a thread of its own. Waits until it returns, the group
  // fails or the deadline has passed.
  void run(const char* name, std::function<void()> call);

  Rank rank_;
  double deadline_;
  const Module* module_ = nullptr;
  bool started_by_program_ = false;
  std::vector<std::int32_t> pes_;
};

}  // namespace ferry::nvshmem
