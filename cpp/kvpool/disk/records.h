// Bytes of the journal and of snapshots: a header, then records. docs/internals/disk.md draws them.
//
// The checksum of a record begins with that of its file's header, so that a record of another file is not
// taken for one of this file. Sequence numbers are consecutive, so records that are left of earlier times are not,
// either.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace kvpool {

inline constexpr std::uint32_t kDiskVersion = 1;

using DiskId = std::array<std::byte, 16>;  // of a store: random, made with it

enum class LogKind : std::uint32_t { kJournal = 0x4A44564B, kSnapshot = 0x5344564B };  // "KVDJ", "KVDS"

// 64 bytes in one sector: it is there whole or not at all.
struct LogHeader {
  LogKind kind{};
  std::uint32_t version = kDiskVersion;
  DiskId store{};
  std::uint64_t number = 0;          // of the file; a snapshot has that of the first journal behind it
  std::uint64_t first_sequence = 0;  // journal: of its first record. Snapshot: of the first record that it lacks
  std::uint64_t records = 0;         // of a snapshot
  std::uint64_t unused = 0;
  std::uint32_t unused_too = 0;
  std::uint32_t crc = 0;  // of all before it
};
static_assert(sizeof(LogHeader) == 64);

// Fills in the checksum.
LogHeader sealed(LogHeader header) noexcept;
bool is_sound(const LogHeader& header) noexcept;

enum class Change : std::uint32_t { kPut = 1, kErase = 2 };

struct RecordHead {
  std::uint32_t crc;    // of the header of the file, and all behind this field
  std::uint32_t bytes;  // of the record, a multiple of 8
  std::uint64_t sequence;
  Change change;
  std::uint32_t slot;
  std::uint64_t generation;
  std::uint32_t meta_bytes;
  std::uint32_t pieces;  // checksums
  // checksums, meta, zeros up to a multiple of 8
};
static_assert(sizeof(RecordHead) == 40);

// A record, as it is given to be written or was read.
struct Record {
  Change change{};
  std::uint32_t slot = 0;
  std::uint64_t generation = 0;
  std::span<const std::byte> checksums;  // 4 bytes each
  std::span<const std::byte> meta;
};

// Appends the record to `bytes`.
void add_record(std::vector<std::byte>& bytes, const LogHeader& header, std::uint64_t sequence, const Record& record);
// The record at the begin of `bytes`, and how long it is; nullopt if no sound one with this sequence number is there.
struct ReadRecord {
  Record record;
  std::size_t bytes;
};
std::optional<ReadRecord> read_record(std::span<const std::byte> bytes, const LogHeader& header,
                                      std::uint64_t sequence) noexcept;

// Of piece `piece` of an entry.
std::uint32_t piece_checksum(std::uint32_t slot, std::uint64_t generation, std::uint32_t piece, const std::byte* data,
                             std::size_t bytes) noexcept;

}  // namespace kvpool
