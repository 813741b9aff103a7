// Letting go of Python's GIL while the core works.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

namespace kvpool::bindings {

// Like pybind11's gil_scoped_release, but also right in a daemon thread that comes back while the interpreter ends.
// Python before 3.14 ends such a thread by unwinding it, which no destructor survives; here it waits for the end of the
// process, as Python 3.14 has it.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // it throws nothing: this is the unwinding
      for (;;) pause();
    }
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace kvpool::bindings
