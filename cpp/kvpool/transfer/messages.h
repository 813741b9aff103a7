// The bodies of calls and answers: docs/wire.md. Reading checks format and limits; the session checks that numbers name
// existing blocks and layers.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/base/error.h"
#include "kvpool/net/link.h"
#include "kvpool/net/wire.h"
#include "kvpool/transfer/request.h"
#include "kvpool/transfer/verbs.h"

namespace kvpool {

struct LendBody {
  std::uint32_t blocks = 0;
  MediumChoice medium = Medium::kHbm;
  bool may_evict = true;
};

struct ReserveBody {
  std::uint32_t blocks = 0;
  MediumChoice medium = Medium::kHbm;
  bool may_evict = true;
  bool insert = false;
  bool one_sided = true;  // the sender will write by a one-sided route
  std::uint64_t lifetime_ms = 0;
  std::string name_space;
  std::vector<Token> tokens;
};

struct ReservedBody {
  std::uint32_t held = 0;  // blocks of the prompt that the receiver has cached
  std::vector<Address> addresses;
};

struct CompleteBody {
  std::uint64_t bytes = 0;  // written in all; a receiver that has placed them compares
  bool has_private = false;
  bool has_checksum = false;
  bool insert = false;         // of named blocks: the prompt below
  std::uint32_t checksum = 0;  // CRC-32C of the blocks' contents, in the order of the request
  std::vector<Address> named;  // lent destinations; empty if they were reserved
  Bytes private_bytes;
  std::string name_space;
  std::vector<Token> tokens;
};

struct FetchBody {
  Priority priority = Priority::kPrefill;
  std::vector<Address> from;  // of the owner
  std::vector<Address> to;    // of the caller, reserved for the owner
  bool checksum = false;      // the answer has one
  std::string route = {};     // empty: the owner chooses
};

// What the owner has done.
struct FetchedBody {
  std::string route;
  std::uint64_t calls = 0;
  std::uint64_t write_us = 0;
  std::optional<std::uint32_t> checksum;  // as in CompleteBody
};

// Reads and writes the memory of others: a prompt may be long, and is read once.
struct MatchBody {
  std::uint32_t hold_ms = 0;  // how long the caller wants the blocks held
  std::span<const Token> tokens;
  std::string_view name_space;
};

struct MatchedBody {
  std::uint32_t hold_ms = 0;       // how long they are held, from now on
  std::vector<Address> addresses;  // of the owner: the cached beginning of the prompt
};

// Reads and writes the memory of others, too.
struct MatchKeysBody {
  std::uint32_t hold_ms = 0;
  bool every = false;  // all that are stored, not only those before the first that is not
  std::uint8_t key_bytes = 0;
  std::span<const std::byte> keys;  // one after another
  std::string_view cache;
};

struct MatchedKeysBody {
  std::uint32_t hold_ms = 0;
  Bytes found;                     // a bit for each key, from the lowest of the first byte on
  std::vector<Address> addresses;  // of the owner: one for each bit that is set
};

inline constexpr std::size_t kErrorTextMax = 4096;
inline constexpr std::size_t kErrorFieldsMax = 16;
inline constexpr std::size_t kErrorNameMax = 64;
inline constexpr std::size_t kErrorBytesMax = 1 + (4 + kErrorTextMax) + 1 + kErrorFieldsMax * (4 + kErrorNameMax + 8);

// Throws kArgument if a call cannot hold such a prompt. `call`: what it is for, in the error's text.
void check_prompt(std::size_t tokens, std::string_view name_space, std::string_view call);
Bytes write_body(const LendBody& body);
Bytes write_body(const ReserveBody& body);
Bytes write_body(const ReservedBody& body);
Bytes write_body(const CompleteBody& body);
Bytes write_body(const FetchBody& body);
Bytes write_body(const FetchedBody& body);
Bytes write_body(const MatchBody& body);
Bytes write_body(const MatchedBody& body);
Bytes write_body(const MatchKeysBody& body);
Bytes write_body(const MatchedKeysBody& body);
Bytes write_addresses(std::span<const Address> addresses);  // of lend, return and complete
Bytes write_error(const Error& error);                      // kRefused

// Throw Error kProtocol.
LendBody read_lend(std::span<const std::byte> bytes);
ReserveBody read_reserve(std::span<const std::byte> bytes);
ReservedBody read_reserved(std::span<const std::byte> bytes);
CompleteBody read_complete(std::span<const std::byte> bytes);
FetchBody read_fetch(std::span<const std::byte> bytes);
FetchedBody read_fetched(std::span<const std::byte> bytes);
MatchBody read_match(std::span<const std::byte> bytes);  // as long as the bytes are there, which are aligned for Token
MatchedBody read_matched(std::span<const std::byte> bytes);
MatchKeysBody read_match_keys(std::span<const std::byte> bytes);  // as long as the bytes are there
MatchedKeysBody read_matched_keys(std::span<const std::byte> bytes);
std::vector<Address> read_addresses(std::span<const std::byte> bytes);
Error read_error(std::span<const std::byte> bytes);

}  // namespace kvpool
