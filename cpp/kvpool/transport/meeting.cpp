#include "kvpool/transport/meeting.h"

#include <algorithm>
#include <string_view>

namespace kvpool {
namespace {

constexpr std::size_t kTextBytesMax = 2048;
constexpr std::size_t kHostBytesMax = 255;
constexpr std::size_t kDoorBytesMax = 107;  // what fits into an abstract socket name

// A text of the peer's goes into logs and terminals: what could steer those is taken out.
std::string plain(std::string_view text) {
  std::string out(text.substr(0, kTextBytesMax));
  std::replace_if(
      out.begin(), out.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }, ' ');
  return out;
}

std::string_view as_text(std::span<const std::byte> body) {
  return {reinterpret_cast<const char*>(body.data()), body.size()};
}

}  // namespace

Bytes write_body(const DoorBody& body) {
  Bytes out;
  WireWriter(out).number(static_cast<std::uint8_t>(body.checksum)).text(body.host).text(body.door);
  return out;
}

DoorBody read_door(std::span<const std::byte> body) {
  WireReader in(body);
  DoorBody door;
  door.checksum = in.number<std::uint8_t>() != 0;
  door.host = in.text(kHostBytesMax);
  door.door = in.text(kDoorBytesMax);
  in.finish();
  return door;
}

Bytes write_card_body(const PeerCard& card) {
  Bytes out;
  WireWriter writer(out);
  write_card(card, writer);
  if (out.size() > kCardBytesMax) {
    throw Error(ErrorCode::kArgument, "what the pool says of itself has " + std::to_string(out.size()) +
                                          " bytes; at most " + std::to_string(kCardBytesMax));
  }
  return out;
}

PeerCard read_card_body(std::span<const std::byte> body) {
  WireReader in(body);
  PeerCard card = read_card(in);
  in.finish();
  return card;
}

Bytes write_reject(const Error& why) {
  Bytes out;
  const std::string_view text = why.what();
  WireWriter(out).number(static_cast<std::uint8_t>(why.code())).text(text.substr(0, kTextBytesMax));
  return out;
}

Error read_reject(std::span<const std::byte> body) {
  WireReader in(body);
  const auto code = in.number<std::uint8_t>();
  const std::string text = plain(in.text(kTextBytesMax));
  in.finish();
  if (code > static_cast<std::uint8_t>(ErrorCode::kCancelled) || text.empty()) {
    return {ErrorCode::kPeerLost, "refused by the peer, and it gave no reason that this version understands"};
  }
  return {static_cast<ErrorCode>(code), text};
}

Bytes write_bye(const Error& why) {
  const auto text = std::as_bytes(std::span(std::string_view(why.what()).substr(0, kTextBytesMax)));
  return {text.begin(), text.end()};
}

Error read_bye(std::span<const std::byte> body) {
  return {ErrorCode::kPeerLost, "closed by the peer: " + plain(as_text(body))};
}

}  // namespace kvpool
