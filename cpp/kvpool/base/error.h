// The one exception type of the core. The binding turns each code into the Python class of the same name, and each
// field into an attribute of the exception, so that a program can read the numbers that the text tells a person.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace kvpool {

enum class ErrorCode : std::uint8_t {
  kArgument,        // a value that no state of the pool would accept
  kOutOfBlocks,     // not enough free or evictable blocks
  kOutOfMemory,     // an arena does not fit the machine or its cgroup
  kStaleAddress,    // the block behind the address was freed or moved
  kState,           // the block or the pool is in a state that forbids the call
  kNotOwner,        // the address belongs to another instance or pool
  kLayoutMismatch,  // memory offered does not have the layout's shape
  kClosed,          // the pool or handle was closed
  kFork,            // called in a child process after fork
  kUnsupported,     // this machine or build cannot do it
  kAudit,           // an invariant is broken: a bug in kvpool or memory corruption
  kPeerLost,        // the peer is gone, or does not answer
  kDeadline,        // not done by its deadline
  kBusy,            // a limit on what one peer may have under way
  kAuth,            // the peer does not know the secret
  kProtocol,        // the peer says what no kvpool of a version that we speak says
  kCancelled,       // by the caller
  // Never on the wire, but for the last.
  kFenced,       // this pool has no lease in its cluster: it has no peers
  kDeviceLost,   // the GPU, or this process's context on it, is gone, and what was in its memory
  kRouteFailed,  // a way to the peer broke down; the peer may be well, and reached by another, or later
};
inline constexpr std::size_t kErrorCodes = static_cast<std::size_t>(ErrorCode::kRouteFailed) + 1;

using ErrorField = std::pair<const char*, std::int64_t>;

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message, std::initializer_list<ErrorField> fields = {})
      : std::runtime_error(message), code_(code), fields_(fields) {}

  ErrorCode code() const noexcept { return code_; }
  const std::vector<ErrorField>& fields() const noexcept { return fields_; }
  void add(const char* name, std::int64_t value) { fields_.emplace_back(name, value); }  // a static string

 private:
  ErrorCode code_;
  std::vector<ErrorField> fields_;
};

}  // namespace kvpool
