#include "kvpool/base/digest.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "fuzz_seeds.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

std::vector<std::byte> random_bytes(Dice& dice, std::size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(dice.any());
  return bytes;
}

// The definition: one bit at a time.
std::uint32_t naive_crc32c(std::uint32_t crc, const std::vector<std::byte>& bytes) {
  crc = ~crc;
  for (const std::byte byte : bytes) {
    crc ^= static_cast<std::uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78U : 0U);
  }
  return ~crc;
}

std::string hex(const Digest& digest) {
  std::string text;
  for (const std::byte byte : digest) {
    text += "0123456789abcdef"[std::to_integer<int>(byte) >> 4];
    text += "0123456789abcdef"[std::to_integer<int>(byte) & 15];
  }
  return text;
}

// Input of BLAKE3's own test vectors: 0, 1, ..., 250, 0, 1, ...
std::vector<std::byte> vector_input(std::size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i % 251);
  return bytes;
}

constexpr std::string_view kVectorKey = "whats the Elvish word for friend";
constexpr std::string_view kVectorContext = "BLAKE3 2019-12-27 16:29:52 test vectors context";

struct Vector {
  std::size_t bytes;
  std::string_view keyed_hash;
  std::string_view derived_key;
};

// From test_vectors.json of BLAKE3.
constexpr Vector kVectors[] = {
    {0, "92b2b75604ed3c761f9d6f62392c8a9227ad0ea3f09573e783f1498a4ed60d26",
     "2cc39783c223154fea8dfb7c1b1660f2ac2dcbd1c1de8277b0b0dd39b7e50d7d"},
    {1, "6d7878dfff2f485635d39013278ae14f1454b8c0a3a2d34bc1ab38228a80c95b",
     "b3e2e340a117a499c6cf2398a19ee0d29cca2bb7404c73063382693bf66cb06c"},
    {1023, "c951ecdf03288d0fcc96ee3413563d8a6d3589547f2c2fb36d9786470f1b9d6e",
     "74a16c1c3d44368a86e1ca6df64be6a2f64cce8f09220787450722d85725dea5"},
    {1024, "75c46f6f3d9eb4f55ecaaee480db732e6c2105546f1e675003687c31719c7ba4",
     "7356cd7720d5b66b6d0697eb3177d9f8d73a4a5c5e968896eb6a689684302706"},
    {1025, "357dc55de0c7e382c900fd6e320acc04146be01db6a8ce7210b7189bd664ea69",
     "effaa245f065fbf82ac186839a249707c3bddf6d3fdda22d1b95a3c970379bcb"},
    {2048, "879cf1fa2ea0e79126cb1063617a05b6ad9d0b696d0d757cf053439f60a99dd1",
     "7b2945cb4fef70885cc5d78a87bf6f6207dd901ff239201351ffac04e1088a23"},
    {2049, "9f29700902f7c86e514ddc4df1e3049f258b2472b6dd5267f61bf13983b78dd5",
     "2ea477c5515cc3dd606512ee72bb3e0e758cfae7232826f35fb98ca1bcbdf273"},
    {3072, "044a0e7b172a312dc02a4c9a818c036ffa2776368d7f528268d2e6b5df191770",
     "050df97f8c2ead654d9bb3ab8c9178edcd902a32f8495949feadcc1e0480c46b"},
    {3073, "68dede9bef00ba89e43f31a6825f4cf433389fedae75c04ee9f0cf16a427c95a",
     "72613c9ec9ff7e40f8f5c173784c532ad852e827dba2bf85b2ab4b76f7079081"},
    {4096, "befc660aea2f1718884cd8deb9902811d332f4fc4a38cf7c7300d597a081bfc0",
     "1e0d7f3db8c414c97c6307cbda6cd27ac3b030949da8e23be1a1a924ad2f25b9"},
    {4097, "00df940cd36bb9fa7cbbc3556744e0dbc8191401afe70520ba292ee3ca80abbc",
     "aca51029626b55fda7117b42a7c211f8c6e9ba4fe5b7a8ca922f34299500ead8"},
    {5120, "2c493e48e9b9bf31e0553a22b23503c0a3388f035cece68eb438d22fa1943e20",
     "7a7acac8a02adcf3038d74cdd1d34527de8a0fcc0ee3399d1262397ce5817f60"},
    {5121, "6ccf1c34753e7a044db80798ecd0782a8f76f33563accaddbfbb2e0ea4b2d024",
     "b07f01e518e702f7ccb44a267e9e112d403a7b3f4883a47ffbed4b48339b3c34"},
    {6144, "3d6b6d21281d0ade5b2b016ae4034c5dec10ca7e475f90f76eac7138e9bc8f1d",
     "2a95beae63ddce523762355cf4b9c1d8f131465780a391286a5d01abb5683a15"},
    {6145, "9ac301e9e39e45e3250a7e3b3df701aa0fb6889fbd80eeecf28dbc6300fbc539",
     "379bcc61d0051dd489f686c13de00d5b14c505245103dc040d9e4dd1facab8e5"},
    {7168, "b42835e40e9d4a7f42ad8cc04f85a963a76e18198377ed84adddeaecacc6f3fc",
     "11c37a112765370c94a51415d0d651190c288566e295d505defdad895dae2237"},
    {7169, "ed9b1a922c046fdb3d423ae34e143b05ca1bf28b710432857bf738bcedbfa511",
     "554b0a5efea9ef183f2f9b931b7497995d9eb26f5c5c6dad2b97d62fc5ac31d9"},
    {8192, "dc9637c8845a770b4cbf76b8daec0eebf7dc2eac11498517f08d44c8fc00d58a",
     "ad01d7ae4ad059b0d33baa3c01319dcf8088094d0359e5fd45d6aeaa8b2d0c3d"},
    {8193, "954a2a75420c8d6547e3ba5b98d963e6fa6491addc8c023189cc519821b4a1f5",
     "af1e0346e389b17c23200270a64aa4e1ead98c61695d917de7d5b00491c9b0f1"},
    {16384, "9e9fc4eb7cf081ea7c47d1807790ed211bfec56aa25bb7037784c13c4b707b0d",
     "160e18b5878cd0df1c3af85eb25a0db5344d43a6fbd7a8ef4ed98d0714c3f7e1"},
    {31744, "efa53b389ab67c593dba624d898d0f7353ab99e4ac9d42302ee64cbf9939a419",
     "39772aef80e0ebe60596361e45b061e8f417429d529171b6764468c22928e28e"},
    {102400, "1c35d1a5811083fd7119f5d5d1ba027b4d01c0c6c49fb6ff2cf75393ea5db4a7",
     "4652cff7a3f385a6103b5c260fc1593e13c778dbe608efb092fe7ee69df6e9c6"},
};

