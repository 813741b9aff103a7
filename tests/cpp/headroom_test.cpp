#include <doctest/doctest.h>
#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include "kvpool/arena/arena.h"

namespace kvpool {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kMib = std::uint64_t{1} << 20;

// A tree of files that stands for the machine's / while it lives.
class FakeRoot {
 public:
  FakeRoot() {
    std::string name = (fs::temp_directory_path() / "kvpool-headroom-XXXXXX").string();
    REQUIRE(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~FakeRoot() { fs::remove_all(path_); }
  FakeRoot(const FakeRoot&) = delete;
  FakeRoot& operator=(const FakeRoot&) = delete;

  void write(const std::string& path, const std::string& text) const {
    fs::create_directories(fs::path(path_ + path).parent_path());
    std::ofstream(path_ + path) << text;
  }
  void meminfo(std::uint64_t available_mib) const {
    write("/proc/meminfo", "MemTotal:       99999999 kB\nMemFree:          111111 kB\nMemAvailable:   " +
                               std::to_string(available_mib * 1024) + " kB\n");
  }
  // A cgroup of version 2, in MiB.
  void group(const std::string& path, const std::string& max, std::uint64_t current,
             std::uint64_t inactive_file) const {
    write(path + "/memory.max", max + "\n");
    write(path + "/memory.current", std::to_string(current * kMib) + "\n");
    write(path + "/memory.stat", "anon 5\nfile 7\ninactive_anon 1\nactive_file 2\ninactive_file " +
                                     std::to_string(inactive_file * kMib) + "\nslab 9\n");
  }

  MemoryHeadroom headroom() const { return memory_headroom(path_); }

 private:
  std::string path_;
};

std::string mib(std::uint64_t count) { return std::to_string(count * kMib); }

TEST_CASE("without cgroups the headroom is the memory that the machine has available") {
  const FakeRoot root;
  root.meminfo(1000);
  CHECK(root.headroom().available_bytes == 1000 * kMib);
  CHECK(root.headroom().limit == "MemAvailable");
}

TEST_CASE("a machine that reports nothing has no known limit") {
  const FakeRoot root;
  CHECK(root.headroom().available_bytes == UINT64_MAX);
  CHECK(root.headroom().limit == "none");
}

TEST_CASE("a cgroup's headroom is its limit minus its use, without reclaimable cache") {
  const FakeRoot root;
  root.meminfo(1000);
  root.write("/proc/self/cgroup", "0::/app\n");
  root.group("/sys/fs/cgroup/app", mib(500), 300, 40);
  CHECK(root.headroom().available_bytes == 240 * kMib);
  CHECK(root.headroom().limit == "/sys/fs/cgroup/app");
}

TEST_CASE("a cgroup without a limit does not count") {
  const FakeRoot root;
  root.meminfo(1000);
  root.write("/proc/self/cgroup", "0::/app\n");
  root.group("/sys/fs/cgroup/app", "max", 300, 40);
  CHECK(root.headroom().available_bytes == 1000 * kMib);
  CHECK(root.headroom().limit == "MemAvailable");
}

TEST_CASE("the tightest ancestor decides") {
  const FakeRoot root;
  root.meminfo(1000);
  root.write("/proc/self/cgroup", "0::/a/b/c\n");
  root.group("/sys/fs/cgroup/a/b/c", mib(900), 10, 0);
  root.group("/sys/fs/cgroup/a/b", "max", 10, 0);
  root.group("/sys/fs/cgroup/a", mib(200), 150, 5);
  CHECK(root.headroom().available_bytes == 55 * kMib);
  CHECK(root.headroom().limit == "/sys/fs/cgroup/a");
}

TEST_CASE("a cgroup that is over its limit has no headroom") {
  const FakeRoot root;
  root.meminfo(1000);
  root.write("/proc/self/cgroup", "0::/app\n");
  root.group("/sys/fs/cgroup/app", mib(100), 130, 10);
  CHECK(root.headroom().available_bytes == 0);
}

TEST_CASE("more cache than use does not make more headroom than the limit") {
  const FakeRoot root;
  root.meminfo(1000);
  root.write("/proc/self/cgroup", "0::/app\n");
  root.group("/sys/fs/cgroup/app", mib(100), 10, 50);
  CHECK(root.headroom().available_bytes == 100 * kMib);
}

TEST_CASE("a container's own cgroup namespace has its limit at the mount point") {
  const FakeRoot root;
  root.meminfo(1000);
  root.write("/proc/self/cgroup", "0::/\n");
  root.group("/sys/fs/cgroup", mib(64), 14, 0);
  CHECK(root.headroom().available_bytes == 50 * kMib);
  CHECK(root.headroom().limit == "/sys/fs/cgroup");
}

TEST_CASE("a path that the container does not show is replaced by its nearest visible ancestor") {
  for (const char* path : {"/docker/0123abcd", "/../other", "/..", "/kube/pod (deleted)"}) {
    CAPTURE(path);
    const FakeRoot root;
    root.meminfo(1000);
    root.write("/proc/self/cgroup", std::string("0::") + path + "\n");
    root.group("/sys/fs/cgroup", mib(64), 14, 0);
    CHECK(root.headroom().available_bytes == 50 * kMib);
  }
}

TEST_CASE("a cgroup mount of a subtree is read from that subtree on") {
  const FakeRoot root;
  root.meminfo(1000);
  root.write("/proc/self/mountinfo",
             "24 1 0:22 / /proc rw - proc proc rw\n"
             "31 23 0:28 /docker/abc /cg ro,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n");
  root.group("/cg/inner", mib(300), 100, 0);
  root.group("/cg", mib(400), 250, 0);
  root.write("/proc/self/cgroup", "0::/docker/abc/inner\n");
  CHECK(root.headroom().available_bytes == 150 * kMib);
  CHECK(root.headroom().limit == "/cg");
  root.group("/cg/inner", mib(300), 290, 0);
  CHECK(root.headroom().available_bytes == 10 * kMib);
  root.write("/proc/self/cgroup", "0::/docker/abcdef/inner\n");  // another one, with the same beginning
  CHECK(root.headroom().available_bytes == 150 * kMib);
}

TEST_CASE("cgroup version 1 is read with its own file names") {
  const FakeRoot root;
  root.meminfo(1000);
  root.write("/proc/self/mountinfo",
             "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
             "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
             "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
  root.write("/proc/self/cgroup", "9:name=systemd:/x\n5:cpu,cpuacct:/y\n4:memory:/jobs/one\n0::/\n");
  const std::string one = "/sys/fs/cgroup/memory/jobs/one";
  root.write(one + "/memory.limit_in_bytes", mib(100) + "\n");
  root.write(one + "/memory.usage_in_bytes", mib(80) + "\n");
  root.write(one + "/memory.stat", "inactive_file 1\ntotal_inactive_file " + mib(30) + "\n");
  root.write("/sys/fs/cgroup/memory/jobs/memory.limit_in_bytes", "9223372036854771712\n");
  root.write("/sys/fs/cgroup/memory/jobs/memory.usage_in_bytes", mib(80) + "\n");
  CHECK(root.headroom().available_bytes == 50 * kMib);
  CHECK(root.headroom().limit == one);
}

TEST_CASE("files with other contents are not taken for limits") {
  const FakeRoot root;
  root.write("/proc/meminfo", "MemAvailable: lots\nMemAvailableX: 1 kB\n");
  root.write("/proc/self/cgroup", "nonsense\n0:\n::\n0::relative\n");
  root.write("/proc/self/mountinfo", "\n - \nshort - cgroup2\n");
  root.group("/sys/fs/cgroup", "-5", 10, 0);
  CHECK(root.headroom().available_bytes == UINT64_MAX);
  root.write("/proc/self/cgroup", "0::/\n");
  root.group("/sys/fs/cgroup", "99999999999999999999999", 10, 0);  // more than 64 bits: as good as none
  CHECK(root.headroom().available_bytes == UINT64_MAX);
}

TEST_CASE("this machine has some headroom") {
  const MemoryHeadroom headroom = memory_headroom();
  CHECK(headroom.available_bytes > 0);
  CHECK(!headroom.limit.empty());
}

}  // namespace
}  // namespace kvpool
