// Questions to peers for the prompts that they have cached, and fetches of such prompts.
#include <utility>

#include "kvpool/base/failure.h"
#include "kvpool/peers/service.h"

namespace kvpool {

// Several questions of one call are all asked before anyone waits: so connecting, which may take long, is left to
// threads that wait for peers, one for each question.
void Service::ask(const std::shared_ptr<PeerMatch>& match) {
  const auto ask_by = [match](const std::shared_ptr<Session>& session) {
    if (const auto failure = failure_of([&] { match->ask(session); })) match->fail(*failure);
  };
  const std::shared_ptr<Session> connected = table_.find(match->peer());
  if (connected != nullptr && !connected->lost()) [[likely]] {
    return ask_by(connected);
  }
  waits_.run(match.get(), Priority::kDecode, [this, match, ask_by] {
    const auto given_up = [&] { return match->done(); };
    std::shared_ptr<Session> session;
    const auto failure = failure_of([&] { session = caller_->reach(match->peer(), match->deadline_ns(), given_up); });
    if (failure) return match->fail(*failure);
    ask_by(session);
  });
}

std::shared_ptr<Transfer> Service::fetch_prompt(PromptFetchRequest&& request, const GivenUp& given_up) {
  const auto session = caller_->reach(request.peer, request.deadline_ns, given_up);
  return session->fetch_prompt(std::move(request));
}

}  // namespace kvpool
