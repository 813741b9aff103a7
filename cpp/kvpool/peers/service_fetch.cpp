// Fetches of blocks by their addresses: which of the two sides copies.
#include <algorithm>
#include <utility>

#include "kvpool/base/failure.h"
#include "kvpool/peers/read_fetch.h"
#include "kvpool/peers/service.h"
#include "kvpool/pool/pool.h"
#include "kvpool/sequences/sequence_blocks.h"

namespace kvpool {
namespace {

bool have_all(const MediaSpans& spans, std::uint32_t instance, std::span<const Address> blocks) {
  return !blocks.empty() && blocks.size() <= kAddressesMax && std::ranges::all_of(blocks, [&](Address address) {
    return is_medium(medium_bits_of(address)) && instance_of(address) == instance &&
           block_of(address) < spans[medium_of(address)].blocks;
  });
}

}  // namespace

std::shared_ptr<Transfer> Service::fetch(FetchRequest&& request, const GivenUp& given_up) {
  if (request.peer.empty()) request.peer = caller_->owner_of(request.from);
  const std::shared_ptr<Session> session = caller_->reach(request.peer, request.deadline_ns, given_up);
  const bool allocated = request.to.empty() && !request.from.empty();
  if (allocated) {
    request.to.resize(request.from.size());
    if (!pool_.try_alloc(request.to.size(), request.medium, request.to.data())) {
      if (!request.may_evict) pool_.throw_out_of_blocks(request.to.size(), request.medium);
      pool_.alloc_evicting(request.to.size(), request.medium, request.to.data());
    }
  }
  try {
    if (auto reader = reader_for(*session, request)) {
      auto fetch = std::make_shared<ReadFetch>(session, incarnation_, request, allocated, std::move(reader));
      fetch->start();
      return fetch;
    }
    return session->fetch(request, /*frees_on_failure=*/allocated);
  } catch (...) {
    // Unless the peer may write them already: then the session frees them.
    if (allocated) static_cast<void>(failure_of([&] { pool_.free(request.to.data(), request.to.size()); }));
    throw;
  }
}

// The owner writes into destinations that it can map: it needs no answer before it begins. Into others it would have to
// write through the link, or with access to this whole process. Null: the owner writes, and finds what is wrong.
std::unique_ptr<Route> Service::reader_for(const Session& session, const FetchRequest& request) {
  const auto here = [&](Address address) {
    return is_medium(medium_bits_of(address)) && !blocks_.in_file(medium_of(address)) &&
           !blocks_.on_gpu(medium_of(address));
  };
  if (request.checksum || !request.route.empty()) return nullptr;
  if (session.lost() || session.by_ranks() || request.to.size() != request.from.size()) return nullptr;
  if (!std::ranges::all_of(request.to, here)) return nullptr;
  const auto mapped = session.readable();
  if (mapped == nullptr || !have_all(*mapped, session.peer().instance, request.from)) return nullptr;
  if (failure_of([&] { SequenceBlocks::check_pool(pool_); })) return nullptr;  // its blocks cannot be viewed
  return routes_.reader(mapped);
}

}  // namespace kvpool
