// match() and match_batch() of what has a prompt index: the pool, and the index by itself.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

#include "arguments.h"
#include "handles.h"
#include "kvpool/index/shared_index.h"
#include "kvpool/pool/pool.h"

namespace kvpool::bindings {

inline std::size_t block_tokens_of(const Pool& pool) { return pool.layout().block_tokens; }
inline std::size_t block_tokens_of(const SharedIndex& index) { return index.page_tokens(); }

template <class Owner>
Match match_tokens(const std::shared_ptr<Owner>& owner, const Vector<Token>& tokens, std::string_view name) {
  const std::size_t page = block_tokens_of(*owner);
  thread_local std::vector<Address> room;  // nobody else has the GIL until what is in it has been copied
  if (room.size() < tokens.size() / page) room.resize(tokens.size() / page);
  const IndexHit hit = owner->match(name, tokens.data(), tokens.size(), room.data());
  Match result;
  result.pins = Pins(owner, hit.pin);
  result.tokens = hit.pages * page;
  result.partial_tokens = hit.partial_tokens;
  result.addrs = to_array(room.data(), hit.pages);
  return result;
}

template <class Owner>
Match match(const std::shared_ptr<Owner>& owner, py::handle tokens_argument, py::handle name) {
  const Vector<Token> tokens = tokens_from(tokens_argument);
  return match_tokens(owner, tokens, name_from(name));
}

template <class Owner>
std::vector<Match> match_batch(const std::shared_ptr<Owner>& owner, const py::sequence& prompts, py::handle name) {
  std::vector<Match> matches;
  matches.reserve(prompts.size());
  // All prompts are read before the first is matched, and kept: a sequence may make each item when it is asked for.
  std::vector<py::object> kept;
  std::vector<Vector<Token>> tokens;
  kept.reserve(prompts.size());
  tokens.reserve(prompts.size());
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    tokens.push_back(tokens_from(kept.emplace_back(prompts[i])));
  }
  for (const Vector<Token>& prompt : tokens) matches.push_back(match_tokens(owner, prompt, name_from(name)));
  return matches;
}

}  // namespace kvpool::bindings
