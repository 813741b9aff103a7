// Media, and how addresses and requests name them.
#include "kvpool/base/medium.h"

#include <doctest/doctest.h>

#include <set>
#include <string_view>

#include "kvpool/base/address.h"
#include "kvpool/base/media_set.h"

namespace kvpool {
namespace {

TEST_CASE("an address keeps its four parts, whatever the others") {
  for (const Medium medium : kMedia) {
    for (const std::uint32_t instance : {0U, 1U, kInstanceMax}) {
      for (const std::uint32_t generation : {0U, 1U, kGenerationMax}) {
        for (const std::uint32_t block : {0U, 1U, kBlocksMax - 1}) {
          const Address address = make_address(instance, medium, generation, block);
          CHECK(instance_of(address) == instance);
          CHECK(medium_of(address) == medium);
          CHECK(generation_of(address) == generation);
          CHECK(block_of(address) == block);
        }
      }
    }
  }
  CHECK(kInstanceMax == 16'383);
  CHECK(kGenerationMax == 8'388'607);
  CHECK(kBlocksMax == 16'777'216);
}

TEST_CASE("media have the codes of docs/wire.md, and other codes name no medium") {
  CHECK(static_cast<int>(Medium::kHbm) == 1);
  CHECK(static_cast<int>(Medium::kDram) == 2);
  CHECK(static_cast<int>(Medium::kDisk) == 3);
  std::set<std::uint32_t> media;
  for (std::uint32_t code = 0; code < 1U << kMediumBits; ++code) {
    if (is_medium(code)) media.insert(code);
  }
  CHECK(media == std::set<std::uint32_t>{1, 2, 3});
}

TEST_CASE("MIXED is a request: its code is that of no medium, and does not fit an address") {
  CHECK_FALSE(is_medium(kMixed.code()));
  CHECK(kMixed.code() >= 1U << kMediumBits);
  CHECK(media_set_of(kMixed) == MediaSet{true, true, false});
  CHECK(media_set_of(Medium::kDisk) == MediaSet{false, false, true});
  for (std::uint32_t code = 0; code < 256; ++code) {
    CHECK(MediumChoice::is_code(code) == (is_medium(code) || code == kMixed.code()));
  }
  for (const Medium medium : kMedia) {
    CHECK(std::string_view(MediumChoice(medium).name()) == medium_name(medium));
    CHECK(MediumChoice(medium) != kMixed);
  }
}

}  // namespace
}  // namespace kvpool
