#include "kvpool/net/connect/handshake_messages.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

namespace kvpool {
namespace {

constexpr std::size_t kTextBytesMax = 2048;
constexpr std::size_t kFieldsMax = 16;
constexpr std::size_t kFieldNameMax = 64;
// Of a refusal, what this side understands; as in Error, they are static strings.
constexpr std::array<std::string_view, 5> kFieldNames = {"incarnation", "instance", "retry_after_us", "offered_bytes",
                                                         "layout_bytes"};
constexpr std::size_t kSocketScopeBytesMax = 255;
constexpr std::size_t kLocalSocketBytesMax = 107;  // what fits into an abstract socket name

// A text of the peer's goes into logs and terminals: what could steer those is taken out.
std::string plain(std::string_view text) {
  std::string out(text.substr(0, kTextBytesMax));
  std::replace_if(
      out.begin(), out.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }, ' ');
  return out;
}

// The causes that may travel to a peer. An unknown cause reads as no cause.
bool crosses(ErrorCause cause) noexcept {
  return cause == ErrorCause::kConnectedAlready || cause == ErrorCause::kInstanceTaken || cause == ErrorCause::kDropped;
}

std::string_view as_text(std::span<const std::byte> body) {
  return {reinterpret_cast<const char*>(body.data()), body.size()};
}

}  // namespace

std::string socket_scope() {
  struct stat network{};
  const bool known = stat("/proc/self/ns/net", &network) == 0;
  return host_id() + "-" + (known ? std::to_string(network.st_ino) : "unknown-" + std::to_string(getpid()));
}

Bytes write_body(const ServerCapabilities& body) {
  Bytes out;
  WireWriter(out).number(static_cast<std::uint8_t>(body.checksum)).text(body.socket_scope).text(body.local_socket);
  return out;
}

ServerCapabilities read_capabilities(std::span<const std::byte> body) {
  WireReader in(body);
  ServerCapabilities capabilities;
  const auto checksum = in.number<std::uint8_t>();
  if (checksum > 1) {
    throw Error(ErrorCode::kProtocol, "the peer's capabilities have " + std::to_string(checksum) +
                                          " where 0 or 1 says whether a checksum takes the MAC's place");
  }
  capabilities.checksum = checksum != 0;
  capabilities.socket_scope = in.text(kSocketScopeBytesMax);
  capabilities.local_socket = in.text(kLocalSocketBytesMax);
  in.finish();
  return capabilities;
}

Bytes write_metadata_body(const PeerMetadata& metadata) {
  Bytes out;
  WireWriter writer(out);
  write_metadata(metadata, writer);
  if (out.size() > kMetadataBytesMax) {
    throw Error(ErrorCode::kArgument, "what the pool says of itself has " + std::to_string(out.size()) +
                                          " bytes; at most " + std::to_string(kMetadataBytesMax));
  }
  return out;
}

PeerMetadata read_metadata_body(std::span<const std::byte> body) {
  WireReader in(body);
  PeerMetadata metadata = read_metadata(in);
  in.finish();
  return metadata;
}

Bytes write_reject(const Error& why) {
  Bytes out;
  const std::string_view text = why.what();
  WireWriter writer(out);
  const std::size_t fields = std::min(why.fields().size(), kFieldsMax);
  writer.number(static_cast<std::uint8_t>(why.code()))
      .number(static_cast<std::uint8_t>(why.cause()))
      .number(why.subject())
      .text(text.substr(0, kTextBytesMax))
      .number(static_cast<std::uint8_t>(fields));
  for (std::size_t i = 0; i < fields; ++i) {
    const auto& [name, value] = why.fields()[i];
    writer.text(std::string_view(name).substr(0, kFieldNameMax)).number(static_cast<std::uint64_t>(value));
  }
  return out;
}

Error read_reject(std::span<const std::byte> body) {
  WireReader in(body);
  const auto code = in.number<std::uint8_t>();
  const auto cause = static_cast<ErrorCause>(in.number<std::uint8_t>());
  const auto subject = in.number<std::uint64_t>();
  const std::string text = plain(in.text(kTextBytesMax));
  std::vector<ErrorField> known;
  const auto fields = in.number<std::uint8_t>();
  if (fields > kFieldsMax) throw Error(ErrorCode::kProtocol, "a refusal has " + std::to_string(fields) + " fields");
  for (int i = 0; i < fields; ++i) {
    const std::string name = in.text(kFieldNameMax);
    const auto value = static_cast<std::int64_t>(in.number<std::uint64_t>());
    const auto* const field = std::find(kFieldNames.begin(), kFieldNames.end(), name);
    if (field != kFieldNames.end()) known.emplace_back(field->data(), value);
  }
  in.finish();
  if (code > static_cast<std::uint8_t>(ErrorCode::kCancelled) || text.empty()) {
    return {ErrorCode::kPeerLost, "refused by the peer, and it gave no reason that this version understands"};
  }
  Error why(static_cast<ErrorCode>(code), text);
  for (const auto& [name, value] : known) why.add(name, value);
  return crosses(cause) ? why.because(cause, subject) : why;
}

Bytes write_bye(const Error& why) {
  const auto text = std::as_bytes(std::span(std::string_view(why.what()).substr(0, kTextBytesMax)));
  return {text.begin(), text.end()};
}

Error read_bye(std::span<const std::byte> body) {
  return {ErrorCode::kPeerLost, "closed by the peer: " + plain(as_text(body))};
}

}  // namespace kvpool
