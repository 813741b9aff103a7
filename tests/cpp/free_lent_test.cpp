// Blocks that several peers have lent are given back in one call: all or nothing, and in full.
#include <doctest/doctest.h>

#include <optional>

#include "endpoint_fixture.h"
#include "kvpool/peers/instance_id.h"
#include "kvpool/transfer/messages.h"
#include "service_kit.h"

namespace kvpool::testing {
using namespace services;  // NOLINT(google-build-using-namespace)
namespace {

void free_all(Node& node, const Addresses& addresses) { node.node->free(addresses.data(), addresses.size()); }

std::optional<std::int64_t> position_in(const Error& error) {
  for (const auto& [name, value] : error.fields()) {
    if (std::string_view(name) == "position") return value;
  }
  return std::nullopt;
}

// A peer as seen on the wire, which lends blocks and follows the test when they come back.
struct Lender : Member {
  explicit Lender(const std::string& name) : Member(name, {.secret = "s3cret"}) {
    metadata.instance = id.value();
    metadata.block_tokens = kPage;
    metadata.piece_bytes = {64, 64};
    metadata.media[Medium::kHbm].blocks = 16;
    metadata.media[Medium::kHbm].segments = {{0x10000, 128, 128}};  // which is not used: there is only sock
  }
  void meet(Node& node, std::function<void(Link&, const Message&)> on_return) {
    const auto link = endpoint->connect(node.service.listen(unix_address()), in_seconds(60));
    handlers[0]->answer = [this, to = link.get(), on_return = std::move(on_return)](const Message& message) {
      if (message.verb == kLendVerb.number) {
        Addresses lent;
        for (std::uint32_t i = 0; i < read_lend(message.body).blocks; ++i) {
          lent.push_back(make_address(id.value(), Medium::kHbm, 1, next_block++));
        }
        to->send(message_of(FrameKind::kAnswer, message.id, write_addresses(lent), message.verb));
      }
      if (message.verb == kReturnVerb.number) on_return(*to, message);
    };
    REQUIRE(soon([&] { return node.service.peers().size() == 1; }));
  }

