#include "kvpool/routes/route_error.h"

#include "kvpool/cuda/lasting.h"

namespace kvpool {

Error route_error(const Error& error) {
  if (error.code() != ErrorCode::kUnsupported || is_lasting(error)) return error;
  Error failed(ErrorCode::kRouteFailed, error.what());
  for (const auto& [name, value] : error.fields()) failed.add(name, value);
  return failed;
}

}  // namespace kvpool
