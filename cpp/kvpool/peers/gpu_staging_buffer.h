// Receives content from a link for blocks on a GPU: first into a page-locked buffer, then into the blocks.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kvpool/cuda/staging.h"
#include "kvpool/transfer/block_host.h"

namespace kvpool {

// A buffer for `bytes` bytes that go to these pieces, which it takes over. One thread at a time may use it. Throws
// kProtocol for more than our data frames contain, and as DeviceStaging::buffer.
std::unique_ptr<StagingBuffer> make_gpu_staging_buffer(std::shared_ptr<DeviceStaging> staging,
                                                       std::vector<iovec>& pieces, std::uint64_t bytes);

}  // namespace kvpool
