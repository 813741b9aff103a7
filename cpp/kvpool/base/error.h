// The only exception type of the core. The binding turns each code into the Python class of the same name, and each
// field into an attribute of the exception, so programs need not parse the text for numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace kvpool {

enum class ErrorCode : std::uint8_t {
  kArgument,        // a value that is invalid in every state of the pool
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
  kBusy,            // a limit on a peer's concurrent work
  kAuth,            // the peer does not know the secret
  kProtocol,        // the peer violates the protocol, or speaks an unsupported version
  kCancelled,       // by the caller
  // Of these, only kRouteFailed goes over the wire.
  kFenced,       // this pool has no lease in its cluster, so it has no peers
  kDeviceLost,   // the GPU, or this process's context on it, is lost, with the content of its memory
  kRouteFailed,  // a route failed; another route may reach the peer, or this one later
  kSuspended,    // the engine has taken HBM back for a while; peers hear kBusy
  kStoreFailed,  // the file system below a store on disk failed
};
inline constexpr std::size_t kErrorCodes = static_cast<std::size_t>(ErrorCode::kStoreFailed) + 1;

// Tells apart errors of one code that callers handle differently. Code branches on code and cause only; text and fields
// are for people.
enum class ErrorCause : std::uint8_t {
  kOther,
  kNobodyListens,  // kPeerLost: nothing listens at the address, perhaps not yet
  kReset,          // kPeerLost: the connection was reset
  kUnanswered,     // kPeerLost: the link ended before the peer answered whether it admits this side
  // These go over the wire, when a side refuses to admit the other.
  kConnectedAlready,  // kState; subject: the incarnation of the side that was called
  kInstanceTaken,     // kState: another peer has the caller's instance id
  kDropped,           // kBusy; subject: the caller's incarnation, whose blocks are gone here
  // These stay in the process. The numbers of those above are part of the protocol.
  kMayPass,     // kUnsupported: the CUDA driver refused something that it may grant another time
  kQuota,       // kOutOfBlocks: a model of a shared space may have no more of it; counts are units of the space
  kInUse,       // kState: another store is open on the directory
  kForeign,     // kState: the directory is not that of a store
  kDamaged,     // kState: the store's journal or its description is damaged
  kLostOnDisk,  // kStaleAddress, kStoreFailed: a page on DISK is gone for good; a new match ends before it
};

using ErrorField = std::pair<const char*, std::int64_t>;

// Copies of an error share immutable content, so several threads may copy, read and destroy copies of one error at the
// same time. std::runtime_error shares its text, too, but counts references inside the C++ library, where
// ThreadSanitizer cannot see it.
class Error : public std::exception {
 public:
  Error(ErrorCode code, std::string message, std::initializer_list<ErrorField> fields = {})
      : code_(code), said_(std::make_shared<const Said>(Said{std::move(message), fields})) {}
  // No moves: they would leave an empty error.
  Error(const Error&) noexcept = default;
  Error& operator=(const Error&) noexcept = default;
  ~Error() override = default;

  const char* what() const noexcept override { return said_->text.c_str(); }
  ErrorCode code() const noexcept { return code_; }
  const std::vector<ErrorField>& fields() const noexcept { return said_->fields; }
  const std::string& model() const noexcept { return said_->model; }  // whose quota it is; empty: nobody's
  ErrorCause cause() const noexcept { return cause_; }
  std::uint64_t subject() const noexcept { return subject_; }  // of the cause; 0: none

  // The same error with this cause.
  Error because(ErrorCause cause, std::uint64_t subject = 0) const noexcept {
    Error error(*this);
    error.cause_ = cause;
    error.subject_ = subject;
    return error;
  }

  // Adds a field to this copy alone. `name` is a static string.
  void add(const char* name, std::int64_t value) {
    Said said = *said_;
    said.fields.emplace_back(name, value);
    said_ = std::make_shared<const Said>(std::move(said));
  }
  // Names the model of kQuota in this copy alone.
  void set_model(std::string name) {
    Said said = *said_;
    said.model = std::move(name);
    said_ = std::make_shared<const Said>(std::move(said));
  }

 private:
  struct Said {
    std::string text;
    std::vector<ErrorField> fields;
    std::string model = {};
  };

  ErrorCode code_;
  ErrorCause cause_ = ErrorCause::kOther;
  std::uint64_t subject_ = 0;
  std::shared_ptr<const Said> said_;
};

}  // namespace kvpool
