// The handle of a transfer, as Python sees it.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "kvpool/pool/pool.h"
#include "kvpool/transfer/handle.h"

namespace kvpool::bindings {

// Not the core's own class: that one is polymorphic, which pybind11 would look up at each cast. Keeps its pool.
struct TransferHandle {
  std::shared_ptr<Pool> pool;
  std::shared_ptr<Transfer> transfer;
};

// Its class: transfer_handle.cpp.
void bind_transfer_handle(pybind11::module_& module);

// A kvpool.TransferStream that sends the layers of a Transfer, and its class: transfer_stream.cpp.
pybind11::object stream_layers(pybind11::object transfer, pybind11::handle stream);
void bind_transfer_stream(pybind11::module_& module);

// A method of it: wait_on.cpp.
void bind_wait_on(pybind11::class_<TransferHandle>& handle);

}  // namespace kvpool::bindings
