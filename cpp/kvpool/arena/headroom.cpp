// How much memory this process can still get: what the machine has, and what its cgroups allow.

#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string_view>

#include "kvpool/arena/arena.h"

namespace kvpool {
namespace {

constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();
// What cgroup v1 writes for "no limit": the largest multiple of a page in 63 bits. Nobody means a limit above half.
constexpr std::uint64_t kUnlimitedV1 = std::uint64_t{1} << 62;

// The number that a text begins with, after blanks.
std::optional<std::uint64_t> leading_number(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t"), text.size()));
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc::result_out_of_range) {
    return kUnlimited;
  }
  return error == std::errc{} ? std::optional(value) : std::nullopt;
}

// The number in a file of one number; nothing when there is no file or it says "max".
std::optional<std::uint64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  return std::getline(file, line) ? leading_number(line) : std::nullopt;
}

// The number behind `key` in a file of lines "key value" or "key: value unit".
std::optional<std::uint64_t> number_of_key(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    const std::string_view text = line;
    if (text.starts_with(key) && text.size() > key.size() && (text[key.size()] == ' ' || text[key.size()] == ':')) {
      return leading_number(text.substr(key.size() + 1));
    }
  }
  return std::nullopt;
}

bool is_directory(const std::string& path) {
  struct stat status{};
  return stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

// The file names of one cgroup version.
struct CgroupFiles {
  const char* limit;
  const char* usage;
  const char* reclaimable;  // key in memory.stat: file cache that the kernel gives up before it kills
  std::uint64_t unlimited;  // a limit this large means no limit
};
constexpr CgroupFiles kFilesV2{"memory.max", "memory.current", "inactive_file", kUnlimited};
constexpr CgroupFiles kFilesV1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", kUnlimitedV1};

// A cgroup hierarchy that limits memory: where it is mounted, and what part of it that mount shows.
struct CgroupMount {
  std::string point;
  std::string shown = "/";  // the cgroup that stands at the mount point
};

bool has_word(std::string_view list, std::string_view word) {
  while (!list.empty()) {
    const std::size_t comma = std::min(list.find(','), list.size());
    if (list.substr(0, comma) == word) {
      return true;
    }
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  return false;
}

// From /proc/self/mountinfo; where that cannot be read, where everybody mounts it.
// A line is "id parent device shown point options [optional...] - type source super-options".
CgroupMount find_mount(const std::string& root, bool v2) {
  std::ifstream file(root + "/proc/self/mountinfo");
  std::string line;
  while (std::getline(file, line)) {
    const std::size_t dash = line.find(" - ");
    if (dash == std::string::npos) {
      continue;
    }
    std::istringstream head(line.substr(0, dash));
    std::istringstream tail(line.substr(dash + 3));
    std::string skip, shown, point, type, source, options;
    head >> skip >> skip >> skip >> shown >> point;
    tail >> type >> source >> options;
    if (v2 ? type == "cgroup2" : type == "cgroup" && has_word(options, "memory")) {
      return CgroupMount{point, shown};
    }
  }
  return CgroupMount{v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory", "/"};
}

// This process's cgroup in one hierarchy, from /proc/self/cgroup: lines "id:controllers:path", with id 0 and no
// controllers for v2.
std::optional<std::string> find_cgroup(const std::string& root, bool v2) {
  std::ifstream file(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) {
      continue;
    }
    const std::string_view controllers = std::string_view(line).substr(first + 1, second - first - 1);
    if (v2 ? line.starts_with("0::") : has_word(controllers, "memory")) {
      return line.substr(second + 1);
    }
  }
  return std::nullopt;
}

// The cgroup's directory below the mount point: "" is the mount point itself. In a container the path may be one that
// the mount does not show (it begins with "/..", or is the host's): then the mount point is the nearest that is seen.
std::string directory_below(const std::string& root, const CgroupMount& mount, std::string path) {
  if (mount.shown != "/") {
    const bool below =
        path.starts_with(mount.shown) && (path.size() == mount.shown.size() || path[mount.shown.size()] == '/');
    path = below ? path.substr(mount.shown.size()) : "";
  }
  if (path == "/" || path == "/.." || path.starts_with("/../")) {
    path.clear();
  }
  while (!path.empty() && !is_directory(root + mount.point + path)) {
    path.resize(path.rfind('/'));
  }
  return path;
}

void apply_cgroups(const std::string& root, bool v2, MemoryHeadroom& headroom) {
  const std::optional<std::string> cgroup = find_cgroup(root, v2);
  if (!cgroup || !cgroup->starts_with('/')) {
    return;
  }
  const CgroupFiles& files = v2 ? kFilesV2 : kFilesV1;
  const CgroupMount mount = find_mount(root, v2);
  std::string below = directory_below(root, mount, *cgroup);
  while (true) {
    const std::string directory = mount.point + below;
    std::string prefix = root + directory;
    prefix += '/';
    const std::optional<std::uint64_t> limit = number_in(prefix + files.limit);
    if (limit && *limit < files.unlimited) {
      const std::uint64_t usage = number_in(prefix + files.usage).value_or(0);
      const std::uint64_t cache = number_of_key(prefix + "memory.stat", files.reclaimable).value_or(0);
      const std::uint64_t used = usage - std::min(usage, cache);
      const std::uint64_t available = *limit - std::min(*limit, used);
      if (available < headroom.available_bytes) {
        headroom = MemoryHeadroom{available, directory};
      }
    }
    if (below.empty()) {
      return;
    }
    below.resize(below.rfind('/'));
  }
}

}  // namespace

MemoryHeadroom memory_headroom(const std::string& root) {
  MemoryHeadroom headroom{kUnlimited, "none"};
  if (const auto kilobytes = number_of_key(root + "/proc/meminfo", "MemAvailable")) {
    headroom = MemoryHeadroom{*kilobytes > kUnlimited >> 10 ? kUnlimited : *kilobytes << 10, "MemAvailable"};
  }
  apply_cgroups(root, true, headroom);
  apply_cgroups(root, false, headroom);
  return headroom;
}

}  // namespace kvpool
