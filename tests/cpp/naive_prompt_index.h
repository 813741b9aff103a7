// The prompt index in the slow and obvious way: a map from every cached prefix to its last page. What a tree keeps by
// node this keeps by page, so it also says what is exact: which page is the coldest.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kvpool/index/prompt_index.h"

namespace kvpool::testing {

using Tokens = std::vector<Token>;

struct Prefix {
  std::string name_space;
  Tokens tokens;
  auto operator<=>(const Prefix&) const = default;
  bool starts_with(const Prefix& other) const {
    return name_space == other.name_space && tokens.size() >= other.tokens.size() &&
           std::equal(other.tokens.begin(), other.tokens.end(), tokens.begin());
  }
};

struct NaivePage {
  Address value = 0;
  ValueClass value_class = ValueClass::kOpaque;
  std::uint32_t pins = 0;
  std::uint32_t hits = 0;
  bool held = false;
  std::uint64_t rank = 0;  // in the order of eviction; a release ranks the end of a prompt before what precedes it

  bool evictable() const { return pins == 0 && !held; }
};

class NaivePromptIndex {
 public:
  NaivePromptIndex(std::size_t page_tokens, EvictionPolicy policy) : page_tokens_(page_tokens), policy_(policy) {}

  std::map<Prefix, NaivePage> pages;  // by the prefix that ends with the page; sorted, so a prefix stands before all
                                      // that continues it

  Prefix cut(const Prefix& prefix, std::size_t n_pages) const {
    return {prefix.name_space,
            Tokens(prefix.tokens.begin(), prefix.tokens.begin() + static_cast<std::ptrdiff_t>(n_pages * page_tokens_))};
  }
  std::size_t page_count(const Prefix& prefix) const { return prefix.tokens.size() / page_tokens_; }

  std::size_t longest(const Prefix& prompt) const {
    std::size_t n = 0;
    while (n < page_count(prompt) && pages.contains(cut(prompt, n + 1))) ++n;
    return n;
  }

  // Tokens of agreement inside the page after the first n.
  std::size_t partial(const Prefix& prompt, std::size_t n) const {
    const Prefix above = cut(prompt, n);
    std::size_t best = 0;
    for (const auto& [prefix, page] : pages) {
      if (!prefix.starts_with(above) || page_count(prefix) != n + 1) continue;
      std::size_t agreed = 0;
      while (agreed < page_tokens_ && above.tokens.size() + agreed < prompt.tokens.size() &&
             prefix.tokens[above.tokens.size() + agreed] == prompt.tokens[above.tokens.size() + agreed]) {
        ++agreed;
      }
      best = std::max(best, agreed);
    }
    return best;
  }

  MatchEnd end_of(const Prefix& prompt, std::size_t n) const {
    if (prompt.name_space.empty() || has_below({prompt.name_space, {}})) {
      if (n == page_count(prompt)) return MatchEnd::kComplete;
      return has_below(cut(prompt, n)) ? MatchEnd::kDiverges : MatchEnd::kNothingBeyond;
    }
    return MatchEnd::kNoNamespace;
  }

  // visit(prefix, page) for every page of a prompt from its end to its start.
  template <class Visit>
  void from_the_end(const Prefix& prompt, Visit&& visit) {
    for (std::size_t n = page_count(prompt); n > 0; --n) {
      const Prefix prefix = cut(prompt, n);
      visit(prefix, pages.at(prefix));
    }
  }

  void pin(const Prefix& prompt) {
    from_the_end(prompt, [](const Prefix&, NaivePage& page) { ++page.pins; });
  }
  void unpin(const Prefix& prompt) {
    from_the_end(prompt, [&](const Prefix&, NaivePage& page) {
      if (--page.pins > 0) return;
      if (policy_ != EvictionPolicy::kFifo) page.rank = ++clock_;
    });
  }

  void match(const Prefix& found) {
    from_the_end(found, [](const Prefix&, NaivePage& page) { ++page.hits; });
    pin(found);
  }

