// What ranks send and receive: work of the fake driver's streams.
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>
#include <vector>

#include "state.h"

namespace kvpool::fake_nccl {
namespace {

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

thread_local int group_depth = 0;
thread_local std::vector<Op> group;

void wait_for_abort(const Comm& comm) {
  while (!comm.aborted) nap();
}

}  // namespace

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

namespace {

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

}  // extern "C"
