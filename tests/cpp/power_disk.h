// Files in memory that lose power: they know what was flushed, and what was not yet.
//
// Loss of power drops what is not durable, tears it at sectors and reorders it: each sector that was written keeps its
// old content or gets the new one, each name that was changed is the old one or the new one. A killed process loses
// nothing, but what it has left is no more durable than before.
//
// Faults: `fault` is asked before each call. Thread-safety: all of it, but for the two functions, which are set before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fuzz_seeds.h"
#include "kvpool/disk/files.h"

namespace kvpool::testing {

class PowerDisk final : public DiskDirectory {
 public:
  static constexpr std::size_t kSector = 512;
  static constexpr int kShort = -1;  // of `fault`: a part of the bytes only

  enum class Call { kRead, kWrite, kFlush, kReserve, kOpen, kRename, kRemove, kFlushNames };

  // Returns 0, an errno, or kShort. It may block.
  std::function<int(Call call, const std::string& name)> fault;
  // After each call that changed something.
  std::function<void()> changed;
  std::uint64_t room = std::uint64_t{1} << 40;  // free_bytes()

  // As the next process finds it.
  std::shared_ptr<PowerDisk> after_power_loss(Dice& dice);
  std::shared_ptr<PowerDisk> after_kill();
  // From now on every call fails.
  void cut() { cut_ = true; }

  // The bytes of a file, to spoil them.
  std::vector<std::byte>& bytes_of(const std::string& name) { return now_.at(name)->now; }
  bool has(const std::string& name) const { return now_.count(name) > 0; }

  int open(const std::string& name, DiskOpen how, std::unique_ptr<DiskFile>& file) override;
  int rename(const std::string& from, const std::string& to) override;
  int remove(const std::string& name) override;
  int flush() override;
  int names(std::vector<std::string>& names) override;
  int lock(const std::string& name) override;
  std::uint64_t free_bytes() override { return room; }

 private:
  friend class PowerFile;
  struct Write {
    std::uint64_t offset;
    std::vector<std::byte> bytes;
  };
  struct Node {
    std::vector<std::byte> now;
    std::vector<std::byte> durable;
    std::vector<Write> pending;
  };
  using Names = std::map<std::string, std::shared_ptr<Node>>;

  int ask(Call call, const std::string& name);
  void tell();
  static std::shared_ptr<Node> after_loss(const Node& node, Dice& dice, std::uint32_t mode);

  std::mutex mutex_;
  bool cut_ = false;
  Names now_;
  Names durable_;
  std::vector<std::pair<std::string, std::shared_ptr<Node>>> renamed_;  // since the last flush; null: removed
};

}  // namespace kvpool::testing
