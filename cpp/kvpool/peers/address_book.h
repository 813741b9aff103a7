// The addresses of a cluster's members, as its directory reports them, and the incarnations that it has expelled.
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

// One incarnation. Callers try its addresses in order.
struct ClusterMember {
  std::string name;
  std::uint32_t instance = 0;
  std::uint64_t incarnation = 0;
  std::vector<std::string> addresses;
};

class AddressBook {
 public:
  // How many expelled incarnations are remembered, the latest. An older one has no connection that could wake up.
  static constexpr std::size_t kExpelledMax = 4096;

  // Replaces the list of members; they are no longer expelled. Returns the incarnations that a new one has replaced
  // under the same name. Throws std::bad_alloc; then nothing has changed.
  std::vector<std::uint64_t> set(std::vector<ClusterMember> members);
  // Removes the incarnation, which is refused until a list contains it again. Throws as set().
  void expel(std::uint64_t incarnation, const std::string& why);

  std::optional<ClusterMember> find(const std::string& name) const;
  // The name of the member whose block addresses contain this id; "" for none.
  std::string name_of(std::uint32_t instance) const;
  bool lists(const ClusterMember& member) const;
  // Why it was expelled, if it was.
  std::optional<std::string> expelled(std::uint64_t incarnation) const;
  // For messages: "a, b, c"; "" when it is empty.
  std::string names() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, ClusterMember> members_;
  std::unordered_map<std::uint64_t, std::string> expelled_;
  std::deque<std::uint64_t> expelled_in_order_;
};

}  // namespace kvpool
