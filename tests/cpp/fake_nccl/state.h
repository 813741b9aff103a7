// Shared by the parts of the fake NCCL.
#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace kvpool::fake_nccl {

enum Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

struct Comm {
  int rank = 0;
  int device = 0;
  int fd = -1;  // of init, then of one stream's work at a time
  std::atomic<bool> aborted{false};
  std::atomic<int> state{kInProgress};
  std::atomic<int> polls{0};
  std::thread joining;
  std::vector<unsigned long long> buffers;  // of NCCL's own, on the GPU
  ~Comm() {
    if (fd >= 0) close(fd);
  }
};

struct State {
  std::mutex mutex;  // of all below; nothing that waits holds it
  std::map<std::string, int> settings;
  std::map<std::string, std::size_t> counts;
  int fail_in = 0;
  int fail_code = 0;
  bool failed = false;
  std::map<std::string, int> listeners;  // by name
  std::map<void*, std::shared_ptr<Comm>> comms;
  std::uintptr_t next_comm = 1;
  std::set<int> loaded;  // GPUs that have the kernels
};

State& state();  // never destroyed

// The first step of a call: counts it, and returns the code with which it is to fail.
int enter(const char* call);
int setting(const char* name);
void count(const char* name);
std::shared_ptr<Comm> comm_of(void* handle);  // null for one that is not there
// NCCL makes some buffers when a communicator is made, and others for its first message. Returns its error.
int make_buffer(Comm& comm);

// Moves bytes over the communicator's socket. False: it was aborted, or is broken and then was.
bool move_bytes(Comm& comm, bool sends, std::byte* at, std::size_t bytes);

// Before one looks again.
inline void nap() { std::this_thread::sleep_for(std::chrono::microseconds(200)); }

template <class Function>
Function* of_driver(const char* name) {
  void* driver = dlopen(std::getenv("KVPOOL_CUDA_LIBRARY"), RTLD_NOW | RTLD_NOLOAD);
  if (driver == nullptr) std::abort();  // a test that has no fake driver
  auto* function = reinterpret_cast<Function*>(dlsym(driver, name));
  dlclose(driver);
  if (function == nullptr) std::abort();
  return function;
}

}  // namespace kvpool::fake_nccl
