// A few simulated processes that send each other blocks, a network and a fate that do what they can against it, and the
// checks that nothing came of that:
//
//   R1  No wrong byte is ever returned as success, and no write lands in a block that is not its writer's.
//   R2  The states of all blocks add up; nothing is kept for an incarnation that is proved gone.
//   R3  Every request ends once, by its deadline; what a peer was sent, it gets once.
//
// Everything follows from the seed.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "kvpool/sequences/readable_blocks.h"
#include "kvpool/transfer/peer_match.h"
#include "kvpool/views/remote_view.h"
#include "kvpool/views/view_messages.h"
#include "sim_process.h"

namespace kvpool::testing {

struct SimPlan {
  std::uint64_t seed = 1;
  SimBugs bugs = {};
  int fates = -1;  // kills, pauses, cuts and so on; -1: by the seed
};

class SimWorld {
 public:
  explicit SimWorld(const SimPlan& plan);
  ~SimWorld();
  SimWorld(const SimWorld&) = delete;
  SimWorld& operator=(const SimWorld&) = delete;

  // Lives through it. Returns what went wrong; empty when nothing has.
  std::string run();

  std::uint64_t log_hash() const noexcept { return clock_.log_hash(); }
  std::uint64_t log_lines() const noexcept { return clock_.log_lines(); }
  // What has happened how often, to see that the faults are really tried.
  const std::map<std::string, std::uint64_t>& happened() const noexcept { return happened_; }

 private:
  struct Member;
  class Watcher;

  // One side of a link, and what the application of that side has by it.
  struct Peering {
    Member* self;
    Member* other;
    std::shared_ptr<Session> session;
    std::shared_ptr<SimLink> link;
    std::vector<std::shared_ptr<Route>> routes;
    std::vector<Address> borrowed;
    std::map<Address, std::uint64_t> named_by;  // the last transfer to each, by serial
    bool over = false;                          // on_closed has come
    bool parting = false;                       // it is being disconnected
    bool gone_proved = false;                   // that the other side writes nothing any more
  };
  struct Job {
    enum class Kind : std::uint8_t { kPlain, kInsert, kNamed, kNamedInsert, kFetch, kFetchPrompt };
    Kind kind = Kind::kPlain;
    std::shared_ptr<Transfer> transfer;
    Peering* peering = nullptr;
    std::uint64_t serial = 0;
    bool told = false;  // the receiving application is
    std::vector<Address> local;
    bool freed = false;
    std::vector<Address> named;
    std::vector<std::uint64_t> stamps;
    std::int64_t deadline_ns = 0;
    std::uint32_t layers = 0;  // still to be sent, of a streamed transfer
    bool streamed = false;
  };
  struct Owned {
    Address address;
    std::uint64_t stamp;
  };
  // Blocks of a peer that the application views; a stamp of 0 is that of a block which it may write itself.
  struct Viewed {
    Peering* peering = nullptr;
    std::shared_ptr<RemoteView> view;
    std::vector<Address> addresses;
    std::vector<std::uint64_t> stamps;
  };
  // What the application has matched at a peer.
  struct Matched {
    Peering* peering = nullptr;
    std::shared_ptr<PeerMatch> match;
    Token prompt = 0;
  };
  // A call for attention at a peer.
  struct Attending {
    Peering* peering = nullptr;
    std::int64_t deadline_ns = 0;
    AttendBody asked;
    std::vector<std::uint64_t> stamps;  // of the blocks; 0 as in a view
  };
  // What it is reading of them through a mapping.
  struct Reading {
    Member* owner = nullptr;
    std::vector<Owned> blocks;
    ReadableBlocks held;
  };
  // A process and its application.
  struct Member {
    std::unique_ptr<SimProcess> process;
    std::vector<std::unique_ptr<Peering>> peerings;
    std::vector<Job> jobs;
    std::vector<Owned> owned;
    std::vector<std::unique_ptr<Received>> pinned;
    std::vector<Viewed> viewed;
    std::vector<std::unique_ptr<Reading>> readings;
    std::vector<Matched> matched;
    std::map<std::uint64_t, Attending> attending;  // by number of the call
    std::int64_t slow_until_ns = 0;
    std::int64_t resumed_ns = 0;
  };

