// Distinguishes a forked child from the process that made an object: a pool's threads and lock do not survive a fork.
#pragma once

#include <cstdint>

namespace kvpool {

// Grows by one in the child of every fork (pthread_atfork). One relaxed load.
std::uint32_t fork_generation() noexcept;

}  // namespace kvpool
