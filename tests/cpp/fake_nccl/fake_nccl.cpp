// A shared library that stands in for NCCL. Here is the state with which all calls begin, and what tests set and ask.
#include "fake_nccl.h"

#include "state.h"

namespace kvpool::fake_nccl {
namespace {

std::map<std::string, int> default_settings() {
  return {{"version", 22809}, {"join", 1},       {"stall", 0},        {"break_in", 0},  {"polls", 0},
          {"linger", 0},      {"hold_abort", 0}, {"loads_lazily", 1}, {"buffer_kib", 0}};
}

}  // namespace

// Never destroyed: streams may outlive static objects.
State& state() {
  static auto* const the_state = [] {
    auto* made = new State;
    made->settings = default_settings();
    return made;
  }();
  return *the_state;
}

int enter(const char* call) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  ++s.counts[call];
  if (s.fail_in == 0 || --s.fail_in > 0) return kSuccess;
  s.failed = true;
  return s.fail_code;
}

int setting(const char* name) {
  const std::lock_guard lock(state().mutex);
  return state().settings.at(name);
}

void count(const char* name) {
  const std::lock_guard lock(state().mutex);
  ++state().counts[name];
}

std::shared_ptr<Comm> comm_of(void* handle) {
  const std::lock_guard lock(state().mutex);
  const auto found = state().comms.find(handle);
  return found == state().comms.end() ? nullptr : found->second;
}

int make_buffer(Comm& comm) {
  const int kib = setting("buffer_kib");
  if (kib == 0) return kSuccess;
  unsigned long long address = 0;
  const auto bytes = static_cast<std::size_t>(kib) << 10;
  if (of_driver<int(unsigned long long*, std::size_t)>("cuMemAlloc_v2")(&address, bytes) != 0) {
    return kUnhandledCudaError;
  }
  comm.buffers.push_back(address);
  return kSuccess;
}

}  // namespace kvpool::fake_nccl

using namespace kvpool::fake_nccl;

extern "C" {

int ncclGetVersion(int* version) {
  *version = setting("version");
  return kSuccess;
}

const char* ncclGetErrorString(int result) {
  switch (result) {
    case kRemoteError:
      return "remote process exited or there was a network error";
    case kInvalidArgument:
      return "invalid argument";
    case kInvalidUsage:
      return "invalid usage";
    default:
      return "some error";
  }
}

const char* ncclGetLastError(void* handle) {
  const auto comm = comm_of(handle);
  return comm != nullptr && comm->state == kInvalidUsage ? "Duplicate GPU detected : both ranks are on one CUDA device"
                                                         : "";
}

void fake_nccl_reset() {
  const std::lock_guard lock(state().mutex);
  state().settings = default_settings();
  state().loaded.clear();
  state().counts.clear();
  state().fail_in = 0;
  state().failed = false;
}

void fake_nccl_set(const char* name, int value) {
  const std::lock_guard lock(state().mutex);
  state().settings.at(name) = value;
}

void fake_nccl_fail_nth(int n, int code) {
  const std::lock_guard lock(state().mutex);
  state().fail_in = n;
  state().fail_code = code;
  state().failed = false;
}

bool fake_nccl_failed() {
  const std::lock_guard lock(state().mutex);
  return state().failed;
}

std::size_t fake_nccl_count(const char* name) {
  const std::lock_guard lock(state().mutex);
  if (std::string(name) == "communicators") return state().comms.size();
  return state().counts[name];
}

}  // extern "C"