  void insert(const Prefix& prompt, const std::vector<Address>& values, const std::vector<ValueClass>& classes) {
    for (std::size_t n = longest(prompt) + 1; n <= page_count(prompt); ++n) {
      pages[cut(prompt, n)] = NaivePage{.value = values[n - 1], .value_class = classes[n - 1]};
    }
    pin(prompt);
    if (policy_ == EvictionPolicy::kFifo) {
      from_the_end(prompt, [&](const Prefix&, NaivePage& page) { page.rank = ++clock_; });
    }
  }

  void undo(const Prefix& prompt, std::size_t pages_present) {
    unpin(prompt);
    for (std::size_t n = page_count(prompt); n > pages_present; --n) pages.erase(cut(prompt, n));
  }

  // The page that goes first.
  const Prefix* coldest(ValueClass value_class) const {
    const auto key = [&](const NaivePage& page) {
      return std::pair(policy_ == EvictionPolicy::kLfu ? page.hits : 0, page.rank);
    };
    const Prefix* best = nullptr;
    for (const auto& [prefix, page] : pages) {
      if (page.value_class != value_class || !page.evictable()) continue;
      if (best == nullptr || key(page) < key(pages.at(*best))) best = &prefix;
    }
    return best;
  }

  bool has_below(const Prefix& prefix) const {
    const auto next = pages.upper_bound(prefix);
    return next != pages.end() && next->first.starts_with(prefix);
  }

  struct Erasure {
    std::set<Prefix> pages;  // to go
    std::size_t pinned = 0;  // of these
  };
  Erasure erasure(const Prefix& prompt, bool descendants) const {
    Erasure erasure;
    std::size_t n = longest(prompt);
    const bool whole = n == prompt.tokens.size() / page_tokens_;
    if (n == 0 || (!(descendants && whole) && has_below(cut(prompt, n)))) return erasure;
    while (n > 1 && children(cut(prompt, n - 1)) == 1) --n;
    const Prefix top = cut(prompt, n);
    for (const auto& [prefix, page] : pages) {
      if (!prefix.starts_with(top)) continue;
      erasure.pages.insert(prefix);
      if (page.pins > 0) ++erasure.pinned;
    }
    return erasure;
  }

  // Pages that were forgotten, by their values, as long as they are pinned.
  std::map<Address, NaivePage> forgotten;

  // Forgets a page and all that continues it. Returns the values of those that are not pinned.
  std::set<Address> forget(const Prefix& top) {
    std::set<Address> gone;
    std::erase_if(pages, [&](const auto& entry) {
      if (!entry.first.starts_with(top)) return false;
      if (entry.second.pins > 0) {
        forgotten[entry.second.value] = entry.second;
      } else {
        gone.insert(entry.second.value);
      }
      return true;
    });
    return gone;
  }
  // Returns whether that was the last pin.
  bool unpin_forgotten(Address value) {
    if (--forgotten.at(value).pins > 0) return false;
    forgotten.erase(value);
    return true;
  }
  std::size_t count_forgotten(ValueClass value_class) const {
    return static_cast<std::size_t>(std::count_if(forgotten.begin(), forgotten.end(), [&](const auto& entry) {
      return entry.second.value_class == value_class;
    }));
  }

  void hold(const Prefix& prefix) { pages.at(prefix).held = true; }
  // REQUIRES: called for the last page of a node first.
  void release_hold(const Prefix& prefix) {
    NaivePage& page = pages.at(prefix);
    page.held = false;
  }
  // REQUIRES: called for the last page of a node first.
  void redirect(const Prefix& prefix, Address value, ValueClass value_class) {
    NaivePage& page = pages.at(prefix);
    page.value = value;
    page.value_class = value_class;
  }

  std::size_t count(ValueClass value_class, bool evictable_only) const {
    return static_cast<std::size_t>(std::count_if(pages.begin(), pages.end(), [&](const auto& entry) {
      return entry.second.value_class == value_class && (!evictable_only || entry.second.evictable());
    }));
  }
  std::size_t namespaces() const {
    std::set<std::string> names{""};
    for (const auto& [prefix, page] : pages) names.insert(prefix.name_space);
    return names.size();
  }

