#include "kvpool/disk/files.h"

#include <cerrno>
#include <system_error>

namespace kvpool {

int read_all(DiskFile& file, std::uint64_t offset, std::byte* to, std::size_t bytes) noexcept {
  while (bytes > 0) {
    std::size_t done = 0;
    const int error = file.read(offset, to, bytes, done);
    if (error == EINTR) continue;
    if (error != 0) return error;
    if (done == 0) return EIO;
    offset += done;
    to += done;
    bytes -= done;
  }
  return 0;
}

int write_all(DiskFile& file, std::uint64_t offset, const std::byte* from, std::size_t bytes) noexcept {
  while (bytes > 0) {
    std::size_t done = 0;
    const int error = file.write(offset, from, bytes, done);
    if (error == EINTR) continue;
    if (error != 0) return error;
    if (done == 0) return EIO;
    offset += done;
    from += done;
    bytes -= done;
  }
  return 0;
}

std::string errno_text(int error) { return std::generic_category().message(error); }

}  // namespace kvpool
