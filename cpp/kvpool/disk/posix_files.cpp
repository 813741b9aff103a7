#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/base/fork_guard.h"
#include "kvpool/disk/disk_store.h"
#include "kvpool/disk/files.h"

namespace kvpool {
namespace {

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) noexcept : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int fd() const noexcept { return fd_; }
  void forget() noexcept { fd_ = -1; }

 private:
  int fd_;
};

// Descriptors of locks, plus 1; 0: a free place. A forked child closes its copies: otherwise it would keep the lock
// when its parent was killed, until it has ended itself. Beyond so many locks it keeps them.
constexpr std::size_t kLocksMax = 256;
std::array<std::atomic<int>, kLocksMax> lock_descriptors{};

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] {
  for (std::atomic<int>& place : lock_descriptors) {
    if (const int fd = place.exchange(0) - 1; fd >= 0) close(fd);
  }
});

void close_in_children(int fd) noexcept {
  for (std::atomic<int>& place : lock_descriptors) {
    int free = 0;
    if (place.compare_exchange_strong(free, fd + 1)) return;
  }
}

// Before it is closed here.
void forget_lock(int fd) noexcept {
  for (std::atomic<int>& place : lock_descriptors) {
    int expected = fd + 1;
    if (place.compare_exchange_strong(expected, 0)) return;
  }
}

// Returns 0 or an errno.
int set_lock(int fd, short type) noexcept {
  struct flock whole{};
  whole.l_type = type;
  whole.l_whence = SEEK_SET;
  return fcntl(fd, F_OFD_SETLK, &whole) < 0 ? errno : 0;
}

// From the result of a call that sets errno.
int code_of_call(long result) noexcept { return result < 0 ? errno : 0; }

class PosixFile final : public DiskFile {
 public:
  PosixFile(Descriptor fd, bool direct) noexcept : fd_(std::move(fd)), direct_(direct) {}

  int read(std::uint64_t offset, std::byte* to, std::size_t bytes, std::size_t& done) noexcept override {
    const ssize_t got = pread(fd_.fd(), to, bytes, static_cast<off_t>(offset));
    done = got < 0 ? 0 : static_cast<std::size_t>(got);
    return code_of_call(got);
  }
  int write(std::uint64_t offset, const std::byte* from, std::size_t bytes, std::size_t& done) noexcept override {
    const ssize_t put = pwrite(fd_.fd(), from, bytes, static_cast<off_t>(offset));
    done = put < 0 ? 0 : static_cast<std::size_t>(put);
    return code_of_call(put);
  }
  int flush() noexcept override { return code_of_call(fdatasync(fd_.fd())); }
  int size(std::uint64_t& bytes) noexcept override {
    struct stat found{};
    const int error = code_of_call(fstat(fd_.fd(), &found));
    bytes = static_cast<std::uint64_t>(found.st_size);
    return error;
  }
  // posix_fallocate writes zeros where the file system cannot reserve.
  int reserve(std::uint64_t bytes) noexcept override {
    int error = EINTR;  // a signal ends the call on tmpfs
    while (error == EINTR) error = posix_fallocate(fd_.fd(), 0, static_cast<off_t>(bytes));
    return error;
  }
  int descriptor() const noexcept override { return fd_.fd(); }
  bool direct() const noexcept override { return direct_; }

 private:
  Descriptor fd_;
  bool direct_;
};

class PosixDirectory final : public DiskDirectory {
 public:
  explicit PosixDirectory(Descriptor fd) noexcept : fd_(std::move(fd)) {}
  // A process that has inherited the descriptor in another way than by fork() would keep a lock that is only closed.
  ~PosixDirectory() override {
    if (lock_.fd() < 0) return;
    if (fork_generation() != fork_generation_) {
      lock_.forget();  // it was closed when the process was forked, and its number may be another file's
      return;
    }
    forget_lock(lock_.fd());
    static_cast<void>(set_lock(lock_.fd(), F_UNLCK));
  }

