// The bodies of the frames that peers exchange while they meet and when they part. docs/wire.md has the bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "kvpool/base/error.h"
#include "kvpool/net/connect/peer_metadata.h"
#include "kvpool/net/frame.h"
#include "kvpool/net/wire.h"

namespace kvpool {

inline constexpr std::size_t kMetadataBytesMax = std::size_t{4} << 20;
inline constexpr std::size_t kShortBodyBytesMax = 4096;  // of kBye, kCapabilities and kReject

// The first frame that a server sends. A MAC protects it against modification.
struct ServerCapabilities {
  bool checksum = false;     // its settings declare the network trusted: a checksum may take the MAC's place
  std::string socket_scope;  // where local_socket can be reached: socket_scope() of the server
  std::string local_socket;  // as PeerMetadata::local_socket; empty without one
};
// Of this process. Two processes with the same scope see the same abstract socket names: they share the host, the PID
// namespace and the network namespace. If the kernel does not report these, the scope is unique to this process.
std::string socket_scope();

Bytes write_body(const ServerCapabilities& body);
ServerCapabilities read_capabilities(std::span<const std::byte> body);  // throws kProtocol

Bytes write_metadata_body(const PeerMetadata& metadata);
PeerMetadata read_metadata_body(std::span<const std::byte> body);  // throws kProtocol

// A refusal keeps its code and its text on the way. An unknown code, or a missing text, reads as kPeerLost.
Bytes write_reject(const Error& why);
Error read_reject(std::span<const std::byte> body);

Bytes write_bye(const Error& why);
Error read_bye(std::span<const std::byte> body);  // kPeerLost, "closed by the peer: ..."

}  // namespace kvpool
