// Commits the memory of a mapping now, so that running out of memory is an error here and not a fault later.
#pragma once

#include <cstddef>

#include "kvpool/arena/arena.h"

namespace kvpool {

inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

// Commits all of [base, base + bytes), the mapping of the whole memfd `fd`: in huge pages as far as `huge_pages` and
// the machine let it, the rest in small ones. The bytes stay zero. Works in `threads` threads, the caller among them.
// Returns how many bytes are mapped by huge pages, as the kernel reports it.
//
// Never lets the kernel send SIGBUS: throws Error kOutOfMemory when memory runs out, and kUnsupported when required
// huge pages are not available. After an error some of the memory may be committed; the caller unmaps it.
//
// REQUIRES: base is aligned to kHugePageBytes; bytes is a positive multiple of the page size.
std::size_t commit_memory(int fd, std::byte* base, std::size_t bytes, HugePages huge_pages, int threads);

// Binds the range to a NUMA node before it is committed. The node is preferred, not strict: when it is full the kernel
// uses other nodes instead of killing the process. Throws Error: kArgument (no such node), kUnsupported (the kernel or
// a sandbox forbids it).
void prefer_numa_node(std::byte* base, std::size_t bytes, int node);

}  // namespace kvpool
