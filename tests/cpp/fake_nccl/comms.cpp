// Communicators: how two ranks find each other and join, and how one is aborted.
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstring>
#include <functional>
#include <random>
#include <utility>

#include "state.h"

namespace kvpool::fake_nccl {
namespace {

sockaddr_un address_of(const std::string& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

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

}  // extern "C"
