// Who has to know when a peer takes lent blocks back.
#pragma once

#include <unordered_set>

#include "kvpool/base/address.h"

namespace kvpool {

using AddressSet = std::unordered_set<Address>;

class LoanWatch {
 public:
  virtual ~LoanWatch() = default;
  // Loans have ended at the deadline of a recall; among them may be blocks that the watcher does not know. Must not
  // wait.
  virtual void on_loans_ended(const AddressSet& addresses) noexcept = 0;
};

}  // namespace kvpool
