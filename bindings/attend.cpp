// Attention over sequences.
#include "kvpool/distributed/attend.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "bind.h"
#include "cpu_tensor.h"
#include "gil.h"
#include "kvpool/base/failure.h"
#include "kvpool/pool/pool.h"
#include "kvpool/sequences/sequence_blocks.h"
#include "node.h"
#include "partial.h"
#include "sequence.h"
#include "service.h"
#include "stream.h"
#include "vectors.h"
#include "work_handle.h"

namespace kvpool::bindings {
namespace {

constexpr const char* kWork = "the attention";

// Keeps its pool, which goes after the other members.
struct AttendHandle {
  NodePointer node;
  std::shared_ptr<Attend> task;
  py::object result;  // once somebody has asked for it
};

std::optional<float> scale_from(const py::object& argument) {
  if (argument.is_none()) return std::nullopt;
  const double scale = PyFloat_AsDouble(argument.ptr());
  if (PyErr_Occurred() != nullptr) {
    if (PyErr_ExceptionMatches(PyExc_OverflowError) != 0) {
      PyErr_Clear();
      throw_argument("scale must be finite, and is an int that no float can hold");
    }
    throw_type_error("scale must be a number or None, not " + type_name(argument));
  }
  if (!std::isfinite(scale)) throw_argument("scale must be finite");
  return static_cast<float>(scale);
}

AttendWhere where_from(const py::object& argument) {
  if (!py::isinstance<py::str>(argument)) throw_type_error("where must be a str, not " + type_name(argument));
  const auto where = argument.cast<std::string>();
  if (where == "auto") return AttendWhere::kAuto;
  if (where == "here") return AttendWhere::kHere;
  if (where == "there") return AttendWhere::kThere;
  throw_argument("where is '" + where + "', and may be auto, here or there");
}

Attend::Request request_from(const Pool& pool, py::handle layer, const py::object& q_argument,
                             const py::object& sequences_argument, const py::object& query_tokens_argument,
                             const py::object& scale, py::handle causal, const py::object& where, py::handle stream) {
  Attend::Request request;
  request.stream = stream_from(stream);
  request.where = where_from(where);
  const std::size_t layer_number = count_from(layer, "layer");
  request.layer = static_cast<std::uint32_t>(std::min<std::size_t>(layer_number, UINT32_MAX));
  request.scale = scale_from(scale);
  request.causal = flag_from(causal, "causal");
  const std::vector<py::object> sequences = items_from(sequences_argument, "seqs");
  const std::vector<std::uint32_t> query_tokens = query_tokens_from(query_tokens_argument, sequences.size());
  std::int64_t rows = 0;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    if (!py::isinstance<SequenceHandle>(sequences[i])) {
      throw_type_error("seqs must be sequences of Pool.sequence, not " + type_name(sequences[i]));
    }
    request.sequences.push_back({sequences[i].cast<const SequenceHandle&>().sequence, query_tokens[i]});
    rows += query_tokens[i];
  }
  const CpuTensor q = cpu_tensor_from(q_argument, "q", /*writable=*/false);
  const std::array<std::int64_t, 3> wanted = {rows, -1, pool.layout().format.head_dim};
  check_shape(q, "q", wanted, "[query tokens of all sequences, query head, head_dim]");
  request.query_heads = static_cast<std::uint32_t>(std::min<std::int64_t>(q.shape[1], UINT32_MAX));
  request.query_dtype = q.dtype;
  request.q.assign(q.data, q.data + q.bytes);
  return request;
}

AttendHandle attend(const NodePointer& node, py::handle layer, const py::object& q, const py::object& sequences,
                    const py::object& query_tokens, const py::object& scale, py::handle causal, const py::object& where,
                    py::handle stream, py::handle timeout) {
  Pool& pool = node->pool();
  pool.guard();
  SequenceBlocks::check_pool(pool);
  Attend::Request request = request_from(pool, layer, q, sequences, query_tokens, scale, causal, where, stream);
  const std::int64_t deadline = deadline_from(timeout, node->timeout_ns());
  const GilReleased released;
  return {node, Attend::start(*node, std::move(request), deadline), {}};
}

Attend& task_of(const AttendHandle& handle) {
  handle.node->pool().guard_process();
  return *handle.task;
}

PartialBatch batch_of(Attend& task, std::uint32_t head_dim) {
  PartialBatch batch{task.query_heads(), head_dim, {}};
  std::vector<PartialAttention> parts = task.take_parts();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const bool ends_at_queries = task.causal() && parts[i].shape().tokens > 1;
    batch.items.push_back({std::move(parts[i]), task.tokens()[i], ends_at_queries});
  }
  return batch;
}

