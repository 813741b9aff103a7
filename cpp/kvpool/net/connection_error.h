// Errors of a connection, by the number that the kernel gives.
#pragma once

#include <cerrno>
#include <string>
#include <system_error>

#include "kvpool/base/error.h"

namespace kvpool {

// kPeerLost; `what` comes before the kernel's text.
inline Error connection_error(const std::string& what, int number) {
  const Error error(ErrorCode::kPeerLost, what + ": " + std::generic_category().message(number), {{"errno", number}});
  return number == ECONNRESET ? error.because(ErrorCause::kReset) : error;
}

}  // namespace kvpool
