// Two pools, a and b, that know each other by one way: the simulated network or a real route. Cases that are written
// against this run the same over each of them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "doctest/doctest.h"
#include "kvpool/peers/service.h"
#include "pool_fixture.h"
#include "thrown.h"

namespace kvpool::testing {

inline constexpr std::int64_t kSecond = 1'000'000'000;

struct PairOptions {
  std::uint32_t hbm_blocks = 16;  // of each pool, as the limits are
  std::uint32_t dram_blocks = 16;
  std::uint32_t transfers_max = 64;
  std::uint32_t reserved_max = 1024;
  std::uint32_t received_max = 64;
  bool aggregated = true;  // of two layers; b is the other way round
  std::vector<std::size_t> piece_bytes{48, 80, 64, 64};
  int device = -1;  // the GPU of a's HBM; b's is the next one. -1: ordinary memory

  PairOptions of_b() const {
    PairOptions other = *this;
    other.aggregated = !aggregated;
    if (device >= 0) ++other.device;
    return other;
  }
};

// One of the two. The verbs are the session's, towards the other one.
class Node {
 public:
  virtual ~Node() = default;
  virtual const std::shared_ptr<Pool>& pool() = 0;
  virtual std::shared_ptr<Transfer> transfer(TransferRequest&& request) = 0;
  virtual std::shared_ptr<Transfer> fetch(FetchRequest&& request) = 0;  // names its destinations
  virtual std::shared_ptr<PeerMatch> match_at(MatchRequest&& request) = 0;
  virtual std::shared_ptr<Transfer> fetch_prompt(PromptFetchRequest&& request) = 0;
  virtual Addresses borrow(std::size_t n, MediumChoice medium) = 0;
  virtual void give_back(const Addresses& addresses) = 0;
  // The next item for the application, or null.
  virtual std::unique_ptr<Received> next_received() = 0;

  std::uint32_t count(BlockState state) {
    const PoolStats stats = pool()->audit();
    const auto at = static_cast<std::size_t>(state);
    return stats.media[Medium::kHbm].by_state[at] + stats.media[Medium::kDram].by_state[at];
  }
};

class JoinedPair {
 public:
  virtual ~JoinedPair() = default;
  virtual Node& a() = 0;
  virtual Node& b() = 0;
  // As the stats of a transfer name it.
  virtual const char* route() const = 0;
  virtual std::int64_t now_ns() const = 0;
  // Lets both live on until this holds, or until then. Returns whether it holds.
  virtual bool live(std::int64_t until_ns, const std::function<bool()>& holds) = 0;

  std::int64_t in_seconds(double seconds) const {
    return now_ns() + static_cast<std::int64_t>(seconds * static_cast<double>(kSecond));
  }
  bool eventually(const std::function<bool()>& holds) { return live(in_seconds(60), holds); }

  TransferRequest request(const Addresses& from) const {
    TransferRequest request;
    request.from = from;
    request.deadline_ns = in_seconds(10);
    return request;
  }
  FetchRequest fetch_request(const Addresses& from, const Addresses& to) const {
    FetchRequest request;
    request.from = from;
    request.to = to;
    request.deadline_ns = in_seconds(10);
    return request;
  }
  // For one statement: the tokens stay the caller's.
  MatchRequest match_request(const std::vector<Token>& tokens, double hold_seconds = 30) const {
    MatchRequest request;
    request.tokens = tokens;
    request.hold_ns = static_cast<std::int64_t>(hold_seconds * static_cast<double>(kSecond));
    request.deadline_ns = in_seconds(10);
    return request;
  }
  PromptFetchRequest prompt_request(const std::vector<Token>& tokens, Medium medium = Medium::kHbm) const {
    PromptFetchRequest request;
    request.tokens = tokens;
    request.medium = medium;
    request.deadline_ns = in_seconds(10);
    return request;
  }
  // How it ended; nothing when it was well.
  std::optional<Error> end_of(Transfer& transfer) {
    REQUIRE(transfer.wait(in_seconds(20)));
    return error_of([&] { transfer.rethrow_if_failed(); });
  }
  void finish(Transfer& transfer) {
    const auto error = end_of(transfer);
    REQUIRE_MESSAGE(!error, std::string(error ? error->what() : ""));
  }
  // Waits for an item for the application of this node.
  std::unique_ptr<Received> receive(Node& node) {
    std::unique_ptr<Received> item;
    REQUIRE(eventually([&] { return (item = node.next_received()) != nullptr; }));
    return item;
  }
};

// Active blocks with stamps from `first` on.
inline Addresses alloc_stamped(Pool& pool, std::size_t n, std::uint64_t first, Medium medium = Medium::kHbm) {
  const Addresses addresses = alloc(pool, n, medium);
  for (std::size_t i = 0; i < n; ++i) stamp(pool, addresses[i], first + i);
  return addresses;
}

inline bool are_stamped(Pool& pool, const Addresses& addresses, std::uint64_t first) {
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    if (!has_stamp(pool, addresses[i], first + i)) return false;
  }
  return true;
}

// `holder`: a pool, or a node, which frees blocks of peers as well.
template <class Holder>
void free_all(Holder& holder, const Addresses& addresses) {
  holder.free(addresses.data(), addresses.size());
}

}  // namespace kvpool::testing
