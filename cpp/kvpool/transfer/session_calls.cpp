// Requests of a session whose callers wait for the answer; borrowing is made of them.
#include <limits>
#include <utility>

#include "kvpool/transfer/session.h"
#include "kvpool/transfer/transfer_id.h"

namespace kvpool {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

}  // namespace

// A request whose caller waits in the call. Ends once: answered, lost or given up.
class Session::Call final : public PendingAnswer {
 public:
  explicit Call(Session& session) noexcept : session_(session) {}

  void on_answer(Message&& message) override {
    {
      const std::lock_guard lock(mutex_);
      if (!over_) {
        answer_ = std::move(message);
        return finish();
      }
      if (!given_up_) return;
    }
    session_.on_unwanted(message);
  }
  void on_lost(const Error& why) override {
    const std::lock_guard lock(mutex_);
    if (over_) return;
    lost_ = why;
    finish();
  }
  std::int64_t on_tick(std::int64_t /*now_ns*/) override { return kNever; }  // the caller looks at the clock

  bool done() const noexcept { return done_.load(std::memory_order_acquire); }
  // Nobody waits any more. False: it was answered, or lost, just now.
  bool give_up() noexcept {
    const std::lock_guard lock(mutex_);
    if (over_) return false;
    return given_up_ = over_ = true;
  }
  // REQUIRES: done(). Throws what ended it.
  Message take() {
    if (lost_) throw Error(*lost_);
    return std::move(answer_);
  }

 private:
  void finish() noexcept {
    over_ = true;
    done_.store(true, std::memory_order_release);
  }

  Session& session_;  // calls it
  std::mutex mutex_;
  bool over_ = false;
  bool given_up_ = false;
  std::atomic<bool> done_{false};
  Message answer_;
  std::optional<Error> lost_;
};

Message Session::call(FrameKind kind, std::uint64_t id, Bytes body, const Waiting& waiting, const char* what,
                      const std::function<void()>& on_sent) {
  const auto open = link();
  if (open == nullptr) throw_lost();
  const auto pending = std::make_shared<Call>(*this);
  expect_answer(id, pending);
  try {
    send(kind, id, std::move(body));
    if (on_sent) on_sent();
    while (!pending->done() && host_.now_ns() < waiting.until_ns && !lost()) {
      if (open->drive(waiting.slice_ns(host_.now_ns()), [&] { return pending->done(); })) break;
      waiting.check();
    }
  } catch (...) {
    static_cast<void>(pending->give_up());
    forget_answer(id);
    throw;
  }
  const bool late = pending->give_up();
  forget_answer(id);
  if (late) {
    if (lost()) throw_lost();
    throw Error(ErrorCode::kDeadline, std::string("peer ") + peer_.name + " did not answer in time: " + what);
  }
  Message answer = pending->take();
  if (answer.kind == FrameKind::kRefused) throw read_error(answer.body);
  return answer;
}

// The answer to a request that nobody waits for any more. What was lent goes back.
void Session::on_unwanted(const Message& answer) {
  if (answer.kind == FrameKind::kLent) tell(FrameKind::kReturn, next_id(), answer.body);
  if ((answer.id & kFetchBit) != 0) receiver_->on_fetch_over(answer.id);
}

std::vector<Address> Session::borrow(std::size_t n, MediumChoice medium, bool may_evict, const Waiting& waiting) {
  if (n > kAddressesMax) {
    throw Error(ErrorCode::kArgument, std::to_string(n) + " blocks; one request takes " + std::to_string(kAddressesMax),
                {{"requested", static_cast<std::int64_t>(n)}, {"maximum", kAddressesMax}});
  }
  const LendBody body{static_cast<std::uint32_t>(n), medium, may_evict};
  const Message answer = call(FrameKind::kLend, next_id(), write_body(body), waiting, "lending blocks");
  try {
    if (answer.kind != FrameKind::kLent) throw Error(ErrorCode::kProtocol, "the peer answered what it was not asked");
    std::vector<Address> addresses = read_addresses(answer.body);
    if (addresses.size() != n) {
      throw Error(ErrorCode::kProtocol, "the peer lent another number of blocks than asked for");
    }
    borrowed_.add(addresses);
    return addresses;
  } catch (const Error& error) {
    close_link(error);  // it says what no session of ours says
    throw;
  } catch (...) {
    on_unwanted(answer);
    throw;
  }
}

void Session::give_back(std::span<const Address> addresses, const Waiting& waiting) {
  borrowed_.begin_write(addresses);  // nobody else writes them, or gives them back
  give_back_marked(addresses, waiting);
}

// They are not borrowed any more before the peer can hear of it: it may lend them again at once, to another thread.
void Session::give_back_marked(std::span<const Address> addresses, const Waiting& waiting) {
  bool sent = false;
  borrowed_.drop_written(addresses);
  try {
    static_cast<void>(call(FrameKind::kReturn, next_id(), write_addresses(addresses), waiting, "taking blocks back",
                           [&] { sent = true; }));
  } catch (...) {
    if (!sent) borrowed_.take_again(addresses);
    throw;
  }
}

}  // namespace kvpool
