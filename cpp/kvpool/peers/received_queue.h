// Deliveries of peers that wait for the application.
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
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "kvpool/base/error.h"
#include "kvpool/net/link.h"
#include "kvpool/peers/received.h"

namespace kvpool {

class ReceivedQueue {
 public:
  explicit ReceivedQueue(std::uint32_t capacity) : capacity_(capacity) {}
  ~ReceivedQueue();
  ReceivedQueue(const ReceivedQueue&) = delete;
  ReceivedQueue& operator=(const ReceivedQueue&) = delete;

  // How many bytes may wait: above that, peers get kBusy.
  static constexpr std::size_t kBytesMax = std::size_t{256} << 20;
  // A peer's reserved share of the bytes and of the items is 1 / kShares, and at least one item.
  static constexpr std::size_t kShares = 16;

  // Reserves room for one item of this peer with this many bytes of tokens and private data. Throws kBusy when the
  // application is too far behind, and as pop() after close() or fail().
  void reserve(const std::string& peer, std::size_t bytes = 0);
  // REQUIRES: this room was reserved.
  void unreserve(const std::string& peer, std::size_t bytes = 0) noexcept;
  // REQUIRES: room was reserved for its peer and its bytes.
  void push(std::unique_ptr<Received> item) noexcept;

  // The link to a peer, or null.
  using FindLink = std::function<std::shared_ptr<Link>(const std::string& peer)>;
  // The next item; null at `until_ns`. Spins for at most 50 us after what came last, then sleeps. Throws kClosed, or
  // the error of fail(), once closed and empty. With `find_link`, one of the threads that wait reads the link of the
  // peer whose item came last, so an item of that peer wakes one thread instead of two (docs/adr/0010).
  std::unique_ptr<Received> pop(std::int64_t until_ns, const FindLink& find_link = {});
  int descriptor();
  // Takes no more items; pop() still returns those that wait.
  void close() noexcept;
  // The same with an error. The first error counts, and takes precedence over a close.
  void fail(const Error& why);

 private:
  struct Load {
    std::size_t items = 0;
    std::size_t bytes = 0;
  };
  bool ended_locked() const noexcept { return closed_ || why_failed_; }
  // Whether pop() has something to return or to throw.
  bool is_ready() const noexcept { return waiting_.load() != 0 || ended_.load(); }
  void check_open_locked(const char* closed) const;
  void check_room_locked(const Load& own, std::size_t bytes) const;
  void let_go_locked(const std::string& peer, std::size_t bytes) noexcept;
  void end_locked() noexcept;
  bool read_link(std::int64_t until_ns, const FindLink& find_link);
  std::unique_ptr<Received> take_locked();
  std::unique_ptr<Received> try_pop();

  const std::uint32_t capacity_;
  std::atomic<std::size_t> waiting_{0};  // items that may be taken
  std::atomic<bool> ended_{false};       // ended_locked(); changed under mutex_
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::list<std::unique_ptr<Received>> items_;
  std::list<std::unique_ptr<Received>> kept_;  // list nodes of reserved room, so that push() cannot fail
  Load all_;                                   // waiting and reserved
  std::unordered_map<std::string, Load> of_;   // by peer; without empty ones
  std::string last_peer_;                      // of the item that was taken last
  std::shared_ptr<Link> read_;                 // by a thread in pop()
  int event_ = -1;
  std::optional<Error> why_failed_;
  bool closed_ = false;
};

}  // namespace kvpool
