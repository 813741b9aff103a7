// Content that a link brings for blocks on a GPU: a page-locked buffer first, then the blocks.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kvpool/cuda/staging.h"
#include "kvpool/transfer/block_host.h"

namespace kvpool {

// For so many bytes that go to these pieces; takes them over. It belongs to one thread at a time. Throws kProtocol for
// more than a data frame of ours has, and as DeviceStaging::buffer.
std::unique_ptr<StagingBuffer> make_gpu_staging_buffer(std::shared_ptr<DeviceStaging> staging,
                                                       std::vector<iovec>& pieces, std::uint64_t bytes);

}  // namespace kvpool
