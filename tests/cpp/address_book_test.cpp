#include "kvpool/peers/address_book.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

namespace kvpool::testing {
namespace {

ClusterMember member(const std::string& name, std::uint32_t instance, std::uint64_t incarnation) {
  return {name, instance, incarnation, {"unix:@" + name}};
}

TEST_CASE("a book finds members by name and by id, and lists them") {
  AddressBook book;
  CHECK(book.names().empty());
  CHECK_FALSE(book.find("a"));
  CHECK(book.set({member("b", 2, 20), member("a", 1, 10)}).empty());
  CHECK(book.names() == "a, b");
  REQUIRE(book.find("b"));
  CHECK(book.find("b")->incarnation == 20);
  CHECK(book.find("b")->addresses == std::vector<std::string>{"unix:@b"});
  CHECK(book.name_of(1) == "a");
  CHECK(book.name_of(3).empty());
  CHECK(book.lists(member("a", 1, 10)));
  CHECK_FALSE(book.lists(member("a", 1, 11)));
  CHECK(book.set({member("b", 2, 20)}).empty());  // a member that is left out was not replaced
  CHECK_FALSE(book.find("a"));
}

TEST_CASE("an incarnation that is replaced under its name is reported once") {
  AddressBook book;
  book.set({member("a", 1, 10), member("b", 2, 20)});
  CHECK(book.set({member("a", 3, 30), member("b", 2, 20)}) == std::vector<std::uint64_t>{10});
  CHECK(book.set({member("a", 3, 30), member("b", 2, 20)}).empty());
}

TEST_CASE("an expelled member is not in the book until a new list names it") {
  AddressBook book;
  book.set({member("a", 1, 10), member("b", 2, 20)});
  for (int i = 0; i < 2; ++i) book.expel(10, "its lease has run out");
  CHECK(book.expelled(10) == "its lease has run out");
  CHECK_FALSE(book.expelled(20));
  CHECK(book.names() == "b");
  book.set({member("b", 2, 20)});
  CHECK(book.expelled(10));
  book.set({member("a", 1, 10)});
  CHECK_FALSE(book.expelled(10));
}

TEST_CASE("the book remembers only the latest dead members, without those that came back") {
  AddressBook book;
  book.expel(1, "first");
  book.set({member("a", 1, 1)});
  book.expel(2, "second");
  for (std::uint64_t incarnation = 3; incarnation < 2 + AddressBook::kExpelledMax; ++incarnation)
    book.expel(incarnation, "");
  CHECK(book.expelled(2));
  book.expel(1, "again");
  CHECK_FALSE(book.expelled(2));
  CHECK(book.expelled(3));
  CHECK(book.expelled(1) == "again");
}

}  // namespace
}  // namespace kvpool::testing
