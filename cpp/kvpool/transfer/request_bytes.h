// What the requests of one peer take of memory here while they wait or are under way: prompts, lists of addresses,
// private bytes. Their number alone bounds little, for one may be as long as a frame.
//
// Thread-safety: all of it, but for one Held by several threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>

namespace kvpool {

class RequestBytes : public std::enable_shared_from_this<RequestBytes> {
 public:
  // A part of it, until this goes; lives as long as it likes.
  class Held {
   public:
    Held() = default;
    Held(Held&& other) noexcept : of_(std::move(other.of_)), bytes_(std::exchange(other.bytes_, 0)) {}
    Held& operator=(Held&& other) noexcept {
      of_.swap(other.of_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Held();

   private:
    friend class RequestBytes;
    std::shared_ptr<RequestBytes> of_;
    std::size_t bytes_ = 0;
  };

  // Throws kBusy when more than `bytes_max` would be held then; nothing has changed.
  Held hold(std::size_t bytes, std::size_t bytes_max);

 private:
  std::atomic<std::size_t> held_{0};
};

}  // namespace kvpool
