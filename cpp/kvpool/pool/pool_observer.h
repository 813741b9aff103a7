// Is told how a pool ends. For things that use a pool and must end with it.
#pragma once

#include "kvpool/base/error.h"

namespace kvpool {

class PoolObserver {
 public:
  // The content of the pool's blocks is lost; verbs throw `why` from now on. Called from any thread, with a lock of the
  // pool held: it must not call the pool.
  virtual void on_pool_failed(const Error& why) noexcept = 0;
  // The pool is being closed. When this returns, the observer no longer uses the pool's memory.
  virtual void on_pool_closing() noexcept = 0;

 protected:
  ~PoolObserver() = default;
};

}  // namespace kvpool
