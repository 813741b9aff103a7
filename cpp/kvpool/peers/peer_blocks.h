// Implements block_host.h for sessions, with a Pool and the queue of items for its application.
//
// Thread-safety: all of it.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "kvpool/base/media_set.h"
#include "kvpool/cuda/order.h"
#include "kvpool/cuda/staging.h"
#include "kvpool/peers/received_queue.h"
#include "kvpool/pool/pool.h"
#include "kvpool/transfer/block_host.h"

namespace kvpool {

class PeerBlocks final : public BlockHost {
 public:
  // Both outlive it. Throws kClosed.
  PeerBlocks(Pool& pool, ReceivedQueue& received);

  const Layout& layout() const noexcept override { return pool_.layout(); }
  std::uint32_t instance() const noexcept override { return pool_.instance(); }
  bool fills_with_zeros() const noexcept override { return pool_.zeroes_on_alloc(); }
  bool on_gpu(Medium medium) const noexcept override { return on_gpu_[medium]; }
  std::optional<Reservation> reserve(const ReserveSpec& spec, Writer writer, Room room) override;
  std::optional<std::vector<Address>> lend(std::size_t n, MediumChoice medium, Writer writer, Room room) override;
  void check_reserved(std::span<const Address> addresses, Writer writer) override;
  void release(std::span<const Address> addresses) noexcept override;
  void quarantine(std::span<const Address> addresses) noexcept override;
  Delivered deliver(Delivery&& delivery) override;
  void publish(std::unique_ptr<News> news) noexcept override;
  bool in_file(Medium medium) const noexcept override { return in_file_[medium]; }
  const MediaSpans& spans() const noexcept override { return spans_; }
  std::uint32_t checksum(std::span<const Address> addresses) override;
  std::unique_ptr<StagingBuffer> staging_buffer(std::span<const Address> blocks, std::vector<iovec>& pieces,
                                                std::uint64_t bytes) override;
  void expect_staging_buffer() override;
  CachedPrefix match(std::string_view name_space, std::span<const Token> tokens) override;
  StoredKeys match_keys(std::string_view cache, std::size_t key_bytes, std::span<const std::byte> keys,
                        bool every) override;
  std::shared_ptr<const DeviceOrder> device_order() override;
  void hold_for_reading(std::span<const Address> addresses, std::uint64_t for_incarnation) override;
  void release_reading(std::span<const Address> addresses) noexcept override;
  void expect_writes(std::span<const Address> addresses, Writer writer) override;
  void end_writes(std::span<const Address> addresses) noexcept override;
  void lend_active(std::span<const Address> addresses, Writer writer) override;

  // Throws kClosed after let_go().
  std::shared_ptr<Arena> arena(Medium medium) const;
  // Keeps the memory of spans() alive. Null after let_go().
  std::shared_ptr<void> keepalive() const;
  // The pool is closed: stops keeping its memory alive, which only results of keepalive() still do.
  void let_go() noexcept;

 private:
  CachedPrefix pin_cached(std::string_view name_space, std::span<const Token> tokens);
  IndexPin insert(const Delivery& delivery, std::vector<Address>& cached);
  std::shared_ptr<DeviceStaging> staging() const;
  void add_instance(std::span<Address> addresses) const noexcept;
  bool take(std::size_t n, MediumChoice medium, BlockState to, Writer writer, Room room, Address* out);

  Pool& pool_;
  ReceivedQueue& received_;
  using Arenas = MediumMap<std::shared_ptr<Arena>>;
  mutable std::mutex mutex_;
  std::shared_ptr<const Arenas> arenas_;    // under mutex_
  std::shared_ptr<DeviceStaging> staging_;  // likewise; null without a GPU
  const MediaSpans spans_;                  // of the memory in arenas_
  const MediaSet on_gpu_;
  const MediaSet in_file_;
  std::shared_ptr<const DeviceOrder> order_;  // under mutex_; null without a GPU
};

}  // namespace kvpool
