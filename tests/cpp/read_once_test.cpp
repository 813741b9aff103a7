#include "kvpool/index/read_once.h"

#include <doctest/doctest.h>

#include <numeric>
#include <vector>

namespace kvpool::testing {

TEST_CASE("runs agree up to their first difference, whatever their length and alignment") {
  std::vector<Token> ours(400);
  std::iota(ours.begin(), ours.end(), 7);
  for (std::size_t offset = 0; offset < 4; ++offset) {
    for (std::size_t n = 0; n < 140; ++n) {
      std::vector<Token> theirs(ours.begin(), ours.end());
      CHECK(agreement_read_once(ours.data() + offset, theirs.data() + offset, n) == n);
      for (std::size_t at = 0; at < n; ++at) {
        theirs[offset + at] ^= 1 << (at % 31);
        CHECK(agreement_read_once(ours.data() + offset, theirs.data() + offset, n) == at);
        theirs[offset + at] = ours[offset + at];
      }
    }
  }
}

TEST_CASE("the first of several differences counts, and nothing beyond the end is read") {
  std::vector<Token> ours(1000, 3);
  for (std::size_t first = 0; first < 300; first += 7) {
    std::vector<Token> theirs = ours;
    for (std::size_t at = first; at < theirs.size(); at += 3) theirs[at] = -1;
    CHECK(agreement_read_once(ours.data(), theirs.data(), theirs.size()) == first);
    CHECK(agreement_read_once(ours.data(), theirs.data(), first) == first);
  }
}

TEST_CASE("a copy of a page has the bytes that were read, for pages of any length") {
  for (const std::size_t page : {1, 16, 64, 65, 4096}) {
    std::vector<Token> tokens(page);
    std::iota(tokens.begin(), tokens.end(), 1);
    PageCopy copy(page);
    const Token* read = copy.read(tokens.data(), page);
    tokens.assign(page, 0);
    CHECK(read[0] == 1);
    CHECK(read[page - 1] == static_cast<Token>(page));
  }
}

}  // namespace kvpool::testing
