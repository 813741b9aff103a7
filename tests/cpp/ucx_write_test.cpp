// What a write makes of what UCX says of its puts, over a table of functions that stand for UCX.
#include "kvpool/routes/ucx/ucx_write.h"

#include <doctest/doctest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <deque>
#include <string>
#include <vector>

#include "block_memory.h"
#include "kvpool/routes/ucx/ucx_context.h"
#include "kvpool/routes/ucx/ucx_worker.h"
#include "thrown.h"
#include "ucx_kit.h"

namespace kvpool::testing {
namespace {

// It takes an operation, and completes it when it makes progress, in order. Used under the worker's lock alone.
struct FakeUcx {
  struct Operation {
    ucp_request_param_t params;
    ucs_status_t status;
  };
  struct Answer {
    ucs_status_t status = UCS_OK;
    bool at_once = false;
  };
  std::deque<Answer> puts;  // to those that come next; UCS_OK behind them
  ucs_status_t flush = UCS_OK;
  ucs_status_t endpoint_fails = UCS_OK;  // when the flush completes
  std::deque<Operation> under_way;
  int puts_made = 0;
  int flushes = 0;
  int closes = 0;
  ucp_err_handler_t on_error{};
};

FakeUcx& fake() {
  static FakeUcx one;
  return one;
}

ucp_ep_h endpoint() { return reinterpret_cast<ucp_ep_h>(&fake()); }

ucs_status_ptr_t begin(FakeUcx::Answer answer, const ucp_request_param_t* params) {
  if (answer.at_once) return reinterpret_cast<void*>(static_cast<std::intptr_t>(answer.status));  // NOLINT
  fake().under_way.push_back({*params, answer.status});
  return &fake();
}

unsigned complete_one() {
  if (fake().under_way.empty()) return 0;
  const FakeUcx::Operation done = fake().under_way.front();
  fake().under_way.pop_front();
  done.params.cb.send(&fake(), done.status, done.params.user_data);
  return 1;
}

const UcxLibrary& library() {
  static const UcxLibrary table = [] {
    UcxLibrary ucx;
    ucx.version = "1.22.0";
    ucx.minor = 22;
    ucx.status_string = [](ucs_status_t status) {
      return status == UCS_ERR_CANCELED ? "Request canceled" : "something else";
    };
    ucx.config_read = [](const char*, const char*, ucp_config_t**) { return UCS_OK; };
    ucx.config_modify = [](ucp_config_t*, const char*, const char*) { return UCS_OK; };
    ucx.config_release = [](ucp_config_t*) {};
    ucx.init_version = [](unsigned, unsigned, const ucp_params_t*, const ucp_config_t*, ucp_context_h*) {
      return UCS_OK;
    };
    ucx.cleanup = [](ucp_context_h) {};
    ucx.mem_map = [](ucp_context_h, const ucp_mem_map_params_t*, ucp_mem_h*) { return UCS_OK; };
    ucx.mem_unmap = [](ucp_context_h, ucp_mem_h) { return UCS_OK; };
    ucx.rkey_pack = [](ucp_context_h, ucp_mem_h, void** key, std::size_t* bytes) {
      static char text[] = "key";
      *key = text;
      *bytes = sizeof(text);
      return UCS_OK;
    };
    ucx.rkey_buffer_release = [](void*) {};
    ucx.worker_create = [](ucp_context_h, const ucp_worker_params_t*, ucp_worker_h* worker) {
      *worker = reinterpret_cast<ucp_worker_h>(&fake());  // null is a worker that was closed
      return UCS_OK;
    };
    ucx.worker_destroy = [](ucp_worker_h) {};
    ucx.worker_get_address = [](ucp_worker_h, ucp_address_t** address, std::size_t* bytes) {
      static char text[] = "here";
      *address = reinterpret_cast<ucp_address_t*>(text);
      *bytes = sizeof(text);
      return UCS_OK;
    };
    ucx.worker_release_address = [](ucp_worker_h, ucp_address_t*) {};
    ucx.worker_get_efd = [](ucp_worker_h, int* descriptor) {
      static const int one = eventfd(0, EFD_CLOEXEC);
      *descriptor = one;
      return UCS_OK;
    };
    ucx.worker_arm = [](ucp_worker_h) { return fake().under_way.empty() ? UCS_OK : UCS_ERR_BUSY; };
    ucx.ep_create = [](ucp_worker_h, const ucp_ep_params_t* params, ucp_ep_h* made) {
      fake().on_error = params->err_handler;
      *made = endpoint();
      return UCS_OK;
    };
    ucx.ep_close_nbx = [](ucp_ep_h, const ucp_request_param_t*) -> ucs_status_ptr_t {
      ++fake().closes;
      for (FakeUcx::Operation& operation : fake().under_way) operation.status = UCS_ERR_CANCELED;
      return nullptr;
    };
    ucx.ep_print_info = [](ucp_ep_h, FILE*) {};
    ucx.ep_rkey_unpack = [](ucp_ep_h, const void*, ucp_rkey_h*) { return UCS_OK; };
    ucx.rkey_destroy = [](ucp_rkey_h) {};
    ucx.request_free = [](void*) {};
    ucx.put_nbx = [](ucp_ep_h, const void*, std::size_t, std::uint64_t, ucp_rkey_h, const ucp_request_param_t* params) {
      FakeUcx::Answer answer;
      ++fake().puts_made;
      if (!fake().puts.empty()) {
        answer = fake().puts.front();
        fake().puts.pop_front();
      }
      return begin(answer, params);
    };
    ucx.ep_flush_nbx = [](ucp_ep_h, const ucp_request_param_t* params) {
      ++fake().flushes;
      return begin({fake().flush, false}, params);
    };
    ucx.worker_progress = [](ucp_worker_h) {
      const unsigned done = complete_one();
      if (done != 0 && fake().flushes > 0 && fake().under_way.empty() && fake().endpoint_fails != UCS_OK) {
        fake().on_error.cb(fake().on_error.arg, endpoint(), fake().endpoint_fails);
      }
      return done;
    };
    return ucx;
  }();
  return table;
}

constexpr std::size_t kBlock = 4096;

// The way from a pool's memory to itself.
struct OneRoute {
  explicit OneRoute(std::size_t block = kBlock) : memory(8 * block) {
    fake() = {};
    UcxLocal local;
    local.spans[0] = {8, {{memory.data(), block, block}}};
    context = std::make_shared<UcxContext>(library(), local, nullptr);
    worker = context->make_worker();
    PeerMetadata metadata;
    metadata.name = "peer";
    metadata.media[Medium::kHbm].blocks = 8;
    metadata.media[Medium::kHbm].segments = {{reinterpret_cast<std::uint64_t>(memory.data()), block, block}};
    metadata.ucx = worker->blob();
    route = worker->make_route(metadata);
  }
  WriteOutcome write() {
    return write_blocks(*route, {{0, 0, kBlock}}, {block(0), block(2), block(4)}, {block(1), block(3), block(5)});
  }
  // "" when it throws nothing.
  std::string said_by_write() {
    try {
      write();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }
  static Address block(std::uint32_t number) { return make_address(0, Medium::kHbm, 1, number); }
  bool suits() const { return route->suits({true, false}, {true, false}); }

  std::vector<std::byte> memory;
  std::shared_ptr<UcxContext> context;
  std::shared_ptr<UcxWorker> worker;
  std::shared_ptr<UcxRoute> route;
};

TEST_CASE("ucx write: puts that complete are a write") {
  OneRoute one;
  const WriteOutcome outcome = one.write();
  CHECK(outcome.calls == 3);
  CHECK(outcome.bytes == 3 * kBlock);
  CHECK(fake().flushes == 1);
  CHECK(one.suits());
}

TEST_CASE("ucx write: a piece that is put in parts is one call") {
  constexpr std::size_t kLong = std::size_t{9} << 20;
  OneRoute one(kLong);
  const WriteOutcome outcome = write_blocks(*one.route, {{0, 0, kLong}}, {OneRoute::block(0)}, {OneRoute::block(1)});
  CHECK(fake().puts_made == 3);
  CHECK(outcome.calls == 1);
  CHECK(outcome.bytes == kLong);
}

TEST_CASE(
    "ucx write: a put that has no way is the route's own failure, whenever UCX says so, and the endpoint stands") {
  for (const ucs_status_t why : {UCS_ERR_UNSUPPORTED, UCS_ERR_UNREACHABLE, UCS_ERR_CANCELED}) {
    for (const bool at_once : {false, true}) {
      for (const std::size_t behind : {0U, 1U, 2U}) {
        CAPTURE(why);
        CAPTURE(at_once);
        CAPTURE(behind);
        OneRoute one;
        fake().puts.assign(behind, {});
        fake().puts.push_back({why, at_once});
        CHECK(code_of([&] { one.write(); }) == ErrorCode::kUnsupported);
        // Nothing of it is under way: what was put is flushed, and what was refused at the first put needs none.
        CHECK(fake().under_way.empty());
        CHECK(fake().flushes == (behind == 0 && at_once && why == UCS_ERR_UNSUPPORTED ? 0 : 1));
        CHECK(fake().closes == 0);
        CHECK_FALSE(one.suits());
        CHECK(one.write().calls == 3);
      }
    }
  }
}

TEST_CASE("ucx write: the error of a put that has no way says what UCX said") {
  OneRoute one;
  fake().puts = {{UCS_ERR_CANCELED, false}};
  const std::string said = one.said_by_write();
  CHECK(said.find("no way") != std::string::npos);
  CHECK(said.find("Request canceled") != std::string::npos);
}

TEST_CASE("ucx write: puts that are cancelled because the endpoint fails are the peer's loss") {
  for (const bool at_once : {false, true}) {
    for (const bool flush_fails : {false, true}) {
      CAPTURE(at_once);
      CAPTURE(flush_fails);
      OneRoute one;
      fake().puts = {{UCS_ERR_CANCELED, at_once}};
      if (flush_fails) {
        fake().flush = UCS_ERR_CANCELED;
      } else {
        fake().endpoint_fails = UCS_ERR_ENDPOINT_TIMEOUT;
      }
      CHECK(code_of([&] { one.write(); }) == ErrorCode::kPeerLost);
      CHECK(fake().under_way.empty());
      CHECK(fake().closes == 1);
      CHECK(one.suits());
    }
  }
}

TEST_CASE("ucx write: another error of a put is the peer's loss, also beside one that has no way") {
  for (const bool at_once : {false, true}) {
    OneRoute one;
    fake().puts = {{UCS_ERR_CANCELED, false}, {UCS_ERR_CONNECTION_RESET, at_once}};
    CHECK(code_of([&] { one.write(); }) == ErrorCode::kPeerLost);
    CHECK(fake().under_way.empty());
    CHECK(one.suits());
  }
}

// As OneRoute, with DRAM beside it. The peer's HBM is on a GPU.
struct MixedRoute {
  MixedRoute() : hbm(4 * kBlock), dram(4 * kBlock) {
    fake() = {};
    UcxLocal local;
    local.spans[0] = {4, {{hbm.data(), kBlock, kBlock}}};
    local.spans[1] = {4, {{dram.data(), kBlock, kBlock}}};
    context = std::make_shared<UcxContext>(library(), local, nullptr);
    worker = context->make_worker();
    PeerMetadata metadata;
    metadata.name = "peer";
    for (const Medium i : {Medium::kHbm, Medium::kDram}) {
      const Segment& segment = local.spans[i].segments[0];
      metadata.media[i].blocks = 4;
      metadata.media[i].segments = {{reinterpret_cast<std::uint64_t>(segment.base), kBlock, kBlock}};
    }
    metadata.media[Medium::kHbm].kind = MemoryKind::kGpu;
    metadata.ucx = worker->blob();
    route = worker->make_route(metadata);
  }
  // From HBM to HBM, and from DRAM to DRAM.
  void write() {
    const auto at = [](Medium medium, std::uint32_t block) { return make_address(0, medium, 1, block); };
    write_blocks(*route, {{0, 0, kBlock}}, {at(Medium::kHbm, 0), at(Medium::kDram, 0)},
                 {at(Medium::kHbm, 2), at(Medium::kDram, 2)});
  }
  bool suits(Medium medium) const {
    MediaSet reach{};
    reach[medium] = true;
    return route->suits(reach, reach);
  }

