// Signals are for the application's threads: its handlers do not expect to run on a thread of ours.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace kvpool {

// Blocks all signals in this thread while it lives, so that a thread started meanwhile inherits the mask.
class SignalsBlocked {
 public:
  SignalsBlocked() noexcept {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace kvpool
