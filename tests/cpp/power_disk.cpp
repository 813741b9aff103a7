#include "power_disk.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace kvpool::testing {
namespace {

enum Mode : std::uint32_t { kNothing, kEverything, kSectors, kWrites, kModes };

void put_bytes(std::vector<std::byte>& content, std::uint64_t offset, const std::byte* from, std::size_t bytes) {
  if (content.size() < offset + bytes) content.resize(offset + bytes);
  if (bytes > 0) std::memcpy(content.data() + offset, from, bytes);
}

}  // namespace

class PowerFile final : public DiskFile {
 public:
  PowerFile(PowerDisk& disk, std::string name, std::shared_ptr<PowerDisk::Node> node)
      : disk_(disk), name_(std::move(name)), node_(std::move(node)) {}

  int read(std::uint64_t offset, std::byte* to, std::size_t bytes, std::size_t& done) noexcept override {
    const int fault = disk_.ask(PowerDisk::Call::kRead, name_);
    if (fault > 0) return fault;
    const std::lock_guard lock(disk_.mutex_);
    const std::uint64_t there = node_->now.size() - std::min<std::uint64_t>(offset, node_->now.size());
    done = std::min<std::uint64_t>(bytes, there);
    if (fault == PowerDisk::kShort) done = (done + 1) / 2;
    if (done > 0) std::memcpy(to, node_->now.data() + offset, done);
    return 0;
  }
  int write(std::uint64_t offset, const std::byte* from, std::size_t bytes, std::size_t& done) noexcept override {
    const int fault = disk_.ask(PowerDisk::Call::kWrite, name_);
    if (fault > 0) return fault;
    done = fault == PowerDisk::kShort ? (bytes + 1) / 2 : bytes;
    {
      const std::lock_guard lock(disk_.mutex_);
      put_bytes(node_->now, offset, from, done);
      node_->pending.push_back({offset, {from, from + done}});
    }
    disk_.tell();
    return 0;
  }
  int flush() noexcept override {
    const int fault = disk_.ask(PowerDisk::Call::kFlush, name_);
    if (fault != 0) return fault;
    {
      const std::lock_guard lock(disk_.mutex_);
      node_->durable = node_->now;
      node_->pending.clear();
    }
    disk_.tell();
    return 0;
  }
  int size(std::uint64_t& bytes) noexcept override {
    const std::lock_guard lock(disk_.mutex_);
    bytes = node_->now.size();
    return 0;
  }
  int reserve(std::uint64_t bytes) noexcept override {
    const int fault = disk_.ask(PowerDisk::Call::kReserve, name_);
    if (fault != 0) return fault;
    {
      const std::lock_guard lock(disk_.mutex_);
      if (node_->now.size() < bytes) node_->now.resize(bytes);
    }
    disk_.tell();
    return 0;
  }

 private:
  PowerDisk& disk_;
  const std::string name_;
  const std::shared_ptr<PowerDisk::Node> node_;
};

int PowerDisk::ask(Call call, const std::string& name) {
  if (cut_) return EIO;
  return fault ? fault(call, name) : 0;
}

void PowerDisk::tell() {
  if (changed) changed();
}

std::shared_ptr<PowerDisk::Node> PowerDisk::after_loss(const Node& node, Dice& dice, std::uint32_t mode) {
  auto left = std::make_shared<Node>();
  std::vector<std::byte> content = node.durable;
  for (const Write& write : node.pending) {
    const bool whole = mode == kEverything || (mode == kWrites && dice.one_in(2));
    for (std::size_t at = 0; at < write.bytes.size();) {
      const std::size_t sector_end = ((write.offset + at) / kSector + 1) * kSector;
      const std::size_t part = std::min<std::size_t>(write.bytes.size() - at, sector_end - (write.offset + at));
      const bool keep = whole || (mode == kSectors && dice.one_in(2));
      if (keep) put_bytes(content, write.offset + at, write.bytes.data() + at, part);
      at += part;
    }
  }
  // The size is in the file system's journal, and not bound to the content.
  if (mode == kEverything || dice.one_in(2)) content.resize(std::max(content.size(), node.now.size()));
  if (mode == kSectors && content.size() > node.durable.size() && dice.one_in(3)) {
    content.resize(node.durable.size() + dice.below(content.size() - node.durable.size() + 1));
  }
  left->now = content;
  left->durable = std::move(content);
  return left;
}

