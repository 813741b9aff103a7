#include "fake_nccl.h"

#include <dlfcn.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace kvpool::fake_nccl {
namespace {

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

struct Message {
  std::shared_ptr<Comm> comm;
  bool sends;
  std::byte* at;  // where the CPU finds it
  std::size_t bytes;
};

struct Op {
  void* comm;
  bool sends;
  std::uintptr_t address;
  std::size_t bytes;
  void* stream;
};

struct State {
  std::mutex mutex;
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

std::map<std::string, int> default_settings() {
  return {{"version", 22809}, {"join", 1},       {"stall", 0},        {"break_in", 0},  {"polls", 0},
          {"linger", 0},      {"hold_abort", 0}, {"loads_lazily", 1}, {"buffer_kib", 0}};
}

// Never destroyed: streams may outlive static objects.
State& state() {
  static auto* const the_state = [] {
    auto* made = new State;
    made->settings = default_settings();
    return made;
  }();
  return *the_state;
}

thread_local int group_depth = 0;
thread_local std::vector<Op> group;

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

template <class Function>
Function* of_driver(const char* name) {
  void* driver = dlopen(std::getenv("KVPOOL_CUDA_LIBRARY"), RTLD_NOW | RTLD_NOLOAD);
  if (driver == nullptr) std::abort();  // a test that has no fake driver
  auto* function = reinterpret_cast<Function*>(dlsym(driver, name));
  dlclose(driver);
  if (function == nullptr) std::abort();
  return function;
}

sockaddr_un address_of(const std::string& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

void nap() { std::this_thread::sleep_for(std::chrono::microseconds(200)); }

// Of a GPU, as NCCL compares it: its host has a name, which NCCL_HOSTID may replace.
struct Seat {
  std::uint64_t host;
  std::int64_t device;
  bool operator==(const Seat&) const = default;
};

Seat seat_of(const Comm& comm) {
  const char* host = std::getenv("NCCL_HOSTID");
  return {std::hash<std::string>()(host == nullptr ? "" : host), comm.device};
}

bool move_bytes(Comm& comm, bool sends, std::byte* at, std::size_t bytes);

// ---- joining

// Each side tells the other its GPU: NCCL does not join two ranks on one.
int meet_other(Comm& comm) {
  Seat own = seat_of(comm);
  Seat other{};
  if (!move_bytes(comm, true, reinterpret_cast<std::byte*>(&own), sizeof(own))) return kInProgress;
  if (!move_bytes(comm, false, reinterpret_cast<std::byte*>(&other), sizeof(other))) return kInProgress;
  return own == other ? kInvalidUsage : kSuccess;
}

void join_as_first(Comm& comm, int listener) {
  while (!comm.aborted) {
    pollfd wanted{listener, POLLIN, 0};
    if (poll(&wanted, 1, 1) <= 0) continue;
    comm.fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (comm.fd >= 0) break;
  }
  close(listener);
}

void join_as_second(Comm& comm, const std::string& name) {
  socklen_t length = 0;
  const sockaddr_un address = address_of(name, length);
  while (!comm.aborted) {
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, reinterpret_cast<const sockaddr*>(&address), length) == 0) {
      comm.fd = fd;
      return;
    }
    close(fd);
    nap();
  }
}

// The first communicator on a GPU asks for the attributes of every kernel there (cudaFuncGetAttributes), which loads
// them one by one, and a GPU that loads stands still first.
void load_kernels(int device) {
  {
    State& s = state();
    const std::lock_guard lock(s.mutex);
    if (s.settings.at("loads_lazily") == 0 || !s.loaded.insert(device).second) return;
  }
  of_driver<void(int)>("fake_cuda_load_module")(device);
}

void join(const std::shared_ptr<Comm>& comm, int device, const std::string& name, int listener) {
  load_kernels(device);
  while (setting("join") == 0 && !comm->aborted) nap();
  if (listener >= 0) {
    join_as_first(*comm, listener);
  } else {
    join_as_second(*comm, name);
  }
  // A side that knows the other may go on before the other does, as with NCCL.
  if (comm->fd >= 0) comm->state = meet_other(*comm);
}

// ---- messages

void wait_for_abort(const Comm& comm) {
  while (!comm.aborted) nap();
}

// False: the communicator was aborted, or is broken and then was.
bool move_bytes(Comm& comm, bool sends, std::byte* at, std::size_t bytes) {
  while (bytes > 0 && !comm.aborted) {
    const ssize_t n =
        sends ? send(comm.fd, at, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) : recv(comm.fd, at, bytes, MSG_DONTWAIT);
    if (n > 0) {
      at += n;
      bytes -= static_cast<std::size_t>(n);
    } else if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
      pollfd wanted{comm.fd, static_cast<short>(sends ? POLLOUT : POLLIN), 0};
      poll(&wanted, 1, 1);
    } else {
      wait_for_abort(comm);  // the peer has gone: a GPU does not know
    }
  }
  return bytes == 0;
}

