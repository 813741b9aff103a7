// Items that peers sent for the application.
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "bind.h"
#include "node.h"
#include "service.h"

namespace kvpool::bindings {
namespace {

// An item of the queue. Until it is closed it pins what is cached, or owns the blocks, unless they are lent.
class ReceivedItem {
 public:
  ReceivedItem(PoolPointer pool, std::unique_ptr<Received> item) : pool_(std::move(pool)), item_(std::move(item)) {}
  ReceivedItem(ReceivedItem&&) noexcept = default;
  ReceivedItem& operator=(ReceivedItem&&) = delete;
  ~ReceivedItem() { close(); }

  const Received& item() const noexcept { return *item_; }
  bool closed() const noexcept { return item_ == nullptr || !open_; }

  void take() {
    if (!open_) throw Error(ErrorCode::kClosed, "the item is closed, or was taken before");
    if (item_->inserted) {
      throw Error(ErrorCode::kState, "the blocks are the index's: keep the item open for as long as you read them");
    }
    if (item_->lent) {
      throw Error(ErrorCode::kState, "the blocks are lent to " + item_->peer +
                                         ", which keeps them: read them at addrs, or copy them to blocks of your own");
    }
    open_ = false;
  }

  void close() noexcept {
    if (closed()) return;
    open_ = false;
    item_->pins.release();
    if (item_->inserted || item_->lent) return;
    try {
      pool_->free(item_->addresses.data(), item_->addresses.size());
    } catch (const std::exception&) {
      // The pool is closed, or the application has freed or inserted what it did not take.
    }
  }

 private:
  PoolPointer pool_;
  std::unique_ptr<Received> item_;
  bool open_ = true;
};

py::object receive(const NodePointer& node, py::handle timeout) {
  const std::int64_t until = deadline_from(timeout, node->timeout_ns());
  Service& service = service_of(*node);
  std::unique_ptr<Received> item;
  wait_interruptibly(until, [&](std::int64_t slice) {
    item = service.receive(slice);
    return item != nullptr;
  });
  if (item == nullptr) return py::none();
  return py::cast(ReceivedItem(pool_of(node), std::move(item)));
}

py::object tokens(const ReceivedItem& received) {
  const std::vector<Token>& tokens = received.item().tokens;
  py::array_t<Token> array(static_cast<py::ssize_t>(tokens.size()));
  if (!tokens.empty()) std::memcpy(array.mutable_data(), tokens.data(), tokens.size() * sizeof(Token));
  return array;
}

py::array_t<Address> addresses(const ReceivedItem& received) {
  return to_array(received.item().addresses.data(), received.item().addresses.size());
}

py::bytes private_bytes(const ReceivedItem& received) {
  const Bytes& bytes = received.item().private_bytes;
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

void bind_received(py::module_& module, PoolClass& pool) {
  py::class_<ReceivedItem>(module, "Received",
                           R"(An item that a peer sent. Its blocks are here, with all bytes in place.

Use it in a ``with``: closing unpins inserted blocks, and frees blocks that were not taken. Dropping an item closes it.

Attributes:
    peer: Name of the sender.
    addrs: uint64 array, in the sender's order. Inserted: cached, and pinned until the item is closed. Otherwise active:
        they belong to the item until take(). Lent: they stay lent to the sender, which may write them again or give
        them back.
    inserted: Whether the blocks were given to the index.
    lent: Whether the blocks are still lent to the sender.
    tokens: int32 array: the prompt of an insertion, else empty.
    namespace: Of the prompt.
    private: The sender's bytes.
    closed: Whether it is closed, or was taken.)")
      .def_property_readonly(
          "peer", [](const ReceivedItem& self) { return self.item().peer; }, "The name of the sender.")
      .def_property_readonly("addrs", &addresses, "uint64 array of addresses, in the sender's order.")
      .def_property_readonly(
          "inserted", [](const ReceivedItem& self) { return self.item().inserted; },
          "Whether the blocks were given to the index.")
      .def_property_readonly(
          "lent", [](const ReceivedItem& self) { return self.item().lent; },
          "Whether the blocks are still lent to the sender.")
      .def_property_readonly("tokens", &tokens, "int32 array: the prompt of an insertion, else empty.")
      .def_property_readonly(
          "namespace", [](const ReceivedItem& self) { return self.item().name_space; }, "Of the prompt.")
      .def_property_readonly("private", &private_bytes, "The sender's bytes.")
      .def_property_readonly("closed", &ReceivedItem::closed, "Whether it is closed, or was taken.")
      .def(
          "take",
          [](ReceivedItem& self) {
            self.take();
            return addresses(self);
          },
          R"(Takes the blocks over: the caller owns them from now on, and inserts or frees them.

Returns:
    ``addrs``.

Raises:
    ClosedError: It is closed, or was taken before.
    StateError: The blocks were inserted, so the index owns them; or they are lent to the sender.)")
      .def("close", &ReceivedItem::close,
           "Unpins inserted blocks, frees blocks that were not taken, and keeps lent blocks. Idempotent.")
      .def(
          "__enter__",
          [](py::object self) {
            if (self.cast<const ReceivedItem&>().closed()) throw Error(ErrorCode::kClosed, "the item is closed");
            return self;
          },
          "Itself.")
      .def(
          "__exit__", [](ReceivedItem& self, const py::object&, const py::object&, const py::object&) { self.close(); },
          "Closes.")
      .def("__repr__", [](const ReceivedItem& self) {
        const Received& item = self.item();
        return "<Received from " + item.peer + ": " + std::to_string(item.addresses.size()) + " blocks, " +
               std::to_string(item.private_bytes.size()) + " private bytes" + (item.inserted ? ", inserted" : "") +
               (item.lent ? ", lent" : "") + (self.closed() ? ", closed>" : ">");
      });
  pool.def("_receive", &receive, py::arg("timeout")).def("_received_fd", [](PeerNode& self) {
    return service_of(self).received_fd();
  });
}

}  // namespace kvpool::bindings
