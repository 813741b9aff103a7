// Helpers of the tests of the sending half of the protocol.
#pragma once

#include <cstddef>
#include <cstdint>

#include "session_kit.h"

namespace kvpool::testing::outgoing {

inline TransferRequest request_for(SessionKit& kit, std::size_t n) {
  TransferRequest request;
  request.peer = "peer";
  request.from = alloc(*kit.pool, n);
  request.private_bytes = Bytes(2, std::byte{1});
  request.deadline_ns = kit.host.now + 100 * kMs;
  return request;
}

inline Bytes reserved(const Addresses& addresses, std::uint32_t held = 0) {
  return write_body(ReservedBody{held, addresses});
}

// Whether the sources can be freed and are free then, because no transfer reads them.
inline bool is_unread(SessionKit& kit, const Addresses& from) {
  kit.pool->free(from.data(), from.size());
  return kit.count(BlockState::kFree) == 16;
}

}  // namespace kvpool::testing::outgoing