bool is_to_break() {
  const std::lock_guard lock(state().mutex);
  int& left = state().settings.at("break_in");
  return left > 0 && --left == 0;
}

void pass_bytes(const Message& message) {
  Comm& comm = *message.comm;
  if (comm.state != kSuccess && comm.state != kInProgress) return wait_for_abort(comm);
  std::uint64_t expected = message.bytes;
  if (!move_bytes(comm, message.sends, reinterpret_cast<std::byte*>(&expected), sizeof(expected))) return;
  if (expected != message.bytes) {
    count("mismatches");
    comm.state = kInternalError;
    return wait_for_abort(comm);
  }
  const std::size_t last = message.sends ? 1 : 0;
  if (!move_bytes(comm, message.sends, message.at, message.bytes - last)) return;
  if (is_to_break()) {
    comm.state = kRemoteError;
    return wait_for_abort(comm);
  }
  while (setting("stall") != 0 && !comm.aborted) nap();
  if (!move_bytes(comm, message.sends, message.at + message.bytes - last, last)) return;
  count("messages");
  if (!message.sends) return;
  const std::lock_guard lock(state().mutex);
  state().counts["bytes sent"] += message.bytes;
}

void pass(const Message& message) {
  pass_bytes(message);
  if (message.sends || !message.comm->aborted || setting("linger") == 0) return;
  while (setting("linger") != 0) nap();
  *message.at = std::byte{0xee};
}

// NCCL makes some buffers when a communicator is made, and others for its first message.
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

int launch(const std::vector<Op>& ops) {
  using Host = void*(int device, unsigned long long address, std::size_t bytes);
  using Launch = int(void* stream, void (*function)(void*), void* argument);
  auto* const host = of_driver<Host>("fake_cuda_host_of");
  auto* const launch_host = of_driver<Launch>("cuLaunchHostFunc");
  for (const Op& op : ops) {
    const auto comm = comm_of(op.comm);
    if (comm == nullptr || comm->state != kSuccess || op.bytes == 0) return kInvalidArgument;
    if (comm->buffers.size() == 1 && make_buffer(*comm) != kSuccess) return kUnhandledCudaError;
    auto* at = static_cast<std::byte*>(host(comm->device, op.address, op.bytes));
    if (at == nullptr) return kInvalidArgument;
    auto message = std::make_unique<Message>(Message{comm, op.sends, at, op.bytes});
    comm->polls = setting("polls");
    const auto call = [](void* argument) { pass(*std::unique_ptr<Message>(static_cast<Message*>(argument))); };
    if (launch_host(op.stream, call, message.get()) != 0) return kUnhandledCudaError;
    static_cast<void>(message.release());
  }
  return kSuccess;
}

int add(const char* call, bool sends, std::uintptr_t address, std::size_t bytes, int type, int peer, void* comm,
        void* stream) {
  if (const int code = enter(call); code != kSuccess) return code;
  const auto found = comm_of(comm);
  if (found == nullptr || type != 0 || peer != 1 - found->rank) return kInvalidArgument;
  const Op op{comm, sends, address, bytes, stream};
  if (group_depth == 0) return launch({op});
  group.push_back(op);
  return kSuccess;
}

}  // namespace
}  // namespace kvpool::fake_nccl

