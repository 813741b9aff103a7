// Arguments and results of the verbs on cached prompts.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/index/prompt_index.h"

namespace kvpool {

struct InsertOutcome {
  IndexPin pin;
  std::size_t inserted = 0;         // blocks newly stored
  std::vector<Address> duplicates;  // given blocks whose page was cached already; still active
};

struct InsertItem {
  const Token* tokens;
  std::size_t n_tokens;
  const Address* addresses;
  std::size_t n_addresses;
  Address* canonical;  // room for n_addresses
};

class Swap;

// A save that a thread of the pool carries out.
struct StartedSave {
  std::shared_ptr<Swap> swap;
  std::size_t blocks = 0;  // that it copies
};

struct MatchExplanation {
  std::size_t requested_tokens = 0;
  std::size_t matched_pages = 0;
  std::size_t partial_tokens = 0;
  MatchEnd end = MatchEnd::kComplete;
  std::vector<Address> addresses;
  // Other namespaces that hold more of these tokens, and how many pages each.
  std::vector<std::pair<std::string, std::size_t>> elsewhere;
};

}  // namespace kvpool
