// Bulk copies between arenas: as fast as the memory allows, for any mix of piece sizes.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <span>

namespace kvpool {

struct CopyPiece {
  std::byte* dst;
  const std::byte* src;
  std::size_t bytes;
};

// A few threads that copy lists of pieces together with the caller. Thread-safe: several callers may run at once.
// `threads` counts the caller: 1 never starts a thread. Batches up to kInlineBytes are copied by the caller alone.
// Worker threads start with the first large batch, block all signals, sleep when idle, and end with the team.
class CopyTeam {
 public:
  static constexpr std::size_t kInlineBytes = std::size_t{1} << 20;

  explicit CopyTeam(int threads);
  ~CopyTeam();
  CopyTeam(const CopyTeam&) = delete;
  CopyTeam& operator=(const CopyTeam&) = delete;

  // Returns when every piece is copied; the bytes are visible to the caller. REQUIRES: no destination overlaps any
  // source or destination of the batch. Never throws: when a worker cannot be started the caller copies alone.
  void run(std::span<const CopyPiece> pieces) noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvpool
