#include "kvpool/views/remote_view.h"

#include <algorithm>
#include <utility>

#include "kvpool/base/failure.h"
#include "kvpool/base/fork_guard.h"
#include "kvpool/transfer/verbs.h"
#include "kvpool/views/view_messages.h"

namespace kvpool {

struct RemoteView::Reading {
  Reading(std::shared_ptr<RemoteView> of, std::uint64_t at) : view(std::move(of)), number(at) {}
  ~Reading() { view->end_reading(number); }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

  std::shared_ptr<RemoteView> view;
  std::shared_ptr<void> counted;  // by the session
  std::uint64_t number;
};

std::shared_ptr<RemoteView> RemoteView::open(std::shared_ptr<Session> session) {
  auto view = std::make_shared<RemoteView>(std::move(session));
  view->session_->watch_loans(view);
  return view;
}

RemoteView::RemoteView(std::shared_ptr<Session> session)
    : session_(std::move(session)),
      spans_(session_->readable()),
      id_(session_->calls().next_id()),
      made_in_(fork_generation()) {}

RemoteView::~RemoteView() { remove(kEverything); }  // no reading is under way: each keeps the view

void RemoteView::add(std::uint64_t first, std::span<const Address> addresses, const Waiting& waiting) {
  PeerCalls& calls = session_->calls();
  const BlockRange all{first, addresses.size()};
  note(first, addresses);
  try {
    while (!addresses.empty()) {
      const auto some = addresses.first(std::min(addresses.size(), kAddressesMax));
      const ViewBody body{id_, spans_ != nullptr, first, {some.begin(), some.end()}};
      static_cast<void>(calls.call(kViewVerb, calls.next_id(), write_body(body), waiting));
      first += some.size();
      addresses = addresses.subspan(some.size());
    }
  } catch (...) {
    remove(all);  // the peer carries the two out in this order, also when the first is late
    throw;
  }
}

void RemoteView::begin_add(std::uint64_t first, std::span<const Address> addresses, std::int64_t until_ns,
                           std::function<void(const Error* error)> done) {
  PeerCalls& calls = session_->calls();
  const BlockRange all{first, addresses.size()};
  note(first, addresses);
  try {
    const ViewBody body{id_, spans_ != nullptr, first, {addresses.begin(), addresses.end()}};
    calls.begin(kViewVerb, calls.next_id(), write_body(body), until_ns,
                [self = shared_from_this(), all, done = std::move(done)](const Message*, const Error* error) {
                  if (error != nullptr) self->remove(all);
                  done(error);
                });
  } catch (...) {
    remove(all);
    throw;
  }
}

void RemoteView::note(std::uint64_t first, std::span<const Address> addresses) {
  const std::lock_guard lock(mutex_);
  auto runs = std::make_shared<BlockRuns>(*runs_);
  runs->add(first, addresses);
  runs_ = std::move(runs);
  all_mapped_ = all_mapped_ && spans_ != nullptr && std::ranges::all_of(addresses, [&](Address address) {
                  return block_of(address) < (*spans_)[medium_of(address)].blocks;
                });
}

void RemoteView::remove(const BlockRange& blocks) noexcept {
  if (made_in_ != fork_generation()) return;  // the link is the parent's
  const auto failure = failure_of([&] {
    const std::lock_guard lock(mutex_);
    take_out(blocks);
  });
  if (failure) return give_up(*failure);
  tell_removed();
}

// REQUIRES: mutex_ is held.
void RemoteView::take_out(const BlockRange& blocks) {
  removed_.reserve(removed_.size() + 1);
  auto runs = std::make_shared<BlockRuns>(*runs_);
  runs->remove(blocks);
  runs_ = std::move(runs);
  removed_.push_back({removals_++, readings_.next(), blocks});
}

// Blocks count as held until their removal was sent: what adds them again comes behind it.
void RemoteView::tell_removed() noexcept {
  const auto failure = failure_of([&] {
    std::vector<Removed> due;
    {
      const std::lock_guard lock(mutex_);
      due.reserve(removed_.size());
      for (Removed& one : removed_) {
        if (one.being_told || readings_.any_before(one.before)) continue;
        one.being_told = true;
        due.push_back(one);
      }
    }
    PeerCalls& calls = session_->calls();
    for (const Removed& one : due) {
      calls.post(kUnviewVerb, calls.next_id(), write_body(UnviewBody{id_, one.blocks}));
    }
    const std::lock_guard lock(mutex_);
    for (const Removed& told : due)
      std::erase_if(removed_, [&](const Removed& one) { return one.number == told.number; });
  });
  if (failure) give_up(*failure);
}

// Without memory for a message the peer would hold blocks for nothing.
void RemoteView::give_up(const Error& why) noexcept { session_->calls().close(why); }

bool RemoteView::has_any(const BlockRange& blocks) const {
  const std::lock_guard lock(mutex_);
  return runs_->has_any(blocks) || std::ranges::any_of(removed_, [&](const Removed& one) {
           return one.blocks.first < blocks.end() && blocks.first < one.blocks.end();
         });
}

std::vector<BlockRange> RemoteView::missing(const BlockRange& blocks) const {
  const std::lock_guard lock(mutex_);
  std::vector<BlockRange> missing;
  std::uint64_t next = blocks.first;
  for (const BlockRuns::Run& run : runs_->runs()) {
    if (run.end() <= next || run.first >= blocks.end()) continue;
    if (run.first > next) missing.push_back({next, run.first - next});
    next = run.end();
  }
  if (next < blocks.end()) missing.push_back({next, blocks.end() - next});
  return missing;
}

bool RemoteView::is_readable(const BlockRange& blocks) const {
  if (spans_ == nullptr) return false;
  const std::lock_guard lock(mutex_);
  return all_mapped_ && runs_->find(blocks).has_value();
}

ReadableBlocks RemoteView::read() {
  const auto reading = [&] {
    std::shared_ptr<RemoteView> self = shared_from_this();
    const std::lock_guard lock(mutex_);
    const std::uint64_t number = readings_.begin();
    try {
      return std::pair(std::make_shared<Reading>(std::move(self), number), runs_);
    } catch (...) {
      readings_.end(number);
      throw;
    }
  }();
  reading.first->counted = session_->begin_reading();
  return {reading.second, spans_, reading.first};
}

void RemoteView::end_reading(std::uint64_t number) noexcept {
  if (made_in_ != fork_generation()) return;
  {
    const std::lock_guard lock(mutex_);
    readings_.end(number);
    if (removed_.empty()) return;
  }
  tell_removed();
}

void RemoteView::on_loans_ended(const AddressSet& addresses) noexcept {
  const auto failure = failure_of([&] {
    const std::lock_guard lock(mutex_);
    const std::vector<BlockRange> ended = runs_->places_of(addresses);
    if (ended.empty()) return;
    auto runs = std::make_shared<BlockRuns>(*runs_);
    runs->remove(ended);
    for (const BlockRange& blocks : ended) removed_.push_back({removals_++, readings_.next(), blocks});
    runs_ = std::move(runs);
  });
  if (failure) return give_up(*failure);
  tell_removed();
}

}  // namespace kvpool
