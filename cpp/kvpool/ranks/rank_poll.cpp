#include "kvpool/ranks/rank_poll.h"

#include <new>
#include <utility>

#include "kvpool/transfer/messages.h"

namespace kvpool {

void RankPoll::expect() noexcept {
  const std::lock_guard lock(mutex);
  ++missing;
}

void RankPoll::take(const Error* error) noexcept {
  const std::lock_guard lock(mutex);
  --missing;
  changed.notify_all();
  if (error == nullptr || std::exchange(failed, true)) return;
  try {
    failure_ = *error;
  } catch (const std::bad_alloc&) {
    failure_.reset();
  }
}

void RankPoll::take_failure_unread() noexcept {
  const std::lock_guard lock(mutex);
  --missing;
  failed = true;
  changed.notify_all();
}

void RankPoll::take(const Message* answer, const Error* why) {
  if (why != nullptr || answer->kind != FrameKind::kRefused) return take(why);
  std::optional<Error> refusal;
  try {
    refusal = read_error(answer->body);
  } catch (const Error& unread) {
    take(&unread);
    throw;
  } catch (const std::bad_alloc&) {
    return take_failure_unread();  // the link is well
  }
  take(&*refusal);
}

void RankPoll::rethrow_if_failed() const {
  if (failure_) throw Error(*failure_);
  if (failed) throw std::bad_alloc();
}

}  // namespace kvpool