Digest key_of(std::string_view text) {
  Digest key{};
  std::memcpy(key.data(), text.data(), std::min(text.size(), key.size()));
  return key;
}

}  // namespace

TEST_CASE("CRC-32C gives the values of RFC 3720, in every implementation that this processor can run") {
  const auto check = [](const std::vector<std::byte>& bytes, std::uint32_t expected) {
    CHECK(crc32c(0, bytes.data(), bytes.size()) == expected);
    for (const CrcWay& way : crc32c_ways()) {
      CAPTURE(way.name);
      CHECK(way.append(0, bytes.data(), bytes.size()) == expected);
    }
  };
  std::vector<std::byte> bytes(32, std::byte{0});
  check(bytes, 0x8A9136AA);
  std::fill(bytes.begin(), bytes.end(), std::byte{0xFF});
  check(bytes, 0x62A8AB43);
  for (std::size_t i = 0; i < 32; ++i) bytes[i] = static_cast<std::byte>(i);
  check(bytes, 0x46DD794E);
  std::reverse(bytes.begin(), bytes.end());
  check(bytes, 0x113FDB5C);
  // An iSCSI read command.
  const unsigned char command[48] = {0x01, 0xC0, 0, 0, 0, 0, 0,    0, 0,    0, 0, 0,    0, 0, 0, 0,
                                     0x14, 0,    0, 0, 0, 0, 0x04, 0, 0,    0, 0, 0x14, 0, 0, 0, 0x18,
                                     0x28, 0,    0, 0, 0, 0, 0,    0, 0x02, 0, 0, 0,    0, 0, 0, 0};
  bytes.assign(48, std::byte{0});
  std::memcpy(bytes.data(), command, 48);
  check(bytes, 0xD9963A56);
  const char digits[] = "123456789";
  CHECK(crc32c(0, digits, 9) == 0xE3069283);
  CHECK(crc32c(0, digits, 0) == 0);
}

