// Checks the invariants of a PromptIndex.
#include <array>
#include <string>

#include "kvpool/base/error.h"
#include "kvpool/index/prompt_index.h"

namespace kvpool {

void PromptIndex::audit() const {
  const auto fail = [](const std::string& what) { throw Error(ErrorCode::kAudit, "prompt index: " + what); };
  if (const std::string fault = tree_.audit(); !fault.empty()) fail(fault);
  std::array<std::size_t, kValueClassCount> pages{};
  std::array<std::size_t, kValueClassCount> evictable{};
  std::array<std::size_t, kValueClassCount> ordered{};
  std::array<std::size_t, kValueClassCount> held{};
  for_each_node([&](const Node& node) {
    const PromptPayload& payload = node.payload;
    const auto slot = static_cast<std::size_t>(payload.value_class);
    pages[slot] += node.pages;
    if (payload.held && payload.pins == 0) held[slot] += node.pages;
    if (payload.ordered) {
      evictable[slot] += node.pages;
      ++ordered[slot];
    }
    if (payload.ordered != (payload.pins == 0 && !payload.held)) fail("a node is wrongly in or out of the order (P3)");
    if (!node.parent->is_root() && node.parent->payload.pins < payload.pins) fail("pins do not cover a prefix (P1)");
    for (std::uint32_t i = 0; i < node.pages; ++i) {
      if (class_of(payload.values[i]) != payload.value_class) fail("a node with values of two classes (P4)");
    }
  });
  for (std::size_t slot = 0; slot < kValueClassCount; ++slot) {
    if (pages[slot] != pages_[slot] || evictable[slot] != evictable_[slot] || held[slot] != held_[slot])
      fail("a wrong count of pages");
    if (order_->count_checked(static_cast<ValueClass>(slot)) != ordered[slot]) fail("a wrong count of ordered nodes");
  }
  audit_forgotten();
}

void PromptIndex::audit_forgotten() const {
  const auto fail = [](const std::string& what) { throw Error(ErrorCode::kAudit, "prompt index: " + what); };
  std::array<std::size_t, kValueClassCount> pages{};
  for_each_forgotten([&](const Node& node) {
    const PromptPayload& payload = node.payload;
    pages[static_cast<std::size_t>(payload.value_class)] += node.pages;
    if (!payload.forgotten || payload.ordered || payload.held || node.children != nullptr) {
      fail("a forgotten node is in use (P6)");
    }
    if (payload.pins == 0) fail("a forgotten node that nobody pins (P6)");
    if (!node.parent->is_root() && node.parent->payload.pins < payload.pins) fail("pins do not cover a prefix (P1)");
    for (std::uint32_t i = 0; i < node.pages; ++i) {
      if (class_of(payload.values[i]) != payload.value_class) fail("a node with values of two classes (P4)");
    }
  });
  if (pages != forgotten_) fail("a wrong count of forgotten pages (P6)");
}

}  // namespace kvpool
