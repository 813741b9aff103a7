// What the applications of the simulated world ask each other for by its tokens: matches at a peer, and fetches of
// prompts.
#include <algorithm>

#include "sim_world.h"

namespace kvpool::testing {
namespace {

constexpr std::int64_t kMs = 1'000'000;
constexpr std::size_t kMatchesMax = 4;  // of one application

}  // namespace

// Some are closed after a while, some left to their deadline, and some closed before they are answered.
void SimWorld::match_at(Member& member) {
  SimDice& dice = clock_.dice();
  Peering* const peering = any_peering(member);
  if (peering == nullptr) return;
  if (member.matched.size() >= kMatchesMax) member.matched.erase(member.matched.begin());
  Matched matched;
  matched.peering = peering;
  matched.prompt = static_cast<Token>(dice.below(kPrompts));
  MatchRequest request;
  request.peer = peering->session->peer().name;
  const Tokens tokens = prompt(matched.prompt, kPromptPages);
  request.tokens = tokens;
  request.hold_ns = dice.between(0, 150 * kMs);
  request.deadline_ns = draw_deadline();
  matched.match = std::make_shared<PeerMatch>(request, kPage);
  clock_.log("match", static_cast<std::uint64_t>(matched.prompt), peering->other->process->actor());
  count("matches");
  try {
    matched.match->ask(peering->session);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kPeerLost || error.code() == ErrorCode::kBusy) return;
    return fail(std::string("R3: a match was refused: ") + error.what());
  }
  if (dice.chance(100)) matched.match->close();
  member.matched.push_back(std::move(matched));
}

void SimWorld::fetch_prompt(Member& member) {
  SimDice& dice = clock_.dice();
  Peering* const peering = any_peering(member);
  if (peering == nullptr || member.jobs.size() >= kJobsMax) return;
  Job job;
  job.kind = Job::Kind::kFetchPrompt;
  job.peering = peering;
  job.deadline_ns = draw_deadline();
  job.serial = ++serials_;
  job.freed = true;  // the index's
  PromptFetchRequest request;
  request.peer = peering->session->peer().name;
  request.tokens = prompt(static_cast<Token>(dice.below(kPrompts)), 1 + dice.below(kPromptPages));
  request.medium = dice.chance(700) ? MediumChoice(Medium::kHbm) : kMixed;
  request.may_evict = dice.chance(800);
  request.deadline_ns = job.deadline_ns;
  clock_.log("fetch prompt", job.serial, request.tokens.size());
  count("prompts fetched");
  try {
    job.transfer = peering->session->fetch_prompt(std::move(request));
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kPeerLost || error.code() == ErrorCode::kBusy) return;
    return fail(std::string("R3: a fetch of a prompt was refused: ") + error.what());
  }
  member.jobs.push_back(std::move(job));
}

// What a match has found keeps its content, as long as it is not closed here and both sides know of the link.
void SimWorld::check_matches(Member& member) {
  std::erase_if(member.matched, [](const Matched& matched) { return matched.peering->over; });
  for (const Matched& matched : member.matched) {
    Member& owner = *matched.peering->other;
    const Peering* const back = live(owner, member);
    if (!owner.process->alive() || back == nullptr || back->link->ended() || matched.peering->link->ended()) continue;
    if (!matched.match->done() || matched.match->closed() || matched.match->addresses().empty()) continue;
    count("matches that held");
    const std::vector<Address>& found = matched.match->addresses();
    for (std::size_t page = 0; page < found.size(); ++page) {
      if (has_stamp(owner.process->pool(), found[page], page_stamp(matched.prompt, page))) continue;
      return fail("R1: a block was reused while a peer had matched it");
    }
  }
}

}  // namespace kvpool::testing