  static constexpr std::uint32_t kLayers = SimProcess::kLayers;
  static constexpr Token kPrompts = 10;
  static constexpr std::size_t kPromptPages = 8;
  static constexpr std::size_t kJobsMax = 10;  // of one member

  // sim_world.cpp: processes, links, fate
  Member& start_process(std::uint32_t place);
  void meet_all();
  void meet(Member& left, Member& right);
  Peering* live(Member& self, const Member& other);
  bool may_meet(Member& self, Member& other);
  void prove_gone(const Member& gone);
  void plan_fates(int fates);
  void strike();
  void kill(Member& member);
  void pause(Member& member);
  void disconnect(Peering& peering);
  void finish_disconnect(Peering& peering);
  void on_staging_buffer(const std::byte* at, std::size_t bytes, SimClock::Actor writer);
  void fail(const std::string& what);
  void count(const char* what) { ++happened_[what]; }

  // sim_application.cpp: what the applications do
  void live_on(Member& member);
  void act(Member& member);
  void transfer(Member& member);
  void fetch(Member& member);
  void probe(Member& member);
  void receive(Member& member);
  void take(Member& member, std::unique_ptr<Received> item);
  void work_alone(Member& member);
  void go_on(Job& job);
  // sim_borrowing.cpp: what they do with borrowed blocks
  void borrow(Member& member);
  void give_back(Member& member, Peering& peering, std::size_t n, std::int64_t timeout_ns);
  void recall(Member& member);
  void on_recalled(Member& member, const Session& session, const std::vector<Address>& addresses);
  // sim_views.cpp: what they read of each other's blocks without having them sent
  void view(Member& member);
  void unview(Member& member);
  void read(Member& member, const Viewed& viewed);
  void end_reading(Member& member, Reading& reading);
  void check_views(Member& member);
  void end_views(Member& member);

  // sim_attends.cpp: what they have computed over blocks where they lie
  void attend(Member& member);
  void conclude(Member& member, std::uint64_t serial, const Message* answer, const Error* error);
  Bytes answer_to(Member& member, const Attending& call);

  // sim_matches.cpp: what they ask for by its tokens
  void match_at(Member& member);
  void fetch_prompt(Member& member);
  void check_matches(Member& member);

  Peering* any_peering(Member& member);
  std::vector<Owned> blocks_of(Member& owner);
  std::vector<Address> alloc(Member& member, std::size_t n);
  std::vector<Address> alloc_stamped(Member& member, std::size_t n, std::vector<std::uint64_t>& stamps);
  std::int64_t draw_deadline();
  static std::uint64_t page_stamp(Token prompt, std::size_t page) noexcept;

  // sim_checks.cpp
  void look_at_jobs(Member& member);
  void conclude(Member& member, Job& job);
  void check_success(Member& member, const Job& job);
  void check_owned(Member& member);
  void check_cached(Member& member);
  void become_quiet();
  void check_quiet(Member& member);

  SimPlan plan_;
  SimClock clock_;
  SimFaults faults_;
  SimWatch watch_;
  std::string failure_;
  std::map<std::string, std::uint64_t> happened_;
  std::vector<std::unique_ptr<Member>> members_;  // dead ones too
  std::vector<Member*> now_;                      // by place
  std::uint32_t instances_ = 0;
  std::uint64_t serials_ = 0;
  std::uint64_t stamps_ = 0;
  bool waiting_ = false;  // some application waits in a call
  bool quiet_ = false;    // nothing new is begun
  std::int64_t end_ns_ = 0;
  bool one_sided_ = true;
  bool placed_ = true;
  bool attendable_ = true;
  std::unique_ptr<Pool> reference_;  // for answers to calls for attention
  struct Sent {
    std::vector<std::uint64_t> stamps;
    bool named;
  };
  std::map<std::uint64_t, Sent> sent_;               // what applications are to hear of, by serial
  std::set<std::uint64_t> got_;                      // serials that arrived
  std::map<std::uint64_t, const Member*> promised_;  // to whom, of those whose sender heard of success
};

}  // namespace kvpool::testing
