// Lent blocks that their owner wants back, from both ends.
//
//   owner                                          borrower
//   recall: addresses, for so long ──────────────▶ tells its application, which returns them or moves what they hold
//                    ◀──────────── return, ...
//                    ◀──────────── answer: none of them is borrowed, or written, any more
//   at the deadline: cancel ─────────────────────▶ at its own deadline, or at this word, whichever comes first: the
//   loans takes back what is left                        are over, and transfers that write to them are stopped; it
//   answers
//                    ◀──────────── answer          when these have ended
//
// So an owner whose borrower is stopped has its blocks back at the deadline, if perhaps in quarantine; and a borrower
// that wakes up reads the cancellation behind the recall.
#include <algorithm>
#include <limits>
#include <utility>

#include "kvpool/base/failure.h"
#include "kvpool/exec/completion.h"
#include "kvpool/transfer/loan_watch.h"
#include "kvpool/transfer/outgoing.h"
#include "kvpool/transfer/peer_reads.h"
#include "kvpool/transfer/session.h"

namespace kvpool {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kNsPerMs = 1'000'000;

// Freed blocks that the borrower may still be reading are as good as quarantined.
void count_read(RecallResult& result, std::size_t read) noexcept {
  const auto kept = std::min<decltype(result.freed)>(static_cast<decltype(result.freed)>(read), result.freed);
  result.freed -= kept;
  result.quarantined += kept;
}

// What the caller waits for.
struct Waited {
  RecallResult result;  // once it is done
  Completion completion;
};

}  // namespace

// --- the owner ---

RecallResult Session::recall(std::vector<Address> addresses, const Waiting& waiting) {
  for (Address& address : addresses) {
    if (instance_of(address) == 0) address |= Address{host_.blocks().instance()} << kInstanceShift;
  }
  if (addresses.size() > kAddressesMax) {
    throw Error(ErrorCode::kArgument,
                std::to_string(addresses.size()) + " blocks; one recall takes " + std::to_string(kAddressesMax),
                {{"requested", static_cast<std::int64_t>(addresses.size())}, {"maximum", kAddressesMax}});
  }
  if (lost()) throw_lost();
  receiver_->check_lent(addresses);
  return wait_for_recall(std::move(addresses), waiting);
}

RecallResult Session::recall_some(std::size_t count, const Waiting& waiting) {
  if (lost()) throw_lost();
  return wait_for_recall(receiver_->some_lent(std::min(count, kAddressesMax)), waiting);
}

RecallResult Session::wait_for_recall(std::vector<Address> addresses, const Waiting& waiting) {
  if (addresses.empty()) return {};
  const auto waited = std::make_shared<Waited>();
  Completion& completion = waited->completion;
  begin_recall(std::move(addresses), waiting.until_ns,
               [waited, weak = std::weak_ptr(link())](const RecallResult* result, const Error* error) {
                 if (result != nullptr) waited->result = *result;
                 waited->completion.finish(error != nullptr ? std::optional(*error) : std::nullopt);
                 if (const auto open = weak.lock()) open->wake();
               });
  while (!completion.done()) {
    const auto open = link();
    if (open != nullptr && open->drive(waiting.slice_ns(host_.now_ns()), [&] { return completion.done(); })) break;
    const std::int64_t now_ns = host_.now_ns();
    if (now_ns >= waiting.until_ns) static_cast<void>(calls_->tick(now_ns));
    if (completion.done()) break;
    waiting.check();
    completion.sleep_until(now_ns + kNsPerMs);  // the link has ended, or another thread is about to be done
  }
  if (completion.error()) throw Error(*completion.error());
  return waited->result;
}

// Blocks that are not lent any more when it is over have been given back.
void Session::begin_recall(std::vector<Address> addresses, std::int64_t until_ns, RecallDone done, bool always) {
  struct Asked {
    std::vector<Address> addresses;
    Receiver::QuarantineRoom room;
    RecallDone done;
    RecallResult result = {};
  };
  const std::uint64_t id = calls_->next_id();
  const auto asked = std::make_shared<Asked>();
  asked->room = Receiver::quarantine_room(id | kRecallBit, {});
  asked->room.mapped().addresses.reserve(addresses.size());
  asked->addresses = std::move(addresses);
  asked->done = std::move(done);
  receiver_->expect_recall(id, asked->addresses);
  try {
    calls_->begin(
        kRecallVerb, id, write_addresses(asked->addresses), until_ns,
        [asked, id, receiver = receiver_, reads = reads_, host = &host_, key = this](const Message*,
                                                                                     const Error* error) {
          const bool late = error != nullptr && error->code() == ErrorCode::kDeadline;
          if (error != nullptr && !late) {
            receiver->forget_recall(id);
            return asked->done(nullptr, error);
          }
          asked->result = receiver->end_recall(std::move(asked->room), asked->addresses, /*writer_ended=*/!late);
          if (reads == nullptr || asked->addresses.empty() || !reads->has_any())
            return asked->done(&asked->result, nullptr);
          // A search through all views takes longer than the thread that reads links may.
          const auto search = [asked, reads] {
            count_read(asked->result, reads->on_recalled(asked->addresses));
            asked->done(&asked->result, nullptr);
          };
          if (failure_of([&] { host->run(key, search); })) search();
        },
        always);
  } catch (...) {
    receiver_->forget_recall(id);
    throw;
  }
}

