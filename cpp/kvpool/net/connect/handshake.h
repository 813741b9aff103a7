// How two peers prove to each other that they know the cluster's secret, and agree on a version and on keys.
//
// A pure state machine over bytes: no socket, no clock, so that tests and fuzzers drive it. docs/wire.md has the bytes.
//
//   client: hello (magic, role, channel, versions, nonce)
//   server: hello (magic, role, channel, versions, the version agreed on, nonce)
//   client: proof that it knows the secret; the server closes on a wrong one and has told nothing but a nonce
//   server: verdict, and its own proof
//
// Invariants:
//   K1  Each proof is a MAC over the sender's role and over every byte that both sides have sent before it. So a proof
//       is valid only for this role (no reflection), this connection (no replay: both nonces are in it), and these
//       versions and this channel (no downgrade).
//   K2  Each direction of each connection has separate keys, which depend on the secret and on every byte above.
//   K3  The handshake buffers at most one message, whose size this side knows beforehand.
//
// An empty secret works like any other; the caller decides whether to allow it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "kvpool/net/frame.h"
#include "kvpool/net/wire.h"

namespace kvpool {

using Key = std::array<std::byte, 32>;
using Nonce = std::array<std::byte, 32>;

struct SessionKeys {
  Key send;
  Key receive;
};

// The versions that one side speaks, both ends included.
struct WireVersions {
  std::uint16_t min = kWireVersionMin;
  std::uint16_t max = kWireVersionMax;
};

// The kind of channel that will carry the frames. Both sides must name the same kind. Otherwise a process between a
// client on TCP and a server on a Unix socket could relay the handshake and then forge frames, which have no MAC on a
// Unix socket.
enum class Channel : std::uint8_t {
  kNetwork = 1,  // frames carry a MAC, or both sides trust the network: TCP, and a Unix socket to another user
  kLocal = 2,  // a Unix socket whose other end is of the same user (SO_PEERCRED): no MAC, and descriptors may be passed
};

class Handshake {
 public:
  enum class Role : std::uint8_t { kClient = 1, kServer = 2 };
  // Draws a nonce from the kernel. Throws std::system_error if the kernel gives none.
  Handshake(Role role, std::string secret, Channel channel = Channel::kNetwork);
  // Uses the caller's nonce: only for the simulator and tests, which must be repeatable. With a nonce used twice, an
  // attacker who recorded the first connection can replay it.
  Handshake(Role role, std::string secret, Channel channel, WireVersions versions, const Nonce& nonce);
  ~Handshake();
  Handshake(const Handshake&) = default;
  Handshake& operator=(const Handshake&) = default;

  // What to send first; empty for a server. REQUIRES: called once, before advance().
  Bytes start();
  // Takes bytes that arrived, in pieces of any size; appends to `out` what must be sent in answer. Returns how many
  // bytes it took: all of them until done(), the rest belongs to the frames. Throws Error kAuth (wrong proof),
  // kProtocol (no kvpool, or no version in common: the text says which versions each speaks); `out` may then hold a
  // last answer that tells the peer why. After an error every call throws.
  std::size_t advance(std::span<const std::byte> in, Bytes& out);
  bool done() const noexcept { return state_ == State::kDone; }

  std::uint16_t version() const noexcept { return version_; }
  const SessionKeys& keys() const noexcept { return keys_; }  // REQUIRES: done()

 private:
  enum class State : std::uint8_t { kHello, kProof, kVerdict, kDone, kFailed };
  struct Hello;

  std::size_t message_bytes() const noexcept;
  void check_beginning() const;
  void take_message(Bytes& out);
  void take_client_hello(Bytes& out);
  void take_server_hello(Bytes& out);
  void take_client_proof(Bytes& out);
  void take_verdict();
  void take_server_proof();

  Hello own_hello() const noexcept;
  Hello take_hello();
  void check_channel(const Hello& theirs) const;
  void send(std::span<const std::byte> message, Bytes& out);
  Key proof_of(Role role) const;
  bool proves(Role role) const;
  void agree_on_keys();
  [[noreturn]] void fail_versions(WireVersions theirs) const;

  Role role_;
  Channel channel_;
  State state_ = State::kHello;
  WireVersions versions_;
  std::uint16_t version_ = 0;
  Nonce nonce_;
  Key proof_key_;    // from the secret
  Key session_key_;  // from the secret
  SessionKeys keys_{};
  Bytes pending_;     // an incomplete message
  Bytes transcript_;  // what both have said so far, in order
};

}  // namespace kvpool
