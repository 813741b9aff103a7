// The events that a PromptIndex publishes.
#include <algorithm>
#include <new>
#include <utility>

#include "kvpool/index/prompt_index.h"

namespace kvpool {

std::shared_ptr<EventQueue> PromptIndex::subscribe(std::uint64_t capacity_tokens, bool include_cached) {
  auto queue = events_.subscribe(capacity_tokens);
  try {
    if (include_cached) {
      for_each_node([&](const Node& node) {
        queue->begin_with(make_event(EventKind::kStored, events_.sequence(), &node, 0, node.pages, nullptr));
      });
    }
  } catch (...) {
    events_.unsubscribe(queue);
    throw;
  }
  return queue;
}

// Says that pages [first, first + count) of a node have changed.
std::shared_ptr<Event> PromptIndex::make_event(EventKind kind, std::uint64_t sequence, const Node* node,
                                               std::uint32_t first, std::uint32_t count,
                                               const Address* old_values) const {
  auto event = std::make_shared<Event>();
  event->kind = kind;
  event->sequence = sequence;
  std::size_t above = 0;
  const Node* at = node->parent;
  for (; !at->is_root(); at = at->parent) above += at->pages;
  event->name_space = static_cast<const Tree::Root*>(at)->name;
  event->first_page = static_cast<std::uint32_t>(above + first);
  event->tokens.resize((above + first + count) * tree_.page_tokens());
  Token* end = event->tokens.data() + event->tokens.size();
  const auto prepend = [&](const Node* from, std::size_t pages) {
    const Token* tokens = from->tokens.get();
    end = std::copy_backward(tokens, tokens + pages * tree_.page_tokens(), end);
  };
  prepend(node, first + count);
  for (at = node->parent; !at->is_root(); at = at->parent) prepend(at, at->pages);
  const Address* values = node->payload.values.get() + first;
  event->values.assign(values, values + count);
  if (old_values != nullptr) event->old_values.assign(old_values, old_values + count);
  return event;
}

void PromptIndex::publish(EventKind kind, const Node* node, std::uint32_t first, std::uint32_t count,
                          const Address* old_values) noexcept {
  try {
    events_.publish(make_event(kind, events_.next_sequence(), node, first, count, old_values));
  } catch (const std::bad_alloc&) {
    events_.count_lost();
  }
}

}  // namespace kvpool
