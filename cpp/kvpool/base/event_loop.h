// Which threads run an event loop: what waits would stop all that the loop serves.
#pragma once

namespace kvpool {

// True in such a thread. An executor gives its tasks to other threads even when none can be started (exec/executor.h).
inline thread_local bool in_event_loop = false;

}  // namespace kvpool
