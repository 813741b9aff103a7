// Completing a transfer: its blocks become the application's, or the index's.
#include <limits>
#include <string>
#include <utility>

#include "kvpool/base/check.h"
#include "kvpool/base/failure.h"
#include "kvpool/transfer/receiver.h"

namespace kvpool {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

std::string number_of(std::uint64_t id) { return "transfer " + std::to_string(id); }

}  // namespace

void Receiver::on_complete(const CallPointer& call, CompleteBody&& body) {
  const std::uint64_t id = call->id();
  std::shared_ptr<Delivery> delivery;
  const bool named = !body.named.empty();
  const auto refused = failure_of([&] {
    check_id(id);
    delivery = std::make_shared<Delivery>();
    delivery->peer = peer_;
    if (body.has_private) delivery->private_bytes = std::move(body.private_bytes);
    if (named) return complete_named(id, body, *delivery);
    complete_reserved(id, body, *delivery);
  });
  if (refused) {
    // Whatever is wrong with it, its sender writes no more.
    if (named) {
      forget_content(id);
    } else {
      forfeit(id);
    }
    return call->refuse(*refused);
  }
  if (body.has_checksum) return verify(call, body.checksum, delivery);
  deliver(*call, *delivery);
}

void Receiver::forget_content(std::uint64_t id) noexcept {
  const std::lock_guard lock(mutex_);
  arrived_.erase(id);
}

// Of content that this process has placed.
void Receiver::check_content(const ArrivedContent& content, std::size_t blocks, std::uint64_t bytes_sent) const {
  const std::uint64_t needed = blocks * host_.blocks().layout().block_bytes();
  if (content.placed_bytes != bytes_sent || content.placed_bytes != needed) {
    throw Error(
        ErrorCode::kProtocol,
        std::to_string(bytes_sent) + " bytes were sent, " + std::to_string(content.placed_bytes) +
            " have arrived, and the blocks take " + std::to_string(needed),
        {{"needed", static_cast<std::int64_t>(needed)}, {"given", static_cast<std::int64_t>(content.placed_bytes)}});
  }
}

void Receiver::complete_reserved(std::uint64_t id, const CompleteBody& body, Delivery& delivery) {
  const std::lock_guard lock(mutex_);
  if (quarantined_.contains(id)) {
    throw Error(ErrorCode::kDeadline, number_of(id) + " came after its reservation had ended");
  }
  const auto entry = incoming_.find(id);
  if (entry == incoming_.end() || entry->second.phase == Phase::kReserving || entry->second.ended) {
    throw Error(ErrorCode::kDeadline, number_of(id) + " has no reservation here (any more)");
  }
  if (entry->second.phase == Phase::kDelivering) {
    throw Error(ErrorCode::kProtocol, number_of(id) + " was completed before");
  }
  const Incoming& incoming = entry->second;
  if (incoming.content.damaged) {
    throw Error(ErrorCode::kProtocol, "content arrived damaged, or for blocks that were not reserved");
  }
  if (incoming.content.placing > 0) {
    throw Error(ErrorCode::kProtocol, number_of(id) + " is completed while its content is arriving");
  }
  if (!incoming.one_sided) check_content(incoming.content, incoming.reservation.addresses.size(), body.bytes);
  if (body.has_checksum && delivery.private_bytes) entry->second.told = hold_request(delivery.private_bytes->size());
  entry->second.phase = Phase::kDelivering;
  delivery.spec = std::move(*entry->second.spec);
  delivery.reservation = std::move(entry->second.reservation);
}

