// A prompt index with pages of two tokens, in which tests write a prompt as one number a page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <string>
#include <vector>

#include "kvpool/index/prompt_index.h"

namespace kvpool::testing {

using Values = std::vector<Address>;

// Notes what the index tells its owner.
struct IndexListener final : IndexObserver {
  Values placed_values;
  Values dropped_values;
  std::vector<std::uint64_t> unpinned_stamps;
  void placed(PromptNode& node) noexcept override {
    placed_values.insert(placed_values.end(), node.payload.values.get(), node.payload.values.get() + node.pages);
  }
  void dropped(const Address* values, std::size_t n) noexcept override {
    while (n > 0) dropped_values.push_back(values[--n]);  // the end of a prompt goes first
  }
  void unpinned(PromptNode&, std::uint64_t stamp) noexcept override { unpinned_stamps.push_back(stamp); }
};

// An index with pages of two tokens. A prompt is written as one number a page: 5 stands for the tokens 5, 5.
struct IndexRig {
  IndexListener listener;
  PromptIndex index;
  explicit IndexRig(EvictionPolicy policy = EvictionPolicy::kLru,
                    PromptIndex::Values values = PromptIndex::Values::kOpaque)
      : index(2, policy, values, &listener) {}

  static std::vector<Token> tokens_of(std::initializer_list<Token> pages) {
    std::vector<Token> tokens;
    for (const Token page : pages) tokens.insert(tokens.end(), 2, page);
    return tokens;
  }

  IndexInsertion insert_pinned(std::initializer_list<Token> pages, Values values, Values* canonical = nullptr,
                               const std::string& name = "") {
    const IndexInsertion insertion =
        index.insert(name, tokens_of(pages).data(), pages.size(), values.data(), values.data());
    if (canonical != nullptr) *canonical = values;
    index.audit();
    return insertion;
  }
  // With values 100, 101, ... by default.
  void insert(std::initializer_list<Token> pages, Values values = {}, const std::string& name = "") {
    if (values.empty()) {
      values.resize(pages.size());
      std::iota(values.begin(), values.end(), Address{100});
    }
    index.unpin(insert_pinned(pages, values, nullptr, name).pin);
  }
  IndexHit match_pinned(const std::vector<Token>& tokens, Values* values = nullptr, const std::string& name = "") {
    Values out(tokens.size() / 2);
    const IndexHit hit = index.match(name, tokens.data(), tokens.size(), out.data());
    out.resize(hit.pages);
    if (values != nullptr) *values = out;
    index.audit();
    return hit;
  }
  Values match(std::initializer_list<Token> pages, const std::string& name = "") {
    Values values;
    index.unpin(match_pinned(tokens_of(pages), &values, name).pin);
    return values;
  }
  IndexErasure erase(std::initializer_list<Token> pages, bool descendants = false) {
    const std::vector<Token> tokens = tokens_of(pages);
    const IndexErasure erasure = index.erase("", tokens.data(), tokens.size(), descendants);
    index.audit();
    return erasure;
  }
  Values evict(std::size_t n, ValueClass value_class = ValueClass::kOpaque) {
    listener.dropped_values.clear();
    index.evict(value_class, n);
    index.audit();
    return listener.dropped_values;
  }
  MatchEnd end_of(const std::vector<Token>& tokens, const std::string& name = "") const {
    MatchEnd end{};
    index.peek(name, tokens.data(), tokens.size(), nullptr, &end);
    return end;
  }
};

}  // namespace kvpool::testing
