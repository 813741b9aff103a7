// Sends block content over the control link, in data frames that the receiver checks and places: for peers on other
// hosts, and for memory that no other route reaches.
//
// A frame holds as many pieces as may share it, so a layer of all blocks is one message where pieces are small; a write
// that must not gather sends a frame for each piece. The kernel reads the bytes from the blocks. Only pieces so small
// that listing them costs more than copying are gathered first.
#pragma once

#include <memory>

#include "kvpool/base/segment.h"
#include "kvpool/net/link.h"
#include "kvpool/routes/route.h"

namespace kvpool {

class DeviceStaging;

// `local` describes memory that `keepalive` keeps alive. Writes throw what the link throws, and kPeerLost once the
// route is closed; closing it leaves the link open. `staging`: for the local media that are on a GPU, `on_gpu`; null
// without such media.
std::unique_ptr<Route> make_sock_route(MediaSpans local, std::shared_ptr<void> keepalive, std::shared_ptr<Link> link,
                                       std::shared_ptr<DeviceStaging> staging = nullptr, MediaSet on_gpu = {});

}  // namespace kvpool
