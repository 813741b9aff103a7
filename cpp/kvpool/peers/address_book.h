// Where the members of a cluster are, as its directory tells, and which incarnations it has told to be dead.
//
// Thread-safety: all of it. Its lock is taken after any other, and none is taken under it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace kvpool {

// One incarnation. It is called at its addresses in their order.
struct ClusterMember {
  std::string name;
  std::uint32_t instance = 0;
  std::uint64_t incarnation = 0;
  std::vector<std::string> addresses;
};

class AddressBook {
 public:
  // So many dead incarnations are remembered, the latest. One that old has no connection that could wake up.
  static constexpr std::size_t kExpelledMax = 4096;

  // The whole picture, in place of what it was. Who is in it is dead no more. Returns the incarnations that another one
  // has followed under the same name. Throws std::bad_alloc; then nothing has changed.
  std::vector<std::uint64_t> set(std::vector<ClusterMember> members);
  // It is struck off, and let in no more until it is in a picture again. Throws as set().
  void expel(std::uint64_t incarnation, const std::string& why);

  std::optional<ClusterMember> find(const std::string& name) const;
  // The name of the member whose addresses of blocks have this id; "" for none.
  std::string name_of(std::uint32_t instance) const;
  bool lists(const ClusterMember& member) const;
  // Why it was expelled, if it was.
  std::optional<std::string> expelled(std::uint64_t incarnation) const;
  // For people: "a, b, c"; "" when it is empty.
  std::string names() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, ClusterMember> members_;
  std::unordered_map<std::uint64_t, std::string> expelled_;
  std::deque<std::uint64_t> expelled_in_order_;
};

}  // namespace kvpool
