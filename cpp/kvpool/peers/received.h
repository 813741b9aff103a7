// What a peer sent for the application.
#pragma once

#include <string>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/index/pins.h"
#include "kvpool/net/wire.h"

namespace kvpool {

// A delivery of blocks that the application is told of.
struct Received {
  std::string peer;
  std::vector<Address> addresses;  // active: the application owns them; inserted: cached and pinned; lent: the peer's
  bool inserted = false;
  bool lent = false;
  std::string name_space;
  std::vector<Token> tokens;  // of an insertion
  Bytes private_bytes;
  Pins pins;
  IndexPin pin;  // while it waits in the queue, which must not keep the pool alive
};

}  // namespace kvpool
