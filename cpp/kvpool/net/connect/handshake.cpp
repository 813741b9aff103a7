#include "kvpool/net/connect/handshake.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <system_error>

#include "kvpool/base/digest.h"

namespace kvpool {
namespace {

constexpr std::string_view kMagic = "KVPL";

// Contexts of derive_key: constants, different for each purpose, never to be used for another one.
constexpr std::string_view kProofContext = "kvpool 2026 handshake proof";
constexpr std::string_view kSessionContext = "kvpool 2026 handshake session";
constexpr std::string_view kClientToServerContext = "kvpool 2026 frames client to server";
constexpr std::string_view kServerToClientContext = "kvpool 2026 frames server to client";

constexpr std::byte kWelcome{1};
constexpr std::byte kWrongProof{2};

Nonce draw_nonce() {
  Nonce nonce;
  std::size_t filled = 0;
  while (filled < nonce.size()) {
    const ssize_t got = getrandom(nonce.data() + filled, nonce.size() - filled, 0);
    if (got < 0) {
      if (errno == EINTR) continue;
      throw std::system_error(errno, std::generic_category(), "no random bytes for a handshake");
    }
    filled += static_cast<std::size_t>(got);
  }
  return nonce;
}

std::string range_of(WireVersions versions) {
  return versions.min == versions.max ? std::to_string(versions.min)
                                      : std::to_string(versions.min) + " to " + std::to_string(versions.max);
}

// The highest version that both sides speak; 0 if they have no version in common.
std::uint16_t common_version(WireVersions left, WireVersions right) noexcept {
  const std::uint16_t highest = std::min(left.max, right.max);
  return highest >= std::max(left.min, right.min) ? highest : std::uint16_t{0};
}

[[noreturn]] void fail_protocol(const std::string& what) {
  throw Error(ErrorCode::kProtocol, "what listens or calls at the other end is not a kvpool: " + what);
}

[[noreturn]] void fail_auth(const std::string& what) { throw Error(ErrorCode::kAuth, what); }

constexpr Handshake::Role other(Handshake::Role role) noexcept {
  return role == Handshake::Role::kClient ? Handshake::Role::kServer : Handshake::Role::kClient;
}

}  // namespace

// Both hellos have this shape, and keep it in every version to come: it is what tells versions from one another.
struct Handshake::Hello {
  std::array<char, 4> magic;
  Role role;
  Channel channel;
  WireVersions versions;
  std::uint16_t version;  // the version agreed on; 0 in the client's hello, and in the server's if no version is common
  Nonce nonce;
};

Handshake::Handshake(Role role, std::string secret, Channel channel)
    : Handshake(role, std::move(secret), channel, WireVersions{}, draw_nonce()) {}

Handshake::Handshake(Role role, std::string secret, Channel channel, WireVersions versions, const Nonce& nonce)
    : role_(role),
      channel_(channel),
      versions_(versions),
      nonce_(nonce),
      proof_key_(derive_key(kProofContext, secret.data(), secret.size())),
      session_key_(derive_key(kSessionContext, secret.data(), secret.size())) {
  static_assert(sizeof(Hello) == 44, "no padding: it goes out as it is");
  KVPOOL_CHECK(0 < versions.min && versions.min <= versions.max);
  wipe(secret.data(), secret.size());
}

Handshake::~Handshake() {
  wipe(&proof_key_, sizeof(proof_key_));
  wipe(&session_key_, sizeof(session_key_));
  wipe(&keys_, sizeof(keys_));
}

Bytes Handshake::start() {
  KVPOOL_CHECK(state_ == State::kHello && transcript_.empty());
  Bytes out;
  if (role_ == Role::kClient) {
    const Hello hello = own_hello();
    send(std::as_bytes(std::span(&hello, 1)), out);
  }
  return out;
}

std::size_t Handshake::advance(std::span<const std::byte> in, Bytes& out) {
  if (state_ == State::kFailed) throw Error(ErrorCode::kProtocol, "the handshake has failed already");
  std::size_t taken = 0;
  try {
    while (!done() && taken < in.size()) {
      const std::size_t bytes = std::min(message_bytes() - pending_.size(), in.size() - taken);
      const auto piece = in.subspan(taken, bytes);
      pending_.insert(pending_.end(), piece.begin(), piece.end());
      taken += bytes;
      check_beginning();
      if (pending_.size() == message_bytes()) take_message(out);
    }
  } catch (...) {
    state_ = State::kFailed;
    throw;
  }
  return taken;
}

std::size_t Handshake::message_bytes() const noexcept {
  switch (state_) {
    case State::kHello:
      return sizeof(Hello);
    case State::kVerdict:
      return sizeof(kWelcome);
    default:
      return sizeof(Key);
  }
}

// What is no kvpool is told from it by its first bytes: no need to wait for the rest, which may never come.
void Handshake::check_beginning() const {
  if (state_ != State::kHello) return;
  if (std::memcmp(pending_.data(), kMagic.data(), std::min(pending_.size(), kMagic.size())) != 0) {
    fail_protocol("it does not begin with \"KVPL\"");
  }
}

// The whole message is in pending_.
void Handshake::take_message(Bytes& out) {
  const bool client = role_ == Role::kClient;
  if (state_ == State::kHello) {
    client ? take_server_hello(out) : take_client_hello(out);
  } else if (state_ == State::kVerdict) {
    take_verdict();
  } else {
    client ? take_server_proof() : take_client_proof(out);
  }
  pending_.clear();
}

// ---- the server's side

void Handshake::take_client_hello(Bytes& out) {
  const Hello theirs = take_hello();
  version_ = common_version(versions_, theirs.versions);
  const Hello hello = own_hello();  // also when it leads nowhere: so the client learns why
  send(std::as_bytes(std::span(&hello, 1)), out);
  check_channel(theirs);
  if (version_ == 0) fail_versions(theirs.versions);
  state_ = State::kProof;
}

void Handshake::take_client_proof(Bytes& out) {
  if (!proves(Role::kClient)) {
    out.push_back(kWrongProof);
    fail_auth("a peer that wants to connect does not know the secret; both sides must be given the same one");
  }
  transcript_.insert(transcript_.end(), pending_.begin(), pending_.end());
  send(std::span(&kWelcome, 1), out);
  const Key proof = proof_of(Role::kServer);
  send(proof, out);
  agree_on_keys();
}

// ---- the client's side

void Handshake::take_server_hello(Bytes& out) {
  const Hello theirs = take_hello();
  check_channel(theirs);
  const std::uint16_t expected = common_version(versions_, theirs.versions);
  if (theirs.version == 0 || expected == 0) fail_versions(theirs.versions);
  // Not the server's to choose: a lower one would be a downgrade.
  if (theirs.version != expected) {
    fail_protocol("it chose version " + std::to_string(theirs.version) + " where both speak " +
                  std::to_string(expected));
  }
  version_ = theirs.version;
  const Key proof = proof_of(Role::kClient);
  send(proof, out);
  state_ = State::kVerdict;
}

void Handshake::take_verdict() {
  const std::byte verdict = pending_.front();
  if (verdict == kWrongProof) {
    fail_auth("the peer refuses the connection: its secret differs; give both sides the same one");
  }
  if (verdict != kWelcome) fail_protocol("its verdict is " + std::to_string(std::to_integer<int>(verdict)));
  transcript_.push_back(verdict);
  state_ = State::kProof;
}

void Handshake::take_server_proof() {
  if (!proves(Role::kServer)) {
    fail_auth("the peer that answers does not know the secret, and says that it does: it is not who it should be");
  }
  transcript_.insert(transcript_.end(), pending_.begin(), pending_.end());
  agree_on_keys();
}

// ---- both

Handshake::Hello Handshake::own_hello() const noexcept {
  Hello hello{};
  std::copy(kMagic.begin(), kMagic.end(), hello.magic.begin());
  hello.role = role_;
  hello.channel = channel_;
  hello.versions = versions_;
  hello.version = version_;
  hello.nonce = nonce_;
  return hello;
}

Handshake::Hello Handshake::take_hello() {
  Hello hello;
  std::memcpy(&hello, pending_.data(), sizeof(hello));
  if (hello.role != other(role_)) {
    fail_protocol(role_ == Role::kClient ? "it repeats what it hears, or calls where it should answer"
                                         : "it answers where it should call");
  }
  if (hello.versions.min == 0 || hello.versions.min > hello.versions.max ||
      (role_ == Role::kServer && hello.version != 0)) {
    fail_protocol("its versions make no sense: " + std::to_string(hello.versions.min) + " to " +
                  std::to_string(hello.versions.max) + ", agreed " + std::to_string(hello.version));
  }
  transcript_.insert(transcript_.end(), pending_.begin(), pending_.end());
  return hello;
}

void Handshake::check_channel(const Hello& theirs) const {
  if (theirs.channel != channel_) {
    throw Error(
        ErrorCode::kProtocol,
        channel_ == Channel::kLocal
            ? "the peer takes this connection for one over a network; it is a Unix socket of one user's"
            : "the peer takes this connection for a Unix socket of one user's; it is not. Somebody stands between");
  }
}

void Handshake::send(std::span<const std::byte> message, Bytes& out) {
  out.insert(out.end(), message.begin(), message.end());
  transcript_.insert(transcript_.end(), message.begin(), message.end());
}

// Every message before a proof has a fixed length, so no two conversations have the same bytes.
Key Handshake::proof_of(Role role) const {
  KeyedHash mac(proof_key_);
  mac.update(&role, sizeof(role));
  mac.update(transcript_.data(), transcript_.size());
  return mac.finish();
}

// That pending_ is the proof of `role`.
bool Handshake::proves(Role role) const {
  const Key expected = proof_of(role);
  return equal_secret(expected.data(), pending_.data(), expected.size());
}

void Handshake::agree_on_keys() {
  Bytes material(session_key_.begin(), session_key_.end());
  material.insert(material.end(), transcript_.begin(), transcript_.end());
  const Key to_server = derive_key(kClientToServerContext, material.data(), material.size());
  const Key to_client = derive_key(kServerToClientContext, material.data(), material.size());
  keys_ = role_ == Role::kClient ? SessionKeys{to_server, to_client} : SessionKeys{to_client, to_server};
  wipe(material.data(), session_key_.size());
  state_ = State::kDone;
}

void Handshake::fail_versions(WireVersions theirs) const {
  throw Error(ErrorCode::kProtocol,
              "no version in common: this side speaks version " + range_of(versions_) + " of the protocol, the peer " +
                  range_of(theirs),
              {{"version_min", versions_.min},
               {"version_max", versions_.max},
               {"peer_version_min", theirs.min},
               {"peer_version_max", theirs.max}});
}

}  // namespace kvpool
