// What a failed write says of its route.
#pragma once

#include "kvpool/base/error.h"

namespace kvpool {

// The error as those are told who choose routes, or give orders to a rank: kRouteFailed, with the same text and fields,
// for a kUnsupported that may pass (is_lasting()), because causes do not cross a link; every other error as it is.
Error route_error(const Error& error);

}  // namespace kvpool
