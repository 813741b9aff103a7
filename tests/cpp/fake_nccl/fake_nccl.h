// A library for tests that stands in for NCCL: two ranks a communicator, in one process or two, bytes over a socket,
// and sends and receives that are work of the fake driver's streams (fake_cuda/fake_cuda.h), so they are under way
// while the caller goes on. As with NCCL: what is in a stream ends when its bytes have been passed or the communicator
// is aborted, and never because the peer has gone. A communicator sends and receives memory of its GPU alone, and joins
// no two ranks on one GPU.
//
// The functions for tests, by dlsym.
#pragma once

#include <cstddef>

namespace kvpool::fake_nccl {

using ResetFunction = void();                           // fake_nccl_reset: forgets what is set below
using SetFunction = void(const char* name, int value);  // fake_nccl_set: of kSettings, below
using FailNthFunction = void(int n, int code);          // fake_nccl_fail_nth: of the calls from now on; 0: none
using FailedFunction = bool();                          // fake_nccl_failed: whether it was reached
using CountFunction = std::size_t(const char* name);    // fake_nccl_count: how often it was called, or of kCounts

// The settings of fake_nccl_set:
//   "version"      result of ncclGetVersion                                      22809
//   "join"         0: no communicator is ever complete                            1
//   "stall"        1: messages that begin from now on stop before their last byte 0
//   "break_in"     messages from now on of which the last breaks its communicator 0: none
//   "polls"        answers "in progress" after each group                         0
//   "linger"       1: what is to be received stays in its stream when its
//                  communicator is aborted, until this is 0, and then still
//                  writes a byte                                                  0
//   "hold_abort"   1: ncclCommAbort waits until this is 0                         0
//   "loads_lazily" 1: the first communicator on a GPU waits for all that this GPU
//                  has to do, before it joins the other                           1
// fake_nccl_count counts calls, and:
//   "communicators"  that were made and not aborted
//   "messages"       that have been passed, at either end
//   "bytes sent"     by those
//   "mismatches"     of what was sent and what was to be received

}  // namespace kvpool::fake_nccl
