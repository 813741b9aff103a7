#include "kvpool/index/shared_index.h"

#include <algorithm>
#include <string>

#include "kvpool/base/error.h"

namespace kvpool {

IndexHit SharedIndex::match(std::string_view name_space, const Token* tokens, std::size_t n_tokens, Address* out) {
  const std::lock_guard lock(mutex_);
  return index_.match(name_space, tokens, n_tokens, out);
}

IndexHit SharedIndex::peek(std::string_view name_space, const Token* tokens, std::size_t n_tokens, Address* out,
                           MatchEnd* end, std::vector<std::pair<std::string, std::size_t>>* elsewhere) {
  const std::lock_guard lock(mutex_);
  const IndexHit hit = index_.peek(name_space, tokens, n_tokens, out, end);
  if (elsewhere != nullptr) {
    index_.for_each_namespace(tokens, n_tokens, [&](const std::string& name, std::size_t pages) {
      if (name != name_space && pages > hit.pages) elsewhere->emplace_back(name, pages);
    });
  }
  return hit;
}

std::vector<IndexInsertion> SharedIndex::insert_all(std::string_view name_space, const std::vector<Item>& items) {
  std::vector<IndexInsertion> done;
  done.reserve(items.size());
  const std::lock_guard lock(mutex_);
  try {
    for (const Item& item : items) {
      done.push_back(index_.insert(name_space, item.tokens, item.pages, item.values, item.canonical));
    }
  } catch (...) {
    for (std::size_t i = done.size(); i-- > 0;) index_.undo(done[i]);
    throw;
  }
  return done;
}

std::vector<Address> SharedIndex::erase(std::string_view name_space, const Token* tokens, std::size_t n_tokens,
                                        bool descendants) {
  const std::lock_guard lock(mutex_);
  gone_.clear();
  gone_.reserve(index_.pages(ValueClass::kOpaque));
  const IndexErasure erasure = index_.erase(name_space, tokens, n_tokens, descendants);
  if (erasure.pages_pinned > 0) {
    throw Error(ErrorCode::kState,
                std::to_string(erasure.pages_pinned) + " of the blocks to delete are pinned: nothing was deleted",
                {{"pinned", static_cast<std::int64_t>(erasure.pages_pinned)}});
  }
  return std::exchange(gone_, {});
}

std::vector<Address> SharedIndex::evict(std::size_t n) {
  const std::lock_guard lock(mutex_);
  gone_.clear();
  gone_.reserve(std::min(n, index_.evictable(ValueClass::kOpaque)));
  index_.evict(ValueClass::kOpaque, n);
  return std::exchange(gone_, {});
}

void SharedIndex::unpin(const IndexPin* pins, std::size_t n) noexcept {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < n; ++i) index_.unpin(pins[i]);
}

std::shared_ptr<EventQueue> SharedIndex::subscribe(std::uint64_t capacity_tokens, bool include_cached) {
  const std::lock_guard lock(mutex_);
  return index_.subscribe(capacity_tokens, include_cached);
}

EventQueue::Batch SharedIndex::drain(EventQueue& queue) {
  const std::lock_guard lock(mutex_);
  return queue.drain();
}

void SharedIndex::unsubscribe(const std::shared_ptr<EventQueue>& queue) noexcept {
  const std::lock_guard lock(mutex_);
  index_.events().unsubscribe(queue);
}

SharedIndexStats SharedIndex::stats() {
  const std::lock_guard lock(mutex_);
  return {index_.node_count(), index_.pages(ValueClass::kOpaque), index_.evictable(ValueClass::kOpaque), index_.bytes(),
          index_.namespace_count()};
}

void SharedIndex::audit() {
  const std::lock_guard lock(mutex_);
  index_.audit();
}

}  // namespace kvpool
