#include "kvpool/peers/address_book.h"

#include <algorithm>
#include <utility>

namespace kvpool {

std::vector<std::uint64_t> AddressBook::set(std::vector<ClusterMember> members) {
  std::map<std::string, ClusterMember> next;
  for (ClusterMember& member : members) {
    std::string name = member.name;
    next.insert_or_assign(std::move(name), std::move(member));
  }
  std::vector<std::uint64_t> followed;
  const std::lock_guard lock(mutex_);
  for (const auto& [name, member] : next) {
    const auto before = members_.find(name);
    if (before != members_.end() && before->second.incarnation != member.incarnation)
      followed.push_back(before->second.incarnation);
  }
  for (const auto& [name, member] : next) {
    if (expelled_.erase(member.incarnation) > 0) std::erase(expelled_in_order_, member.incarnation);
  }
  members_.swap(next);
  return followed;
}

void AddressBook::expel(std::uint64_t incarnation, const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (!expelled_.contains(incarnation)) {
    expelled_in_order_.push_back(incarnation);
    try {
      expelled_.emplace(incarnation, why);
    } catch (...) {
      expelled_in_order_.pop_back();
      throw;
    }
    if (expelled_in_order_.size() > kExpelledMax) {
      expelled_.erase(expelled_in_order_.front());
      expelled_in_order_.pop_front();
    }
  }
  std::erase_if(members_, [&](const auto& entry) { return entry.second.incarnation == incarnation; });
}

std::optional<ClusterMember> AddressBook::find(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  const auto entry = members_.find(name);
  return entry == members_.end() ? std::nullopt : std::optional(entry->second);
}

std::string AddressBook::name_of(std::uint32_t instance) const {
  const std::lock_guard lock(mutex_);
  const auto entry =
      std::find_if(members_.begin(), members_.end(), [&](const auto& it) { return it.second.instance == instance; });
  return entry == members_.end() ? std::string() : entry->first;
}

bool AddressBook::lists(const ClusterMember& member) const {
  const std::lock_guard lock(mutex_);
  const auto entry = members_.find(member.name);
  return entry != members_.end() && entry->second.incarnation == member.incarnation;
}

std::optional<std::string> AddressBook::expelled(std::uint64_t incarnation) const {
  const std::lock_guard lock(mutex_);
  const auto entry = expelled_.find(incarnation);
  return entry == expelled_.end() ? std::nullopt : std::optional(entry->second);
}

std::string AddressBook::names() const {
  std::string names;
  const std::lock_guard lock(mutex_);
  for (const auto& [name, member] : members_) names += (names.empty() ? "" : ", ") + name;
  return names;
}

}  // namespace kvpool
