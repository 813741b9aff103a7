// What two pools ask of each other: one verb for each kind of call. Bodies are in messages.h, how a call goes in
// peer_calls.h; who answers is registered there, by verb.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvpool/base/address.h"
#include "kvpool/net/frame.h"

namespace kvpool {

struct Verb {
  std::uint16_t number;  // on the wire, not 0; of no other verb
  const char* name;
  std::size_t request_bytes_max;
  std::size_t answer_bytes_max;
  // To answer may set blocks free: it waits for content that is on its way to them. See Session::handle_later().
  bool frees_blocks = false;
  // Likewise its answer, for the one who asked.
  bool answer_frees_blocks = false;
};

inline constexpr std::size_t kAddressesMax = std::size_t{1} << 19;  // of one request
inline constexpr std::size_t kNamespaceBytesMax = 65536;
inline constexpr std::size_t kAddressListBytesMax = sizeof(std::uint32_t) + kAddressesMax * sizeof(Address);

// Lend me blocks.
inline constexpr Verb kLendVerb{1, "lend", 16, kAddressListBytesMax};
// I give lent blocks back.
inline constexpr Verb kReturnVerb{2, "return", kAddressListBytesMax, 0, /*frees_blocks=*/true};
// Reserve blocks for a transfer; the id of the call is that of the transfer.
inline constexpr Verb kReserveVerb{3, "reserve", 64 + kNamespaceBytesMax + kTokenBytesMax, 4 + kAddressListBytesMax};
// The transfer with this id has been written.
inline constexpr Verb kCompleteVerb{4, "complete", kBodyBytesMax, kAddressListBytesMax, /*frees_blocks=*/true};
// The transfer with this id will not be, and nothing writes for it any more.
inline constexpr Verb kAbandonVerb{5, "abandon", 0, 0, /*frees_blocks=*/true};
// Write your blocks into mine; the id of the call is that of the content.
inline constexpr Verb kFetchVerb{6,
                                 "fetch",
                                 16 + 2 * kAddressListBytesMax,
                                 0,
                                 /*frees_blocks=*/false,
                                 /*answer_frees_blocks=*/true};
// Give these lent blocks back, by the end of the call; it is answered when none of them is written any more.
inline constexpr Verb kRecallVerb{7,
                                  "recall",
                                  kAddressListBytesMax,
                                  0,
                                  /*frees_blocks=*/false,
                                  /*answer_frees_blocks=*/true};

}  // namespace kvpool
