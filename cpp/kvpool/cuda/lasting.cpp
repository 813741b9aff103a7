#include "kvpool/cuda/lasting.h"

namespace kvpool {

bool is_lasting(CuResult result) noexcept {
  switch (result) {
    case 34:   // STUB_LIBRARY
    case 100:  // NO_DEVICE
    case 101:  // INVALID_DEVICE
    case 209:  // NO_BINARY_FOR_GPU
    case 217:  // PEER_ACCESS_UNSUPPORTED
    case 222:  // UNSUPPORTED_PTX_VERSION
    case 224:  // UNSUPPORTED_EXEC_AFFINITY
    case 500:  // NOT_FOUND: an entry of the driver, or a kernel of ours
    case 800:  // NOT_PERMITTED
    case 801:  // NOT_SUPPORTED
    case 803:  // SYSTEM_DRIVER_MISMATCH
    case 804:  // COMPAT_NOT_SUPPORTED_ON_DEVICE
      return true;
    default:
      return false;
  }
}

bool is_lasting(const Error& error) noexcept {
  return error.code() == ErrorCode::kUnsupported && error.cause() != ErrorCause::kMayPass;
}

}  // namespace kvpool
