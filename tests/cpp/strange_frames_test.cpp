// A peer that knows the secret and sends authentic frames with any content: what it was not given stays as it is,
// and peers that keep the rules go on. KVPOOL_LONG=1: 100,000 frames.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>

#include "fuzz_seeds.h"
#include "kvpool/net/data_body.h"
#include "kvpool/net/frame_reader.h"
#include "kvpool/transfer/messages.h"
#include "raw_peer.h"
#include "service_kit.h"
#include "stranger_kit.h"
#include "thrown.h"

using namespace kvpool;
using namespace kvpool::testing;
using namespace kvpool::testing::services;

namespace {

// Makes up frames: mostly plausible ones, with addresses of blocks of the peer itself, of others', or made up.
class Inventor {
 public:
  Inventor(Dice& dice, const Pool& pool, Addresses others)
      : dice_(dice), bytes_(pool.layout().block_bytes()), others_(std::move(others)) {}

  void add_frame(Stranger& stranger) {
    mine_ = stranger.given;
    FrameForge& forge = stranger.forge();
    if (dice_.one_in(30) && !stranger.lent.empty()) return add_transfer(forge, stranger.lent);
    // Or its limit is soon reached, and all that it asks for is refused.
    if (dice_.one_in(10) && !mine_.empty()) {
      forge.header.verb = kReturnVerb.number;
      return forge.add(FrameKind::kCall, id(), write_addresses({&dice_.pick(mine_), 1}));
    }
    const FrameKind kind = dice_.one_in(200) ? static_cast<FrameKind>(dice_.below(64)) : dice_.pick(kKinds);
    const std::uint16_t verb = dice_.one_in(100) ? static_cast<std::uint16_t>(dice_.any()) : dice_.pick(kVerbs)->number;
    const bool says_verb = kind == FrameKind::kCall || kind == FrameKind::kCancel || kind == FrameKind::kAnswer ||
                           kind == FrameKind::kRefused;
    if (says_verb || dice_.one_in(300)) forge.header.verb = verb;
    if (kind == FrameKind::kCall || dice_.one_in(300)) forge.header.lifetime_ms = dice_.below(1000);
    Bytes body = body_of(kind, verb);
    Bytes payload;
    if (kind == FrameKind::kData) {
      payload = some_bytes(dice_.one_in(20) ? 1 + dice_.below(3000) : std::max<std::uint64_t>(1, payload_bytes_),
                           static_cast<unsigned>(dice_.below(200)));
    }
    if (dice_.one_in(40) && !body.empty())
      body[dice_.below(body.size())] ^= static_cast<std::byte>(1U << dice_.below(8));
    if (dice_.one_in(300)) body.resize(dice_.below(body.size() + 1));
    if (dice_.one_in(300)) forge.header.flags = static_cast<std::uint8_t>(dice_.any());
    const std::array ends = {PayloadEnd::kWhole, PayloadEnd::kWhole, PayloadEnd::kWhole, PayloadEnd::kGivenUp};
    forge.add(kind, id(), body, payload, dice_.one_in(500) ? static_cast<PayloadEnd>(9) : dice_.pick(ends));
  }

 private:
  // As it should be; but perhaps a part of it is given up.
  void add_transfer(FrameForge& forge, const Addresses& lent) {
    const BlockStrip whole{0, 0, bytes_};
    const Addresses to = {dice_.pick(lent)};
    Bytes body;
    write_data_body({&whole, 1}, to, body);
    const std::uint64_t number = 1000 + dice_.below(1'000'000);
    forge.add(FrameKind::kData, number, body, some_bytes(bytes_, 3),
              dice_.one_in(4) ? PayloadEnd::kGivenUp : PayloadEnd::kWhole);
    CompleteBody complete;
    complete.named = to;
    complete.bytes = bytes_;
    complete.has_private = true;
    forge.header.verb = kCompleteVerb.number;
    forge.add(FrameKind::kCall, number, write_body(complete));
  }

  static constexpr std::array kKinds = {FrameKind::kCall, FrameKind::kCall,   FrameKind::kCall,   FrameKind::kCall,
                                        FrameKind::kCall, FrameKind::kCall,   FrameKind::kCall,   FrameKind::kCall,
                                        FrameKind::kData, FrameKind::kData,   FrameKind::kData,   FrameKind::kCancel,
                                        FrameKind::kData, FrameKind::kAnswer, FrameKind::kRefused};
  static constexpr std::array kVerbs = {&kLendVerb,     &kLendVerb,      &kReturnVerb,  &kReserveVerb, &kReserveVerb,
                                        &kCompleteVerb, &kCompleteVerb,  &kAbandonVerb, &kFetchVerb,   &kMatchVerb,
                                        &kUnmatchVerb,  &kMatchKeysVerb, &kOfferVerb};

  std::uint64_t id() { return dice_.one_in(50) ? dice_.any() : 1 + dice_.below(12); }

