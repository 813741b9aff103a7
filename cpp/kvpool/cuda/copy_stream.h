// A stream that kvpool makes for copies, and its table.
//
// Thread-safety: none; any thread may destroy it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kvpool/cuda/copy_table.h"
#include "kvpool/cuda/stream.h"

namespace kvpool {

class CopyStream {
 public:
  // This and the methods with names of CudaStream are as there.
  explicit CopyStream(const std::shared_ptr<const CudaContext>& context) : context_(context), stream_(context) {}

  // Allocates a table for copy descriptions of `bytes`. Each copy whose description fits (counting all copies between
  // two calls of drain()) is one launch. If memory is short there is no table, and such copies take several launches.
  // Throws as CopyTable::make. Afterwards the destructor may wait for the GPU. REQUIRES: nothing is in the stream;
  // bytes > 0.
  void add_table(std::size_t bytes) { table_ = CopyTable::make(context_, bytes); }
  CopyTable* table() const noexcept { return table_.get(); }
  std::size_t table_bytes() const noexcept { return table_ != nullptr ? table_->bytes() : 0; }

  const CudaContext& context() const noexcept { return *context_; }
  CuStream handle() const noexcept { return stream_.handle(); }
  void follow(const CopyOrder& order) { stream_.follow(order); }
  bool ends_within(std::int64_t ns) noexcept { return stream_.ends_within(ns); }
  void drain(const char* what);

 private:
  const std::shared_ptr<const CudaContext> context_;
  CudaStream stream_;
  std::unique_ptr<CopyTable> table_;
};

}  // namespace kvpool
