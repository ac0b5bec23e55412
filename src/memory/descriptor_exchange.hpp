// All-gather of open files: every rank gets a descriptor of every rank's file.
#pragma once

#include <vector>

#include "base/descriptors.hpp"
#include "ferry/group.hpp"

namespace ferry {

// Collective. Returns [ranks] descriptors: entry r is a duplicate of the one that rank r passed. Ranks must
// share a host and a network namespace; they may be threads of one process. A killed process leaves nothing
// behind.
// @throws PeerLostError, TimeoutError  as every collective
// @throws SystemError                  on all ranks, if one of them cannot have more files open
std::vector<FileDescriptor> exchange_descriptors(const Rank& rank, const FileDescriptor& mine);

}  // namespace ferry
