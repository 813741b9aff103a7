// The verbs that move blocks between pools.
#include "transfer.h"

#include <pybind11/stl.h>

#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bind.h"
#include "fast_method.h"
#include "kvpool/net/frame.h"
#include "node.h"
#include "service.h"
#include "stream.h"
#include "vectors.h"

namespace kvpool::bindings {
namespace {

// ---- arguments

Strategy strategy_from(py::handle argument) {
  const std::string_view name = text_from(argument, "strategy");
  if (name == "auto") return Strategy::kAuto;
  if (name == "by_layer") return Strategy::kByLayer;
  if (name == "by_layer_agg") return Strategy::kByLayerAgg;
  if (name == "by_request") return Strategy::kByRequest;
  if (name == "by_request_agg") return Strategy::kByRequestAgg;
  throw Error(
      ErrorCode::kArgument,
      "strategy must be auto, by_layer, by_layer_agg, by_request or by_request_agg, and is " + std::string(name));
}

Priority priority_from(py::handle argument) {
  const std::string_view name = text_from(argument, "priority");
  if (name == "prefill") return Priority::kPrefill;
  if (name == "decode") return Priority::kDecode;
  if (name == "background") return Priority::kBackground;
  throw Error(ErrorCode::kArgument, "priority must be decode, prefill or background, and is " + std::string(name));
}

// The common arguments of all verbs that send.
struct Options {
  py::handle to;
  py::handle medium;
  py::handle evict;
  py::handle private_bytes;
  py::handle strategy;
  py::handle priority;
  py::handle route;
  py::handle checksum;
  py::handle stream;
  py::handle timeout;
};

TransferRequest request_from(const PeerNode& node, py::handle peer, py::handle addresses, const Options& options) {
  TransferRequest request;
  request.peer = text_from(peer, "peer");
  request.from = addresses_from(addresses).copy();
  if (!options.to.is_none()) request.to = addresses_from(options.to).copy();
  request.medium = medium_choice_from(options.medium);
  request.may_evict = flag_from(options.evict, "evict");
  if (!options.private_bytes.is_none()) {
    request.private_bytes = bytes_from(options.private_bytes, "private", kPrivateBytesMax);
  }
  request.strategy = strategy_from(options.strategy);
  request.priority = priority_from(options.priority);
  if (!options.route.is_none()) request.route = text_from(options.route, "route");
  request.checksum = flag_from(options.checksum, "checksum");
  request.deadline_ns = deadline_from(options.timeout, node.timeout_ns());
  if (!options.to.is_none() && request.to.size() != request.from.size()) {
    throw Error(
        ErrorCode::kArgument,
        std::to_string(request.from.size()) + " blocks are sent, and to names " + std::to_string(request.to.size()),
        {{"given", static_cast<std::int64_t>(request.to.size())},
         {"needed", static_cast<std::int64_t>(request.from.size())}});
  }
  request.after = node.pool().order_after(stream_from(options.stream));
  return request;
}

void add_tokens(TransferRequest& request, py::handle tokens, py::handle name_space) {
  request.insert = true;
  request.tokens = tokens_from(tokens).copy();
  request.name_space = name_from(name_space);
}

// ---- starting

TransferHandle start(const NodePointer& node, TransferRequest&& request) {
  Service& service = service_of(*node);
  TransferHandle handle{pool_of(node), nullptr};
  handle.transfer =
      call_interruptibly([&](const GivenUp& given_up) { return service.transfer(std::move(request), given_up); });
  return handle;
}

// Of one whose layers follow: the kvpool.TransferStream that sends them.
py::object begin(const NodePointer& node, TransferRequest&& request, py::handle layerwise, py::handle stream) {
  request.streamed = flag_from(layerwise, "layerwise");
  const bool streamed = request.streamed;
  py::object handle = py::cast(start(node, std::move(request)));
  if (!streamed) return handle;
  return stream_layers(std::move(handle), stream);
}

py::object transfer(const NodePointer& node, py::handle peer, py::handle addresses, py::handle to, py::handle medium,
                    py::handle evict, py::handle private_bytes, py::handle strategy, py::handle priority,
                    py::handle route, py::handle checksum, py::handle stream, py::handle layerwise,
                    py::handle timeout) {
  return begin(node,
               request_from(*node, peer, addresses,
                            {to, medium, evict, private_bytes, strategy, priority, route, checksum, stream, timeout}),
               layerwise, stream);
}

py::object transfer_with_insert(const NodePointer& node, py::handle peer, py::handle tokens, py::handle addresses,
                                py::handle name_space, py::handle to, py::handle medium, py::handle evict,
                                py::handle private_bytes, py::handle strategy, py::handle priority, py::handle route,
                                py::handle checksum, py::handle stream, py::handle layerwise, py::handle timeout) {
  TransferRequest request = request_from(
      *node, peer, addresses, {to, medium, evict, private_bytes, strategy, priority, route, checksum, stream, timeout});
  add_tokens(request, tokens, name_space);
  return begin(node, std::move(request), layerwise, stream);
}

// Of what has the fields of a TransferSpec: the bindings know no class of Python's.
py::object field_of(const py::object& specification, const char* name) {
  const std::string wrong = "specs must be TransferSpec, and one is " + type_name(specification);
  if (!py::hasattr(specification, name)) throw_type_error(wrong);
  auto field = py::reinterpret_steal<py::object>(PyObject_GetAttrString(specification.ptr(), name));
  if (!field) throw_type_error(wrong);
  return field;
}

TransferRequest request_of(const PeerNode& node, const py::object& specification) {
  const auto field = [&](const char* name) { return field_of(specification, name); };
  const py::object to = field("to");
  const py::object medium = field("medium");
  const py::object evict = field("evict");
  const py::object private_bytes = field("private");
  const py::object strategy = field("strategy");
  const py::object priority = field("priority");
  const py::object route = field("route");
  const py::object checksum = field("checksum");
  const py::object stream = field("stream");
  const py::object timeout = field("timeout");
  TransferRequest request =
      request_from(node, field("peer"), field("addrs"),
                   {to, medium, evict, private_bytes, strategy, priority, route, checksum, stream, timeout});
  const py::object tokens = field("tokens");
  if (!tokens.is_none()) add_tokens(request, tokens, field("namespace"));
  return request;
}

std::vector<TransferHandle> transfer_batch(const NodePointer& node, py::handle specifications) {
  std::vector<TransferRequest> requests;
  for (const py::object& one : items_from(specifications, "specs")) requests.push_back(request_of(*node, one));
  Service& service = service_of(*node);
  std::vector<std::shared_ptr<Transfer>> transfers = call_interruptibly(
      [&](const GivenUp& given_up) { return service.transfer_batch(std::move(requests), given_up); });
  std::vector<TransferHandle> handles;
  handles.reserve(transfers.size());
  for (std::shared_ptr<Transfer>& transfer : transfers) handles.emplace_back(pool_of(node), std::move(transfer));
  return handles;
}

TransferHandle fetch(const NodePointer& node, py::handle peer, py::handle addresses, py::handle to, py::handle medium,
                     py::handle evict, py::handle priority, py::handle route, py::handle checksum, py::handle timeout) {
  FetchRequest request;
  if (!peer.is_none()) request.peer = text_from(peer, "peer");
  request.from = addresses_from(addresses).copy();
  request.medium = medium_choice_from(medium);
  request.may_evict = flag_from(evict, "evict");
  request.priority = priority_from(priority);
  if (!route.is_none()) request.route = text_from(route, "route");
  request.checksum = flag_from(checksum, "checksum");
  request.deadline_ns = deadline_from(timeout, node->timeout_ns());
  if (!to.is_none()) {
    request.to = addresses_from(to).copy();
    if (request.to.size() != request.from.size()) {
      throw Error(ErrorCode::kArgument,
                  std::to_string(request.from.size()) + " blocks are fetched, and to names " +
                      std::to_string(request.to.size()),
                  {{"given", static_cast<std::int64_t>(request.to.size())},
                   {"needed", static_cast<std::int64_t>(request.from.size())}});
    }
  }
  Service& service = service_of(*node);
  TransferHandle handle{pool_of(node), nullptr};
  handle.transfer =
      call_interruptibly([&](const GivenUp& given_up) { return service.fetch(std::move(request), given_up); });
  return handle;
}

TransferHandle fetch_with_insert(const NodePointer& node, py::handle peer, py::handle tokens, py::handle name_space,
                                 py::handle medium, py::handle evict, py::handle priority, py::handle timeout) {
  PromptFetchRequest request;
  request.peer = text_from(peer, "peer");
  request.tokens = tokens_from(tokens).copy();
  request.name_space = name_from(name_space);
  request.medium = medium_choice_from(medium);
  request.may_evict = flag_from(evict, "evict");
  request.priority = priority_from(priority);
  request.deadline_ns = deadline_from(timeout, node->timeout_ns());
  Service& service = service_of(*node);
  TransferHandle handle{pool_of(node), nullptr};
  handle.transfer =
      call_interruptibly([&](const GivenUp& given_up) { return service.fetch_prompt(std::move(request), given_up); });
  return handle;
}

}  // namespace

void bind_transfer(py::module_& module, PoolClass& pool) {
  bind_transfer_handle(module);
  bind_transfer_stream(module);
  const auto medium = py::arg("medium") = static_cast<int>(Medium::kHbm);
  const auto to = py::arg("to") = py::none();
  const auto evict = py::arg("evict") = true;
  const auto private_bytes = py::arg("private") = py::none();
  const auto strategy = py::arg("strategy") = "auto";
  const auto priority = py::arg("priority") = "prefill";
  const auto route = py::arg("route") = py::none();
  const auto checksum = py::arg("checksum") = false;
  const auto stream = py::arg("stream") = py::none();
  const auto layerwise = py::arg("layerwise") = false;
  const auto timeout = py::arg("timeout") = py::none();
  const auto name_space = py::arg("namespace") = "";
  pool.def("transfer", &transfer, py::arg("peer"), py::arg("addrs"), py::kw_only(), to, medium, evict, private_bytes,
           strategy, priority, route, checksum, stream, layerwise, timeout, R"(Sends blocks to a peer.

The blocks must not change until the transfer is done; cached ones are pinned meanwhile. Releases the GIL. Up to 1 MiB
to a peer on this host is copied before this returns, more by threads of the pool.

Args:
    peer: Its name, from Peers.connect or a Received, or the name of a member of the pool's cluster, to which the pool
        connects first if necessary.
    addrs: Blocks of this pool, active or cached. None, with ``private``: a message to the receiving application alone.
    to: Blocks that the peer lent (``alloc(instance=...)``), one for each: the receiver need not be asked. They stay
        lent. Without it the receiver reserves blocks, which its application owns when the transfer is done.
    medium: Where the receiver reserves: kvpool.HBM, kvpool.DRAM or kvpool.MIXED.
    evict: Whether the receiver may drop cached prompts for it.
    private: Up to 1 MiB for the receiving application, which gets it with the blocks: see Pool.inbox. None: the
        application is not told.
    strategy: How blocks are cut into calls: "by_layer", "by_layer_agg", "by_request", "by_request_agg". "auto" is
        "by_request_agg": one call for each contiguous run, or for many pieces where the route gathers ("sock", "cma",
        "nccl"). "by_layer" and "by_request" make a call for each piece.
    priority: "decode" goes before "prefill", and that before "background".
    route: "shm", "cuda_ipc", "cma", "sock", "ucx", "nccl" or "loopback"; None: the cheapest that both sides have.
    checksum: The receiver verifies the content before it commits.
    stream: For a pool on a GPU: the CUDA stream whose work so far must end before the blocks are read, as an int or an
        object that has one (torch, CuPy). The caller does not wait for it. None: all work of the GPU.
    layerwise: Sends the layers one by one, as they are computed; the blocks need not have their content yet. Every
        strategy but "by_layer" is "by_layer_agg" then. `stream` is the default of send_layer, which waits for the
        stream's work up to that call.
    timeout: Seconds until it fails with DeadlineExceeded; None: the setting ``timeout_s``.

Returns:
    A Transfer; with ``layerwise`` a TransferStream.

Raises:
    PeerLost: There is no such peer, or it cannot be reached.
    Fenced: This pool has lost its lease in the cluster.
    StaleAddress, NotOwner, StateError: An address names no block that can be sent. The handle raises errors that only
        the receiver can find.
    Busy: Too many transfers with this peer are under way. Or the handle raises it, of an insertion: the receiver itself
        is filling blocks of this prompt (``filled=False``), or forgot meanwhile what was cached of it. Try again later.
    ArgumentError: A wrong value; nothing was sent.)")
      .def("transfer_with_insert", &transfer_with_insert, py::arg("peer"), py::arg("tokens"), py::arg("addrs"),
           py::kw_only(), name_space, to, medium, evict, private_bytes, strategy, priority, route, checksum, stream,
           layerwise, timeout, R"(Sends a prompt's blocks to a peer, which caches them.

A prefix of the prompt that the receiver has cached is not sent: ``stats.skipped_blocks``. ``addrs`` of the handle are
the canonical addresses at the receiver.

Args:
    peer: As in transfer.
    tokens: Token ids of whole blocks.
    addrs: One address for each block.
    namespace: As in match.
    to: As in transfer, like all others; an insertion ends the loan.
    medium: Where the receiver reserves.
    evict: Whether the receiver may drop cached prompts for it.
    private: For the receiving application.
    strategy: How blocks are cut into calls.
    priority: "decode", "prefill" or "background".
    route: One route.
    checksum: The receiver verifies the content.
    stream: As in transfer.
    layerwise: As in transfer.
    timeout: Seconds; None: the setting ``timeout_s``.

Returns:
    A Transfer; with ``layerwise`` a TransferStream.

Raises:
    As transfer.)")
      .def("_transfer_batch", &transfer_batch, py::arg("specs"))
      .def("fetch", &fetch, py::arg("peer"), py::arg("addrs"), py::kw_only(), to, medium, evict, priority, route,
           checksum, timeout,
           R"(Brings copies of a peer's blocks here.

The owner pins cached blocks while they are read. ``addrs`` of the handle are active blocks of this pool, which the
caller owns.

Args:
    peer: The owner. None: the peer or member of the cluster whose instance id is in the addresses.
    addrs: Its blocks, by addresses from a match there, an event or a router.
    to: Active blocks of this pool to use, one for each; without it the pool allocates, and frees them if it fails.
    medium: Where the pool allocates.
    evict: Whether cached blocks here may be evicted for it.
    priority: "decode", "prefill" or "background".
    route: By which the owner writes. None: the cheapest way; where the owner's memory is mapped here and these blocks
        are not mapped there, that is to read them from here.
    checksum: The content is compared with the owner's before the fetch ends (CRC-32C); then the owner writes it.
    timeout: Seconds; None: the setting ``timeout_s``.

Returns:
    A Transfer. A stream can wait for it in place of a thread: ``wait_on``.

Raises:
    As transfer. The handle raises StaleAddress for a block that has left its address at the owner, Unsupported if the
    owner has no such route, and ProtocolError if the checksums differ.)")
      .def("fetch_with_insert", &fetch_with_insert, py::arg("peer"), py::arg("tokens"), py::kw_only(), name_space,
           medium, evict, priority, timeout,
           R"(Brings what a peer has cached of a prompt here, and caches it: the mirror of transfer_with_insert.

The peer is asked which blocks of the prompt it has. Those that this pool has cached already are not sent
(``stats.skipped_blocks``), and if that is all of the prompt, the peer is not asked. The others are inserted here when all
of them have arrived: all or nothing. ``addrs`` of the handle are the canonical addresses here of all that is cached now,
so ``len(addrs) * block_tokens`` tokens are; none when neither pool has any. They are not pinned: match the prompt.
Releases the GIL.

Args:
    peer: As in transfer.
    tokens: Token ids; a block that is not whole is ignored. At most 1,048,576.
    namespace: As in match, at the peer and here.
    medium: Where this pool allocates. A pool with ``engine_allocates`` caches in kvpool.DRAM only.
    evict: Whether cached blocks here may be evicted for it.
    priority: "decode", "prefill" or "background".
    timeout: Seconds; None: the setting ``timeout_s``.

Returns:
    A Transfer. ``reserve_us`` of its stats is the time until the peer had answered and this pool had blocks.

Raises:
    As transfer. The handle raises OutOfBlocks when there is no room here, and StateError when HBM is the engine's.)");
  make_fast<&transfer>(
      "transfer", {"peer", "addrs"},
      {to, medium, evict, private_bytes, strategy, priority, route, checksum, stream, layerwise, timeout});
  make_fast<&transfer_with_insert>(
      "transfer_with_insert", {"peer", "tokens", "addrs"},
      {name_space, to, medium, evict, private_bytes, strategy, priority, route, checksum, stream, layerwise, timeout});
  make_fast<&fetch>("fetch", {"peer", "addrs"}, {to, medium, evict, priority, route, checksum, timeout});
  make_fast<&fetch_with_insert>("fetch_with_insert", {"peer", "tokens"},
                                {name_space, medium, evict, priority, timeout});
}

}  // namespace kvpool::bindings
