// What the applications of the simulated world have computed over each other's blocks where they lie. Each answer is
// compared, bit by bit, with attention over blocks of the same content here.
#include <algorithm>

#include "kvpool/sequences/attend_task.h"
#include "kvpool/sequences/sequence_blocks.h"
#include "kvpool/transfer/verbs.h"
#include "sim_world.h"

namespace kvpool::testing {
namespace {

constexpr std::int64_t kMs = 1'000'000;
constexpr std::uint32_t kQueryHeads = 2;
constexpr std::size_t kAttendsMax = 4;  // of one application

std::vector<std::byte> some_query(SimDice& dice) {
  std::vector<float> q(kQueryHeads * std::size_t{SimProcess::kHeadDim});
  for (float& one : q) one = static_cast<float>(dice.below(64)) / 8;
  const auto bytes = std::as_bytes(std::span(q));
  return {bytes.begin(), bytes.end()};
}

}  // namespace

// Over some tokens of a view, which may be closed at once or later, its blocks freed or recalled, and the link lost.
void SimWorld::attend(Member& member) {
  SimDice& dice = clock_.dice();
  if (!attendable_ || member.viewed.empty() || member.attending.size() >= kAttendsMax) return;
  const std::size_t at = dice.below(member.viewed.size());
  const Viewed& viewed = member.viewed[at];
  if (viewed.peering->over || viewed.peering->parting) return;
  Attending call;
  call.peering = viewed.peering;
  call.deadline_ns = draw_deadline();
  call.stamps = viewed.stamps;
  call.asked.layer = static_cast<std::uint32_t>(dice.below(kLayers));
  call.asked.query_heads = kQueryHeads;
  call.asked.query_dtype = DType::kFloat32;
  call.asked.q = some_query(dice);
  const std::uint64_t tokens = viewed.addresses.size() * kPage;
  const std::uint64_t begin = dice.below(tokens);
  const std::uint64_t end = begin + 1 + dice.below(tokens - begin);
  call.asked.items.push_back({viewed.view->id(), 1, end - 1, {{begin, end}}});

  PeerCalls& calls = viewed.peering->session->calls();
  const std::uint64_t serial = ++serials_;
  const std::uint64_t id = calls.next_id();
  clock_.log("attend", serial, end - begin);
  count("attends");
  Bytes request = write_body(call.asked);
  const std::int64_t deadline = call.deadline_ns;
  member.attending.emplace(serial, std::move(call));
  try {
    calls.begin(kAttendVerb, id, std::move(request), deadline,
                [this, &member, serial](const Message* answer, const Error* error) {
                  conclude(member, serial, answer, error);
                });
  } catch (const Error& error) {
    member.attending.erase(serial);
    if (error.code() != ErrorCode::kPeerLost && error.code() != ErrorCode::kBusy) {
      fail(std::string("R3: a call for attention was not begun: ") + error.what());
    }
    return;
  }
  if (dice.chance(100)) calls.cancel(kAttendVerb, id);
  if (dice.chance(500)) member.viewed.erase(member.viewed.begin() + static_cast<std::ptrdiff_t>(at));
}

void SimWorld::conclude(Member& member, std::uint64_t serial, const Message* answer, const Error* error) {
  if (!member.process->alive()) return;
  const auto entry = member.attending.find(serial);
  if (entry == member.attending.end()) return fail("R3: a call for attention ended twice");
  const Attending call = std::move(entry->second);
  member.attending.erase(entry);
  clock_.log("attended", serial, error == nullptr ? 0 : 1 + static_cast<std::uint64_t>(error->code()));
  if (clock_.now_ns() > std::max(call.deadline_ns, member.resumed_ns) + kMs) {
    fail("R3: a call for attention ended after its deadline");
  }
  if (error != nullptr) {
    switch (error->code()) {
      case ErrorCode::kPeerLost:
      case ErrorCode::kDeadline:
      case ErrorCode::kBusy:
      case ErrorCode::kCancelled:
      case ErrorCode::kStaleAddress:  // closed or recalled meanwhile
        return;
      default:
        return fail(std::string("R3: a call for attention was refused: ") + error->what());
    }
  }
  try {
    static_cast<void>(read_attended(answer->body, call.asked, SimProcess::kHeadDim));
  } catch (const Error& wrong) {
    return fail(std::string("R3: an answer to a call for attention: ") + wrong.what());
  }
  if (std::ranges::find(call.stamps, 0) != call.stamps.end()) return;
  count("attended");
  if (answer->body != answer_to(member, call)) fail("R1: attention read a block that was reused");
}

// What its peer has to answer, computed over blocks of a pool that is used for nothing else.
Bytes SimWorld::answer_to(Member& member, const Attending& call) {
  const auto n = static_cast<std::uint32_t>(call.stamps.size());
  if (reference_ == nullptr) {
    SimIdentity identity;
    identity.hbm_blocks = kPromptPages;
    reference_ = std::make_unique<Pool>(SimProcess::options(identity));
  }
  Pool& pool = *reference_;
  std::vector<Address> addresses(n);
  if (!pool.try_alloc(n, Medium::kHbm, addresses.data())) throw std::bad_alloc();
  for (std::size_t i = 0; i < n; ++i) stamp(pool, addresses[i], call.stamps[i]);
  AttendedBody body{call.asked.layer, {}};
  {
    const auto blocks = std::make_shared<SequenceBlocks>(pool, SequenceBlocks::kApplication, false);
    blocks->add(0, addresses);
    AttendRequest request;
    request.layer = call.asked.layer;
    request.query_heads = call.asked.query_heads;
    request.query_dtype = call.asked.query_dtype;
    request.q = call.asked.q;
    const AttendBody::Item& item = call.asked.items.front();
    request.entries.push_back({blocks->read(), item.ranges, 0, item.query_tokens, item.query_begin, 0});
    AttendTask task(pool, std::move(request), item.query_tokens, member.process->attender());
    body.items.push_back({item.view, std::move(task.run().front()).take_nodes()});
  }
  pool.free(addresses.data(), n);
  return write_body(body);
}

}  // namespace kvpool::testing
