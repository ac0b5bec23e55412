// Handing open files from process to process.
#pragma once

#include <vector>

#include "ferry/group.hpp"
#include "memory/file_descriptor.hpp"

namespace ferry::cuda {

// Collective. Every rank gives one open file and gets that of every rank: [ranks], the own one as a
// duplicate. Needs a group whose ranks share a host (and a network namespace); they may be threads too. Ends
// with PeerLostError or TimeoutError as every collective, with SystemError on all ranks if one of them cannot
// have more files open. Nothing is left behind by a killed process: the sockets have no names in the file
// system.
std::vector<Descriptor> exchange_descriptors(const Rank& rank, const Descriptor& mine);

}  // namespace ferry::cuda