// What it has failed with; of a lost peer, with the tokens that are lost.
py::object failure_of_task(const Attend& task) {
  py::object failure = failure_as_exception(task);
  const std::vector<Attend::Lost> lost = failure.is_none() ? std::vector<Attend::Lost>() : task.lost();
  if (lost.empty()) return failure;
  py::list list;
  for (const Attend::Lost& one : lost) list.append(py::make_tuple(one.position, ranges_as_list(one.ranges)));
  failure.attr("lost") = list;
  return failure;
}

// The same object each time. The GIL orders the callers.
py::object wait(AttendHandle& handle, py::handle timeout) {
  Attend& task = task_of(handle);
  await_end(handle, task, timeout, kWork);
  const py::object failure = failure_of_task(task);
  if (!failure.is_none()) {
    PyErr_SetObject(py::type::handle_of(failure).ptr(), failure.ptr());
    throw py::error_already_set();
  }
  {
    const GilReleased released;
    task.merge();
  }
  if (!handle.result) {
    handle.result = py::cast(batch_of(task, handle.node->pool().layout().format.head_dim));
  }
  return handle.result;
}

py::object exception(const AttendHandle& handle, py::handle timeout) {
  Attend& task = task_of(handle);
  await_end(handle, task, timeout, kWork);
  return failure_of_task(task);
}

const char* way_name(AttendWay way) {
  switch (way) {
    case AttendWay::kHeads:
      return "heads";
    case AttendWay::kLeaves:
      return "leaves";
    case AttendWay::kLeavesAndMerges:
      return "leaves_and_merges";
  }
  return "";
}

py::tuple tokens_of_peers(const Attend::SequencePlan::Tokens& tokens) {
  py::list list;
  for (const auto& [peer, count] : tokens) list.append(py::make_tuple(peer, count));
  return py::tuple(list);
}

py::tuple plan_of(const AttendHandle& handle) {
  const Attend::Plan& plan = task_of(handle).plan();
  py::list items;
  for (const Attend::SequencePlan& one : plan.sequences) {
    items.append(py::make_tuple(way_name(one.here.way), one.here.head_groups, one.here.nodes,
                                tokens_of_peers(one.there), tokens_of_peers(one.mapped), one.gpu_tokens));
  }
  const py::object gpu_kernel = plan.gpu_kernel ? py::cast(kernel_name(*plan.gpu_kernel)) : py::none();
  return py::make_tuple(kernel_name(plan.kernel), gpu_kernel, plan.threads, items);
}

void bind_handle(py::module_& module) {
  py::class_<AttendHandle>(module, "Attend", R"(Attention that is being computed: the result of `Pool.attend`.

A thread of the pool computes it, or the thread that waits for it, whichever comes first. Thread-safe. ``await`` it in a
coroutine, which gives what ``wait`` returns. Dropping the handle does not cancel it.)")
      .def("wait", &wait, py::arg("timeout") = py::none(), R"(Waits until it is done. Releases the GIL.

Args:
    timeout: Seconds; None: the setting ``timeout_s``. It is not looked at while this thread itself computes, which it
        does not do for blocks on a GPU whose content is still being written.

Returns:
    The PartialAttention of all sequences.

Raises:
    TimeoutError: ``timeout`` passed; the computation goes on.
    Cancelled: By cancel().
    ClosedError: The pool was closed before it began.
    PeerLost: A peer that had some of the blocks is lost. Its attribute ``lost`` says what went with it: a list of
        (position of the sequence in the batch, [(begin, end), ...]), in tokens.
    StaleAddress: A peer has recalled some of the blocks: ``position`` is that of a sequence in the batch, and its `lost`
        says which tokens.
    Busy: A peer computes for too many calls already, and its memory is not mapped here; ``retry_after_us`` says when to
        try again.
    DeadlineExceeded: A peer did not answer in time, or the work of `stream` did not end.
    DeviceLost: The GPU is lost, and the pool with it.)")
      .def(
          "done", [](const AttendHandle& handle) { return task_of(handle).done(); },
          "Whether it has ended, one way or another. Does not wait.")
      .def(
          "cancel", [](const AttendHandle& handle) { return task_of(handle).cancel(); },
          R"(Ends it with Cancelled, unless this pool computes its part just now. Does not wait.

Returns:
    False when it computes, or has ended; then nothing changes.)")
      .def("exception", &exception, py::arg("timeout") = py::none(),
           R"(Waits until it is done, and returns the exception that wait() would raise, or None on success.

Args:
    timeout: As in wait.

Raises:
    TimeoutError: ``timeout`` passed; the computation goes on.)")
      .def(
          "fileno", [](const AttendHandle& handle) { return task_of(handle).done_fd(); },
          "A file descriptor that becomes readable when it is done, for select and its like. Do not read or close it.")
      .def("_plan", &plan_of)
      .def("__repr__", [](const AttendHandle& handle) {
        return std::string("<Attend ") + (handle.task->done() ? "done" : "under way") + ">";
      });
}

}  // namespace

