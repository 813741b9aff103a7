// What peers sent for the application, until it asks.
//
// The number of waiting items is bounded for all peers together, and each peer has a reserved share: an item of a peer
// within its share is accepted even when others have filled the queue. So the queue may exceed the bound by one share
// for each peer.
//
// Thread-safety: all of it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "kvpool/base/error.h"
#include "kvpool/peers/received.h"

namespace kvpool {

class ReceivedQueue {
 public:
  explicit ReceivedQueue(std::uint32_t capacity) : capacity_(capacity) {}
  ~ReceivedQueue();
  ReceivedQueue(const ReceivedQueue&) = delete;
  ReceivedQueue& operator=(const ReceivedQueue&) = delete;

  // What may wait: peers get kBusy above it.
  static constexpr std::size_t kBytesMax = std::size_t{256} << 20;
  // So much of it, and of the items, is a peer's own; one item always is.
  static constexpr std::size_t kShares = 16;

  // Keeps room for one item of this peer with so many bytes of tokens and private data. Throws kBusy when the
  // application is too far behind, and as pop() once nothing more comes.
  void reserve(const std::string& peer, std::size_t bytes = 0);
  // REQUIRES: room was kept for this.
  void unreserve(const std::string& peer, std::size_t bytes = 0) noexcept;
  // REQUIRES: room was kept for it: of its peer, with its bytes.
  void push(std::unique_ptr<Received> item) noexcept;

  // The next item; null at `until_ns`. Spins for at most 50 us, then sleeps. Throws kClosed once closed and empty, or
  // what it has failed with.
  std::unique_ptr<Received> pop(std::int64_t until_ns);
  int descriptor();
  // What still waits can be taken with pop(); nothing more comes.
  void close() noexcept;
  // The same, for another reason. The first one counts, and counts more than that the queue is closed.
  void fail(const Error& why);

 private:
  struct Load {
    std::size_t items = 0;
    std::size_t bytes = 0;
  };
  bool ended_locked() const noexcept { return closed_ || why_failed_; }
  void check_open_locked(const char* closed) const;
  void check_room_locked(const Load& own, std::size_t bytes) const;
  void let_go_locked(const std::string& peer, std::size_t bytes) noexcept;
  void wake() noexcept;
  std::unique_ptr<Received> try_pop();

  const std::uint32_t capacity_;
  std::atomic<std::size_t> waiting_{0};  // items that may be taken
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::list<std::unique_ptr<Received>> items_;
  std::list<std::unique_ptr<Received>> kept_;  // room: items that are to come, and must not fail then
  Load all_;                                   // of both
  std::unordered_map<std::string, Load> of_;   // by peer; of those that have any
  int event_ = -1;
  std::optional<Error> why_failed_;
  bool closed_ = false;
};

}  // namespace kvpool