  const InstanceId id = InstanceId::draw();
  std::uint32_t next_block = 0;  // used by the thread that reads the link
};

}  // namespace

TEST_CASE("a wrong address, of any peer and anywhere in the list, makes a free change nothing") {
  Node a = make_node("a");
  Node b = make_node("b");
  Node c = make_node("c");
  a.service.connect(b.service.listen(unix_address()), in_seconds(60));
  a.service.connect(c.service.listen(unix_address()), in_seconds(60));
  const auto borrow = [&](const Node& from, std::size_t n) {
    return a.service.alloc(from.name, n, Medium::kHbm, true, in_seconds(60));
  };
  const Addresses own = alloc(*a.pool, 2);
  const Addresses of_b = borrow(b, 2);
  const Addresses of_c = borrow(c, 2);
  const Addresses stale = borrow(c, 1);
  free_all(a, stale);
  const Addresses freed = alloc(*a.pool, 1);
  free_all(a, freed);
  const Addresses good = {of_b[0], own[0], of_c[0], own[1], of_b[1], of_c[1]};
  const auto block_of_c = [&](std::uint32_t block) { return make_address(c.pool->instance(), Medium::kHbm, 1, block); };
  const InstanceId nobodys = InstanceId::draw();
  struct Wrong {
    const char* what;
    Address address;
    ErrorCode code;
  };
  const Wrong wrongs[] = {
      {"of nobody here", make_address(nobodys.value(), Medium::kHbm, 1, 0), ErrorCode::kNotOwner},
      {"not lent", block_of_c(9), ErrorCode::kNotOwner},
      {"no block", block_of_c(1 << 20), ErrorCode::kNotOwner},
      {"given back before", stale[0], ErrorCode::kNotOwner},
      {"of an earlier loan", of_c[0] ^ (Address{8} << kGenerationShift), ErrorCode::kStaleAddress},
      {"own, and free", freed[0], ErrorCode::kStaleAddress},
  };
  const auto nothing_has_changed = [&] {
    CHECK(blocks_in(*b.pool, BlockState::kLent) == 2);
    CHECK(blocks_in(*c.pool, BlockState::kLent) == 2);
    CHECK(blocks_in(*a.pool, BlockState::kActive) == 2);
  };
  for (const Wrong& wrong : wrongs) {
    CAPTURE(wrong.what);
    for (std::size_t at = 0; at <= good.size(); ++at) {
      Addresses list = good;
      list.insert(list.begin() + static_cast<std::ptrdiff_t>(at), wrong.address);
      const auto error = error_of([&] { free_all(a, list); });
      REQUIRE(error);
      CHECK(error->code() == wrong.code);
      CHECK(position_in(*error) == static_cast<std::int64_t>(at));
      nothing_has_changed();
    }
  }
  for (const Address twice : good) {
    Addresses list = good;
    list.push_back(twice);
    const auto error = error_of([&] { free_all(a, list); });
    REQUIRE(error);
    CHECK(error->code() == ErrorCode::kArgument);
    CHECK(position_in(*error) == static_cast<std::int64_t>(good.size()));
    nothing_has_changed();
  }
  free_all(a, good);
  for (Node* node : {&a, &b, &c}) CHECK(blocks_in(*node->pool, BlockState::kFree) == 32);
}

TEST_CASE("a peer that is lost or refuses does not stop the own blocks and other peers' from being freed") {
  for (const bool is_lost : {true, false}) {
    CAPTURE(is_lost);
    Node a = make_node("a");
    Lender b("b");
    Node c = make_node("c");
    b.meet(a, [is_lost](Link& link, const Message& message) {
      const Error why(is_lost ? ErrorCode::kPeerLost : ErrorCode::kBusy, "not now");
      if (is_lost) return link.close(why);
      link.send(message_of(FrameKind::kRefused, message.id, write_error(why), message.verb));
    });
    a.service.connect(c.service.listen(unix_address()), in_seconds(60));
    const Addresses own = alloc(*a.pool, 1);
    const Addresses of_b = a.service.alloc("b", 2, Medium::kHbm, true, in_seconds(60));
    const Addresses of_c = a.service.alloc("c", 2, Medium::kHbm, true, in_seconds(60));
    const auto error = error_of([&] { free_all(a, {of_b[0], of_c[0], own[0], of_b[1], of_c[1]}); });
    REQUIRE(error);
    CHECK(error->code() == (is_lost ? ErrorCode::kPeerLost : ErrorCode::kBusy));
    CHECK(blocks_in(*c.pool, BlockState::kLent) == 0);
    CHECK(blocks_in(*a.pool, BlockState::kActive) == 0);
    // No one here has them any more.
    const auto again = error_of([&] { free_all(a, of_c); });
    REQUIRE(again);
    CHECK(again->code() == ErrorCode::kNotOwner);
  }
}

// A peer that gets more in one message takes it for nonsense, and ends the connection.
TEST_CASE("lent blocks that exceed one message are returned in several, each once") {
  Node a = make_node("a");
  Lender b("b");
  b.metadata.media[Medium::kHbm].blocks = 1U << 20;
  std::vector<std::size_t> returned;  // by the thread that reads b's link; read when all is answered
  b.meet(a, [&](Link& link, const Message& message) {
    returned.push_back(read_addresses(message.body).size());
    link.send(message_of(FrameKind::kAnswer, message.id, {}, message.verb));
  });
  Addresses lent = a.service.alloc("b", kAddressesMax, Medium::kHbm, true, in_seconds(60));
  const Addresses more = a.service.alloc("b", 2, Medium::kHbm, true, in_seconds(60));
  lent.insert(lent.end(), more.begin(), more.end());
  lent.push_back(lent.front());
  const auto twice = error_of([&] { free_all(a, lent); });
  REQUIRE(twice);
  CHECK(position_in(*twice) == static_cast<std::int64_t>(lent.size() - 1));
  CHECK(returned.empty());
  lent.pop_back();
  const auto error = error_of([&] { free_all(a, lent); });
  CHECK_MESSAGE(!error, std::string(error ? error->what() : ""));
  CHECK(returned == std::vector<std::size_t>{kAddressesMax, 2});
}

}  // namespace kvpool::testing