  int open(const std::string& name, DiskOpen how, std::unique_ptr<DiskFile>& file) override {
    int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW;
    if (how == DiskOpen::kNew) flags |= O_CREAT | O_EXCL;
    bool direct = how == DiskOpen::kThereDirect;
    int fd = openat(fd_.fd(), name.c_str(), flags | (direct ? O_DIRECT : 0), 0600);
    if (fd < 0 && errno == EINVAL && direct) {
      direct = false;
      fd = openat(fd_.fd(), name.c_str(), flags, 0600);
    }
    if (fd < 0) return errno;
    file = std::make_unique<PosixFile>(Descriptor(fd), direct);
    return 0;
  }
  int rename(const std::string& from, const std::string& to) override {
    return code_of_call(renameat(fd_.fd(), from.c_str(), fd_.fd(), to.c_str()));
  }
  int remove(const std::string& name) override { return code_of_call(unlinkat(fd_.fd(), name.c_str(), 0)); }
  int flush() override { return code_of_call(fsync(fd_.fd())); }
  int names(std::vector<std::string>& names) override {
    const int fd = openat(fd_.fd(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return errno;
    DIR* const directory = fdopendir(fd);
    if (directory == nullptr) {
      const int error = errno;
      close(fd);
      return error;
    }
    names.clear();
    errno = 0;
    for (const dirent* entry = readdir(directory); entry != nullptr; entry = readdir(directory)) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(name);
    }
    const int error = errno;
    closedir(directory);
    std::sort(names.begin(), names.end());
    return error;
  }
  // Of the open file, not of the process: two stores of one process refuse each other.
  int lock(const std::string& name) override {
    Descriptor fd(openat(fd_.fd(), name.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
    if (fd.fd() < 0) return errno;
    const int error = set_lock(fd.fd(), F_WRLCK);
    if (error != 0) return error == EACCES ? EAGAIN : error;
    close_in_children(fd.fd());
    lock_ = std::move(fd);
    return 0;
  }
  std::uint64_t free_bytes() override {
    struct statvfs found{};
    if (fstatvfs(fd_.fd(), &found) != 0) return 0;
    return std::uint64_t{found.f_bavail} * found.f_frsize;
  }

 private:
  Descriptor fd_;
  Descriptor lock_;
  const std::uint32_t fork_generation_ = fork_generation();
};

[[noreturn]] void throw_unsafe(const std::string& path, const std::string& why) {
  throw Error(ErrorCode::kState, path + " " + why + ": what is served from a store on disk must be this user's alone")
      .because(ErrorCause::kForeign);
}

// Others who may write here could put their bytes into prompts; who may read here sees prompts.
void require_private(const std::string& path, const struct stat& found, mode_t refused) {
  if (found.st_uid != geteuid()) throw_unsafe(path, "belongs to another user");
  if ((found.st_mode & refused) != 0) throw_unsafe(path, "may be used by others (chmod go-rwx)");
}

std::string parent_of(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

[[noreturn]] void throw_failed(const std::string& what, int error) {
  throw Error(ErrorCode::kStoreFailed, what + ": " + errno_text(error), {{"errno", error}});
}

}  // namespace

std::shared_ptr<DiskDirectory> posix_directory(const std::string& path) {
  if (mkdir(path.c_str(), 0700) == 0) {
    const Descriptor parent(::open(parent_of(path).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (parent.fd() < 0 || fsync(parent.fd()) != 0)
      throw_failed("cannot make the directory " + path + " durable", errno);
  } else if (errno != EEXIST) {
    throw_failed("cannot make the directory " + path, errno);
  }
  Descriptor fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd.fd() < 0 && errno == ENOTDIR) {
    throw Error(ErrorCode::kState, path + " is a file, and a store on disk needs a directory")
        .because(ErrorCause::kForeign);
  }
  if (fd.fd() < 0) throw_failed("cannot open the directory " + path, errno);
  struct stat found{};
  if (fstat(fd.fd(), &found) != 0) throw_failed("cannot look at the directory " + path, errno);
  require_private(path, found, S_IWGRP | S_IWOTH);
  const int at = fd.fd();
  auto directory = std::make_shared<PosixDirectory>(std::move(fd));
  std::vector<std::string> names;
  if (const int error = directory->names(names); error != 0) throw_failed("cannot list the directory " + path, error);
  for (const std::string& name : names) {
    if (name.rfind("kvpool.", 0) != 0) continue;
    if (fstatat(at, name.c_str(), &found, AT_SYMLINK_NOFOLLOW) != 0) {
      if (errno == ENOENT) continue;  // another store, which has it open, has just removed it
      throw_failed("cannot look at " + path + "/" + name, errno);
    }
    if (!S_ISREG(found.st_mode)) throw_unsafe(path + "/" + name, "is no regular file");
    require_private(path + "/" + name, found, S_IRWXG | S_IRWXO);
  }
  return directory;
}

}  // namespace kvpool
