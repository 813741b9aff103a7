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
#include "vectors.h"

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
  const Vector<Token> tokens = tokens_to_find(tokens_argument);
  return match_tokens(owner, tokens, name_from(name));
}

template <class Owner>
std::vector<Match> match_batch(const std::shared_ptr<Owner>& owner, py::handle prompts, py::handle name_argument) {
  const std::string_view name = name_from(name_argument);
  // All prompts are read before the first is matched.
  std::vector<Vector<Token>> tokens;
  for (const py::object& prompt : items_from(prompts, "prompts")) tokens.push_back(tokens_from(prompt));
  std::vector<Match> matches;
  matches.reserve(tokens.size());
  for (const Vector<Token>& prompt : tokens) matches.push_back(match_tokens(owner, prompt, name));
  return matches;
}

}  // namespace kvpool::bindings