  std::vector<std::byte> hbm;
  std::vector<std::byte> dram;
  std::shared_ptr<UcxContext> context;
  std::shared_ptr<UcxWorker> worker;
  std::shared_ptr<UcxRoute> route;
};

TEST_CASE("ucx write: of a write of several kinds of memory only that is given up which has no way") {
  for (const ucs_status_t why : {UCS_ERR_UNSUPPORTED, UCS_ERR_CANCELED}) {
    for (const bool at_once : {false, true}) {
      for (const bool to_gpu : {true, false}) {
        CAPTURE(why);
        CAPTURE(at_once);
        CAPTURE(to_gpu);
        MixedRoute mixed;
        if (!to_gpu) fake().puts.push_back({});
        fake().puts.push_back({why, at_once});
        CHECK(code_of([&] { mixed.write(); }) == ErrorCode::kUnsupported);
        CHECK(mixed.suits(Medium::kHbm) == !to_gpu);
        CHECK(mixed.suits(Medium::kDram) == to_gpu);
      }
    }
  }
}

TEST_CASE("ucx write: all kinds of memory of a write that have no way are given up") {
  MixedRoute mixed;
  fake().puts = {{UCS_ERR_CANCELED, false}, {UCS_ERR_CANCELED, false}};
  CHECK(code_of([&] { mixed.write(); }) == ErrorCode::kUnsupported);
  CHECK_FALSE(mixed.suits(Medium::kHbm));
  CHECK_FALSE(mixed.suits(Medium::kDram));
}

}  // namespace
}  // namespace kvpool::testing
