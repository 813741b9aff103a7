// A link without a peer, for tests that see what is sent and answer themselves.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "kvpool/net/link.h"

namespace kvpool::testing {

// Only send() is left to the test.
class SilentLink : public Link {
 public:
  void send_data(std::uint64_t, std::span<const std::byte>, std::span<const iovec>, std::int64_t,
                 const std::atomic<bool>*) override {}
  bool drive(std::int64_t, const std::function<bool()>& done) override { return done(); }
  void wake() noexcept override {}
  int descriptor(std::size_t) const noexcept override { return -1; }
  int pidfd() const noexcept override { return -1; }
  std::string describe() const override { return "silent"; }
  void close(const Error&) noexcept override {}
};

}  // namespace kvpool::testing
