// The one place where the core's errors become Python's.
#include <exception>
#include <string>

#include "arguments.h"
#include "bind.h"
#include "kvpool/base/error.h"

namespace kvpool::bindings {

namespace py = pybind11;

const char* class_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kArgument:
      return "ArgumentError";
    case ErrorCode::kOutOfBlocks:
      return "OutOfBlocks";
    case ErrorCode::kOutOfMemory:
      return "OutOfMemory";
    case ErrorCode::kStaleAddress:
      return "StaleAddress";
    case ErrorCode::kState:
      return "StateError";
    case ErrorCode::kNotOwner:
      return "NotOwner";
    case ErrorCode::kLayoutMismatch:
      return "LayoutMismatch";
    case ErrorCode::kClosed:
      return "ClosedError";
    case ErrorCode::kFork:
      return "ForkError";
    case ErrorCode::kUnsupported:
      return "Unsupported";
    case ErrorCode::kAudit:
      return "AuditError";
    case ErrorCode::kPeerLost:
      return "PeerLost";
    case ErrorCode::kDeadline:
      return "DeadlineExceeded";
    case ErrorCode::kBusy:
      return "Busy";
    case ErrorCode::kAuth:
      return "AuthError";
    case ErrorCode::kProtocol:
      return "ProtocolError";
    case ErrorCode::kCancelled:
      return "Cancelled";
    case ErrorCode::kFenced:
      return "Fenced";
    case ErrorCode::kDeviceLost:
      return "DeviceLost";
    case ErrorCode::kRouteFailed:
      return "RouteFailed";
    case ErrorCode::kSuspended:
      return "Suspended";
    case ErrorCode::kStoreFailed:
      return "StoreFailed";
  }
  return "Error";
}

py::object exception_from(const Error& error) {
  const bool of_quota = error.cause() == ErrorCause::kQuota;
  const py::object type = py::module_::import("kvpool.errors").attr(of_quota ? "OutOfQuota" : class_of(error.code()));
  py::dict fields;
  if (!error.model().empty()) fields["model"] = text_of(error.model().c_str());
  for (const auto& [name, value] : error.fields()) {
    const bool is_address = std::string(name) == "address";  // 64 bits without a sign
    fields[name] = is_address ? py::cast(static_cast<std::uint64_t>(value)) : py::cast(value);
    if (std::string(name) == "fragmented") fields[name] = py::bool_(value != 0);
  }
  return type(text_of(error.what()), **fields);
}

void bind_errors(py::module_& /*module*/) {
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      try {
        const py::object exception = exception_from(error);
        PyErr_SetObject(py::type::handle_of(exception).ptr(), exception.ptr());
      } catch (py::error_already_set& raised) {  // by a signal's handler: Ctrl-C while the call was waiting
        raised.restore();
      }
    }
  });
}

}  // namespace kvpool::bindings