  Address address() {
    if (!mine_.empty() && !dice_.one_in(12))
      return mine_[mine_.size() - 1 - dice_.below(std::min<std::size_t>(mine_.size(), 8))];
    if (dice_.one_in(2)) return dice_.pick(others_);
    return make_address(1 + dice_.below(100), dice_.one_in(2) ? Medium::kHbm : Medium::kDram, dice_.below(4),
                        dice_.below(20));
  }

  Addresses addresses(std::size_t most) {
    Addresses some(dice_.below(most) + 1);
    for (Address& one : some) one = address();
    return some;
  }

  Bytes body_of(FrameKind kind, std::uint16_t verb) {
    switch (kind) {
      case FrameKind::kCall:
        return request_of(verb);
      case FrameKind::kAnswer:
        return write_addresses(addresses(2));
      case FrameKind::kRefused:
        return write_error(Error(ErrorCode::kBusy, "no"));
      case FrameKind::kData: {
        std::vector<BlockStrip> strips;
        if (dice_.one_in(2)) {
          strips.push_back({0, 0, bytes_});
        } else {
          const std::uint64_t at = dice_.below(bytes_);
          strips.push_back({0, at, 1 + dice_.below(dice_.one_in(10) ? bytes_ : bytes_ - at)});
        }
        const Addresses to = addresses(2);
        payload_bytes_ = strip_bytes(strips) * to.size();
        Bytes body;
        write_data_body(strips, to, body);
        return body;
      }
      default:
        return {};
    }
  }

  Bytes request_of(std::uint16_t verb) {
    switch (verb) {
      case kLendVerb.number:
        return write_body(LendBody{dice_.below(4), dice_.one_in(4) ? Medium::kDram : Medium::kHbm, dice_.one_in(2)});
      case kReturnVerb.number:
        return write_addresses(addresses(2));
      case kOfferVerb.number: {  // the stranger's, or the link ends
        const std::uint64_t first = dice_.below(7);
        Addresses some = {make_address(kStranger, Medium::kHbm, 1, first),
                          make_address(kStranger, Medium::kHbm, 1, first + 1)};
        if (dice_.one_in(2)) some.pop_back();
        if (dice_.one_in(60)) some.back() = address();
        return write_addresses(some);
      }
      case kReserveVerb.number: {
        ReserveBody body;
        body.blocks = dice_.below(3) + 1;
        body.may_evict = dice_.one_in(2);
        body.one_sided = dice_.one_in(8);
        body.lifetime_ms = dice_.below(2000);
        if (dice_.one_in(5)) {
          body.insert = true;
          body.tokens = prompt(static_cast<Token>(dice_.below(9)), body.blocks);
        }
        return write_body(body);
      }
      case kCompleteVerb.number: {
        CompleteBody body;
        if (dice_.one_in(2)) body.named = addresses(2);
        body.bytes = dice_.one_in(4) ? dice_.any() : bytes_ * std::max<std::size_t>(1, body.named.size());
        body.has_private = dice_.one_in(2);
        if (body.has_private) body.private_bytes = some_bytes(dice_.below(60));
        body.has_checksum = dice_.one_in(6);
        return write_body(body);
      }
      case kMatchVerb.number: {
        Tokens tokens = prompt(static_cast<Token>(dice_.below(9)), 1 + dice_.below(3));
        if (dice_.one_in(4)) tokens.pop_back();
        return write_body(MatchBody{static_cast<std::uint32_t>(dice_.any()), tokens, ""});
      }
      case kMatchKeysVerb.number: {
        const Bytes keys = some_bytes(8 * dice_.below(4));
        return write_body(MatchKeysBody{static_cast<std::uint32_t>(dice_.any()), dice_.one_in(2), 8, keys, "kv"});
      }
      case kFetchVerb.number: {
        FetchBody body;
        body.from = addresses(2);
        for (std::size_t i = 0; i < body.from.size(); ++i)
          body.to.push_back(make_address(kStranger, Medium::kHbm, 1, dice_.below(8)));
        return write_body(body);
      }
      default:
        return {};
    }
  }

  Dice& dice_;
  const std::uint64_t bytes_;
  Addresses others_;
  Addresses mine_;
  std::uint64_t payload_bytes_ = 1;
};

}  // namespace

TEST_CASE("a body may be as long as is allowed and not a byte longer") {
  FrameHeader header{};
  header.body_bytes = 4096;
  CHECK_NOTHROW(check_body_bytes(header, 4096));
  CHECK(code_of([&] { check_body_bytes(header, 4095); }) == ErrorCode::kProtocol);
  header.body_bytes = UINT32_MAX;
  CHECK(code_of([&] { check_body_bytes(header, UINT32_MAX - std::size_t{1}); }) == ErrorCode::kProtocol);
}

