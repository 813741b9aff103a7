#include "kvpool/transfer/session.h"

#include <algorithm>
#include <utility>

#include "kvpool/base/check.h"
#include "kvpool/base/failure.h"
#include "kvpool/transfer/fetch.h"
#include "kvpool/transfer/outgoing.h"
#include "kvpool/transfer/peer_reads.h"
#include "kvpool/transfer/prompt_fetch.h"
#include "kvpool/transfer/strategy.h"

namespace kvpool {
namespace {

MediumMap<std::uint32_t> blocks_of(const PeerMetadata& peer) {
  MediumMap<std::uint32_t> blocks{};
  for (const Medium medium : kMedia) blocks[medium] = peer.media[medium].blocks;
  return blocks;
}

}  // namespace

Session::Session(SessionHost& host, const PeerMetadata& peer, bool peer_writes_directly, bool by_ranks,
                 bool beyond_files)
    : host_(host),
      peer_(peer),
      peer_writes_directly_(peer_writes_directly),
      by_ranks_(by_ranks),
      beyond_files_(beyond_files),
      borrowed_(peer.name, peer.instance, blocks_of(peer)) {}

void Session::start(std::shared_ptr<Link> link, std::vector<std::shared_ptr<Route>> routes) {
  if (calls_ == nullptr) {
    calls_ = std::make_shared<PeerCalls>(host_, peer_.name, link, weak_from_this());
    receiver_ = std::make_shared<Receiver>(host_, peer_, peer_writes_directly_,
                                           beyond_files_);  // may live longer than the link
    matches_ = std::make_unique<HeldMatches>(host_);
    serve_verbs();
    reads_ = host_.make_reads(peer_, peer_writes_directly_);
    if (reads_ != nullptr) reads_->serve(*calls_);
  }
  for (const auto& route : routes) {
    if (route_receiver_ == nullptr) route_receiver_ = route->route_receiver();
  }
  if (route_receiver_ != nullptr) {
    route_receiver_->begin(
        [receiver = receiver_](std::uint64_t id, std::span<const std::byte> body, std::uint64_t bytes) {
          return receiver->on_pass(id, body, bytes);
        },
        [receiver = receiver_](std::uint64_t token, bool intact) { receiver->on_passed(token, intact); });
  }
  const std::lock_guard lock(mutex());
  link_ = std::move(link);
  routes_ = std::move(routes);
}

std::shared_ptr<Link> Session::link() const {
  const std::lock_guard lock(mutex());
  return link_;
}

void Session::close_link(const Error& why) noexcept {
  if (const auto open = link()) open->close(why);
}

// Handles of transfers keep their session for as long as the application likes. What the link keeps open (a socket, a
// pidfd, the descriptors of the peer's memory) is let go of when nothing needs it any more, as the routes are in
// stop_writing(). A thread that is using it has it from link().
void Session::let_go() noexcept {
  std::shared_ptr<Link> ended;  // destroyed without the lock
  const std::lock_guard lock(mutex());
  if (link_ended() && writes_under_way() == 0) ended.swap(link_);
}

bool Session::peer_writes_directly(std::span<const Address> blocks) const noexcept {
  if (!peer_writes_directly_ || beyond_files_) return peer_writes_directly_;
  return std::ranges::any_of(blocks, [&](Address address) { return host_.blocks().in_file(medium_of(address)); });
}

std::uint32_t Session::under_way() const { return calls_->pending() + pushes_.load(); }

void Session::throw_lost() const {
  const std::lock_guard lock(mutex());
  throw why_lost_ ? Error(*why_lost_) : Error(ErrorCode::kPeerLost, "peer " + peer_.name + " was lost");
}

void Session::check_of_peer(std::span<const Address> addresses) const {
  for (const Address address : addresses) {
    const std::uint32_t bits = medium_bits_of(address);
    if (instance_of(address) == peer_.instance && is_medium(bits) &&
        block_of(address) < peer_.media[medium_of(address)].blocks) {
      continue;
    }
    throw Error(ErrorCode::kProtocol, "peer " + peer_.name + " named a block that it has not",
                {{"address", static_cast<std::int64_t>(address)}});
  }
}

// --- transfers ---

std::shared_ptr<Transfer> Session::transfer(TransferRequest&& request) {
  auto outgoing = prepare(std::move(request));
  outgoing->start();
  return outgoing;
}

std::shared_ptr<Outgoing> Session::prepare(TransferRequest&& request) {
  if (lost()) throw_lost();
  const Layout& layout = host_.blocks().layout();
  const bool gather = merges(strategy_used(request.strategy, request.streamed));
  const WriteSize size{request.from.size() * (layout.aggregated && gather ? 1 : layout.piece_bytes.size()),
                       request.from.size() * layout.block_bytes(), gather};
  const MediaSet reach = request.to.empty() ? media_set_of(request.medium) : media_set_of(request.to);
  auto route = choose_route(request.route, size, media_set_of(request.from), reach, request.checksum);
  if (request.checksum) check_whole(*route);
  return std::make_shared<Outgoing>(shared_from_this(), calls_->next_id(), std::move(request), std::move(route));
}

void Session::check_whole(const Route& route) const {
  if (route.traits().whole) return;
  throw Error(ErrorCode::kUnsupported, std::string("no checksum of the whole can be compared with ") + peer_.name +
                                           " by the route " + route.name() +
                                           ": on neither side can the CPU read all of the content");
}

std::shared_ptr<Transfer> Session::fetch(const FetchRequest& request, bool frees_on_failure) {
  if (lost()) throw_lost();
  auto fetch = std::make_shared<Fetch>(shared_from_this(), calls_->next_id() | kFetchBit, request, frees_on_failure);
  fetch->start();
  return fetch;
}

std::shared_ptr<Transfer> Session::fetch_prompt(PromptFetchRequest&& request) {
  if (lost()) throw_lost();
  auto fetch = std::make_shared<PromptFetch>(shared_from_this(), calls_->next_id(), std::move(request));
  fetch->start();
  return fetch;
}

// The peer takes its leave. It writes nothing any more, and waits to hear the same from here. Only the first time
// counts: each costs a piece of work that waits for a thread.
void Session::on_leave() {
  if (!peer_parting_.advance(PartingState::kDrained)) return;
  host_.run(this, [self = shared_from_this()] {
    self->stop_writing(Error(ErrorCode::kPeerLost, "peer " + self->peer_.name + " has left"));
    if (self->writes_under_way() == 0) self->host_.drained(*self);
  });
}

// A route that was closed because the two part has ended what it wrote; a GPU that is lost then is lost all the same.
void Session::note_broken(const Error& error) noexcept {
  const bool gpu = error.code() == ErrorCode::kDeviceLost;
  if (gpu) host_.write_lost();
  if (gpu || (error.code() == ErrorCode::kPeerLost && !lost())) broken_.store(true);
}

void Session::on_route_broken(const Error& why) noexcept {
  note_broken(why);
  if (lost()) return;
  broken_.store(true);
  close_link(why);
}

void Session::say_drained() noexcept {
  if (broken_.load() || !parting_.advance(PartingState::kSaying)) return;
  const auto open = link();
  if (open == nullptr) return;
  if (failure_of([&] { open->send(Message{FrameKind::kLeave, 0, 0, {}}); })) return;
  parting_.advance(PartingState::kDrained);
}

// --- what arrives ---

void Session::on_message(Message&& message) {
  if (!heard()) heard_.store(true, std::memory_order_relaxed);
  if (route_receiver_ != nullptr && RouteReceiver::takes(message.kind))
    return route_receiver_->on_message(std::move(message));
  if (!handle_later(message)) handle(std::move(message));
}

// What may set blocks free waits for content that is on its way to them. A sender that keeps to the protocol says
// nothing of the kind before its write has ended; one that does not must not make this side write where it should not.
bool Session::handle_later(Message& message) {
  if (route_receiver_ == nullptr) return false;
  if (message.kind != FrameKind::kLeave && !calls_->frees_blocks(message)) return false;
  struct Kept {
    RequestBytes::Held bytes;
    Message message;
  };
  // A sender of ours says it behind the few passes that are under way; who says more ends the link.
  auto bytes = deferred_->hold(sizeof(Kept) + message.body.size(), host_.limits().request_bytes_max);
  const auto kept = std::make_shared<Kept>(Kept{std::move(bytes), std::move(message)});
  std::function<void()> work = [self = shared_from_this(), kept] {
    if (self->parting_.reached(PartingState::kLinkEnded)) {
      if (kept->message.kind != FrameKind::kLeave) return;
      // That the peer writes and reads no more is true without the link as well.
      if (!self->by_ranks_) self->receiver_->on_drained();
      if (self->reads_ != nullptr) self->reads_->on_reader_gone();
      self->peer_parting_.advance(PartingState::kDrained);
      return;
    }
    if (const auto failure = failure_of([&] { self->handle(std::move(kept->message)); })) self->close_link(*failure);
  };
  if (route_receiver_->defer(work)) return true;
  message = std::move(kept->message);
  return false;
}

void Session::on_writer_gone() {
  if (reads_ != nullptr) reads_->on_reader_gone();
  if (route_receiver_ != nullptr) {
    std::function<void()> work = [receiver = receiver_] { receiver->on_writer_gone(); };
    if (route_receiver_->defer(work)) return;
  }
  receiver_->on_writer_gone();
}

void Session::handle(Message&& message) {
  switch (message.kind) {
    case FrameKind::kCall:
    case FrameKind::kCancel:
    case FrameKind::kAnswer:
    case FrameKind::kRefused:
      return calls_->on_message(std::move(message));
    case FrameKind::kLeave:
      if (!by_ranks_) receiver_->on_drained();  // first: the rest may find no memory
      if (reads_ != nullptr) reads_->on_reader_gone();
      return on_leave();
    default:
      throw Error(ErrorCode::kProtocol,
                  "a frame of kind " + std::to_string(static_cast<int>(message.kind)) + " is not a message");
  }
}

// Who answers what the peer asks, and what becomes of answers that come too late.
void Session::serve_verbs() {
  const auto serve = [this](const Verb& verb, auto read, auto on_call) {
    calls_->serve(verb, PeerCalls::Runs::kHere,
                  [read, on_call](const CallPointer& call, Bytes&& request) { on_call(call, read(request)); });
  };
  Receiver* const receiver = receiver_.get();
  serve(kLendVerb, read_lend, [=](const CallPointer& call, const LendBody& body) { receiver->on_lend(call, body); });
  serve(kReturnVerb, read_addresses,
        [=](const CallPointer& call, const std::vector<Address>& addresses) { receiver->on_return(call, addresses); });
  serve(kReserveVerb, read_reserve,
        [=](const CallPointer& call, ReserveBody&& body) { receiver->on_reserve(call, std::move(body)); });
  serve(kCompleteVerb, read_complete,
        [=](const CallPointer& call, CompleteBody&& body) { receiver->on_complete(call, std::move(body)); });
  serve(kFetchVerb, read_fetch, [this](const CallPointer& call, FetchBody&& body) { on_fetch(call, std::move(body)); });
  serve(kOfferVerb, read_addresses,
        [this](const CallPointer& call, const std::vector<Address>& addresses) { on_offer(call, addresses); });
  serve(kRecallVerb, read_addresses,
        [this](const CallPointer& call, const std::vector<Address>& addresses) { on_recall(call, addresses); });
  calls_->serve(kMatchVerb, PeerCalls::Runs::kHere,
                [this](const CallPointer& call, Bytes&& request) { matches_->on_match(*call, read_match(request)); });
  calls_->serve(kMatchKeysVerb, PeerCalls::Runs::kHere, [this](const CallPointer& call, Bytes&& request) {
    matches_->on_match_keys(*call, read_match_keys(request));
  });
  calls_->serve(kUnmatchVerb, PeerCalls::Runs::kHere,
                [this](const CallPointer& call, Bytes&& /*request*/) { matches_->on_unmatch(*call); });
  calls_->serve(kAbandonVerb, PeerCalls::Runs::kHere,
                [=](const CallPointer& call, Bytes&& /*request*/) { receiver->on_abandon(call); });
  // What was lent goes back, and what was held is let go.
  calls_->when_late(kLendVerb, [this](Message&& answer) {
    if (answer.kind == FrameKind::kAnswer) calls_->post(kReturnVerb, calls_->next_id(), answer.body);
  });
  for (const Verb* const verb : {&kMatchVerb, &kMatchKeysVerb}) {
    calls_->when_late(*verb, [this](Message&& answer) {
      if (answer.kind == FrameKind::kAnswer) calls_->post(kUnmatchVerb, answer.id);
    });
  }
  calls_->when_late(kRecallVerb, [=](Message&& answer) {
    if (answer.kind == FrameKind::kAnswer) receiver->on_recall_over(answer.id);
  });
  calls_->when_late(kFetchVerb, [=](Message&& answer) { receiver->on_fetch_over(answer.id); });
}

Placement Session::on_data(std::uint64_t id, std::span<const std::byte> body, std::uint64_t payload_bytes) {
  return receiver_->on_data(id, body, payload_bytes);
}

void Session::on_placed(std::uint64_t token, bool intact) { receiver_->on_placed(token, intact); }

void Session::stop_writing(const Error& why) { stop_writing(why, PartingState::kStopping); }

// Why it is lost, and that it is, are seen together.
void Session::stop_writing(const Error& why, PartingState to) {
  std::vector<std::shared_ptr<Route>> routes;  // writes under way have theirs in their job
  std::vector<std::shared_ptr<void>> open_there;
  {
    const std::lock_guard lock(mutex());
    const bool first = !lost();
    if (first) {
      open_there.reserve(routes_.size());
      routes.swap(routes_);
      why_lost_ = why;
    }
    parting_.advance(to);
    if (!first) return;
  }
  // In this order: unmapping a GPU's memory waits for streams, and these may wait for a fetch to end.
  calls_->end(why);
  calls_ended_.store(true);
  for (const auto& route : routes) route->close();
  for (const auto& route : routes) {
    if (auto one = route->let_go()) open_there.push_back(std::move(one));
  }
  writes_.fetch_add(static_cast<std::uint32_t>(open_there.size()));  // of all, before the first has ended
  for (auto& one : open_there) drop_aside(std::move(one));
  if (const auto open = link()) open->wake();
}

// Giving it back may wait for streams, and these for fetches from other peers, whose answers this thread may be the one
// to bring. Until it is done it counts as a write: this side has not ended before. REQUIRES: it is counted.
void Session::drop_aside(std::shared_ptr<void> open) noexcept {
  const auto ended = [self = shared_from_this()] {
    self->writes_.fetch_sub(1);
    self->after_write();
  };
  const void* const key = open.get();  // not the session's: what waits there may be a write that is yet to be stopped
  const auto failure = failure_of([&] {
    host_.run_waiting(key, Priority::kBackground, [ended, dropped = std::move(open)]() mutable {
      dropped.reset();
      ended();
    });
  });
  if (failure) ended();  // it was dropped here
}

void Session::on_closed(const Error& why) {
  // Whatever ended the link, to those who wait for the peer it is lost. The state changes before writes are counted
  // below: either they see it, or are seen.
  stop_writing(Error(why.code() == ErrorCode::kClosed ? ErrorCode::kClosed : ErrorCode::kPeerLost,
                     "peer " + peer_.name + " is lost: " + why.what()),
               PartingState::kLinkEnded);
  if (route_receiver_ != nullptr) return route_receiver_->close([self = shared_from_this()] { self->end_receiving(); });
  end_receiving();
}

// Nothing arrives any more, and nothing is being placed.
void Session::end_receiving() {
  receiver_->on_lost();
  matches_->on_lost();
  if (reads_ != nullptr) reads_->on_lost();
  parting_.advance(PartingState::kSettled);
  if (writes_under_way() > 0) return;
  host_.drained(*this);
  let_go();
}

std::int64_t Session::tick(std::int64_t now_ns) {
  return std::min({receiver_->tick(now_ns), matches_->tick(now_ns), calls_->tick(now_ns), tick_recalls(now_ns)});
}

}  // namespace kvpool
