// Which routes there are between pools of one process.
#include <doctest/doctest.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "device_kit.h"
#include "kvpool/arena/device_arena.h"
#include "kvpool/routes/host/host_transports.h"
#include "session_kit.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

constexpr std::size_t kBytes = 256;  // of a block

// One of two runs each.
class HalfBlocks final : public BlockPlaces {
 public:
  std::uint32_t pieces() const noexcept override { return 2; }
  std::uint32_t unit_of(std::uint32_t block, std::uint32_t piece) const noexcept override { return block + piece; }
};

LocalMemory on_gpu(bool in_pieces) {
  LocalMemory memory;
  memory.arenas = {std::make_shared<DeviceArena>(DeviceArenaOptions{.blocks = 4, .segment_bytes = {kBytes}}),
                   make_absent_arena(Medium::kDram, 0, kBytes), make_absent_arena(Medium::kDisk, 0, kBytes)};
  if (in_pieces) memory.places[Medium::kHbm] = std::make_shared<HalfBlocks>();
  return memory;
}

std::size_t routes_between(bool from_in_pieces, bool to_in_pieces) {
  const LocalMemory from = on_gpu(from_in_pieces);
  const LocalMemory to = on_gpu(to_in_pieces);
  CopyTeam team;
  const TransportSettings settings;
  std::vector<std::string> notes;
  const auto here = make_loopback_transport({settings, 1, from, team, {}, notes});
  const auto there = make_loopback_transport({settings, 2, to, team, {}, notes});
  PeerMetadata metadata;
  metadata.incarnation = 2;
  const auto script = std::make_shared<ScriptLink>();
  script->pid = getpid();
  const std::shared_ptr<Link> link = script;
  Routes routes;
  here->connect(from, PeerEnd{metadata, link}, nullptr, routes);
  return routes.size();
}

}  // namespace

TEST_CASE("a GPU copies no blocks that lie in pieces, on either side") {
  const FakeCuda cuda;
  CHECK(routes_between(false, false) == 1);
  CHECK(routes_between(true, false) == 0);
  CHECK(routes_between(false, true) == 0);
}

}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
