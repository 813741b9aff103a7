#include "kvpool/peers/admission.h"

#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/base/failure.h"
#include "kvpool/peers/peer_parting.h"
#include "kvpool/peers/peer_table.h"
#include "kvpool/peers/route_maker.h"
#include "kvpool/peers/writer_quarantine.h"
#include "kvpool/pool/pool.h"
#include "kvpool/transfer/failure.h"
#include "kvpool/transfer/same_blocks.h"
#include "kvpool/transfer/session.h"

namespace kvpool {
namespace {

constexpr std::int64_t kRetryAfterUs = 10'000;

}  // namespace

// Between a link and its session: tells when the link has ended.
class Admission::LinkWatcher final : public LinkHandler {
 public:
  LinkWatcher(const Parts& parts, std::shared_ptr<Session> session, std::shared_ptr<Link> link,
              std::shared_ptr<GroupConnection> group)
      : parting_(parts.parting),
        writer_quarantine_(parts.writer_quarantine),
        session_(std::move(session)),
        group_(std::move(group)),
        link_(std::move(link)) {}
  std::size_t body_bytes_max(FrameKind kind, std::uint16_t verb) const noexcept override {
    return session_->body_bytes_max(kind, verb);
  }
  void on_message(Message&& message) override {
    hear();
    session_->on_message(std::move(message));
  }
  Placement on_data(std::uint64_t id, std::span<const std::byte> body, std::uint64_t payload_bytes) override {
    hear();
    return session_->on_data(id, body, payload_bytes);
  }
  void on_placed(std::uint64_t token, bool intact) override { session_->on_placed(token, intact); }
  void on_closed(const Error& why) override {
    session_->on_closed(why);
    parting_.on_session_lost(session_, link_, group_);
    link_.reset();
  }

  // An earlier connection to the same incarnation.
  void replaces(std::shared_ptr<Session> before) { before_ = std::move(before); }
  // The peer has admitted this side, which it does only when it has ended what it wrote before. The side that was
  // called knows it from the first word.
  void hear() {
    if (std::exchange(heard_, true)) return;
    writer_quarantine_.on_writer_gone(session_->peer().incarnation);
    if (before_ != nullptr) before_->on_writer_gone();
    before_.reset();
  }

 private:
  PeerParting& parting_;
  WriterQuarantine& writer_quarantine_;
  bool heard_ = false;  // by the thread that handles what arrives, or admits
  std::shared_ptr<Session> before_;
  const std::shared_ptr<Session> session_;
  const std::shared_ptr<GroupConnection> group_;
  std::shared_ptr<Link> link_;
};

Introduction Admission::introduce() const {
  Introduction introduction = parts_.routes.introduce();
  introduction.metadata.name = parts_.options.name;
  introduction.metadata.incarnation = parts_.incarnation;
  introduction.metadata.model = parts_.options.model;
  parts_.ranks->introduce(introduction.metadata);
  introduction.metadata.instance = parts_.table.instance();
  return introduction;
}

void Admission::check_name(const PeerMetadata& metadata) const {
  const ServiceOptions& own = parts_.options;
  if (metadata.model != own.model) {
    throw Error(ErrorCode::kLayoutMismatch, "the models differ: " + metadata.name + " has '" + metadata.model + "', " +
                                                own.name + " has '" + own.model + "'");
  }
  if (metadata.incarnation == parts_.incarnation) throw Error(ErrorCode::kArgument, "a pool cannot be its own peer");
  if (metadata.name == own.name) {
    throw Error(ErrorCode::kArgument, "both pools are called '" + metadata.name + "': give one of them another name");
  }
}

std::shared_ptr<LinkHandler> Admission::admit(const std::shared_ptr<Link>& link, const PeerMetadata& metadata,
                                              bool initiated_here) {
  if (metadata.rank_of != 0) return parts_.ranks->admit(link, metadata);
  if (const auto lost = failure_of([&] { parts_.pool.guard(); })) throw for_peer(*lost);
  check_name(metadata);
  // Of the whole block, also where it is shared among ranks: tensor and pipeline parallelism may differ, nothing else.
  check_same_blocks(metadata, metadata.name, parts_.pool.layout(), parts_.options.name);
  const auto group = parts_.ranks->plan(metadata);
  const Exposure exposure = parts_.routes.exposure(metadata, link);
  const bool by_ranks = group != nullptr;
  const auto session = std::make_shared<Session>(parts_.host, metadata, by_ranks || exposure.any(), by_ranks,
                                                 by_ranks || exposure.beyond_files);
  session->start(link, group != nullptr ? group->routes() : parts_.routes.make(metadata, link));
  const auto handler = std::make_shared<LinkWatcher>(parts_, session, link, group);

  if (initiated_here) end_half_open(metadata);
  const std::uint64_t initiator = initiated_here ? parts_.incarnation : metadata.incarnation;
  const PeerTable::Peer before = parts_.table.admit({session, link, initiator, group}, parts_.writer_quarantine);
  if (before.link != nullptr) {
    const bool same = before.session->peer().incarnation == metadata.incarnation;
    // That it meets us again says something of a connection, too, whose end has not been noticed here.
    if (same && !before.session->by_ranks()) handler->replaces(before.session);
    before.link->close(Error(ErrorCode::kPeerLost, same ? metadata.name + " has connected again"
                                                        : "a newer process has come under the name " + metadata.name));
  }
  if (initiated_here) handler->hear();  // it has admitted this side before
  return handler;
}

// The peer has just admitted a connection of this side. So it has lost the one that this side made before, and which
// still looks alive here: the peer's goodbye is late, as after a partition. It ends now, and with it what is written by
// it; the next try finds it gone. Throws kBusy then.
void Admission::end_half_open(const PeerMetadata& metadata) {
  const std::shared_ptr<Link> half_open = parts_.table.half_open(metadata);
  if (half_open == nullptr) return;
  half_open->close(Error(ErrorCode::kPeerLost, metadata.name + " had lost the connection before this side knew it"));
  throw Error(ErrorCode::kBusy, "the end of an earlier connection to " + metadata.name + " is being noticed",
              {{"retry_after_us", kRetryAfterUs}});
}

}  // namespace kvpool
