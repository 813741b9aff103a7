// What a session needs of the pool: the blocks, and what becomes of them. The pool implements it.
//
// Owners. Blocks that are promised to a peer carry its incarnation as their tag, so that one incarnation of a peer can
// never write, complete or give back what was another's. Reserved blocks carry the transfer's mark beside it.
//
// Thread-safety: everything here may be called by several threads. Nothing here waits for a peer; what may take long
// because it makes room does so only when told to.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/base/medium.h"
#include "kvpool/base/segment.h"
#include "kvpool/blocks/layout.h"
#include "kvpool/transfer/request.h"

namespace kvpool {

// Who writes: a peer's incarnation, and which of its transfers.
struct Writer {
  std::uint64_t incarnation = 0;
  std::uint32_t mark = 0;
};

// The part of a reservation that is not addresses: which prompt the blocks are for.
struct ReserveSpec {
  std::size_t blocks = 0;  // of the whole request
  MediumChoice medium = Medium::kHbm;
  bool insert = false;
  std::string name_space;
  std::vector<Token> tokens;
};

struct Reservation {
  std::vector<Address> addresses;  // reserved, for blocks [held, blocks) of the request
  std::vector<Address> held;       // the prefix that is cached here, pinned by `hold`
  std::shared_ptr<void> hold;
};

// A transfer that is complete: what to do with its blocks, and whom to tell.
struct Delivery {
  std::string peer;
  ReserveSpec spec;
  Reservation reservation;             // taken over
  bool named = false;                  // its blocks are lent ones: they stay the peer's, unless inserted
  std::optional<Bytes> private_bytes;  // nullopt: the application is told only if blocks become its own
};

// What the application is to hear, until it does.
class News {
 public:
  virtual ~News() = default;
};

struct Delivered {
  std::vector<Address> cached;  // where the blocks of an insertion are now; empty without one
  std::unique_ptr<News> news;   // null when there is nothing to tell
};

// What a request for blocks may do to get them.
enum class Room : std::uint8_t {
  kTry,    // only what is free; nullopt when that does not do
  kFree,   // only what is free; else kOutOfBlocks
  kEvict,  // evict and swap; else kOutOfBlocks. May take long
};

class DeviceOrder;

// Content of one data frame, on its way to blocks that the CPU cannot write.
class StagingBuffer {
 public:
  virtual ~StagingBuffer() = default;
  virtual iovec room() const noexcept = 0;  // where the payload goes first
  // Takes it from there to the blocks; returns when it has arrived. Throws, and nothing is written any more then.
  virtual void land() = 0;
};

class BlockHost {
 public:
  virtual ~BlockHost() = default;

  virtual const Layout& layout() const noexcept = 0;
  virtual std::uint32_t instance() const noexcept = 0;
  // Whether the blocks of this medium lie on a GPU.
  virtual bool on_gpu(Medium /*medium*/) const noexcept { return false; }
  // Whether blocks that are given out are filled with zeros first, which may take long.
  virtual bool fills_with_zeros() const noexcept { return false; }

  // --- for peers that write here ---

  // Blocks for a transfer, with the cached prefix of its prompt left out. Throws kOutOfBlocks, kArgument (tokens do not
  // fit the blocks), kState (an engine allocates them).
  virtual std::optional<Reservation> reserve(const ReserveSpec& spec, Writer writer, Room room) = 0;
  virtual std::optional<std::vector<Address>> lend(std::size_t n, MediumChoice medium, Writer writer, Room room) = 0;

  // Every address names a block that is lent to this incarnation, or reserved for this transfer of it. Throws
  // kStaleAddress, kNotOwner, kArgument. `lent_only` leaves out the reserved ones.
  virtual void check_writable(std::span<const Address> addresses, Writer writer, bool lent_only) = 0;

  // Gives back blocks that are reserved, lent or quarantined. The caller knows that nobody writes them any more.
  virtual void release(std::span<const Address> addresses) noexcept = 0;
  // The same blocks when that is not known.
  virtual void quarantine(std::span<const Address> addresses) noexcept = 0;

  // A transfer is complete: reserved blocks become the application's, or the index's. Throws kBusy when the application
  // is behind with what it was sent, and std::bad_alloc; then the delivery is as it was.
  virtual Delivered deliver(Delivery&& delivery) = 0;
  // Tells the application of a delivery. Comes once for each that has news, after the peer has its answer: an
  // application that wakes may take the processor from the thread that answers.
  virtual void publish(std::unique_ptr<News> news) noexcept = 0;

  // Where the blocks lie in this process. Stays as long as any session.
  virtual const MediaSpans& spans() const noexcept = 0;
  // CRC-32C of the contents of these blocks, one after another. Throws when a GPU cannot be read.
  virtual std::uint32_t checksum(std::span<const Address> addresses) = 0;
  // For content that goes to these blocks, to these pieces of them, so many bytes in all: null where the CPU reaches
  // the pieces. Throws kProtocol for more than a data frame of ours has, and when there is no buffer to be had.
  virtual std::unique_ptr<StagingBuffer> staging_buffer(std::span<const Address> /*blocks*/,
                                                        std::vector<iovec>& /*pieces*/, std::uint64_t /*bytes*/) {
    return nullptr;
  }

  // A stream of the GPU is about to wait for content: what placing it takes of the driver is taken now, for later that
  // might wait for the stream. Throws as staging_buffer().
  virtual void expect_staging_buffer() {}

  // --- for transfers from here ---

  // All that the GPU of this pool was given; null without a GPU.
  virtual std::shared_ptr<const DeviceOrder> device_order() { return nullptr; }

  // The blocks keep their content until the release, even if freed, evicted or moved meanwhile. The release comes
  // exactly once for each hold. Any state but free, reserved and quarantined. `for_incarnation`: of the peer that asks
  // for them, which may not see what is lent to another one; 0: this pool's application. Throws kStaleAddress,
  // kNotOwner, kState, kArgument.
  virtual void hold_for_reading(std::span<const Address> addresses, std::uint64_t for_incarnation) = 0;
  virtual void release_reading(std::span<const Address> addresses) noexcept = 0;

  // Active blocks of the caller become reserved for a peer that was asked to write them, and active again. Throws as
  // free() does, and changes nothing then.
  virtual void expect_writes(std::span<const Address> addresses, Writer writer) = 0;
  virtual void end_writes(std::span<const Address> addresses) noexcept = 0;
};

}  // namespace kvpool
