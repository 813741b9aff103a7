#include "kvpool/cuda/copy_stream.h"

#include "kvpool/base/error.h"

namespace kvpool {

void CopyStream::drain(const char* what) {
  try {
    stream_.drain(what);
  } catch (const Error& error) {
    // Nobody knows then whether something still reads the table; after any other error nothing does.
    if (table_ != nullptr && error.code() != ErrorCode::kDeviceLost) table_->reset();
    throw;
  }
  if (table_ != nullptr) table_->reset();
}

}  // namespace kvpool
