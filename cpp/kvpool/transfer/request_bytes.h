// Limits the memory of one peer's requests that wait or are under way here: prompts, lists of addresses, private bytes.
// Limiting their number is not enough, because one may be as long as a frame.
//
// Thread-safety: all of it, except a Held that several threads share.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>

namespace kvpool {

class RequestBytes : public std::enable_shared_from_this<RequestBytes> {
 public:
  // Counts bytes until it is destroyed; may outlive the RequestBytes.
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

  // Throws kBusy, and changes nothing, if more than `bytes_max` would be held.
  Held hold(std::size_t bytes, std::size_t bytes_max);

 private:
  std::atomic<std::size_t> held_{0};
};

}  // namespace kvpool
