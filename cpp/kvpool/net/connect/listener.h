// A listening socket, and the callers that it has accepted and not yet admitted. In the reactor's thread, but for
// close() and end().
//
// Strangers must not keep out a peer that knows the secret. So the listener accepts at once whatever comes, and bounds
// what it keeps instead: callers that have said nothing, and callers that have sent a hello and owe the proof, each in
// a CallerQueue. Whom a queue sends away is disconnected. Two queues, so that strangers who say hello and stop do not
// push out a peer whose hello is still on its way, nor silent ones a peer whose proof is. A caller that has proved that
// it knows the secret is in no queue, and is never sent away for others.
//
// Every listener has its own queues: strangers at a TCP port take no place from the callers of a Unix door.
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

  // Stops accepting, and ends every server handshake: their callers are told, if they have proved that they know the
  // secret. Waits for an accept that is under way. Idempotent.
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
