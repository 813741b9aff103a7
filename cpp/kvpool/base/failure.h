// An exception as a value, for work that must not throw into its caller.
#pragma once

#include <exception>
#include <optional>
#include <string>

#include "kvpool/base/error.h"

namespace kvpool {

// The Error that the work threw; any other exception counts as out of memory.
template <class Work>
std::optional<Error> failure_of(Work&& work) {
  try {
    work();
    return std::nullopt;
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    return Error(ErrorCode::kOutOfMemory, std::string("memory ran out: ") + error.what());
  }
}

}  // namespace kvpool
