// Blocks on DISK.
#include "disk.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arguments.h"
#include "bind.h"
#include "kvpool/pool/disk_tier.h"
#include "kvpool/pool/pool.h"
#include "node.h"
#include "service.h"

namespace kvpool::bindings {
namespace {

DiskAdmission admission_named(const std::string& name) {
  if (name == "always") return DiskAdmission::kAlways;
  if (name == "second-use") return DiskAdmission::kOnSecondUse;
  throw Error(ErrorCode::kArgument, "disk_admission must be always or second-use, and is " + name);
}

std::size_t flush(PeerNode& node, py::handle everything_argument, py::handle timeout) {
  const bool everything = flag_from(everything_argument, "everything");
  const std::int64_t deadline = deadline_from(timeout, node.timeout_ns());
  return call_interruptibly(
      [&](const GivenUp& given_up) { return node.pool().flush_disk(everything, {deadline, given_up}); });
}

// None without a disk. What the pool counts itself is in Pool._stats.
py::object stats(Pool& pool) {
  if (!pool.has_disk()) return py::none();
  const DiskTierStats stats = pool.disk_stats();
  py::dict dict;
  dict["path"] = text_of(stats.path);
  dict["engine"] = stats.engine;
  dict["direct"] = stats.direct;
  dict["state"] = stats.health.on ? "on" : "off";
  dict["reason"] = text_of(stats.health.reason);
  dict["recovered_blocks"] = stats.recovered;
  dict["read_bytes"] = stats.store.bytes_read;
  dict["written_bytes"] = stats.store.bytes_written;
  dict["written_bytes_today"] = stats.bytes_today;
  dict["corrupt_blocks"] = stats.store.corrupt;
  dict["read_errors"] = stats.store.read_errors;
  dict["write_errors"] = stats.store.write_errors;
  return dict;
}

}  // namespace

DiskTierOptions disk_from(const py::object& disk) {
  using Format = std::vector<std::pair<std::string, std::string>>;
  auto [blocks, path, format, admission, bytes_s, bytes_day, hang_s] =
      disk.cast<std::tuple<std::uint32_t, std::string, Format, std::string, std::uint64_t, std::uint64_t, double>>();
  DiskTierOptions options;
  options.blocks = blocks;
  options.path = std::move(path);
  options.format = std::move(format);
  options.admission = admission_named(admission);
  options.bytes_s = bytes_s;
  options.bytes_day = bytes_day;
  options.hang_ns = static_cast<std::int64_t>(hang_s * 1e9);
  return options;
}

void bind_disk(PoolClass& pool) {
  pool.def("flush", &flush, py::kw_only(), py::arg("everything") = false, py::arg("timeout") = py::none(),
           R"(Writes cached blocks to DISK that are not there yet, and waits until they are durable. Thread-safe.

Nothing has to call it: what is used twice is written anyway, in the background. Call it with ``everything=True`` before
a planned end, so that a pool that is opened on the same path finds what this one has cached. Releases the GIL. The
budget of writes holds for it, too.

Args:
    everything: Also write what the admission policy does not admit. Blocks in HBM of a GPU are left out, and what
        continues them.
    timeout: Seconds; None: the setting ``timeout_s``.

Returns:
    How many blocks were written.

Raises:
    DeadlineExceeded: Not all of it was written in time; what was written stays.
    StoreFailed: The disk has failed and is switched off.
    Unsupported: The pool has no blocks on DISK.)")
      .def("_disk_stats", of_pool(&stats));
}

}  // namespace kvpool::bindings
