// All that a caller can find out about each page of a router's tree.
#pragma once

#include <cstdint>
#include <map>

#include "kvpool/index/instance_index.h"
#include "naive_prompt_index.h"

namespace kvpool::testing {

// For each prefix, when each holder last used it.
using InstanceView = std::map<Prefix, std::map<std::uint32_t, std::uint64_t>>;

inline InstanceView view_of(const InstanceIndex& index) {
  InstanceView view;
  const std::size_t page_tokens = index.page_tokens();
  index.for_each_node([&](const InstanceNode& node) {
    Prefix above;
    const InstanceNode* at = node.parent;
    for (; !at->is_root(); at = at->parent) {
      above.tokens.insert(above.tokens.begin(), at->tokens.get(), at->tokens.get() + at->pages * page_tokens);
    }
    above.name_space = static_cast<const RadixTree<InstancePayload>::Root*>(at)->name;
    for (std::uint32_t i = 0; i < node.pages; ++i) {
      const Token* page = node.tokens.get() + i * page_tokens;
      above.tokens.insert(above.tokens.end(), page, page + page_tokens);
      for (const auto& holder : node.payload.holders) view[above][holder.instance] = node.payload.last_use(holder);
    }
  });
  return view;
}

}  // namespace kvpool::testing
