// A prompt index used alone: opaque values, its own lock, pins that can outlive every other reference.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvpool/index/pins.h"
#include "kvpool/index/prompt_index.h"

namespace kvpool {

struct SharedIndexStats {
  std::size_t nodes;
  std::size_t pages;
  std::size_t evictable;
  std::size_t bytes;
  std::size_t namespaces;
};

// Thread-safe. Errors: std::bad_alloc changes nothing; erase() throws Error kState when a page to remove is pinned.
class SharedIndex final : public PinOwner, private IndexObserver {
 public:
  SharedIndex(std::uint32_t page_tokens, EvictionPolicy policy)
      : index_(page_tokens, policy, PromptIndex::Values::kOpaque, this) {}

  std::uint32_t page_tokens() const noexcept { return index_.page_tokens(); }

  IndexHit match(std::string_view name_space, const Token* tokens, std::size_t n_tokens, Address* out);
  // `out` may be null, and so may `elsewhere`, which receives the other namespaces that hold more, and how many pages.
  IndexHit peek(std::string_view name_space, const Token* tokens, std::size_t n_tokens, Address* out, MatchEnd* end,
                std::vector<std::pair<std::string, std::size_t>>* elsewhere);
  // One insertion of a batch.
  struct Item {
    const Token* tokens;
    std::size_t pages;
    const Address* values;
    Address* canonical;
  };
  // All or nothing.
  std::vector<IndexInsertion> insert_all(std::string_view name_space, const std::vector<Item>& items);
  // Returns the removed values.
  std::vector<Address> erase(std::string_view name_space, const Token* tokens, std::size_t n_tokens, bool descendants);
  std::vector<Address> evict(std::size_t n);
  void unpin(const IndexPin* pins, std::size_t n) noexcept override;

  std::shared_ptr<EventQueue> subscribe(std::uint64_t capacity_tokens, bool include_cached);
  EventQueue::Batch drain(EventQueue& queue);
  void unsubscribe(const std::shared_ptr<EventQueue>& queue) noexcept;

  SharedIndexStats stats();
  void audit();

 private:
  void placed(PromptNode&) noexcept override {}
  void dropped(const Address* values, std::size_t n) noexcept override {
    gone_.insert(gone_.end(), values, values + n);  // within the room that was reserved
  }
  void unpinned(PromptNode&, std::uint64_t) noexcept override {}

  std::mutex mutex_;
  std::vector<Address> gone_;  // while erase() or evict() runs
  PromptIndex index_;
};

}  // namespace kvpool
