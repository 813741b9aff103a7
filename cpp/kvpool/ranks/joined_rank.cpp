#include "kvpool/ranks/joined_rank.h"

#include <utility>

namespace kvpool {

std::shared_ptr<Link> JoinedRank::link() const {
  const std::lock_guard lock(mutex_);
  return link_;
}

std::string JoinedRank::describe() const {
  const auto open = link();
  return open == nullptr ? "closed" : open->describe();
}

std::uint64_t JoinedRank::ask(FrameKind kind, Bytes body, Answer answer) {
  std::shared_ptr<Link> open;
  std::uint64_t id = 0;
  {
    const std::lock_guard lock(mutex_);
    open = link_;
    if (open == nullptr) {
      throw Error(ErrorCode::kPeerLost, "rank " + std::to_string(metadata_.rank) + " of this instance is lost");
    }
    id = ++last_id_;
    waiting_.emplace(id, std::move(answer));
  }
  try {
    open->send(Message{kind, 0, id, std::move(body)});
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (waiting_.erase(id) > 0) throw;  // else the link has ended, and said so
  }
  return id;
}

void JoinedRank::tell(FrameKind kind, std::uint64_t id) noexcept {
  const auto open = link();
  if (open == nullptr) return;
  try {
    open->send(Message{kind, 0, id, {}});
  } catch (const std::exception& failure) {
    open->close(Error(ErrorCode::kPeerLost, failure.what()));
  }
}

void JoinedRank::close(const Error& why) noexcept {
  if (const auto open = link()) open->close(why);
}

void JoinedRank::on_message(Message&& message) {
  Answer answer;
  {
    const std::lock_guard lock(mutex_);
    const auto entry = waiting_.find(message.id);
    if (entry == waiting_.end()) {
      throw Error(ErrorCode::kProtocol, "rank " + std::to_string(metadata_.rank) + " answers what it was not asked");
    }
    answer = std::move(entry->second);
    waiting_.erase(entry);
  }
  answer(&message, nullptr);
}

Placement JoinedRank::on_data(std::uint64_t /*id*/, std::span<const std::byte> /*body*/,
                              std::uint64_t /*payload_bytes*/) {
  throw Error(ErrorCode::kProtocol, "a scheduler has no memory for content");
}

void JoinedRank::on_closed(const Error& why) {
  std::unordered_map<std::uint64_t, Answer> waiting;
  {
    const std::lock_guard lock(mutex_);
    link_.reset();
    waiting.swap(waiting_);
  }
  const Error lost(ErrorCode::kPeerLost,
                   "rank " + std::to_string(metadata_.rank) + " of this instance is lost: " + why.what());
  for (const auto& [id, answer] : waiting) answer(nullptr, &lost);
  on_closed_(lost);
}

}  // namespace kvpool
