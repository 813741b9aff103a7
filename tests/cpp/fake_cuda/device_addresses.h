// Shared by plain and virtual memory of the fake driver. REQUIRES: the lock of state.h.
#pragma once

#include <cstddef>

#include "state.h"

namespace kvpool::fake_cuda {

// Device addresses that were never given out before, with a hole behind them.
Address take_addresses(std::size_t bytes);
// Whether the device has that much memory left.
bool fits(int device, std::size_t bytes);

}  // namespace kvpool::fake_cuda
