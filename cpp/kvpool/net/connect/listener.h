// A listening socket, and the callers that it has accepted but not yet admitted. Runs in the reactor's thread, except
// close() and end().
//
// Strangers must not keep out a peer that knows the secret. So the listener accepts every caller at once and bounds the
// callers that it keeps: silent ones, and ones that have sent a hello but no proof yet, each kind in a separate
// CallerQueue. It disconnects the callers that a queue drops. With two queues, strangers that stop after their hello do
// not displace a peer whose hello is on its way, and silent ones do not displace a peer whose proof is on its way. A
// caller that has proved that it knows the secret is in no queue, and is never dropped for others.
//
// Every listener has its own queues: strangers at a TCP port take no place from callers at a Unix socket.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "kvpool/net/connect/caller_queue.h"
#include "kvpool/net/sock_address.h"

namespace kvpool {

class ServerHandshake;
class EndpointState;

class Listener : public std::enable_shared_from_this<Listener> {
 public:
  // Accepts callers from now on. Throws what Reactor::watch throws.
  static std::shared_ptr<Listener> start(std::shared_ptr<EndpointState> endpoint_state, const SockAddress& address,
                                         Descriptor socket);
  Listener(std::shared_ptr<EndpointState> endpoint_state, const SockAddress& address, Descriptor socket);

  // Stops accepting and ends every server handshake; tells the callers that have proved that they know the secret.
  // Waits for an accept that is under way. Idempotent.
  void close() noexcept;

  // How far a caller has come.
  void heard_hello(std::uint64_t id) noexcept;
  void heard_proof(std::uint64_t id) noexcept;
  // From any thread: the caller is admitted, or gone.
  void end(std::uint64_t id) noexcept;

 private:
  enum class Stage : std::uint8_t { kSilent, kGreeted, kProved };
  struct Caller {
    std::shared_ptr<ServerHandshake> server_handshake;
    std::uint64_t source = 0;
    Stage stage = Stage::kSilent;
  };

  void on_caller() noexcept;
  bool welcome(Descriptor socket, std::uint64_t source) noexcept;
  std::shared_ptr<ServerHandshake> add(std::uint64_t id, std::shared_ptr<ServerHandshake> server_handshake,
                                       std::uint64_t source);
  std::shared_ptr<ServerHandshake> take(std::uint64_t id) noexcept;
  bool send_one_away() noexcept;
  void rest() noexcept;
  void look_for_callers() noexcept;

  const std::shared_ptr<EndpointState> endpoint_state_;
  const SockAddress address_;
  const SocketFile file_;
  Descriptor socket_;
  std::uint64_t last_id_ = 0;

  std::mutex mutex_;
  std::uint64_t watch_ = 0;
  std::unordered_map<std::uint64_t, Caller> callers_;
  CallerQueue silent_;
  CallerQueue greeted_;
  const std::size_t proved_max_;
  std::size_t proved_ = 0;
  bool resting_ = false;  // the kernel refused a descriptor
};

}  // namespace kvpool
