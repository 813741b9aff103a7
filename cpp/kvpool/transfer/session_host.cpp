#include "kvpool/transfer/session_host.h"

#include <utility>

#include "kvpool/transfer/failure.h"

namespace kvpool {

void carry_out(WriteJob& job) {
  WriteOutcome outcome;
  const auto failure = failure_of([&] { outcome = job.route->write(job.request); });
  std::exchange(job.done, nullptr)(outcome, failure ? &*failure : nullptr);
}

}  // namespace kvpool
