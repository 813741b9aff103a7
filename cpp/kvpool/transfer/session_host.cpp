#include "kvpool/transfer/session_host.h"

#include <utility>

#include "kvpool/base/failure.h"
#include "kvpool/cuda/order.h"
#include "kvpool/routes/route_choice.h"

namespace kvpool {

void BlockHost::lend_active(std::span<const Address> /*addresses*/, Writer /*writer*/) {
  throw Error(ErrorCode::kState, "no engine allocates these blocks");
}

void carry_out(WriteJob& job) {
  WriteOutcome outcome;
  const auto failure = failure_of([&] {
    if (job.request.after != nullptr) job.request.after->wait(job.request.deadline_ns, job.request.cancelled);
    outcome = write_by(*job.route, job.request);
  });
  std::exchange(job.done, nullptr)(outcome, failure ? &*failure : nullptr);
}

}  // namespace kvpool
