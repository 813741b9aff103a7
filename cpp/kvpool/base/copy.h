// Bulk copies between arenas: as fast as the memory allows, for any mix of piece sizes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

namespace kvpool {

struct CopyPiece {
  std::byte* dst;
  const std::byte* src;
  std::size_t bytes;
};

enum class CopyWay : std::uint8_t {
  kCached,     // through the caches: what is in them is copied twice as fast, and its next reader finds it there
  kStreaming,  // past the caches: half as fast again for data not in the caches, and evicts no other data from them
};

// Copies the pieces in this thread. On return the bytes are visible to it and, by any release operation or system call
// that follows, to others. REQUIRES: no destination overlaps any source or destination.
void copy_pieces(std::span<const CopyPiece> pieces, CopyWay way) noexcept;

// Runs the work in another thread, or returns false: then it does not run. Throws nothing.
using LendThread = std::function<bool(std::function<void()>)>;

// Copies lists of pieces with a few threads, which it borrows for each batch. Thread-safe: several callers may run at
// once. `threads` counts the caller: 1 never borrows a thread. Batches up to kInlineBytes are copied by the caller
// alone.
class CopyTeam {
 public:
  static constexpr std::size_t kInlineBytes = std::size_t{1} << 20;

  // The callers alone.
  CopyTeam();
  // `lend` may be called until the destructor returns, which waits for the borrowed threads.
  CopyTeam(int threads, LendThread lend);
  ~CopyTeam();
  CopyTeam(const CopyTeam&) = delete;
  CopyTeam& operator=(const CopyTeam&) = delete;

  // Returns when every piece is copied; the bytes are visible to the caller. REQUIRES: no destination overlaps any
  // source or destination of the batch. Never throws: when no thread is lent the caller copies alone.
  void run(std::span<const CopyPiece> pieces) noexcept;

  // Calls part(context, i) once for each i in [0, parts), each in the caller's thread or a borrowed one. Returns when
  // all have returned; what they did is visible to the caller. For work that is more than a list of pieces.
  using Part = void (*)(void* context, std::size_t index) noexcept;
  void run_parts(std::size_t parts, Part part, void* context) noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvpool
