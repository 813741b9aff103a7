// The pool's blocks, as sessions use them. The pool implements it.
//
// Owners. Blocks that are promised to a peer carry its incarnation as their tag, so one incarnation of a peer can never
// write, complete or give back blocks of another. Reserved blocks also carry the transfer's mark.
//
// Thread-safety: everything here may be called by several threads. Nothing here waits for a peer. Making room may take
// long, and happens only with Room::kEvict.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/base/medium.h"
#include "kvpool/base/segment.h"
#include "kvpool/blocks/layout.h"
#include "kvpool/transfer/request.h"

namespace kvpool {

// A peer's incarnation, and one of its transfers.
struct Writer {
  std::uint64_t incarnation = 0;
  std::uint32_t mark = 0;
};

// A reservation without its addresses: the prompt for which the blocks are.
struct ReserveSpec {
  std::size_t blocks = 0;  // of the whole request
  MediumChoice medium = Medium::kHbm;
  bool insert = false;
  std::string name_space;
  std::vector<Token> tokens;
};

// The beginning of a prompt that is cached here.
struct CachedPrefix {
  std::vector<Address> addresses;
  std::shared_ptr<void> hold;  // pins them; null if nothing is cached
};

struct Reservation {
  std::vector<Address> addresses;  // reserved, for blocks [held, blocks) of the request
  std::vector<Address> held;       // the prefix that is cached here, pinned by `hold`
  std::shared_ptr<void> hold;
};

// What is stored here under keys.
struct StoredKeys {
  Bytes found;                     // as in MatchedKeysBody
  std::vector<Address> addresses;  // one for each key that is found
  std::shared_ptr<void> hold;      // pins them; null if none is found
};

// A complete transfer: what to do with its blocks, and what to tell the application.
struct Delivery {
  std::string peer;
  ReserveSpec spec;
  Reservation reservation;             // taken over
  bool named = false;                  // its blocks are lent: they stay lent unless inserted
  std::optional<Bytes> private_bytes;  // nullopt: the application is told only if it gets blocks
};

// A pending message to the application.
class News {
 public:
  virtual ~News() = default;
};

struct Delivered {
  std::vector<Address> cached;  // where the blocks of an insertion are now; empty without one
  std::unique_ptr<News> news;   // null: nothing to tell the application
};

// How a request may get its blocks.
enum class Room : std::uint8_t {
  kTry,    // only free blocks; nullopt if there are too few
  kFree,   // only free blocks; else kOutOfBlocks
  kEvict,  // evict and swap; else kOutOfBlocks. May take long
};

class DeviceOrder;

// A buffer for the content of one data frame, on its way to blocks that the CPU cannot write.
class StagingBuffer {
 public:
  virtual ~StagingBuffer() = default;
  virtual iovec room() const noexcept = 0;  // where the payload goes first
  // Copies it from there to the blocks; returns when it has arrived. When this throws, nothing is written any more.
  virtual void land() = 0;
};

class BlockHost {
 public:
  virtual ~BlockHost() = default;

  virtual const Layout& layout() const noexcept = 0;
  virtual std::uint32_t instance() const noexcept = 0;
  // Whether the blocks of this medium lie on a GPU.
  virtual bool on_gpu(Medium /*medium*/) const noexcept { return false; }
  // Whether new blocks are filled with zeros first, which may take long.
  virtual bool fills_with_zeros() const noexcept { return false; }

  // --- for peers that write here ---

  // Reserves blocks for a transfer, except for the cached prefix of its prompt. Throws kOutOfBlocks, kArgument (tokens
  // do not fit the blocks), kState (an engine allocates them).
  virtual std::optional<Reservation> reserve(const ReserveSpec& spec, Writer writer, Room room) = 0;
  virtual std::optional<std::vector<Address>> lend(std::size_t n, MediumChoice medium, Writer writer, Room room) = 0;

