// The kernels on the CPU: every thread of a small grid is run, one after the other, over a memory that checks each
// access. What the GPU runs is the same code (kvpool/cuda/tile.h) with other loads and stores.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "kvpool/cuda/kernel_plan.h"
#include "kvpool/cuda/tile.h"

namespace kvpool::testing {

// Real memory in which some bytes may be read and some written. Counts how often each byte is written.
class CheckedMemory {
 public:
  // Bytes that a job may touch. Given before it runs, piece by piece.
  void may_read(const std::byte* begin, std::uint64_t bytes) { mark(begin, bytes, kReadable); }
  void may_write(const std::byte* begin, std::uint64_t bytes) { mark(begin, bytes, kWritable); }
  // A buffer that may_read and may_write speak of.
  void know(const std::byte* begin, std::uint64_t bytes) {
    buffers_[address_of(begin)].assign(static_cast<std::size_t>(bytes), 0);
  }

  template <class T>
  T load(std::uint64_t address) {
    touch(address, sizeof(T), kReadable);
    T unit;
    std::memcpy(&unit, pointer(address), sizeof(T));
    return unit;
  }
  template <class T>
  void store(std::uint64_t address, const T& unit) {
    touch(address, sizeof(T), kWritable);
    std::memcpy(pointer(address), &unit, sizeof(T));
  }

  // The first thing that was done wrong or not at all; "" when each byte was written exactly once.
  std::string wrong() const {
    if (!wrong_.empty()) return wrong_;
    for (const auto& [base, marks] : buffers_) {
      for (std::size_t i = 0; i < marks.size(); ++i) {
        if ((marks[i] & kWritable) != 0 && (marks[i] & kWritten) == 0) return "a byte was never written";
      }
    }
    return "";
  }
  const std::set<std::size_t>& units() const { return units_; }  // lengths of accesses

 private:
  static constexpr std::uint8_t kReadable = 1;
  static constexpr std::uint8_t kWritable = 2;
  static constexpr std::uint8_t kWritten = 4;

  static std::uint64_t address_of(const std::byte* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }
  static void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)); }

  // The marks of these bytes; empty when they are of no one buffer.
  std::span<std::uint8_t> marks(std::uint64_t address, std::uint64_t bytes) {
    auto buffer = buffers_.upper_bound(address);
    if (buffer == buffers_.begin()) return {};
    --buffer;
    const std::uint64_t at = address - buffer->first;
    if (at > buffer->second.size() || bytes > buffer->second.size() - at) return {};
    return std::span(buffer->second).subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(bytes));
  }
  void mark(const std::byte* begin, std::uint64_t bytes, std::uint8_t how) {
    const auto found = marks(address_of(begin), bytes);
    REQUIRE(found.size() == bytes);
    for (std::uint8_t& one : found) one |= how;
  }
  void touch(std::uint64_t address, std::size_t bytes, std::uint8_t how) {
    units_.insert(bytes);
    const auto say = [&](const char* what) {
      if (wrong_.empty()) wrong_ = what;
    };
    if (address % bytes != 0) say("an access is not aligned");
    const auto found = marks(address, bytes);
    if (found.size() != bytes) {
      say("an access is outside of all buffers");
      FAIL("an access is outside of all buffers");  // and would be a fault
    }
    for (std::uint8_t& one : found) {
      if ((one & how) == 0)
        say(how == kReadable ? "a byte is read that is of no piece" : "a byte is written of no piece");
      if (how == kWritable) {
        if ((one & kWritten) != 0) say("a byte is written twice");
        one |= kWritten;
      }
    }
  }

  std::map<std::uint64_t, std::vector<std::uint8_t>> buffers_;
  std::set<std::size_t> units_;
  std::string wrong_;
};

// How a job was launched, and the memory in which it ran.
struct Emulation {
  CheckedMemory memory;
  std::uint32_t blocks = 3;  // of the grid
  std::vector<std::uint32_t> widths;
  std::vector<std::size_t> tables;  // their lengths
  int remote_tables = 0;

  static int launch(void* context, const cuda::TableLaunch& launch) {
    auto& self = *static_cast<Emulation*>(context);
    self.widths.push_back(launch.width);
    self.tables.push_back(launch.data_bytes);
    const std::byte* data = launch.data;
    if (launch.device_data != nullptr) {
      ++self.remote_tables;
      std::memcpy(launch.device_data, launch.data, launch.data_bytes);
      data = launch.device_data;
    } else {
      CHECK(launch.data_bytes <= cuda::kInlineTableBytes);
    }
    const cuda::TableView view{launch.header, reinterpret_cast<const unsigned char*>(data)};
    const bool known = cuda::with_work(launch.width, [&]<class Work>(Work) {
      for (std::uint32_t block = 0; block < self.blocks; ++block) {
        for (std::uint32_t thread = 0; thread < cuda::kBlockThreads; ++thread) {
          cuda::run_thread<Work>(view, block, self.blocks, thread, self.memory);
        }
      }
    });
    return known ? 0 : 1;
  }
};

}  // namespace kvpool::testing
