// The files below a store: a directory, and files in it. Tests put layers in their place that lose power and fail.
//
// Calls return 0 or an errno. Nothing is durable before flush(): the content of a file by the file's, the names of a
// directory (open with `create`, rename, remove) by the directory's.
//
// Thread-safety: reads, writes and flushes of a file at the same time are allowed, and so are calls for different
// names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvpool {

class DiskFile {
 public:
  DiskFile() = default;
  virtual ~DiskFile() = default;
  DiskFile(const DiskFile&) = delete;
  DiskFile& operator=(const DiskFile&) = delete;

  // `done` may be less than `bytes` for no reason; 0 of a read: the end of the file.
  virtual int read(std::uint64_t offset, std::byte* to, std::size_t bytes, std::size_t& done) noexcept = 0;
  virtual int write(std::uint64_t offset, const std::byte* from, std::size_t bytes, std::size_t& done) noexcept = 0;
  virtual int flush() noexcept = 0;
  virtual int size(std::uint64_t& bytes) noexcept = 0;
  // Makes the file at least so long, and takes the space for it from the disk.
  virtual int reserve(std::uint64_t bytes) noexcept = 0;
  // For io_uring; -1: no descriptor.
  virtual int descriptor() const noexcept { return -1; }
  // Memory, offsets and sizes must be multiples of kDiskAlignment.
  virtual bool direct() const noexcept { return false; }
};

enum class DiskOpen : std::uint8_t {
  kThere,        // ENOENT if it is absent
  kNew,          // EEXIST if it is there
  kThereDirect,  // O_DIRECT, if the file system has it
};

class DiskDirectory {
 public:
  DiskDirectory() = default;
  virtual ~DiskDirectory() = default;  // gives back the lock
  DiskDirectory(const DiskDirectory&) = delete;
  DiskDirectory& operator=(const DiskDirectory&) = delete;

  virtual int open(const std::string& name, DiskOpen how, std::unique_ptr<DiskFile>& file) = 0;
  virtual int rename(const std::string& from, const std::string& to) = 0;
  virtual int remove(const std::string& name) = 0;
  virtual int flush() = 0;
  virtual int names(std::vector<std::string>& names) = 0;
  // Locks this file, which exists, for as long as the directory lives. EAGAIN: another one has it.
  virtual int lock(const std::string& name) = 0;
  virtual std::uint64_t free_bytes() = 0;
};

// The whole of it: goes on after short reads and writes. EIO when the file ends before.
int read_all(DiskFile& file, std::uint64_t offset, std::byte* to, std::size_t bytes) noexcept;
int write_all(DiskFile& file, std::uint64_t offset, const std::byte* from, std::size_t bytes) noexcept;

// The directory of this path, made with mode 0700 if it is absent. Throws kState (cause kForeign) if the path names
// something else, or the directory or a file of kvpool's in it is not this user's alone (others may write to the
// directory, or use the file in any way; a file is not a regular one); kStoreFailed (errno).
std::shared_ptr<DiskDirectory> posix_directory(const std::string& path);

// For messages: "No space left on device".
std::string errno_text(int error);

}  // namespace kvpool
