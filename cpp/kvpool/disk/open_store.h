// Opens the files of a store, or makes them.
//
//   kvpool.lock      made first; says that the directory is kvpool's; locked while a store is open
//   kvpool.blocks    a header of kDiskAlignment bytes, then the slots
//   kvpool.journal.N, kvpool.snapshot.N
//   kvpool.store     what the store is; made last, by renaming. Without it the store was never used, and is made anew
#pragma once

#include <memory>

#include "kvpool/disk/description.h"
#include "kvpool/disk/disk_store.h"
#include "kvpool/disk/files.h"
#include "kvpool/disk/journal.h"
#include "kvpool/disk/log_state.h"

namespace kvpool {

struct OpenedStore {
  StoreDescription description;
  std::unique_ptr<DiskFile> blocks;
  std::unique_ptr<LogState> found;
  std::unique_ptr<Journal> journal;
};

// Throws what DiskStore::open throws. REQUIRES: options are in range.
OpenedStore open_store(const DiskOptions& options, const std::shared_ptr<DiskDirectory>& directory);

}  // namespace kvpool