void bind_attend(py::module_& module, PoolClass& pool) {
  bind_partial(module);
  bind_sequence(module, pool);
  bind_handle(module);
  pool.def("attend", &attend, py::arg("layer"), py::arg("q"), py::arg("seqs"), py::kw_only(),
           py::arg("query_tokens") = py::none(), py::arg("scale") = py::none(), py::arg("causal") = true,
           py::arg("where") = "auto", py::arg("stream") = py::none(), py::arg("timeout") = py::none(),
           R"(Attention of one layer over sequences, where their blocks are. Does not wait.

The CPU attends to blocks in its memory, and the pool's GPU to blocks in HBM there.

For blocks that lie with peers, the query goes to the peer, which computes their part and sends it back; or this pool
reads them from here, if the peer is on this host and its memory is mapped (routes ``shm`` and ``loopback``).

For decoding: up to 16 query tokens a sequence. Longer chunks of a prompt are faster with the engine's own kernel, whose
result joins by `PartialAttention.from_lse`. K and V of the query tokens must have been written before the call; blocks
must not change until it is done, except for tokens behind those that `Sequence.tokens` counts. Releases the GIL.
Computed by ``attend_threads`` threads; results do not depend on how many there are.

Args:
    layer: The layer of the blocks.
    q: Queries [query token, query head, head_dim] of float32, float16 or bfloat16 (NumPy: uint16), the query tokens of
        all sequences one behind the other. A contiguous NumPy array or tensor on the CPU; it is copied.
    seqs: Sequences of this pool.
    query_tokens: How many query tokens each sequence has; None: one each. With `causal` they are the last ones of the
        sequence.
    scale: Of the scores; None: 1 / sqrt(head_dim).
    causal: Whether a query token sees only the tokens up to its own. False: it sees all, as queries do that stand behind
        all tokens of the sequence, when the part will be merged with one over their own tokens.
    where: "auto" takes, peer by peer, the way that makes the call fastest by what earlier calls took, and reads from here
        what a peer is too busy for. "there": the peers compute. "here": this pool reads the peers' memory.
    stream: For a pool on a GPU: the CUDA stream whose work so far writes the last tokens, as an int or an object that has
        one (torch, CuPy). The GPU's part begins when that has ended; a thread of the pool waits for it. None: when all
        work of the GPU has. If it has ended already, the CPU and the GPU compute at the same time.
    timeout: Seconds that peers, and the work of `stream`, have; None: the setting ``timeout_s``.

Returns:
    An Attend. Its wait() gives the PartialAttention, whose finish() gives the output.

Raises:
    ArgumentError: Numbers or shapes do not fit the layout or each other; the error says which.
    ArgumentTypeError: An argument has the wrong type.
    NotOwner: A sequence of another pool.
    StateError: A sequence is closed.
    Unsupported: As `sequence`; "here", and the memory of a peer is not mapped; or blocks are on a GPU, and `q` has not
        the type of the KV cache.)");
}

}  // namespace kvpool::bindings