std::shared_ptr<PowerDisk> PowerDisk::after_power_loss(Dice& dice) {
  const std::lock_guard lock(mutex_);
  const std::uint32_t mode = dice.below(kModes);
  Names names = durable_;
  for (const auto& [name, node] : renamed_) {
    const bool keep = mode == kEverything || (mode != kNothing && dice.one_in(2));
    if (!keep) continue;
    if (node != nullptr) {
      names[name] = node;
    } else {
      names.erase(name);
    }
  }
  auto left = std::make_shared<PowerDisk>();
  std::map<const Node*, std::shared_ptr<Node>> copies;
  for (const auto& [name, node] : names) {
    std::shared_ptr<Node>& copy = copies[node.get()];
    if (copy == nullptr) copy = after_loss(*node, dice, mode);
    left->now_[name] = copy;
  }
  left->durable_ = left->now_;
  return left;
}

std::shared_ptr<PowerDisk> PowerDisk::after_kill() {
  const std::lock_guard lock(mutex_);
  auto left = std::make_shared<PowerDisk>();
  std::map<const Node*, std::shared_ptr<Node>> copies;
  const auto copy_of = [&](const std::shared_ptr<Node>& node) {
    std::shared_ptr<Node>& copy = copies[node.get()];
    if (copy == nullptr && node != nullptr) copy = std::make_shared<Node>(*node);
    return copy;
  };
  for (const auto& [name, node] : now_) left->now_[name] = copy_of(node);
  for (const auto& [name, node] : durable_) left->durable_[name] = copy_of(node);
  for (const auto& [name, node] : renamed_) left->renamed_.emplace_back(name, copy_of(node));
  return left;
}

int PowerDisk::open(const std::string& name, DiskOpen how, std::unique_ptr<DiskFile>& file) {
  const int asked = ask(Call::kOpen, name);
  if (asked != 0) return asked;
  bool made = false;
  {
    const std::lock_guard lock(mutex_);
    const bool there = now_.count(name) > 0;
    if (there && how == DiskOpen::kNew) return EEXIST;
    if (!there && how != DiskOpen::kNew) return ENOENT;
    made = !there;
    if (made) {
      now_[name] = std::make_shared<Node>();
      renamed_.emplace_back(name, now_[name]);
    }
    file = std::make_unique<PowerFile>(*this, name, now_[name]);
  }
  if (made) tell();
  return 0;
}

int PowerDisk::rename(const std::string& from, const std::string& to) {
  const int asked = ask(Call::kRename, from);
  if (asked != 0) return asked;
  {
    const std::lock_guard lock(mutex_);
    if (now_.count(from) == 0) return ENOENT;
    now_[to] = now_[from];
    now_.erase(from);
    renamed_.emplace_back(to, now_[to]);
    renamed_.emplace_back(from, nullptr);
  }
  tell();
  return 0;
}

int PowerDisk::remove(const std::string& name) {
  const int asked = ask(Call::kRemove, name);
  if (asked != 0) return asked;
  {
    const std::lock_guard lock(mutex_);
    if (now_.erase(name) == 0) return ENOENT;
    renamed_.emplace_back(name, nullptr);
  }
  tell();
  return 0;
}

int PowerDisk::flush() {
  const int asked = ask(Call::kFlushNames, "");
  if (asked != 0) return asked;
  {
    const std::lock_guard lock(mutex_);
    durable_ = now_;
    renamed_.clear();
  }
  tell();
  return 0;
}

int PowerDisk::names(std::vector<std::string>& names) {
  if (cut_) return EIO;
  const std::lock_guard lock(mutex_);
  names.clear();
  for (const auto& [name, node] : now_) names.push_back(name);
  return 0;
}

int PowerDisk::lock(const std::string& name) { return has(name) ? 0 : ENOENT; }

}  // namespace kvpool::testing
