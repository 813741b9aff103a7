// The pool's verbs on cached prompts.
#include "kvpool/base/error.h"
#include "kvpool/blocks/cache_blocks.h"
#include "kvpool/pool/cache_copies.h"
#include "kvpool/pool/pool.h"
#include "kvpool/pool/pool_allocator.h"
#include "kvpool/pool/prompt_cache.h"
#include "kvpool/pool/tier_moves.h"

namespace kvpool {

IndexHit Pool::match(std::string_view name_space, const Token* tokens, std::size_t n_tokens, Address* out) {
  guard();
  const SpaceLock lock = blocks_->lock();
  const IndexHit hit = cache_->match(name_space, tokens, n_tokens, out);
  cache_->audit_if_asked();
  return hit;
}

std::vector<InsertOutcome> Pool::insert(std::string_view name_space, std::span<const InsertItem> items,
                                        bool free_duplicates) {
  guard();
  const SpaceLock lock = blocks_->lock();
  std::vector<InsertOutcome> outcomes = cache_->insert(name_space, items, free_duplicates);
  cache_->audit_if_asked();
  return outcomes;
}

InsertOutcome Pool::insert_unfilled(std::string_view name_space, const InsertItem& item, bool free_duplicates) {
  guard();
  const SpaceLock lock = blocks_->lock();
  InsertOutcome outcome = cache_->insert_unfilled(name_space, item, free_duplicates);
  cache_->audit_if_asked();
  return outcome;
}

void Pool::filled(std::span<const Address> addresses) {
  guard();
  const SpaceLock lock = blocks_->lock();
  cache_->filled(addresses);
  cache_->audit_if_asked();
}

std::size_t Pool::forget(std::span<const Address> addresses) {
  guard();
  const auto reclaim = moves_->reclaiming();
  const SpaceLock lock = blocks_->lock();
  guard();
  const std::size_t forgotten = cache_->forget(addresses);
  cache_->audit_if_asked();
  return forgotten;
}

std::size_t Pool::erase(std::string_view name_space, const Token* tokens, std::size_t n_tokens, bool descendants) {
  guard();
  const auto reclaim = moves_->reclaiming();
  const SpaceLock lock = blocks_->lock();
  guard();
  const std::size_t erased = cache_->erase(name_space, tokens, n_tokens, descendants);
  cache_->audit_if_asked();
  return erased;
}

std::size_t Pool::evict(std::size_t n, MediumChoice medium) {
  guard();
  check_has(medium);
  return moves_->evict(n, medium);
}

MatchExplanation Pool::explain(std::string_view name_space, const Token* tokens, std::size_t n_tokens) {
  guard();
  MatchExplanation explanation;
  explanation.requested_tokens = n_tokens;
  explanation.addresses.resize(n_tokens / layout().block_tokens);
  const SpaceLock lock = blocks_->lock();
  cache_->explain(name_space, tokens, n_tokens, explanation);
  return explanation;
}

void Pool::unpin(const IndexPin* pins, std::size_t n) noexcept {
  if (guard_.in_child()) return;
  const SpaceLock lock = blocks_->lock();
  cache_->unpin(pins, n);
}

std::shared_ptr<EventQueue> Pool::subscribe(std::uint64_t capacity_tokens, bool include_cached) {
  guard();
  const SpaceLock lock = blocks_->lock();
  return cache_->subscribe(capacity_tokens, include_cached);
}

EventQueue::Batch Pool::drain(EventQueue& queue) {
  guard();
  const SpaceLock lock = blocks_->lock();
  return queue.drain();
}

void Pool::unsubscribe(const std::shared_ptr<EventQueue>& queue) noexcept {
  if (guard_.in_child()) return;
  const SpaceLock lock = blocks_->lock();
  cache_->events().unsubscribe(queue);
}

// --- moves between the tiers ---

std::vector<Address> Pool::swap_out(std::size_t n, const CallerStream& after) {
  guard();
  return moves_->swap_out(n, after);
}

std::size_t Pool::suspend(bool keep, const Waiting& waiting, const CallerStream& after) {
  guard();
  return moves_->suspend(keep, waiting, after);
}

void Pool::resume() {
  guard();
  const SpaceLock lock = blocks_->lock();
  if (!blocks_->hbm_suspended()) throw Error(ErrorCode::kState, "HBM of this pool is not suspended");
  blocks_->resume_hbm();
  cache_->audit_if_asked();
}

bool Pool::suspended() {
  guard();
  const SpaceLock lock = blocks_->lock();
  return blocks_->hbm_suspended();
}

std::vector<IndexPin> Pool::swap_in(std::span<const Address> addresses, std::span<const Address> into, Address* out,
                                    const CallerStream& after) {
  guard();
  if (reaches_disk(addresses)) [[unlikely]] {
    return swap_in_from_disk(addresses, into, out, after);
  }
  return moves_->swap_in(addresses, into, out, after);
}

std::size_t Pool::save(std::string_view name_space, std::span<const Token> tokens, std::size_t first,
                       std::span<const Address> addresses, const CallerStream& after) {
  guard();
  return copies_->save(name_space, tokens, first, addresses, after);
}

void Pool::copy(TierWay way, std::span<const Address> addresses, std::span<const Address> into,
                const CallerStream& after) {
  guard();
  copies_->copy(way, addresses, into, after);
}

StartedSave Pool::begin_save(std::string_view name_space, std::span<const Token> tokens, std::size_t first,
                             std::span<const Address> addresses, const CallerStream& after) {
  guard();
  return copies_->begin_save(name_space, tokens, first, addresses, after);
}

std::shared_ptr<Swap> Pool::begin_copy(TierWay way, std::span<const Address> addresses, std::span<const Address> into,
                                       const CallerStream& after) {
  guard();
  return copies_->begin_copy(way, addresses, into, after);
}

std::shared_ptr<Swap> Pool::begin_swap_out(std::size_t n, const CallerStream& after) {
  guard();
  return moves_->begin_swap_out(n, after);
}

std::shared_ptr<Swap> Pool::begin_swap_in(std::span<const Address> addresses, std::span<const Address> into,
                                          const CallerStream& after) {
  guard();
  if (into.empty() && reaches_disk(addresses)) [[unlikely]] {
    return begin_from_disk(addresses, after, /*to_hbm=*/true);
  }
  return moves_->begin_swap_in(addresses, into, after);
}

}  // namespace kvpool
