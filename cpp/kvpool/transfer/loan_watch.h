// Who has to know when a peer takes lent blocks back.
#pragma once

#include <span>

#include "kvpool/base/address.h"

namespace kvpool {

class LoanWatch {
 public:
  virtual ~LoanWatch() = default;
  // Loans have ended at the deadline of a recall; among them may be blocks that the watcher does not know. Must not
  // wait.
  virtual void on_loans_ended(std::span<const Address> addresses) noexcept = 0;
};

}  // namespace kvpool
