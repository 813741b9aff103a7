#include "kvpool/disk/records.h"

#include <bit>
#include <cstring>

#include "kvpool/base/digest.h"

namespace kvpool {
namespace {

static_assert(std::endian::native == std::endian::little, "files are little-endian");

constexpr std::size_t kCrcBytes = sizeof(std::uint32_t);

std::uint32_t record_crc(const LogHeader& header, const std::byte* record, std::size_t bytes) noexcept {
  return crc32c(header.crc, record + kCrcBytes, bytes - kCrcBytes);
}

std::size_t record_bytes(const RecordHead& head) noexcept {
  const std::uint64_t bytes = sizeof(RecordHead) + std::uint64_t{head.pieces} * kCrcBytes + head.meta_bytes;
  return (bytes + 7) / 8 * 8;
}

}  // namespace

LogHeader sealed(LogHeader header) noexcept {
  header.crc = crc32c(0, &header, sizeof(header) - kCrcBytes);
  return header;
}

bool is_sound(const LogHeader& header) noexcept { return sealed(header).crc == header.crc; }

void add_record(std::vector<std::byte>& bytes, const LogHeader& header, std::uint64_t sequence, const Record& record) {
  RecordHead head{};
  head.sequence = sequence;
  head.change = record.change;
  head.slot = record.slot;
  head.generation = record.generation;
  head.meta_bytes = static_cast<std::uint32_t>(record.meta.size());
  head.pieces = static_cast<std::uint32_t>(record.checksums.size() / kCrcBytes);
  head.bytes = static_cast<std::uint32_t>(record_bytes(head));
  const std::size_t begin = bytes.size();
  bytes.resize(begin + head.bytes);
  std::byte* const at = bytes.data() + begin;
  std::memcpy(at, &head, sizeof(head));
  if (!record.checksums.empty()) {
    std::memcpy(at + sizeof(head), record.checksums.data(), record.checksums.size());
  }
  if (!record.meta.empty()) {
    std::memcpy(at + sizeof(head) + record.checksums.size(), record.meta.data(), record.meta.size());
  }
  head.crc = record_crc(header, at, head.bytes);
  std::memcpy(at, &head.crc, kCrcBytes);
}

std::optional<ReadRecord> read_record(std::span<const std::byte> bytes, const LogHeader& header,
                                      std::uint64_t sequence) noexcept {
  RecordHead head;
  if (bytes.size() < sizeof(head)) return std::nullopt;
  std::memcpy(&head, bytes.data(), sizeof(head));
  if (head.sequence != sequence || head.bytes > bytes.size() || head.bytes != record_bytes(head)) return std::nullopt;
  if (record_crc(header, bytes.data(), head.bytes) != head.crc) return std::nullopt;
  Record record{head.change, head.slot, head.generation, {}, {}};
  record.checksums = bytes.subspan(sizeof(head), head.pieces * kCrcBytes);
  record.meta = bytes.subspan(sizeof(head) + record.checksums.size(), head.meta_bytes);
  return ReadRecord{record, head.bytes};
}

std::uint32_t piece_checksum(std::uint32_t slot, std::uint64_t generation, std::uint32_t piece, const std::byte* data,
                             std::size_t bytes) noexcept {
  const std::uint64_t place[] = {generation, std::uint64_t{slot} << 32 | piece};
  return crc32c(crc32c(0, place, sizeof(place)), data, bytes);
}

}  // namespace kvpool
