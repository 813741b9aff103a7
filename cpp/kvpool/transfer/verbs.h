// The calls between two pools: one verb for each kind. Bodies are in messages.h; peer_calls.h makes and serves calls,
// and registers a handler for each verb.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvpool/base/address.h"
#include "kvpool/base/key_bytes.h"
#include "kvpool/net/frame.h"

namespace kvpool {

struct Verb {
  std::uint16_t number;  // on the wire, not 0; of no other verb
  const char* name;
  std::size_t request_bytes_max;
  std::size_t answer_bytes_max;
  // Whether handling the call may free blocks: then it waits for content that is on its way to them. See
  // Session::handle_later().
  bool frees_blocks = false;
  // The same for handling the answer, at the caller.
  bool answer_frees_blocks = false;
  // Nobody looks at the answer: the call is not refused because too many are under way. If there is no memory for it,
  // the link ends.
  bool never_busy = false;
};

inline constexpr std::size_t kAddressesMax = std::size_t{1} << 19;  // of one request
inline constexpr std::size_t kNamespaceBytesMax = 65536;
inline constexpr std::size_t kAddressListBytesMax = sizeof(std::uint32_t) + kAddressesMax * sizeof(Address);
inline constexpr std::size_t kRouteNameBytesMax = 32;
inline constexpr std::size_t kKeyListBytesMax = std::size_t{1} << 20;  // the thread that reads the link looks them up
inline constexpr std::size_t kMatchedKeysMax = kKeyListBytesMax / kKeyBytesMin;
inline constexpr std::size_t kCacheNameBytesMax = 255;

// Lend me blocks.
inline constexpr Verb kLendVerb{1, "lend", 16, kAddressListBytesMax};
// Here are your lent blocks back.
inline constexpr Verb kReturnVerb{2, "return", kAddressListBytesMax, 0, /*frees_blocks=*/true};
// Reserve blocks for a transfer; the id of the call is that of the transfer.
inline constexpr Verb kReserveVerb{3, "reserve", 64 + kNamespaceBytesMax + kTokenBytesMax, 4 + kAddressListBytesMax};
// The transfer with this id has been written.
inline constexpr Verb kCompleteVerb{4, "complete", kBodyBytesMax, kAddressListBytesMax, /*frees_blocks=*/true};
// The transfer with this id is cancelled, and no longer writes.
inline constexpr Verb kAbandonVerb{5, "abandon", 0, 0, /*frees_blocks=*/true};
// Write your blocks into mine; the content has the id of the call.
inline constexpr Verb kFetchVerb{6,
                                 "fetch",
                                 32 + kRouteNameBytesMax + 2 * kAddressListBytesMax,
                                 32 + kRouteNameBytesMax,
                                 /*frees_blocks=*/false,
                                 /*answer_frees_blocks=*/true};
// Give these lent blocks back by the deadline of the call. The answer says that you no longer write them.
inline constexpr Verb kRecallVerb{7,
                                  "recall",
                                  kAddressListBytesMax,
                                  0,
                                  /*frees_blocks=*/false,
                                  /*answer_frees_blocks=*/true};
// Hold these blocks of a sequence of mine for reading, so that later calls can name them by their place in it.
inline constexpr Verb kViewVerb{8, "view", 17 + kAddressListBytesMax, 0};
// I read these no longer.
inline constexpr Verb kUnviewVerb{9,
                                  "unview",
                                  24,
                                  0,
                                  /*frees_blocks=*/false,
                                  /*answer_frees_blocks=*/false,
                                  /*never_busy=*/true};
// Compute attention over blocks in my views.
inline constexpr Verb kAttendVerb{10, "attend", kBodyBytesMax, kBodyBytesMax};
// Which blocks of this prompt have you cached? Hold them; the id of the call is that of the hold.
inline constexpr Verb kMatchVerb{11, "match", 16 + kNamespaceBytesMax + kTokenBytesMax, 4 + kAddressListBytesMax};
// The hold with this id is over.
inline constexpr Verb kUnmatchVerb{12,
                                   "unmatch",
                                   0,
                                   0,
                                   /*frees_blocks=*/false,
                                   /*answer_frees_blocks=*/false,
                                   /*never_busy=*/true};
// These blocks of mine are lent to you.
inline constexpr Verb kOfferVerb{14, "offer", kAddressListBytesMax, 0};

// Which blocks have you stored under these keys, in your keyed cache of this name? Hold them; the id of the call is
// that of the hold.
inline constexpr Verb kMatchKeysVerb{13, "match keys", 16 + kCacheNameBytesMax + kKeyListBytesMax,
                                     16 + kMatchedKeysMax / 8 + kMatchedKeysMax * sizeof(Address)};

}  // namespace kvpool
