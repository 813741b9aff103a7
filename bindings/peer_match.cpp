// Matches at peers: the methods that ask, and the handles that they return.
#include "kvpool/transfer/peer_match.h"

#include <pybind11/numpy.h>

#include <memory>
#include <string>
#include <utility>

#include "arguments.h"
#include "bind.h"
#include "keys.h"
#include "kvpool/pool/keyed_cache.h"
#include "node.h"
#include "service.h"
#include "vectors.h"

namespace kvpool::bindings {
namespace {

// Keeps its node: its session speaks by the node's threads.
struct MatchHandle {
  MatchHandle(NodePointer of, std::shared_ptr<PeerMatch> asked) : node(std::move(of)), match(std::move(asked)) {}
  MatchHandle(MatchHandle&&) noexcept = default;
  MatchHandle& operator=(MatchHandle&&) = delete;
  ~MatchHandle() {
    if (match != nullptr) match->close();  // another thread may be connecting for it, and has it
  }

  NodePointer node;
  std::shared_ptr<PeerMatch> match;
};

// In a forked child it is left alone: its locks and threads are the parent's.
PeerMatch& match_of(const MatchHandle& handle) {
  handle.node->pool().guard_process();
  return *handle.match;
}

MatchHandle match_at(const NodePointer& node, py::handle peer, py::handle tokens, py::handle name_space,
                     py::handle hold, py::handle timeout) {
  MatchRequest request;
  request.peer = text_from(peer, "peer");
  request.name_space = name_from(name_space);
  const std::int64_t now_ns = steady_ns();
  request.hold_ns = deadline_from(hold, node->timeout_ns(), "hold") - now_ns;
  request.deadline_ns = deadline_from(timeout, node->timeout_ns());
  const Vector<Token> prompt = tokens_to_find(tokens);
  request.tokens = {prompt.data(), prompt.size()};
  auto match = std::make_shared<PeerMatch>(request, node->pool().layout().block_tokens);
  Service& service = service_of(*node);
  const GilReleased released;
  service.ask(match);
  return {node, std::move(match)};
}

struct KeyMatchHandle : MatchHandle {
  using MatchHandle::MatchHandle;
};

KeyMatchHandle match_keys_at(const NodePointer& node, py::handle peer, py::handle cache_argument,
                             py::handle keys_argument, py::handle every, py::handle hold, py::handle timeout) {
  if (!py::isinstance<KeyedCache>(cache_argument)) {
    throw_type_error("cache must be a KeyedCache, and is " + type_name(cache_argument));
  }
  const auto cache = cache_argument.cast<std::shared_ptr<KeyedCache>>();
  if (cache->name().empty()) throw_argument("the keyed cache has no name: peers find those of its name");
  if (!cache->stands_on(node->pool())) throw_argument("the keyed cache is of another pool");
  KeyMatchRequest request;
  request.peer = text_from(peer, "peer");
  request.cache = cache->name();
  request.key_bytes = cache->key_bytes();
  request.every = flag_from(every, "every");
  const std::int64_t now_ns = steady_ns();
  request.hold_ns = deadline_from(hold, node->timeout_ns(), "hold") - now_ns;
  request.deadline_ns = deadline_from(timeout, node->timeout_ns());
  const Keys keys = keys_from(keys_argument, request.key_bytes);
  request.keys = {keys.data(), keys.n * request.key_bytes};
  auto match = std::make_shared<PeerMatch>(request);
  Service& service = service_of(*node);
  const GilReleased released;
  service.ask(match);
  return {node, std::move(match)};
}

void await_end(const MatchHandle& handle, py::handle timeout) {
  PeerMatch& match = match_of(handle);
  const std::int64_t until_ns = deadline_from(timeout, kForever);
  if (match.done() || wait_interruptibly(until_ns, [&](std::int64_t slice) { return match.wait(slice); })) return;
  PyErr_SetString(PyExc_TimeoutError, ("the match at " + match.peer() + " is still under way").c_str());
  throw py::error_already_set();
}

py::object wait(py::object self, py::handle timeout) {
  const auto& handle = self.cast<const MatchHandle&>();
  await_end(handle, timeout);
  handle.match->rethrow_if_failed();
  return self;
}

py::object exception(const MatchHandle& handle, py::handle timeout) {
  await_end(handle, timeout);
  try {
    handle.match->rethrow_if_failed();
  } catch (const Error& error) {
    return exception_from(error);
  }
  return py::none();
}

const std::vector<Address>& found(const MatchHandle& handle) {
  const PeerMatch& match = match_of(handle);
  if (!match.done()) throw Error(ErrorCode::kState, "the match is still under way: wait() for it first");
  match.rethrow_if_failed();
  return match.addresses();
}

py::array_t<bool> found_keys(const KeyMatchHandle& handle) {
  static_cast<void>(found(handle));  // throws what it throws
  const PeerMatch& match = match_of(handle);
  py::array_t<bool> keys(static_cast<py::ssize_t>(match.pages()));
  for (std::size_t i = 0; i < match.pages(); ++i) keys.mutable_data()[i] = match.has(i);
  return keys;
}

std::size_t first_keys(const KeyMatchHandle& handle) {
  static_cast<void>(found(handle));
  const PeerMatch& match = match_of(handle);
  std::size_t first = 0;
  while (first < match.pages() && match.has(first)) ++first;
  return first;
}

void close(MatchHandle& handle) {
  const GilReleased released;
  handle.match->close();
}

std::string repr(const MatchHandle& handle) {
  const std::string head = "<PeerMatch at " + handle.match->peer();
  if (!handle.match->done()) return head + ", under way>";
  try {
    const std::size_t tokens = found(handle).size() * handle.node->pool().layout().block_tokens;
    return head + ", tokens=" + std::to_string(tokens) + (handle.match->closed() ? ">" : " held>");
  } catch (const std::exception&) {
    return head + ", failed>";
  }
}

}  // namespace

void bind_peer_match(py::module_& module, PoolClass& pool) {
  py::class_<MatchHandle>(module, "PeerMatch", R"(What a peer has cached of a prompt, held there until it is closed.

The peer neither evicts nor moves the blocks while it holds them. The hold ends with ``close()``, with ``hold`` seconds
from the call, or with the connection, whichever comes first; so a process that dies leaves no pin behind. Drop the
handle, or leave its ``with``, and it is closed. Thread-safe. ``await`` it in a coroutine.

Attributes:
    peer: The peer's name.
    tokens: Tokens cached there, whole blocks.
    addrs: uint64 array of ``tokens / block_tokens`` addresses of the peer, in the prompt's order, for Pool.fetch; media
        may be mixed.
    closed: Whether the hold is over.)")
      .def("wait", &wait, py::arg("timeout") = py::none(), R"(Waits for the answer. Ctrl-C ends the wait.

Releases the GIL.

Args:
    timeout: Seconds; None: the match's own deadline ends the wait.

Returns:
    Itself.

Raises:
    TimeoutError: ``timeout`` passed; the question is still open.
    PeerLost, DeadlineExceeded, Busy, Unsupported: It failed, and nothing is held. Unsupported: the peer is an older
        kvpool.
    Cancelled: It was closed before it was answered.)")
      .def(
          "done", [](const MatchHandle& handle) { return handle.match->done(); },
          "Whether it has ended, with or without an answer. Does not wait.")
      .def("exception", &exception, py::arg("timeout") = py::none(),
           R"(Waits for the answer, and returns the exception that wait() would raise, or None.

Args:
    timeout: As in wait.

Raises:
    TimeoutError: ``timeout`` passed.)")
      .def_property_readonly(
          "peer", [](const MatchHandle& handle) { return text_of(handle.match->peer()); }, "The peer's name.")
      .def_property_readonly(
          "tokens",
          [](const MatchHandle& handle) { return found(handle).size() * handle.node->pool().layout().block_tokens; },
          R"(Tokens cached there, whole blocks.

Raises:
    StateError: It is under way. If it failed: what wait() raises.)")
      .def_property_readonly(
          "addrs",
          [](const MatchHandle& handle) {
            const std::vector<Address>& addresses = found(handle);
            return to_array(addresses.data(), addresses.size());
          },
          R"(uint64 array of addresses of the peer.

Raises:
    StateError: It is under way. If it failed: what wait() raises.)")
      .def_property_readonly(
          "closed", [](const MatchHandle& handle) { return handle.match->closed(); },
          "Whether the hold is over. True here before the peer lets go of the blocks.")
      .def("close", &close, "Lets the peer go of the blocks, without waiting for it. Idempotent.")
      .def(
          "fileno", [](const MatchHandle& handle) { return match_of(handle).done_fd(); },
          "A file descriptor that becomes readable when it has ended, for select and similar calls. Do not read or "
          "close it.")
      .def(
          "__enter__",
          [](py::object self) {
            if (self.cast<const MatchHandle&>().match->closed())
              throw Error(ErrorCode::kClosed, "the match at the peer is closed");
            return self;
          },
          "Itself.")
      .def(
          "__exit__",
          [](MatchHandle& handle, const py::object&, const py::object&, const py::object&) { close(handle); },
          "Closes.")
      .def("__repr__", &repr);
  py::class_<KeyMatchHandle, MatchHandle>(module, "PeerKeyMatch",
                                          R"(What a peer has stored under keys, held there until it is closed.

As a PeerMatch, with `tokens` and `addrs` of the keys that are found.

Attributes:
    first: Keys found from the first one on.
    found: bool array, one for each key: whether its block is held.)")
      .def_property_readonly("first", &first_keys, "Keys found from the first one on. Raises as `addrs`.")
      .def_property_readonly("found", &found_keys, "bool array: which keys are held there. Raises as `addrs`.");
  pool.def("_match_keys_at", &match_keys_at, py::arg("peer"), py::arg("cache"), py::arg("keys"), py::arg("every"),
           py::arg("hold"), py::arg("timeout"));
  pool.def("_match_at", &match_at, py::arg("peer"), py::arg("tokens"), py::arg("namespace"), py::arg("hold"),
           py::arg("timeout"));
}

}  // namespace kvpool::bindings