 private:
  std::size_t children(const Prefix& prefix) const {
    return static_cast<std::size_t>(std::count_if(pages.begin(), pages.end(), [&](const auto& entry) {
      return entry.first.starts_with(prefix) && page_count(entry.first) == page_count(prefix) + 1;
    }));
  }

  std::size_t page_tokens_;
  EvictionPolicy policy_;
  std::uint64_t clock_ = 0;
};

// The prefix that ends with page `last` (counted in the node) of a node.
inline Prefix prefix_of(const PromptNode& node, std::uint32_t last, std::size_t page_tokens) {
  Prefix prefix;
  const auto prepend = [&](const PromptNode& from, std::size_t n) {
    prefix.tokens.insert(prefix.tokens.begin(), from.tokens.get(), from.tokens.get() + n * page_tokens);
  };
  prepend(node, last + 1);
  const PromptNode* above = node.parent;
  for (; !above->is_root(); above = above->parent) prepend(*above, above->pages);
  prefix.name_space = static_cast<const RadixTree<PromptPayload>::Root*>(above)->name;
  return prefix;
}

// Everything that a caller could find out about each page of an index, except for its place in the order.
using PageView = std::tuple<Address, ValueClass, std::uint32_t, std::uint32_t, bool>;  // pins, hits, held
using IndexView = std::map<Prefix, PageView>;

inline IndexView view_of(const PromptIndex& index) {
  IndexView view;
  index.for_each_node([&](const PromptNode& node) {
    const PromptPayload& payload = node.payload;
    for (std::uint32_t i = 0; i < node.pages; ++i) {
      view[prefix_of(node, i, index.page_tokens())] =
          PageView{payload.values[i], payload.value_class, payload.pins, payload.hits, payload.held};
    }
  });
  return view;
}

inline IndexView view_of(const NaivePromptIndex& model) {
  IndexView view;
  for (const auto& [prefix, page] : model.pages) {
    view[prefix] = PageView{page.value, page.value_class, page.pins, page.hits, page.held};
  }
  return view;
}

// A router's copy, kept by events alone.
class EventReplica {
 public:
  std::map<Prefix, Address> pages;

  // Returns what is wrong with the event, or an empty string.
  std::string apply(const Event& event, std::size_t page_tokens) {
    const std::size_t end = event.tokens.size() / page_tokens;
    if (event.tokens.size() % page_tokens != 0) return "half a page";
    if (event.first_page >= end || event.values.size() != end - event.first_page) return "a wrong number of values";
    if (event.old_values.size() != (event.kind == EventKind::kMoved ? event.values.size() : 0)) return "old values";
    const auto prefix = [&](std::size_t n) {
      const auto last = event.tokens.begin() + static_cast<std::ptrdiff_t>(n * page_tokens);
      return Prefix{event.name_space, Tokens(event.tokens.begin(), last)};
    };
    if (event.first_page > 0 && !pages.contains(prefix(event.first_page))) return "pages that hang in the air";
    for (std::size_t n = event.first_page + 1; n <= end; ++n) {
      const std::size_t i = n - 1 - event.first_page;
      const auto at = pages.find(prefix(n));
      switch (event.kind) {
        case EventKind::kStored:
          if (at != pages.end()) return "stored twice";
          pages[prefix(n)] = event.values[i];
          break;
        case EventKind::kMoved:
          if (at == pages.end() || at->second != event.old_values[i]) return "moved from elsewhere";
          at->second = event.values[i];
          break;
        case EventKind::kRemoved:
          if (at == pages.end() || at->second != event.values[i]) return "removed, and was not there";
          break;
      }
    }
    if (event.kind != EventKind::kRemoved) return "";
    for (std::size_t n = end; n > event.first_page; --n) {
      const auto next = std::next(pages.find(prefix(n)));
      if (next != pages.end() && next->first.starts_with(prefix(n))) return "removed from the middle";
      pages.erase(prefix(n));
    }
    return "";
  }
};

}  // namespace kvpool::testing
