#include "kvpool/transfer/messages.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string_view>

namespace kvpool {
namespace {

// Fields that an error may carry to another process. Names are static strings in an Error, so one that is not here is
// left out on the way in; its number stands in the text anyway.
constexpr std::array kFieldNames = {
    "address",        "position", "requested",   "capacity",     "free",      "active", "evictable", "pinned",
    "retry_after_us", "instance", "tokens",      "block_tokens", "needed",    "given",  "limit",     "blocks",
    "blocks_max",     "maximum",  "value",       "driver_code",  "nccl_code", "begin",  "end",       "block",
    "layer",          "layers",   "query_tokens"};

constexpr std::int64_t kSuspendedRetryAfterUs = 100'000;  // nobody knows when the engine wakes

enum ReserveBit : std::uint8_t { kMayEvict = 1, kInsert = 2, kOneSided = 4 };
enum CompleteBit : std::uint8_t { kHasPrivate = 1, kHasChecksum = 2, kInserts = 4 };

[[noreturn]] void malformed(const std::string& what) {
  throw Error(ErrorCode::kProtocol, "a message from the peer is malformed: " + what);
}

std::uint8_t read_bits(WireReader& in, std::uint8_t known) {
  const auto bits = in.number<std::uint8_t>();
  if ((bits & ~known) != 0) malformed("unknown flags " + std::to_string(bits));
  return bits;
}

MediumChoice read_medium_choice(WireReader& in) {
  const auto value = in.number<std::uint8_t>();
  if (!MediumChoice::is_code(value)) malformed("medium " + std::to_string(value));
  return MediumChoice::from_code(value);
}

std::uint32_t read_blocks(WireReader& in) {
  const auto blocks = in.number<std::uint32_t>();
  if (blocks > kAddressesMax) malformed(std::to_string(blocks) + " blocks in one request");
  return blocks;
}

// What a side that lost its lease or its GPU says is kPeerLost.
bool may_be_told(std::uint8_t code) noexcept {
  return code <= static_cast<std::uint8_t>(ErrorCode::kCancelled) ||
         code == static_cast<std::uint8_t>(ErrorCode::kRouteFailed);
}

std::vector<Token> read_tokens(WireReader& in) { return in.array<Token>(kTokenBytesMax / sizeof(Token)); }

}  // namespace

void check_prompt(std::size_t tokens, std::string_view name_space, std::string_view call) {
  constexpr std::size_t kTokensMax = kTokenBytesMax / sizeof(Token);
  if (tokens <= kTokensMax && name_space.size() <= kNamespaceBytesMax) return;
  throw Error(ErrorCode::kArgument, "too many tokens, or too long a namespace, for one " + std::string(call),
              {{"tokens", static_cast<std::int64_t>(tokens)}, {"maximum", static_cast<std::int64_t>(kTokensMax)}});
}

Bytes write_body(const LendBody& body) {
  Bytes out;
  WireWriter(out)
      .number(body.blocks)
      .number(body.medium.code())
      .number(static_cast<std::uint8_t>(body.may_evict ? kMayEvict : 0));
  return out;
}

LendBody read_lend(std::span<const std::byte> bytes) {
  WireReader in(bytes);
  LendBody body;
  body.blocks = read_blocks(in);
  body.medium = read_medium_choice(in);
  body.may_evict = (read_bits(in, kMayEvict) & kMayEvict) != 0;
  in.finish();
  return body;
}

Bytes write_body(const ReserveBody& body) {
  Bytes out;
  out.reserve(64 + body.name_space.size() + body.tokens.size() * sizeof(Token));
  const int bits = (body.may_evict ? kMayEvict : 0) | (body.insert ? kInsert : 0) | (body.one_sided ? kOneSided : 0);
  WireWriter(out)
      .number(body.blocks)
      .number(body.medium.code())
      .number(static_cast<std::uint8_t>(bits))
      .number(body.lifetime_ms)
      .text(body.name_space)
      .array(std::span<const Token>(body.tokens));
  return out;
}

ReserveBody read_reserve(std::span<const std::byte> bytes) {
  WireReader in(bytes);
  ReserveBody body;
  body.blocks = read_blocks(in);
  body.medium = read_medium_choice(in);
  const std::uint8_t bits = read_bits(in, kMayEvict | kInsert | kOneSided);
  body.may_evict = (bits & kMayEvict) != 0;
  body.insert = (bits & kInsert) != 0;
  body.one_sided = (bits & kOneSided) != 0;
  body.lifetime_ms = in.number<std::uint64_t>();
  body.name_space = in.text(kNamespaceBytesMax);
  body.tokens = read_tokens(in);
  in.finish();
  return body;
}

Bytes write_body(const ReservedBody& body) {
  Bytes out;
  out.reserve(8 + body.addresses.size() * sizeof(Address));
  WireWriter(out).number(body.held).array(std::span<const Address>(body.addresses));
  return out;
}

ReservedBody read_reserved(std::span<const std::byte> bytes) {
  WireReader in(bytes);
  ReservedBody body;
  body.held = read_blocks(in);
  body.addresses = in.array<Address>(kAddressesMax);
  in.finish();
  return body;
}

Bytes write_body(const CompleteBody& body) {
  Bytes out;
  out.reserve(64 + body.private_bytes.size() + body.named.size() * sizeof(Address) + body.name_space.size() +
              body.tokens.size() * sizeof(Token));
  const int bits =
      (body.has_private ? kHasPrivate : 0) | (body.has_checksum ? kHasChecksum : 0) | (body.insert ? kInserts : 0);
  WireWriter(out)
      .number(static_cast<std::uint8_t>(bits))
      .number(body.bytes)
      .number(body.checksum)
      .array(std::span<const Address>(body.named))
      .blob(body.private_bytes)
      .text(body.name_space)
      .array(std::span<const Token>(body.tokens));
  return out;
}

CompleteBody read_complete(std::span<const std::byte> bytes) {
  WireReader in(bytes);
  CompleteBody body;
  const std::uint8_t bits = read_bits(in, kHasPrivate | kHasChecksum | kInserts);
  body.has_private = (bits & kHasPrivate) != 0;
  body.has_checksum = (bits & kHasChecksum) != 0;
  body.insert = (bits & kInserts) != 0;
  body.bytes = in.number<std::uint64_t>();
  body.checksum = in.number<std::uint32_t>();
  body.named = in.array<Address>(kAddressesMax);
  const auto private_bytes = in.blob(kPrivateBytesMax);
  body.private_bytes.assign(private_bytes.begin(), private_bytes.end());
  body.name_space = in.text(kNamespaceBytesMax);
  body.tokens = read_tokens(in);
  in.finish();
  return body;
}

Bytes write_body(const FetchBody& body) {
  Bytes out;
  out.reserve(64 + (body.from.size() + body.to.size()) * sizeof(Address));
  WireWriter(out)
      .number(static_cast<std::uint8_t>(body.priority))
      .number(static_cast<std::uint8_t>(body.checksum ? kHasChecksum : 0))
      .text(body.route)
      .array(std::span<const Address>(body.from))
      .array(std::span<const Address>(body.to));
  return out;
}

FetchBody read_fetch(std::span<const std::byte> bytes) {
  WireReader in(bytes);
  FetchBody body;
  const auto priority = in.number<std::uint8_t>();
  if (priority > static_cast<std::uint8_t>(Priority::kBackground)) malformed("priority " + std::to_string(priority));
  body.priority = static_cast<Priority>(priority);
  body.checksum = read_bits(in, kHasChecksum) != 0;
  body.route = in.text(kRouteNameBytesMax);
  body.from = in.array<Address>(kAddressesMax);
  body.to = in.array<Address>(kAddressesMax);
  in.finish();
  if (body.from.size() != body.to.size()) malformed("as many blocks to read as to write");
  return body;
}

Bytes write_body(const FetchedBody& body) {
  Bytes out;
  WireWriter(out)
      .number(static_cast<std::uint8_t>(body.checksum ? kHasChecksum : 0))
      .number(body.checksum.value_or(0))
      .number(body.calls)
      .number(body.write_us)
      .text(body.route);
  return out;
}

FetchedBody read_fetched(std::span<const std::byte> bytes) {
  WireReader in(bytes);
  FetchedBody body;
  const bool has_checksum = read_bits(in, kHasChecksum) != 0;
  const auto checksum = in.number<std::uint32_t>();
  if (!has_checksum && checksum != 0) malformed("a checksum without its bit");
  if (has_checksum) body.checksum = checksum;
  body.calls = in.number<std::uint64_t>();
  body.write_us = in.number<std::uint64_t>();
  body.route = in.text(kRouteNameBytesMax);
  const bool is_name = std::ranges::all_of(body.route, [](char one) { return one > ' ' && one <= '~'; });
  if (!is_name) malformed("the name of a route");  // the application is shown it
  in.finish();
  return body;
}

Bytes write_body(const MatchBody& body) {
  Bytes out;
  out.reserve(16 + body.name_space.size() + body.tokens.size() * sizeof(Token));
  WireWriter(out).number(body.hold_ms).array(body.tokens).text(body.name_space);
  return out;
}

MatchBody read_match(std::span<const std::byte> bytes) {
  WireReader in(bytes);
  MatchBody body;
  body.hold_ms = in.number<std::uint32_t>();
  const auto count = in.number<std::uint32_t>();
  if (count > kTokenBytesMax / sizeof(Token)) malformed(std::to_string(count) + " tokens");
  const std::span<const std::byte> tokens = in.take(count * sizeof(Token));
  static_assert(sizeof(body.hold_ms) + sizeof(count) == 2 * alignof(Token));  // so they lie aligned in an aligned body
  body.tokens = {reinterpret_cast<const Token*>(tokens.data()), count};
  const std::span<const std::byte> name = in.blob(kNamespaceBytesMax);
  body.name_space = {reinterpret_cast<const char*>(name.data()), name.size()};
  in.finish();
  return body;
}

Bytes write_body(const MatchedBody& body) {
  Bytes out;
  out.reserve(8 + body.addresses.size() * sizeof(Address));
  WireWriter(out).number(body.hold_ms).array(std::span<const Address>(body.addresses));
  return out;
}

MatchedBody read_matched(std::span<const std::byte> bytes) {
  WireReader in(bytes);
  MatchedBody body;
  body.hold_ms = in.number<std::uint32_t>();
  body.addresses = in.array<Address>(kAddressesMax);
  in.finish();
  return body;
}

Bytes write_body(const MatchKeysBody& body) {
  Bytes out;
  out.reserve(16 + body.cache.size() + body.keys.size());
  WireWriter(out)
      .number(body.hold_ms)
      .number(static_cast<std::uint8_t>(body.every))
      .number(body.key_bytes)
      .blob(body.keys)
      .text(body.cache);
  return out;
}

MatchKeysBody read_match_keys(std::span<const std::byte> bytes) {
  WireReader in(bytes);
  MatchKeysBody body;
  body.hold_ms = in.number<std::uint32_t>();
  const auto every = in.number<std::uint8_t>();
  if (every > 1) malformed("a flag of " + std::to_string(every));
  body.every = every == 1;
  body.key_bytes = in.number<std::uint8_t>();
  if (body.key_bytes < kKeyBytesMin || body.key_bytes > kKeyBytesMax) {
    malformed("keys of " + std::to_string(body.key_bytes) + " bytes");
  }
  body.keys = in.blob(kKeyListBytesMax);
  if (body.keys.size() % body.key_bytes != 0) malformed("a part of a key");
  const std::span<const std::byte> name = in.blob(kCacheNameBytesMax);
  body.cache = {reinterpret_cast<const char*>(name.data()), name.size()};
  in.finish();
  return body;
}

Bytes write_body(const MatchedKeysBody& body) {
  Bytes out;
  out.reserve(12 + body.found.size() + body.addresses.size() * sizeof(Address));
  WireWriter(out).number(body.hold_ms).blob(body.found).array(std::span<const Address>(body.addresses));
  return out;
}

MatchedKeysBody read_matched_keys(std::span<const std::byte> bytes) {
  WireReader in(bytes);
  MatchedKeysBody body;
  body.hold_ms = in.number<std::uint32_t>();
  const std::span<const std::byte> found = in.blob(kMatchedKeysMax / 8);
  body.found.assign(found.begin(), found.end());
  body.addresses = in.array<Address>(kMatchedKeysMax);
  in.finish();
  std::size_t set = 0;
  for (const std::byte eight : body.found) set += static_cast<std::size_t>(std::popcount(static_cast<unsigned>(eight)));
  if (set != body.addresses.size()) {
    malformed(std::to_string(set) + " keys are found, and there are " + std::to_string(body.addresses.size()) +
              " addresses");
  }
  return body;
}

Bytes write_addresses(std::span<const Address> addresses) {
  Bytes out;
  out.reserve(4 + addresses.size() * sizeof(Address));
  WireWriter(out).array(addresses);
  return out;
}

std::vector<Address> read_addresses(std::span<const std::byte> bytes) {
  WireReader in(bytes);
  auto addresses = in.array<Address>(kAddressesMax);
  in.finish();
  return addresses;
}

Bytes write_error(const Error& error) {
  if (error.code() == ErrorCode::kSuspended) {  // to a peer one of the reasons to try again later
    return write_error(Error(ErrorCode::kBusy, error.what(), {{"retry_after_us", kSuspendedRetryAfterUs}}));
  }
  Bytes out;
  WireWriter writer(out);
  const std::size_t fields = std::min(error.fields().size(), kErrorFieldsMax);
  writer.number(static_cast<std::uint8_t>(error.code()))
      .text(std::string_view(error.what()).substr(0, kErrorTextMax))
      .number(static_cast<std::uint8_t>(fields));
  for (std::size_t i = 0; i < fields; ++i) {
    const auto& [name, value] = error.fields()[i];
    writer.text(std::string_view(name).substr(0, kErrorNameMax)).number(static_cast<std::uint64_t>(value));
  }
  return out;
}

Error read_error(std::span<const std::byte> bytes) {
  WireReader in(bytes);
  const auto code = in.number<std::uint8_t>();
  if (!may_be_told(code)) malformed("error code " + std::to_string(code));
  const std::string text = in.text(kErrorTextMax);
  Error error(static_cast<ErrorCode>(code), text);
  const auto fields = in.number<std::uint8_t>();
  if (fields > kErrorFieldsMax) malformed(std::to_string(fields) + " fields of an error");
  for (int i = 0; i < fields; ++i) {
    const std::string name = in.text(kErrorNameMax);
    const auto value = static_cast<std::int64_t>(in.number<std::uint64_t>());
    const auto* const known =
        std::find_if(kFieldNames.begin(), kFieldNames.end(), [&](const char* field) { return name == field; });
    if (known != kFieldNames.end()) error.add(*known, value);
  }
  in.finish();
  return error;
}

}  // namespace kvpool
