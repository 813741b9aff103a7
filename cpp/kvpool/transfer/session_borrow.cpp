// Blocks that this side borrows of the peer.
#include <utility>

#include "kvpool/transfer/session.h"

namespace kvpool {

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

}  // namespace kvpool