// --- the borrower ---

struct Session::Recalled {
  CallPointer call;
  std::vector<Address> addresses;
  std::int64_t deadline_ns;
  bool over = false;  // under recalls_mutex_
};

// Of blocks that are not borrowed (any more) it wants nothing.
void Session::on_recall(const CallPointer& call, const std::vector<Address>& addresses) {
  check_of_peer(addresses);
  std::vector<Address> borrowed = borrowed_.borrowed_among(addresses);
  call->hold(receiver_->hold_request(borrowed.size() * sizeof(Address)));
  const std::int64_t deadline_ns = call->deadline_ns();
  const auto recalled = std::make_shared<Recalled>(Recalled{call, std::move(borrowed), deadline_ns});
  {
    const std::lock_guard lock(recalls_mutex_);
    recalls_.push_back(recalled);
  }
  call->when_cancelled([weak = weak_from_this(), over = std::weak_ptr(recalled)] {
    const auto self = weak.lock();
    const auto one = over.lock();
    if (self != nullptr && one != nullptr) self->end_recall(one);
  });
  if (deadline_ns != kNever) host_.tick_by(deadline_ns);
  if (!recalled->addresses.empty()) host_.recalled(*this, recalled->addresses, deadline_ns);
  answer_recalls();  // the blocks may have been given back before the recall was noted
}

void Session::end_recall(const std::shared_ptr<Recalled>& recalled) noexcept {
  std::vector<std::shared_ptr<Outgoing>> writing;
  std::vector<std::shared_ptr<LoanWatch>> watches;
  AddressSet ended;
  std::optional<Error> unwatched;
  {
    const std::lock_guard lock(recalls_mutex_);
    if (std::exchange(recalled->over, true)) return;
    borrowed_.end_loans(recalled->addresses);
    const auto failure = failure_of([&] {
      for (const auto& [id, weak] : named_) {
        if (auto transfer = weak.lock()) writing.push_back(std::move(transfer));
      }
    });
    if (failure) writing.clear();  // then they end by themselves
    unwatched = failure_of([&] {
      for (const auto& weak : loan_watches_) {
        if (auto watch = weak.lock()) watches.push_back(std::move(watch));
      }
      if (!watches.empty()) ended.insert(recalled->addresses.begin(), recalled->addresses.end());
    });
  }
  if (unwatched) close_link(*unwatched);  // else the owner would wait for what nobody is told to stop
  for (const auto& watch : watches) watch->on_loans_ended(ended);
  for (const auto& transfer : writing) transfer->stop_recalled();
  answer_recalls();
}

void Session::watch_loans(const std::shared_ptr<LoanWatch>& watch) {
  const std::lock_guard lock(recalls_mutex_);
  std::erase_if(loan_watches_, [](const auto& weak) { return weak.expired(); });
  loan_watches_.push_back(watch);
}

std::int64_t Session::tick_recalls(std::int64_t now_ns) noexcept {
  while (true) {
    std::shared_ptr<Recalled> due;
    std::int64_t next = kNever;
    {
      const std::lock_guard lock(recalls_mutex_);
      for (const auto& one : recalls_) {
        if (one->over) continue;
        if (one->deadline_ns <= now_ns) {
          due = one;
          break;
        }
        next = std::min(next, one->deadline_ns);
      }
    }
    if (due == nullptr) return next;
    end_recall(due);
  }
}

// Answers the recalls of which no block is borrowed any longer.
void Session::answer_recalls() noexcept {
  while (true) {
    std::shared_ptr<Recalled> answered;
    {
      const std::lock_guard lock(recalls_mutex_);
      if (recalls_.empty() || returning_ > 0) return;
      const auto done =
          std::ranges::find_if(recalls_, [&](const auto& one) { return !borrowed_.any_held(one->addresses); });
      if (done == recalls_.end()) return;
      answered = std::move(*done);
      recalls_.erase(done);
    }
    answered->call->answer({});
  }
}

// Blocks that are about to go back are no longer borrowed, but the peer has not been told: recalls are answered after
// that.
void Session::begin_return() noexcept {
  const std::lock_guard lock(recalls_mutex_);
  ++returning_;
}

void Session::end_return() noexcept {
  {
    const std::lock_guard lock(recalls_mutex_);
    --returning_;
  }
  answer_recalls();
}

// --- transfers to borrowed blocks ---

void Session::begin_named(std::uint64_t id, const std::shared_ptr<Outgoing>& transfer, std::span<const Address> to) {
  const std::lock_guard lock(recalls_mutex_);
  borrowed_.check_still_borrowed(to);
  named_.emplace(id, transfer);
}

void Session::end_named(std::uint64_t id, std::span<const Address> to, bool still_borrowed) noexcept {
  {
    const std::lock_guard lock(recalls_mutex_);
    named_.erase(id);
  }
  if (still_borrowed) return unmark(to);
  borrowed_.drop_written(to);
  answer_recalls();
}

void Session::unmark(std::span<const Address> addresses) noexcept {
  borrowed_.end_write(addresses);
  answer_recalls();
}

}  // namespace kvpool