// Destinations that were lent before. They stay lent, unless they go to the index.
void Receiver::complete_named(std::uint64_t id, CompleteBody& body, Delivery& delivery) {
  if (body.insert && body.tokens.size() != body.named.size() * host_.blocks().layout().block_tokens) {
    throw Error(ErrorCode::kArgument, "tokens and blocks of the insertion do not fit");
  }
  Incoming incoming;
  incoming.phase = Phase::kDelivering;
  incoming.deadline_ns = kNever;
  if (body.insert) incoming.named = body.named;
  if (body.has_checksum) {  // only then it waits here
    incoming.prompt =
        hold_request((delivery.private_bytes ? delivery.private_bytes->size() : 0) +
                     body.named.size() * sizeof(Address) + body.name_space.size() + body.tokens.size() * sizeof(Token));
  }
  const std::lock_guard lock(mutex_);
  const ArrivedMap::node_type arrived = arrived_.extract(id);
  check_quota(0);
  if (quarantined_.contains(id)) throw Error(ErrorCode::kProtocol, number_of(id) + " has a reservation");
  // A pass of whatever transfer that was announced behind this call is still written when the call is handled.
  const bool placing = (arrived && arrived.mapped().placing > 0) || placements_.is_placed_now(body.named);
  if (placing || (arrived && arrived.mapped().damaged)) {
    mark_leaving(body.named);  // throws kNotOwner: the content was dropped because they were recalled, say
    mark_held(body.named);
    throw Error(ErrorCode::kProtocol, "content arrived damaged, for blocks that were not lent, or has not arrived");
  }
  // Of content that did not come by this process only its sender knows how much there was.
  if (arrived) check_content(arrived.mapped(), body.named.size(), body.bytes);
  const auto [entry, is_new] = incoming_.try_emplace(id, std::move(incoming));
  if (!is_new) throw Error(ErrorCode::kProtocol, number_of(id) + " has a reservation");
  try {
    mark_leaving(body.named);
  } catch (...) {
    incoming_.erase(entry);
    throw;
  }
  if (!body.insert) mark_held(body.named);
  delivery.named = true;
  delivery.spec = {body.named.size(), kMixed, body.insert, std::move(body.name_space), std::move(body.tokens)};
  delivery.reservation.addresses = std::move(body.named);
}

void Receiver::verify(const CallPointer& call, std::uint32_t checksum, const std::shared_ptr<Delivery>& delivery) {
  const auto work = [self = shared_from_this(), this, call, checksum, delivery] {
    const std::vector<Address>& addresses = delivery->reservation.addresses;
    std::uint32_t found = 0;
    const auto unread = failure_of([&] { found = host_.blocks().checksum(addresses); });
    if (!unread && found == checksum) return deliver(*call, *delivery);
    finish_delivery(call->id(), *delivery, addresses.size(), /*delivered=*/false);
    if (unread) return call->refuse(*unread);
    call->refuse(*failure_of([&] {
      throw Error(ErrorCode::kProtocol, "the checksum of " + number_of(call->id()) + " is wrong: content was damaged",
                  {{"needed", checksum}, {"given", found}});
    }));
  };
  const void* const key = &incoming_;  // not the receiver's: who asks for blocks does not wait for a checksum
  // Without memory to hand it on, it is done here.
  if (failure_of([&] { host_.run(key, work); })) work();
}

void Receiver::deliver(ServedCall& call, Delivery& delivery) {
  const std::size_t blocks = delivery.reservation.addresses.size();
  Delivered delivered;
  const auto error = failure_of([&] { delivered = host_.blocks().deliver(std::move(delivery)); });
  finish_delivery(call.id(), delivery, blocks, !error);
  if (error) return call.refuse(*error);
  note_received(blocks * host_.blocks().layout().block_bytes());
  answer(call, delivered.cached);
  if (delivered.news != nullptr) host_.blocks().publish(std::move(delivered.news));
}

// What was not delivered is released, or lent as it was before; unless its borrower has gone meanwhile.
void Receiver::finish_delivery(std::uint64_t id, const Delivery& delivery, std::size_t blocks, bool delivered) {
  const std::lock_guard lock(mutex_);
  const auto entry = incoming_.find(id);
  KVPOOL_CHECK(entry != incoming_.end() && entry->second.phase == Phase::kDelivering);
  const std::vector<Address> named = std::move(entry->second.named);
  incoming_.erase(entry);
  if (!delivery.named) {
    promised_ -= static_cast<std::uint32_t>(blocks);
    if (!delivered) host_.blocks().release(delivery.reservation.addresses);
    return;
  }
  for (const Address address : named) {
    const auto lent = lent_.find(address);
    if (!delivered && !lost_ && lent->second == Lent::kLeaving) {
      lent->second = Lent::kHeld;
      continue;
    }
    if (!delivered) host_.blocks().release({&address, 1});  // it has said that it writes no more
    lent_.erase(lent);
    --promised_;
  }
}

}  // namespace kvpool
