// A transfer whose layers are sent one by one, as they are computed.
#include <cstdint>
#include <string>
#include <utility>

#include "arguments.h"
#include "gil.h"
#include "stream.h"
#include "transfer.h"

namespace kvpool::bindings {
namespace {

class TransferStream {
 public:
  // `transfer`: a Transfer. `stream`: for layers without a stream.
  TransferStream(py::object transfer, py::object stream) : transfer_(std::move(transfer)), stream_(std::move(stream)) {}

  const py::object& transfer() const noexcept { return transfer_; }

  void send_layer(py::handle layer_argument, py::handle stream) {
    if (finished_) throw Error(ErrorCode::kState, "the stream was finished: no layer can follow");
    const std::size_t layer = count_from(layer_argument, "layer");
    if (layer > UINT32_MAX) throw_argument("layer " + std::to_string(layer) + " is not there");
    const auto& handle = transfer_.cast<const TransferHandle&>();
    handle.pool->guard_process();
    auto after = handle.pool->order_after(stream_from(stream.is_none() ? py::handle(stream_) : stream));
    const GilReleased released;
    handle.transfer->send_layer(static_cast<std::uint32_t>(layer), std::move(after));
  }

  py::object finish() {
    if (finished_) return transfer_;
    const auto& handle = transfer_.cast<const TransferHandle&>();
    handle.pool->guard_process();
    {
      const GilReleased released;
      handle.transfer->finish();
    }
    finished_ = true;
    return transfer_;
  }

  void leave(py::handle exception_type) {
    if (exception_type.is_none()) {
      finish();
    } else if (!finished_) {
      transfer_.attr("cancel")();
    }
  }

 private:
  py::object transfer_;
  py::object stream_;
  bool finished_ = false;
};

}  // namespace

py::object stream_layers(py::object transfer, py::handle stream) {
  return py::cast(TransferStream(std::move(transfer), py::reinterpret_borrow<py::object>(stream)));
}

void bind_transfer_stream(py::module_& module) {
  py::class_<TransferStream>(module, "TransferStream",
                             R"(A transfer whose layers are sent as soon as each is complete: transfer(layerwise=True).

Leaving a ``with`` finishes it, or cancels it on an exception, without waiting:

    with pool.transfer("decode-0", addrs, layerwise=True) as stream:
        for layer in range(layers):
            compute(layer)
            stream.send_layer(layer)
    stream.wait()

Attributes:
    transfer: The Transfer, to wait for, to ask for its progress, or to cancel.)")
      .def_property_readonly(
          "transfer", [](const TransferStream& self) { return self.transfer(); },
          "The Transfer, to wait for, to ask for its progress, or to cancel.")
      .def("send_layer", &TransferStream::send_layer, py::arg("layer"), py::kw_only(), py::arg("stream") = py::none(),
           R"(Sends one layer of all blocks, K and V, whose content is complete. Each layer is sent once, in any order.

Does not wait for the bytes; they must not change until the transfer is done.

Args:
    layer: From 0 on.
    stream: For a pool on a GPU: the layer is complete when the work of this CUDA stream so far has ended. None: the
        stream of the transfer; without one, all work of the GPU.

Raises:
    ArgumentError: There is no such layer, or it was sent before; or the CUDA stream belongs to another device.
    StateError: The TransferStream was finished.
    PeerLost, DeadlineExceeded, Cancelled, ...: The error with which the transfer has failed meanwhile.)")
      .def("finish", &TransferStream::finish, R"(Declares that all layers were sent. Does not wait. Idempotent.

Returns:
    The transfer.

Raises:
    StateError: A layer is missing.)")
      .def(
          "wait", [](const TransferStream& self, py::handle timeout) { return self.transfer().attr("wait")(timeout); },
          py::arg("timeout") = py::none(),
          R"(Waits until the transfer is done: all layers were sent, and the receiver has them. Ctrl-C ends the wait.

That requires ``finish()``, which another thread may call meanwhile.

Args:
    timeout: Seconds; None: the transfer's own deadline ends the wait.

Returns:
    The transfer.

Raises:
    TimeoutError: ``timeout`` passed; the transfer goes on.
    PeerLost, DeadlineExceeded, Cancelled, ...: It failed, as Transfer.wait says.)")
      .def(
          "done", [](const TransferStream& self) { return self.transfer().attr("done")(); },
          "Whether the transfer has ended, with or without success. Does not wait.")
      .def(
          "__enter__", [](py::object self) { return self; }, "Itself.")
      .def(
          "__exit__", [](TransferStream& self, py::handle type, py::handle, py::handle) { self.leave(type); },
          "Finishes, or cancels.");
}

}  // namespace kvpool::bindings
