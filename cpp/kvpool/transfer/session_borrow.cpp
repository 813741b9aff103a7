// Blocks that this side borrows of the peer, and those that it lends unasked.
#include <string>
#include <utility>

#include "kvpool/base/failure.h"
#include "kvpool/transfer/session.h"
#include "kvpool/transfer/transfer_id.h"

namespace kvpool {
namespace {

constexpr std::int64_t kRetryAfterUs = 10'000;

}  // namespace

std::vector<Address> Session::borrow(std::size_t n, MediumChoice medium, bool may_evict, const Waiting& waiting) {
  if (n > kAddressesMax) {
    throw Error(ErrorCode::kArgument, std::to_string(n) + " blocks; one request takes " + std::to_string(kAddressesMax),
                {{"requested", static_cast<std::int64_t>(n)}, {"maximum", kAddressesMax}});
  }
  const LendBody body{static_cast<std::uint32_t>(n), medium, may_evict};
  const Message answer = calls_->call(kLendVerb, calls_->next_id(), write_body(body), waiting);
  try {
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
    calls_->post(kReturnVerb, calls_->next_id(), answer.body);
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
  begin_return();
  borrowed_.drop_written(addresses);
  try {
    static_cast<void>(calls_->call(kReturnVerb, calls_->next_id(), write_addresses(addresses), waiting, [&] {
      sent = true;
      end_return();
    }));
  } catch (...) {
    if (!sent) {
      borrowed_.take_again(addresses);
      end_return();
    }
    throw;
  }
}

// A peer that was asked may have accepted what it could not say in time: then it hears that the loans are over. That
// counts for no limit, or the blocks would stay lent.
void Session::lend(std::vector<Address> addresses, const Waiting& waiting) {
  for (Address& address : addresses) {
    if (instance_of(address) == 0) address |= Address{host_.blocks().instance()} << kInstanceShift;
  }
  if (addresses.empty() || addresses.size() > kAddressesMax) {
    throw Error(ErrorCode::kArgument,
                std::to_string(addresses.size()) + " blocks; one call lends 1 to " + std::to_string(kAddressesMax),
                {{"requested", static_cast<std::int64_t>(addresses.size())}, {"maximum", kAddressesMax}});
  }
  if (lost()) throw_lost();
  Bytes message = write_addresses(addresses);
  const std::uint64_t id = calls_->next_id();
  Receiver::QuarantineRoom room = Receiver::quarantine_room(id | kRecallBit, {});
  room.mapped().addresses.reserve(addresses.size());
  receiver_->lend_active(addresses);
  bool sent = false;
  try {
    static_cast<void>(calls_->call(kOfferVerb, id, std::move(message), waiting, [&] { sent = true; }));
  } catch (...) {
    if (!sent) {
      receiver_->withdraw_lent(std::move(room), addresses);
      throw;
    }
    // Without memory they stay lent until the peer is lost, or a recall asks for them.
    static_cast<void>(failure_of(
        [&] { begin_recall(std::move(addresses), host_.now_ns(), [](const RecallResult*, const Error*) {}, true); }));
    throw;
  }
}

// A write of an earlier loan may have to be stopped still: it must not count as one of this loan.
void Session::on_offer(const CallPointer& call, const std::vector<Address>& addresses) {
  check_of_peer(addresses);
  if (borrowed_.any_held(addresses)) {
    return call->refuse(Error(ErrorCode::kBusy, "an earlier loan of one of these blocks is not over here",
                              {{"retry_after_us", kRetryAfterUs}}));
  }
  borrowed_.add(addresses);
  call->answer({});
}

}  // namespace kvpool
