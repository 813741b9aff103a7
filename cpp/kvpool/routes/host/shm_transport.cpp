#include "kvpool/routes/host/host_transports.h"
#include "kvpool/routes/host/memory_route.h"

namespace kvpool {
namespace {

class ShmTransport final : public Transport {
 public:
  explicit ShmTransport(const TransportSetup& setup) : team_(setup.team) {}

  std::shared_ptr<Grant> offer(const LocalMemory& memory, Offer& offer) override {
    offer.add_host_files(memory);
    return nullptr;
  }
  void connect(const LocalMemory& memory, const PeerEnd& peer, Grant*, Routes& routes) override {
    if (!peer.same_host || !has_blocks(memory.host_spans())) return;
    MediaFiles files = peer.files();
    for (std::size_t i = 0; i < files.size(); ++i) {
      if (peer.metadata.media[i].kind != MemoryKind::kHost) files[i] = -1;
    }
    // What a peer has adopted cannot be mapped: the route reaches the media that can.
    if (files == kNoFiles) return;
    routes.push_back(make_shm_route(memory.host_spans(), memory.keepalive(), peer.metadata, files, team_));
  }
  Exposure exposure(const PeerEnd& peer) const override { return {.by_process = peer.same_host && peer.is_local()}; }
  bool writes_files_only() const noexcept override { return true; }

 private:
  CopyTeam& team_;
};

}  // namespace

std::unique_ptr<Transport> make_shm_transport(const TransportSetup& setup) {
  return std::make_unique<ShmTransport>(setup);
}

}  // namespace kvpool
