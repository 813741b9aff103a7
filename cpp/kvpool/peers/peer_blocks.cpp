#include "kvpool/peers/peer_blocks.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "kvpool/base/check.h"
#include "kvpool/base/digest.h"
#include "kvpool/base/error.h"
#include "kvpool/base/strips.h"
#include "kvpool/index/key_pins.h"
#include "kvpool/peers/gpu_staging_buffer.h"
#include "kvpool/pool/keyed_cache.h"
#include "kvpool/pool/peer_claims.h"

namespace kvpool {
namespace {

struct ReceivedNews final : News {
  std::unique_ptr<Received> item;
};

MediumSpan span_of(const Arena& arena) { return {arena.blocks(), arena.segments()}; }

MediaSpans spans_of(const MediumMap<std::shared_ptr<Arena>>& arenas, const Pool& pool) {
  MediaSpans spans;
  for (const Medium medium : kMedia) {
    spans[medium] = span_of(*arenas[medium]);
    spans[medium].places = pool.places()[medium];
  }
  return spans;
}

MediaSet gpu_media_of(const MediumMap<std::shared_ptr<Arena>>& arenas) {
  MediaSet on_gpu{};
  for (const Medium medium : kMedia) on_gpu[medium] = arenas[medium]->on_device();
  return on_gpu;
}

MediaSet files_of(const MediumMap<std::shared_ptr<Arena>>& arenas) {
  MediaSet in_file{};
  for (const Medium medium : kMedia) in_file[medium] = arenas[medium]->memfd() >= 0;
  return in_file;
}

// A prefix that is cached here, for as long as a transfer builds on it.
class PrefixHold {
 public:
  PrefixHold(Pool& pool, IndexPin pin) noexcept : pool_(pool), pin_(pin) {}
  ~PrefixHold() { pool_.unpin(&pin_, 1); }
  PrefixHold(const PrefixHold&) = delete;
  PrefixHold& operator=(const PrefixHold&) = delete;

 private:
  Pool& pool_;
  IndexPin pin_;
};

}  // namespace

PeerBlocks::PeerBlocks(Pool& pool, ReceivedQueue& received)
    : pool_(pool),
      received_(received),
      arenas_(std::make_shared<const Arenas>(pool.arenas())),
      spans_(spans_of(*arenas_, pool)),
      on_gpu_(gpu_media_of(*arenas_)),
      in_file_(files_of(*arenas_)) {
  const auto& context = (*arenas_)[on_gpu_[Medium::kHbm] ? Medium::kHbm : Medium::kDram]->context();
  if (context == nullptr) return;
  staging_ = std::make_shared<DeviceStaging>(context);
  order_ = DeviceOrder::after(context, std::nullopt);
}

std::shared_ptr<Arena> PeerBlocks::arena(Medium medium) const {
  const std::lock_guard lock(mutex_);
  if (arenas_ == nullptr) throw Error(ErrorCode::kClosed, "the pool is closed");
  return (*arenas_)[medium];
}

std::shared_ptr<void> PeerBlocks::keepalive() const {
  const std::lock_guard lock(mutex_);
  return std::const_pointer_cast<Arenas>(arenas_);
}

void PeerBlocks::let_go() noexcept {
  std::shared_ptr<const Arenas> arenas;  // destroyed without the lock
  std::shared_ptr<DeviceStaging> staging;
  std::shared_ptr<const DeviceOrder> order;  // which keeps the GPU's context
  const std::lock_guard lock(mutex_);
  arenas.swap(arenas_);
  staging.swap(staging_);
  order.swap(order_);
}

std::shared_ptr<const DeviceOrder> PeerBlocks::device_order() {
  const std::lock_guard lock(mutex_);
  return order_;
}

std::shared_ptr<DeviceStaging> PeerBlocks::staging() const {
  const std::lock_guard lock(mutex_);
  if (arenas_ == nullptr) throw Error(ErrorCode::kClosed, "the pool is closed");
  return staging_;
}

// A peer would take an address without an id for its own. The pool gives out such addresses until it keeps its id.
void PeerBlocks::add_instance(std::span<Address> addresses) const noexcept {
  const Address bits = Address{pool_.instance()} << kInstanceShift;
  for (Address& address : addresses) {
    if (instance_of(address) == 0) address |= bits;
  }
}

// False: only with room to be made.
bool PeerBlocks::take(std::size_t n, MediumChoice medium, BlockState to, Writer writer, Room room, Address* out) {
  constexpr std::size_t kQuickBytes = std::size_t{1} << 20;
  // A GPU fills blocks with zeros when it has done what it is at.
  const bool slow = on_gpu_[Medium::kHbm] || (n > 0 && layout().block_bytes() > kQuickBytes / n);
  if (room == Room::kTry && pool_.zeroes_on_alloc() && slow) return false;
  if (pool_.for_peers().take(n, medium, to, writer.incarnation, writer.mark, room == Room::kEvict, out)) {
    add_instance({out, n});
    return true;
  }
  if (room == Room::kFree) pool_.throw_out_of_blocks(n, medium);
  return false;
}

CachedPrefix PeerBlocks::pin_cached(std::string_view name_space, std::span<const Token> tokens) {
  CachedPrefix cached;
  cached.addresses.resize(tokens.size() / layout().block_tokens);
  const IndexHit hit = pool_.for_peers().match(name_space, tokens.data(), tokens.size(), cached.addresses.data());
  if (hit.pin.node != nullptr) {
    try {
      cached.hold = std::make_shared<PrefixHold>(pool_, hit.pin);
    } catch (...) {
      pool_.unpin(&hit.pin, 1);
      throw;
    }
  }
  cached.addresses.resize(hit.pages);
  return cached;
}

CachedPrefix PeerBlocks::match(std::string_view name_space, std::span<const Token> tokens) {
  CachedPrefix cached = pin_cached(name_space, tokens);
  if (cached.addresses.empty()) cached.hold = nullptr;  // what is pinned then is of other instances
  add_instance(cached.addresses);
  return cached;
}

StoredKeys PeerBlocks::match_keys(std::string_view cache, std::size_t key_bytes, std::span<const std::byte> keys,
                                  bool every) {
  const std::shared_ptr<KeyedCache> asked = pool_.named_caches().find(cache);
  if (asked == nullptr) throw Error(ErrorCode::kState, "the peer has no keyed cache " + std::string(cache));
  if (asked->key_bytes() != key_bytes) {
    throw Error(
        ErrorCode::kArgument,
        "the keys of the peer's cache " + std::string(cache) + " have " + std::to_string(asked->key_bytes()) +
            " bytes, not " + std::to_string(key_bytes),
        {{"needed", static_cast<std::int64_t>(asked->key_bytes())}, {"given", static_cast<std::int64_t>(key_bytes)}});
  }
  const std::size_t n = keys.size() / key_bytes;
  StoredKeys result;
  result.found.resize((n + 7) / 8);
  result.addresses.resize(n);
  std::vector<KeyedEntry*> pins;
  const std::unique_ptr<bool[]> stored(new bool[n]);  // NOLINT(modernize-avoid-c-arrays)
  const auto hold = std::make_shared<KeyPins>();
  const KeyedIndex::Hit hit = asked->match_for_peer(keys.data(), n, every, pins, result.addresses.data(), stored.get());
  *hold = KeyPins(asked, std::move(pins));
  result.addresses.resize(hit.found);
  for (std::size_t i = 0; i < n; ++i) {
    if (stored[i]) result.found[i / 8] |= static_cast<std::byte>(1U << i % 8);
  }
  add_instance(result.addresses);
  if (hit.found > 0) result.hold = hold;
  return result;
}

std::optional<Reservation> PeerBlocks::reserve(const ReserveSpec& spec, Writer writer, Room room) {
  Reservation reservation;
  if (spec.insert) {
    const std::size_t page = layout().block_tokens;
    if (spec.tokens.size() != spec.blocks * page) {
      throw Error(ErrorCode::kArgument,
                  std::to_string(spec.tokens.size()) + " tokens and " + std::to_string(spec.blocks) + " blocks of " +
                      std::to_string(page) + " tokens: an insertion needs whole blocks",
                  {{"tokens", static_cast<std::int64_t>(spec.tokens.size())},
                   {"block_tokens", static_cast<std::int64_t>(page)}});
    }
    CachedPrefix cached = pin_cached(spec.name_space, spec.tokens);
    reservation.held = std::move(cached.addresses);
    reservation.hold = std::move(cached.hold);
  }
  const std::size_t missing = spec.blocks - reservation.held.size();
  reservation.addresses.resize(missing);
  if (missing > 0 && !take(missing, spec.medium, BlockState::kReserved, writer, room, reservation.addresses.data())) {
    return std::nullopt;
  }
  return reservation;
}

std::optional<std::vector<Address>> PeerBlocks::lend(std::size_t n, MediumChoice medium, Writer writer, Room room) {
  std::vector<Address> addresses(n);
  if (n > 0 && !take(n, medium, BlockState::kLent, writer, room, addresses.data())) return std::nullopt;
  return addresses;
}

void PeerBlocks::check_reserved(std::span<const Address> addresses, Writer writer) {
  pool_.for_peers().check_reserved(addresses.data(), addresses.size(), writer.incarnation, writer.mark);
}

void PeerBlocks::release(std::span<const Address> addresses) noexcept {
  pool_.for_peers().release(addresses.data(), addresses.size());
}

void PeerBlocks::quarantine(std::span<const Address> addresses) noexcept {
  pool_.for_peers().quarantine(addresses.data(), addresses.size());
}

// Gives the blocks to the index, behind the prefix that is held. Blocks whose page came in another way meanwhile are
// freed. Writes where the whole prompt lies to `cached`, which has room for it. Throws, and has changed nothing then.
IndexPin PeerBlocks::insert(const Delivery& delivery, std::vector<Address>& cached) {
  const ReserveSpec& spec = delivery.spec;
  const std::vector<Address>& arrived = delivery.reservation.addresses;
  std::vector<Address> addresses = delivery.reservation.held;
  addresses.insert(addresses.end(), arrived.begin(), arrived.end());
  const InsertItem item{spec.tokens.data(), spec.tokens.size(), addresses.data(), addresses.size(), cached.data()};
  const IndexPin pin =
      pool_.for_peers().insert_arrived(spec.name_space, item, std::span(addresses).last(arrived.size()));
  add_instance(cached);
  return pin;
}

// All that can fail comes before the blocks change hands.
Delivered PeerBlocks::deliver(Delivery&& delivery) {
  const bool insert_them = delivery.spec.insert;
  // The application hears of what becomes its own, and of what it is meant to hear.
  const bool tell = delivery.private_bytes.has_value() || (!insert_them && !delivery.named);
  std::vector<Address>& arrived = delivery.reservation.addresses;
  Delivered delivered;
  delivered.cached.resize(insert_them ? delivery.reservation.held.size() + arrived.size() : 0);
  std::unique_ptr<ReceivedNews> news;
  const std::size_t bytes_told =
      (delivery.private_bytes ? delivery.private_bytes->size() : 0) + delivery.spec.tokens.size() * sizeof(Token);
  if (tell) {
    news = std::make_unique<ReceivedNews>();
    news->item = std::make_unique<Received>();
    news->item->addresses.reserve(delivered.cached.size());
    received_.reserve(delivery.peer, bytes_told);
  }
  if (insert_them) {
    IndexPin pin;
    try {
      pin = insert(delivery, delivered.cached);
    } catch (...) {
      if (tell) received_.unreserve(delivery.peer, bytes_told);
      throw;
    }
    if (!tell) {
      pool_.unpin(&pin, 1);
      return delivered;
    }
    news->item->pin = pin;
    news->item->addresses.assign(delivered.cached.begin(), delivered.cached.end());  // there is room
  } else {
    if (!delivery.named) pool_.for_peers().take_over(arrived.data(), arrived.size());
    if (!tell) return delivered;
    news->item->addresses = std::move(arrived);
  }
  news->item->peer = std::move(delivery.peer);
  news->item->inserted = insert_them;
  news->item->lent = delivery.named && !insert_them;
  news->item->name_space = std::move(delivery.spec.name_space);
  news->item->tokens = std::move(delivery.spec.tokens);
  if (delivery.private_bytes) news->item->private_bytes = std::move(*delivery.private_bytes);
  delivered.news = std::move(news);
  return delivered;
}

void PeerBlocks::publish(std::unique_ptr<News> news) noexcept {
  received_.push(std::move(static_cast<ReceivedNews&>(*news).item));
}

std::uint32_t PeerBlocks::checksum(std::span<const Address> addresses) {
  std::uint32_t crc = 0;
  const std::shared_ptr<void> keep = keepalive();
  if (keep == nullptr) return crc;  // the pool is closed: nobody asks for the result any more
  std::shared_ptr<DeviceStaging> staging;
  std::shared_ptr<PinnedBuffer> buffer;
  for (const Address address : addresses) {
    const std::size_t medium = medium_bits_of(address) - 1;
    if (spans_[medium].places != nullptr) {
      const ContentRange whole{0, spans_[medium].block_bytes()};
      std::vector<iovec> pieces;
      ContentPlan(spans_, {&whole, 1}).emit({&address, 1}, true, pieces);
      for (const iovec& piece : pieces) crc = crc32c(crc, static_cast<const std::byte*>(piece.iov_base), piece.iov_len);
      continue;
    }
    for (const Segment& segment : spans_[medium].segments) {
      std::byte* at = segment.base + block_of(address) * segment.stride;
      if (!on_gpu_[medium]) {
        crc = crc32c(crc, at, segment.bytes);
        continue;
      }
      if (buffer == nullptr) buffer = (staging = this->staging())->buffer();
      for (std::size_t done = 0; done < segment.bytes; done += buffer->bytes()) {
        const iovec piece{at + done, std::min(buffer->bytes(), segment.bytes - done)};
        staging->gather({&piece, 1}, buffer->data());
        crc = crc32c(crc, buffer->data(), piece.iov_len);
      }
    }
  }
  return crc;
}

std::unique_ptr<StagingBuffer> PeerBlocks::staging_buffer(std::span<const Address> blocks, std::vector<iovec>& pieces,
                                                          std::uint64_t bytes) {
  const auto lies_on_gpu = [&](Address address) { return on_gpu_[medium_of(address)]; };
  if (std::ranges::none_of(blocks, lies_on_gpu)) return nullptr;
  return make_gpu_staging_buffer(staging(), pieces, bytes);
}

void PeerBlocks::expect_staging_buffer() {
  if (const auto staging = this->staging(); staging != nullptr) staging->warm_up();
}

void PeerBlocks::hold_for_reading(std::span<const Address> addresses, std::uint64_t for_incarnation) {
  pool_.for_peers().hold_for_reading(addresses.data(), addresses.size(), for_incarnation);
}

void PeerBlocks::release_reading(std::span<const Address> addresses) noexcept {
  pool_.for_peers().release_reading(addresses.data(), addresses.size());
}

void PeerBlocks::expect_writes(std::span<const Address> addresses, Writer writer) {
  pool_.for_peers().reserve_active(addresses.data(), addresses.size(), writer.incarnation, writer.mark);
}

void PeerBlocks::end_writes(std::span<const Address> addresses) noexcept {
  pool_.for_peers().take_over(addresses.data(), addresses.size());
}

void PeerBlocks::lend_active(std::span<const Address> addresses, Writer writer) {
  pool_.for_peers().lend_active(addresses.data(), addresses.size(), writer.incarnation);
}

}  // namespace kvpool