  // Throws kStaleAddress, kNotOwner, kArgument unless every address names a block that is reserved for this transfer of
  // this incarnation, by whichever of its two addresses (older than the pool's instance id, or not). What a peer may
  // write of the blocks that are lent to it, the receiver knows, and nobody else: see Receiver::Lent.
  virtual void check_reserved(std::span<const Address> addresses, Writer writer) = 0;

  // Gives back reserved, lent or quarantined blocks. REQUIRES: nothing writes them any longer.
  virtual void release(std::span<const Address> addresses) noexcept = 0;
  // Keeps such blocks out of use, because something may still write them.
  virtual void quarantine(std::span<const Address> addresses) noexcept = 0;

  // A transfer is complete: the application or the index becomes the owner of reserved blocks. Throws kBusy when too
  // many items wait for the application, and std::bad_alloc; then the delivery is unchanged.
  virtual Delivered deliver(Delivery&& delivery) = 0;
  // Tells the application of a delivery. Called once for each delivery with news, after the peer has been answered: an
  // application that wakes may take the processor from the answering thread.
  virtual void publish(std::unique_ptr<News> news) noexcept = 0;

  // Whether a file contains the blocks of this medium, which peers on this host can map.
  virtual bool in_file(Medium /*medium*/) const noexcept { return true; }

  // Where the blocks lie in this process. Valid as long as any session.
  virtual const MediaSpans& spans() const noexcept = 0;
  // CRC-32C of the contents of these blocks, in order. Throws when a GPU cannot be read.
  virtual std::uint32_t checksum(std::span<const Address> addresses) = 0;
  // A buffer for `bytes` bytes of content for these pieces of these blocks; null if the CPU can write the pieces.
  // Throws kProtocol for more than our data frames contain, and when no buffer is available.
  virtual std::unique_ptr<StagingBuffer> staging_buffer(std::span<const Address> /*blocks*/,
                                                        std::vector<iovec>& /*pieces*/, std::uint64_t /*bytes*/) {
    return nullptr;
  }

  // A stream of the GPU is about to wait for content: acquires now what placing it needs of the driver, because later
  // such a call might wait for the stream. Throws as staging_buffer().
  virtual void expect_staging_buffer() {}

  // --- for transfers from here ---

  // The longest prefix of these tokens that is cached here and that a peer may read: see PromptCache::match_for_peer.
  virtual CachedPrefix match(std::string_view name_space, std::span<const Token> tokens) = 0;

  // What the keyed cache of this name has stored under these keys: from the first on, or all with `every`. Throws
  // kState if there is no such cache, kArgument if its keys have another length.
  virtual StoredKeys match_keys(std::string_view cache, std::size_t key_bytes, std::span<const std::byte> keys,
                                bool every) = 0;

  // The order after all work that this pool's GPU has been given so far; null without a GPU.
  virtual std::shared_ptr<const DeviceOrder> device_order() { return nullptr; }

  // The blocks keep their content until the release, even if freed, evicted or moved meanwhile. Every hold is released
  // exactly once. Allows any state but free, reserved and quarantined. `for_incarnation`: the peer that reads; it may
  // not read blocks lent to another peer. 0: this pool's application. Throws kStaleAddress, kNotOwner, kState,
  // kArgument.
  virtual void hold_for_reading(std::span<const Address> addresses, std::uint64_t for_incarnation) = 0;
  virtual void release_reading(std::span<const Address> addresses) noexcept = 0;

  // Reserves active blocks of the caller for a peer that is asked to write them (expect_writes), and makes them active
  // again. Throws as free() does, and changes nothing then.
  virtual void expect_writes(std::span<const Address> addresses, Writer writer) = 0;
  virtual void end_writes(std::span<const Address> addresses) noexcept = 0;

  // Lends blocks that an engine allocates and holds to a peer. They are active again after release(). Throws kState for
  // other blocks, and as free() does; then nothing has changed.
  virtual void lend_active(std::span<const Address> addresses, Writer writer);
};

}  // namespace kvpool
