// Builds the index again from what a store on disk has.
#pragma once

#include <cstdint>
#include <span>

#include "kvpool/blocks/cache_blocks.h"
#include "kvpool/disk/disk_store.h"
#include "kvpool/pool/disk_copies.h"
#include "kvpool/pool/prompt_cache.h"

namespace kvpool {

// Stores the pages of these entries in the index, those written last as the ones used last. Entries that no prompt can
// reach, since the page before them is not there, and such as are there twice are given to `copies` to be erased.
// Returns how many pages the index has. REQUIRES: the space's lock is held; nothing lies on DISK. Throws
// std::bad_alloc.
std::uint32_t recover_pages(std::span<const DiskEntry> entries, std::uint32_t page_tokens, CacheBlocks& blocks,
                            PromptCache& cache, DiskCopies& copies);

}  // namespace kvpool
