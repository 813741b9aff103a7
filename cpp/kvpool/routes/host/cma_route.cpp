#include "kvpool/routes/host/cma_route.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/net/reactor.h"
#include "kvpool/routes/host/host_route.h"
#include "kvpool/routes/peer_memory.h"
#include "kvpool/routes/route_choice.h"
#include "kvpool/routes/write_in_parts.h"
#include "kvpool/routes/write_timer.h"

namespace kvpool {
namespace {

static_assert(kPieceBatch <= IOV_MAX, "a batch of pieces is one call");

// The ranges of one side of a call. Neighbours are joined: the two sides of a call may be cut differently.
class RangeList {
 public:
  void add(void* base, std::size_t bytes) noexcept {
    if (count_ > 0) {
      iovec& last = ranges_[count_ - 1];
      if (static_cast<std::byte*>(last.iov_base) + last.iov_len == base) {
        last.iov_len += bytes;
        return;
      }
    }
    ranges_[count_++] = iovec{base, bytes};
  }
  // Takes the first `bytes` off, after a call that wrote so many.
  void advance(std::size_t bytes) noexcept {
    while (bytes > 0 && bytes >= ranges_[first_].iov_len) bytes -= ranges_[first_++].iov_len;
    if (bytes == 0) return;
    ranges_[first_].iov_base = static_cast<std::byte*>(ranges_[first_].iov_base) + bytes;
    ranges_[first_].iov_len -= bytes;
  }
  const iovec* data() const noexcept { return ranges_.data() + first_; }
  std::size_t size() const noexcept { return count_ - first_; }

 private:
  std::array<iovec, kPieceBatch> ranges_;
  std::size_t first_ = 0;
  std::size_t count_ = 0;
};

// The process that a pidfd stands for; -1 when it has ended, 0 when the kernel does not say.
std::int64_t pid_of(int pidfd) {
  constexpr std::string_view kKey = "Pid:";
  std::ifstream info("/proc/self/fdinfo/" + std::to_string(pidfd));
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with(kKey)) return std::strtoll(line.c_str() + kKey.size(), nullptr, 10);
  }
  return 0;
}

class Process {
 public:
  // Duplicates the pidfd.
  Process(pid_t pid, int pidfd) : pid_(pid), pidfd_(pidfd < 0 ? -1 : fcntl(pidfd, F_DUPFD_CLOEXEC, 0)) {
    if (pidfd_ < 0) throw Error(ErrorCode::kUnsupported, "cma needs a pidfd of the peer, and the kernel gave none");
    // The number is the peer's word, the pidfd the kernel's. 0: a kernel that does not compare them for us.
    const std::int64_t known = pid_of(pidfd_);
    if (known > 0 && known != pid_) {
      ::close(pidfd_);
      throw Error(ErrorCode::kProtocol,
                  "the peer says that it is process " + std::to_string(pid_) + ", and is " + std::to_string(known));
    }
  }
  ~Process() { ::close(pidfd_); }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const noexcept { return pid_; }

  // Its number may be another process's by now.
  void throw_if_gone() const {
    pollfd poll{.fd = pidfd_, .events = POLLIN, .revents = 0};
    if (::poll(&poll, 1, 0) > 0) throw_gone();
  }

  [[noreturn]] void throw_gone() const {
    throw Error(ErrorCode::kPeerLost, "the peer's process " + std::to_string(pid_) + " has ended");
  }

  [[noreturn]] void throw_error(int error) const {
    throw_if_gone();
    if (error == ESRCH) throw_gone();
    if (error == EPERM) {
      throw Error(ErrorCode::kUnsupported,
                  "the kernel does not let this process write into process " + std::to_string(pid_) +
                      " (EPERM): both must run as the same user, the other one must allow cma, and under Yama "
                      "/proc/sys/kernel/yama/ptrace_scope must be 0 or 1",
                  {{"errno", error}});
    }
    if (error == EFAULT) {
      throw Error(ErrorCode::kProtocol, "the peer's memory is not where its metadata says", {{"errno", error}});
    }
    throw Error(ErrorCode::kUnsupported, "process_vm_writev: " + std::generic_category().message(error),
                {{"errno", error}});
  }

 private:
  const pid_t pid_;
  const int pidfd_;
};

class Writer final : public PieceMover {
 public:
  Writer(const Process& peer, bool gather) noexcept : peer_(peer), gather_(gather) {}

  void move(std::span<const CopyPiece> pieces) override {
    if (gather_) return write(pieces);
    for (const CopyPiece& piece : pieces) write({&piece, 1});
  }

 private:
  void write(std::span<const CopyPiece> pieces) {
    RangeList here;
    RangeList there;
    std::size_t left = 0;
    for (const CopyPiece& piece : pieces) {
      here.add(const_cast<std::byte*>(piece.src), piece.bytes);  // NOLINT(cppcoreguidelines-pro-type-const-cast)
      there.add(piece.dst, piece.bytes);
      left += piece.bytes;
    }
    while (left > 0) {
      peer_.throw_if_gone();
      const ssize_t written = process_vm_writev(peer_.pid(), here.data(), here.size(), there.data(), there.size(), 0);
      if (written <= 0) peer_.throw_error(written < 0 ? errno : EFAULT);
      left -= static_cast<std::size_t>(written);
      here.advance(static_cast<std::size_t>(written));
      there.advance(static_cast<std::size_t>(written));
    }
  }

  const Process& peer_;
  const bool gather_;
};

class CmaRoute final : public HostRoute {
 public:
  CmaRoute(MediaSpans local, std::shared_ptr<void> keepalive, const PeerMetadata& metadata, pid_t pid, int pidfd,
           CopyTeam& team)
      : HostRoute(std::move(local), remote_spans(metadata), std::move(keepalive), team, kCmaPrior, kCmaCallUs),
        process_(pid, pidfd) {
    probe();
  }

  const char* name() const noexcept override { return "cma"; }
  RouteTraits traits() const noexcept override {
    return {.one_sided = true, .by_caller = true, .waits = false, .by_name = true};
  }

  WriteOutcome write(const WriteRequest& request) override {
    WriteTimer timer(cost_, request);
    Writer writer(process_, request.gather);
    WriteOutcome outcome = write_in_parts(request, local_, peer_, writer, team_, name(), closed_);
    // By the plan: the parts that the team shares cut lists short.
    if (request.gather) outcome.calls = (outcome.pieces + kPieceBatch - 1) / kPieceBatch;
    timer.stop(outcome);
    return outcome;
  }

 private:
  void probe() const {
    process_.throw_if_gone();
    for (const MediumSpan& medium : peer_) {
      if (medium.blocks == 0) continue;
      std::byte byte;
      const iovec here{&byte, 1};
      const iovec there{medium.segments.front().base, 1};
      if (process_vm_readv(process_.pid(), &here, 1, &there, 1, 0) != 1) process_.throw_error(errno);
    }
  }

  const Process process_;
};

}  // namespace

std::unique_ptr<Route> make_cma_route(MediaSpans local, std::shared_ptr<void> keepalive, const PeerMetadata& metadata,
                                      pid_t pid, int pidfd, CopyTeam& team) {
  return std::make_unique<CmaRoute>(std::move(local), std::move(keepalive), metadata, pid, pidfd, team);
}

}  // namespace kvpool
