// Content that this process places: data of the link, and passes beside it.
#include <algorithm>
#include <string>
#include <utility>

#include "kvpool/base/strips.h"
#include "kvpool/net/data_body.h"
#include "kvpool/transfer/receiver.h"
#include "kvpool/transfer/transfer_id.h"

namespace kvpool {
namespace {

constexpr std::size_t kLateMax = 4096;

bool is_cut(const MediaSpans& spans, std::span<const Address> blocks) {
  return std::ranges::any_of(blocks, [&](Address block) { return spans[medium_of(block)].places != nullptr; });
}

// At least as many pieces as this data has here.
std::size_t pieces_at_most(const DataBody& data, const MediaSpans& spans) {
  std::size_t pieces = 0;
  for (const Address block : data.blocks) {
    const MediumSpan& span = spans[medium_of(block)];
    const std::size_t length = span.places == nullptr ? 1 : span.block_bytes() / span.places->pieces();
    for (const ContentRange& range : data.ranges) pieces += static_cast<std::size_t>(range.bytes / length) + 2;
  }
  return pieces;
}

}  // namespace

// What it wants to write may not be its own (any more). Then the bytes are dropped, and its completion is refused.
//
// Data under a reserved number, or under that of a fetch, is for the blocks that are reserved under it, and no others.
// A lent block is written under other numbers only, by the address by which it was lent, and only while its borrower
// holds it: not while it is given back, checked or inserted.
//
// REQUIRES: mutex_ is held; the pool's lock comes below this one. Throws std::bad_alloc.
bool Receiver::may_place(std::uint64_t id, const std::vector<Address>& blocks, IncomingMap::iterator entry) {
  const bool reserved = entry != incoming_.end();
  if (!reserved && (id & kFetchBit) == 0) {
    return std::ranges::all_of(blocks, [&](Address address) {
      const auto lent = lent_.find(address);
      return lent != lent_.end() && lent->second == Lent::kHeld;
    });
  }
  try {
    host_.blocks().check_reserved(blocks, {incarnation_, reserved ? entry->second.mark : mark_of(id)});
    return true;
  } catch (const Error&) {
    return false;
  }
}

// What the link brings and the CPU cannot place lands in a buffer first. One frame is placed at a time.
Placement Receiver::on_data(std::uint64_t id, std::span<const std::byte> body, std::uint64_t payload_bytes) {
  const MediaSpans& spans = host_.blocks().spans();
  DataBody data = read_data_body(body, payload_bytes, spans);  // throws kProtocol
  if (is_cut(spans, data.blocks)) return admit_cut(id, std::move(data), payload_bytes);
  Placement placement;
  placement.pieces = data_placement(data, spans);
  std::unique_ptr<StagingBuffer> staging_buffer =
      host_.blocks().staging_buffer(data.blocks, placement.pieces, payload_bytes);
  if (staging_buffer != nullptr) placement.pieces = {staging_buffer->room()};
  placement = admit(id, std::move(placement), std::move(data.blocks), payload_bytes);
  if (!placement.pieces.empty()) staging_buffer_ = std::move(staging_buffer);
  return placement;
}

Placement Receiver::on_pass(std::uint64_t id, std::span<const std::byte> body, std::uint64_t payload_bytes) {
  const MediaSpans& spans = host_.blocks().spans();
  DataBody data = read_data_body(body, payload_bytes, spans);  // throws kProtocol
  if (is_cut(spans, data.blocks)) return admit_cut(id, std::move(data), payload_bytes);
  Placement placement{data_placement(data, spans)};
  return admit(id, std::move(placement), std::move(data.blocks), payload_bytes);
}

// The same for blocks that may be cut. Where their pieces lie may only be asked once it is known that they stay, and
// then nothing may fail any more.
Placement Receiver::admit_cut(std::uint64_t id, DataBody&& data, std::uint64_t payload_bytes) {
  const MediaSpans& spans = host_.blocks().spans();
  std::vector<iovec> pieces;
  pieces.reserve(pieces_at_most(data, spans));
  std::vector<Address> blocks = data.blocks;
  Placement placement{{iovec{nullptr, static_cast<std::size_t>(payload_bytes)}}};
  placement = admit(id, std::move(placement), std::move(blocks), payload_bytes);
  if (placement.pieces.empty()) return placement;
  ContentPlan(spans, data.ranges).emit(data.blocks, true, pieces);
  placement.pieces = std::move(pieces);
  return placement;
}

// Marks the transfer as being placed. An empty placement: the content is not wanted (any more).
Placement Receiver::admit(std::uint64_t id, Placement placement, std::vector<Address>&& blocks,
                          std::uint64_t payload_bytes) {
  const std::lock_guard lock(mutex_);
  const auto entry = incoming_.find(id);
  const bool reserved = entry != incoming_.end();
  if (reserved && (entry->second.ended || entry->second.phase != Phase::kReserved)) return {};
  ArrivedContent* const content = reserved ? &entry->second.content : content_to_lent(id);
  if (!may_place(id, blocks, entry)) {
    if (content != nullptr) content->damaged = true;
    return {};
  }
  // From now on the blocks stay, until on_placed: reserved ones because their content counts what is being placed.
  if (reserved) blocks.clear();
  placement.token = placements_.begin(id, content == nullptr ? 0 : content->number, std::move(blocks));
  if (content != nullptr) content->begin(payload_bytes);
  return placement;
}

// Of a transfer that has no reservation; null for a fetch of this side. REQUIRES: mutex_ is held. Throws kProtocol, and
// std::bad_alloc.
ArrivedContent* Receiver::content_to_lent(std::uint64_t id) {
  if ((id & kFetchBit) != 0) return nullptr;
  // Peers of ours write a lent block for one transfer at a time, and say how each has ended, if perhaps late.
  const std::size_t most = std::size_t{host_.limits().reserved_max} + host_.limits().transfers_max + kLateMax;
  if (arrived_.size() >= most && !arrived_.contains(id)) {
    throw Error(ErrorCode::kProtocol, "content of " + std::to_string(most) + " transfers came, and they do not end",
                {{"limit", static_cast<std::int64_t>(most)}});
  }
  ArrivedContent& content = arrived_[id];
  if (content.number == 0) content.number = ++contents_;
  return &content;
}

void Receiver::on_placed(std::uint64_t token, bool intact) {
  const std::unique_ptr<StagingBuffer> staging_buffer = std::move(staging_buffer_);
  try {
    if (staging_buffer != nullptr && intact) staging_buffer->land();
  } catch (...) {
    end_placing(token, false);
    throw;
  }
  end_placing(token, intact);
}

void Receiver::on_passed(std::uint64_t token, bool intact) { end_placing(token, intact); }

void Receiver::end_placing(std::uint64_t token, bool intact) {
  const std::lock_guard lock(mutex_);
  const auto placement = placements_.end(token);
  if (!placement) return;
  if (placement->in_blocks) release_placed();
  const auto arrived = arrived_.find(placement->transfer);
  if (arrived != arrived_.end() && arrived->second.number == placement->content) {
    static_cast<void>(arrived->second.end_placing(intact));
    return;
  }
  const auto entry = incoming_.find(placement->transfer);
  // Blocks of a fetch, or of a transfer that is over, whose id the peer may have used again.
  if (entry == incoming_.end() || entry->second.content.number != placement->content) return;
  if (entry->second.content.end_placing(intact) && entry->second.ended) end(entry, /*writers_gone=*/false);
}

// A payload has arrived in its blocks: frees those that were taken back meanwhile. REQUIRES: mutex_ is held.
void Receiver::release_placed() {
  for (auto entry = quarantined_.begin(); entry != quarantined_.end();) {
    const auto current = entry++;
    if (current->second.being_placed) release_quarantined(current);
  }
}

}  // namespace kvpool