TEST_CASE("CRC-32C agrees with its definition at every length, alignment and cut") {
  for (const std::uint64_t seed : fuzz_seeds()) {
    announce_fuzz("crc32c", seed);
    Dice dice(seed);
    for (int round = 0; round < fuzz_length(300); ++round) {
      // Lengths about the three lanes of 128 and of 2,048 bytes and the folds of 256, where one loop hands over to the
      // next.
      const std::size_t count = dice.one_in(4) ? dice.below(20000) : dice.below(900);
      const auto bytes = random_bytes(dice, count);
      const auto start = static_cast<std::uint32_t>(dice.any());
      const std::uint32_t expected = naive_crc32c(start, bytes);
      std::vector<std::byte> shifted(count + 8);
      const std::size_t shift = dice.below(8);
      if (count > 0) std::memcpy(shifted.data() + shift, bytes.data(), count);
      const std::size_t cut = dice.below(count + 1);
      for (const CrcWay& way : crc32c_ways()) {
        CAPTURE(way.name);
        REQUIRE(way.append(start, bytes.data(), count) == expected);
        const std::uint32_t half = way.append(start, shifted.data() + shift, cut);
        REQUIRE(way.append(half, shifted.data() + shift + cut, count - cut) == expected);
      }
    }
  }
}

TEST_CASE("CRC-32C finds every single flipped bit") {
  Dice dice(7);
  auto bytes = random_bytes(dice, 7000);
  const std::uint32_t before = crc32c(0, bytes.data(), bytes.size());
  for (std::size_t bit = 0; bit < bytes.size() * 8; bit += 61) {
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    CHECK(crc32c(0, bytes.data(), bytes.size()) != before);
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
  }
}

TEST_CASE("keyed BLAKE3 and key derivation give the values of BLAKE3's own test vectors") {
  KeyedHash hash(key_of(kVectorKey));
  for (const Vector& vector : kVectors) {
    const auto input = vector_input(vector.bytes);
    hash.reset();
    hash.update(input.data(), input.size());
    CHECK(hex(hash.finish()) == vector.keyed_hash);
    CHECK(hex(derive_key(kVectorContext, input.data(), input.size())) == vector.derived_key);
  }
}

TEST_CASE("a keyed hash does not depend on how its bytes are cut") {
  for (const std::uint64_t seed : fuzz_seeds()) {
    announce_fuzz("keyed hash", seed);
    Dice dice(seed);
    KeyedHash hash(key_of(kVectorKey));
    for (int round = 0; round < fuzz_length(20); ++round) {
      for (const Vector& vector : kVectors) {
        const auto input = vector_input(vector.bytes);
        hash.reset();
        for (std::size_t at = 0; at < input.size();) {
          const std::size_t longest = dice.one_in(3) ? 70000 : dice.one_in(2) ? 5000 : 60;
          const std::size_t piece = std::min<std::size_t>(dice.below(longest), input.size() - at);
          hash.update(input.data() + at, piece);
          at += piece;
          if (dice.one_in(20)) hash.finish();  // to look at it changes nothing
        }
        REQUIRE(hex(hash.finish()) == vector.keyed_hash);
        REQUIRE(hex(hash.finish()) == vector.keyed_hash);
      }
    }
  }
}

TEST_CASE("different keys or contexts give different hashes") {
  const char text[] = "the same words";
  KeyedHash one(key_of("one"));
  KeyedHash two(key_of("two"));
  one.update(text, sizeof(text));
  two.update(text, sizeof(text));
  CHECK(one.finish() != two.finish());
  CHECK(derive_key("purpose a", text, sizeof(text)) != derive_key("purpose b", text, sizeof(text)));
  CHECK(derive_key("purpose a", text, sizeof(text)) != derive_key("purpose a", text, sizeof(text) - 1));
  CHECK(derive_key("purpose a", nullptr, 0) == derive_key("purpose a", text, 0));
}

TEST_CASE("the first hashes of several threads at once are right") {
  const auto input = vector_input(kVectors[1].bytes);
  std::vector<std::thread> threads;
  threads.reserve(4);
  std::vector<std::string> results(4);
  for (std::string& result : results) {
    threads.emplace_back([&] {
      KeyedHash hash(key_of(kVectorKey));
      hash.update(input.data(), input.size());
      result = hex(hash.finish());
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& result : results) CHECK(result == kVectors[1].keyed_hash);
}

TEST_CASE("secrets are equal if every byte is, and a wiped one is gone") {
  Digest left = key_of(kVectorKey);
  Digest right = left;
  CHECK(equal_secret(left.data(), right.data(), left.size()));
  CHECK(equal_secret(left.data(), right.data(), 0));
  for (std::size_t i = 0; i < right.size(); ++i) {
    right[i] ^= std::byte{0x80};
    CHECK_FALSE(equal_secret(left.data(), right.data(), left.size()));
    CHECK(equal_secret(left.data(), right.data(), i));
    right[i] ^= std::byte{0x80};
  }
  wipe(left.data(), left.size());
  CHECK(left == Digest{});
}