TEST_CASE("a peer that announces a body longer than its call or answer may have is disconnected before it sends it") {
  const auto over_tcp = [](ServiceOptions& options) { options.prefer_unix_socket = false; };
  Node victim = make_node("victim", {"sock"}, 16, over_tcp);
  const std::string address = victim.service.listen("tcp:127.0.0.1:0");
  std::uint64_t incarnation = 1000;
  for (const auto& [kind, verb] :
       {std::pair(FrameKind::kCall, &kAbandonVerb), std::pair(FrameKind::kCall, &kLendVerb),
        std::pair(FrameKind::kAnswer, &kReturnVerb), std::pair(FrameKind::kRefused, &kReserveVerb)}) {
    CAPTURE(static_cast<int>(kind));
    CAPTURE(verb->name);
    std::unique_ptr<Stranger> stranger;
    REQUIRE(soon([&] {  // the one before may still be here
      stranger = std::make_unique<Stranger>(address, *victim.pool, ++incarnation);
      return stranger->admitted();
    }));
    stranger->forge().header.verb = verb->number;
    stranger->forge().header.body_bytes = 1U << 20;
    stranger->forge().add_header(kind);
    CHECK(stranger->is_left());
  }
}

TEST_CASE("a peer that sends arbitrary authentic frames changes only its own blocks, and keeps nobody out") {
  const int frames_max = std::getenv("KVPOOL_LONG") != nullptr ? 100'000 : 3'000;
  const std::uint64_t seed = fuzz_seeds().back();
  announce_fuzz("strange frames", seed);
  Dice dice(seed);
  const auto over_tcp = [](ServiceOptions& options) { options.prefer_unix_socket = false; };
  Node victim = make_node("victim", {"sock"}, 16, over_tcp);
  Node honest = make_node("honest", {"sock"}, 16, over_tcp);
  const std::string address = victim.service.listen("tcp:127.0.0.1:0");
  honest.service.connect(address, in_seconds(30));
  // What the stranger must not touch: a delivered item, blocks lent to another peer, the victim's own.
  const Addresses source = alloc(*honest.pool, 2);
  stamp(*honest.pool, source, 100);
  TransferRequest request = request_to(victim, source);
  request.private_bytes = Bytes(1);
  finish(honest.service.transfer(std::move(request)));
  const auto item = victim.service.receive(in_seconds(10));
  REQUIRE(item);
  const Addresses own = alloc(*victim.pool, 2);
  stamp(*victim.pool, own, 110);
  const Addresses lent = honest.service.alloc("victim", 2, Medium::kHbm, true, in_seconds(10));
  stamp(*victim.pool, lent, 120);
  const auto untouched = [&] {
    return is_stamped(*victim.pool, item->addresses, 100) && is_stamped(*victim.pool, own, 110) &&
           is_stamped(*victim.pool, lent, 120);
  };
  Addresses others = item->addresses;
  others.insert(others.end(), own.begin(), own.end());
  others.insert(others.end(), lent.begin(), lent.end());
  Inventor inventor(dice, *victim.pool, others);
  int frames = 0;
  int connections = 0;
  int refused = 0;
  int items = 0;
  const auto drop_items = [&] {
    while (const auto news = victim.service.receive(0)) {
      ++items;
      if (!news->lent && !news->inserted) victim.pool->free(news->addresses.data(), news->addresses.size());
    }
  };
  while (frames < frames_max) {
    Stranger stranger(address, *victim.pool, 1000 + static_cast<std::uint64_t>(++connections));
    if (!stranger.admitted()) {  // the last one is being taken leave of
      REQUIRE(++refused < 5'000);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      continue;
    }
    while (stranger.admitted() && frames < frames_max) {
      for (std::uint32_t burst = 1 + dice.below(6); burst > 0; --burst, ++frames) inventor.add_frame(stranger);
      stranger.flush();
      stranger.listen();
      drop_items();
    }
    REQUIRE(untouched());
  }
  std::printf("strange frames: %d in %d connections, %d items came of them\n", frames, connections - refused, items);
  CHECK(items > 0);  // some are as they should be
  // The honest peer never noticed.
  REQUIRE(honest.service.peers().size() == 1);
  stamp(*honest.pool, source, 90);
  TransferRequest again = request_to(victim, source);
  again.to = lent;
  again.private_bytes = Bytes(1);
  finish(honest.service.transfer(std::move(again)));
  CHECK(is_stamped(*victim.pool, lent, 90));
  CHECK(is_stamped(*victim.pool, item->addresses, 100));
  // And nothing is left of the stranger.
  CHECK(soon([&] {
    drop_items();
    const PoolStats stats = victim.pool->audit();
    const auto& states = stats.media[Medium::kHbm].by_state;
    return victim.service.peers().size() == 1 && states[static_cast<std::size_t>(BlockState::kLent)] == 2 &&
           states[static_cast<std::size_t>(BlockState::kReserved)] == 0 &&
           states[static_cast<std::size_t>(BlockState::kActive)] == 4;
  }));
}