using namespace kvpool::fake_nccl;

extern "C" {

struct UniqueId {
  char bytes[128];
};
struct Config {
  std::size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
};

int ncclGetVersion(int* version) {
  *version = setting("version");
  return kSuccess;
}

int ncclGetUniqueId(UniqueId* id) {
  if (const int code = enter("ncclGetUniqueId"); code != kSuccess) return code;
  std::random_device random;
  const std::string name = "fake-nccl-" + std::to_string(getpid()) + "-" + std::to_string(random());
  socklen_t length = 0;
  const sockaddr_un address = address_of(name, length);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address), length) != 0 || listen(fd, 1) != 0) return kSystemError;
  *id = {};
  std::memcpy(id->bytes, name.data(), name.size());
  const std::lock_guard lock(state().mutex);
  state().listeners[name] = fd;
  return kSuccess;
}

int ncclCommInitRankConfig(void** handle, int ranks, UniqueId id, int rank, Config* config) {
  if (const int code = enter("ncclCommInitRankConfig"); code != kSuccess) return code;
  if (ranks != 2 || rank < 0 || rank > 1 || config->magic != 0xcafebeef || config->blocking != 0) {
    return kInvalidArgument;
  }
  int device = 0;
  if (of_driver<int(int*)>("cuCtxGetDevice")(&device) != 0) return kUnhandledCudaError;
  const std::string name(id.bytes, strnlen(id.bytes, sizeof(id.bytes)));
  auto comm = std::make_shared<Comm>();
  comm->rank = rank;
  comm->device = device;
  if (const int code = make_buffer(*comm); code != kSuccess) return code;
  const std::lock_guard lock(state().mutex);
  int listener = -1;
  if (rank == 0) {
    const auto found = state().listeners.find(name);
    if (found == state().listeners.end()) return kInvalidArgument;
    listener = found->second;
    state().listeners.erase(found);
  }
  comm->joining = std::thread([comm, device, name, listener] { join(comm, device, name, listener); });
  *handle = reinterpret_cast<void*>(state().next_comm++);
  state().comms[*handle] = std::move(comm);
  return kInProgress;
}

int ncclCommGetAsyncError(void* handle, int* error) {
  if (const int code = enter("ncclCommGetAsyncError"); code != kSuccess) return code;
  const auto comm = comm_of(handle);
  if (comm == nullptr) return kInvalidArgument;
  *error = comm->state;
  if (*error == kSuccess && comm->polls > 0) {
    --comm->polls;
    *error = kInProgress;
  }
  return kSuccess;
}

int ncclCommAbort(void* handle) {
  std::shared_ptr<Comm> comm;
  {
    const std::lock_guard lock(state().mutex);
    ++state().counts["ncclCommAbort"];
    const auto found = state().comms.find(handle);
    if (found == state().comms.end()) return kInvalidArgument;
    comm = std::move(found->second);
    state().comms.erase(found);
  }
  while (setting("hold_abort") != 0) nap();
  comm->aborted = true;
  comm->joining.join();
  for (const unsigned long long buffer : comm->buffers) of_driver<int(unsigned long long)>("cuMemFree_v2")(buffer);
  return kSuccess;
}

int ncclGroupStart() {
  if (const int code = enter("ncclGroupStart"); code != kSuccess) return code;
  ++group_depth;
  return kSuccess;
}

int ncclGroupEnd() {
  if (group_depth == 0) return kInvalidArgument;
  if (--group_depth > 0) return kSuccess;
  const std::vector<Op> ops = std::move(group);
  group.clear();
  if (const int code = enter("ncclGroupEnd"); code != kSuccess) return code;
  return launch(ops);
}

int ncclSend(const void* from, std::size_t bytes, int type, int peer, void* comm, void* stream) {
  return add("ncclSend", true, reinterpret_cast<std::uintptr_t>(from), bytes, type, peer, comm, stream);
}

int ncclRecv(void* to, std::size_t bytes, int type, int peer, void* comm, void* stream) {
  return add("ncclRecv", false, reinterpret_cast<std::uintptr_t>(to), bytes, type, peer, comm, stream);
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
