#include "memory/symmetric_memory.hpp"

#include <optional>

#include "base/published_handle.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"
#include "group/agreement.hpp"
#include "memory/descriptor_exchange.hpp"
#include "memory/shared_file.hpp"

namespace ferry {

SymmetricMemory::SymmetricMemory(const Rank& rank, std::int64_t bytes)
    : rank_(rank.index()), bytes_(bytes), regions_(rank.size()) {
  require_same_size(rank, bytes);
  if (rank.same_process()) {
    share_with_threads(rank);
  } else {
    share_with_processes(rank);
  }
}

void SymmetricMemory::share_with_threads(const Rank& rank) {
  run_on_all_ranks(rank, [&] {
    regions_[rank_] = std::make_shared<Mapping>(Mapping::anonymous(bytes_));
    regions_[rank_]->populate();
  });
  const PublishedHandle published(regions_[rank_]);
  const Mapping* mine = published.address();
  std::vector<const Mapping*> all(rank.size());
  rank.all_gather(&mine, all.data(), sizeof mine);
  run_on_all_ranks(rank, [&] {
    for (int peer = 0; peer < rank.size(); ++peer) {
      regions_[peer] = PublishedHandle<Mapping>::take(all[peer]);
      if (!regions_[peer]) throw UsageError(str("rank ", peer, " has released its symmetric memory"));
    }
  });
}

void SymmetricMemory::share_with_processes(const Rank& rank) {
  std::optional<SharedFile> file;
  run_on_all_ranks(rank, [&] { file.emplace(bytes_); });
  const std::vector<FileDescriptor> files = exchange_descriptors(rank, file->descriptor());
  run_on_all_ranks(rank, [&] {
    for (int peer = 0; peer < rank.size(); ++peer) {
      regions_[peer] = std::make_shared<Mapping>(peer == rank_ ? file->take_mapping()
                                                               : Mapping::file(files[peer].number(), bytes_));
    }
  });
}

}  // namespace ferry
