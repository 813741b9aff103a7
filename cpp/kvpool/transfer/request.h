// Requests and statistics of transfers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/base/medium.h"
#include "kvpool/base/priority.h"
#include "kvpool/base/strips.h"
#include "kvpool/net/wire.h"

namespace kvpool {

class DeviceOrder;

using Token = std::int32_t;

// How blocks are cut into calls (MemServe §5.2; by_layer_agg is ours). kAuto: see strategy_used().
enum class Strategy : std::uint8_t { kAuto, kByLayer, kByLayerAgg, kByRequest, kByRequestAgg };
const char* strategy_name(Strategy strategy) noexcept;

struct TransferRequest {
  std::string peer;
  std::vector<Address> from;           // blocks of this pool; for an insertion, of the whole prompt
  std::vector<Address> to;             // lent by the peer; empty: the receiver reserves
  MediumChoice medium = Medium::kHbm;  // at the receiver, if it reserves
  bool may_evict = true;               // the receiver may drop cached prompts for it
  bool insert = false;                 // with the tokens below: the receiver inserts
  std::string name_space;
  std::vector<Token> tokens;
  std::optional<Bytes> private_bytes;  // for the receiving application, with the blocks; nullopt: it is not told
  Strategy strategy = Strategy::kAuto;
  Priority priority = Priority::kPrefill;
  std::string route;      // "": the cheapest that both sides have
  bool checksum = false;  // of the content, verified by the receiver before it commits
  bool streamed = false;  // opened for layer-wise sending: nothing is written before send_layer()
  // The GPU work that must end before the blocks are read; null: for a pool on a GPU, all work so far.
  std::shared_ptr<const DeviceOrder> after;
  std::int64_t deadline_ns = 0;  // CLOCK_MONOTONIC
};

struct FetchRequest {
  std::string peer;
  std::vector<Address> from;  // blocks of the peer
  std::vector<Address> to;    // active blocks here; empty: they are allocated
  MediumChoice medium = Medium::kHbm;
  bool may_evict = true;
  Priority priority = Priority::kPrefill;
  std::string route;             // by which the owner writes; "": the cheapest way, which may be to read them from here
  bool checksum = false;         // of the content, compared before the fetch ends; then the owner writes
  std::int64_t deadline_ns = 0;  // CLOCK_MONOTONIC
};

struct PromptFetchRequest {
  std::string peer;
  std::string name_space;
  std::vector<Token> tokens;  // a block that is not whole is ignored
  MediumChoice medium = Medium::kHbm;
  bool may_evict = true;
  Priority priority = Priority::kPrefill;
  std::int64_t deadline_ns = 0;  // CLOCK_MONOTONIC
};

// The cost of one transfer. Times in microseconds.
struct TransferStats {
  std::string route;
  std::string strategy;
  std::uint64_t blocks = 0;          // of the request
  std::uint64_t skipped_blocks = 0;  // of these, the prefix that the receiver had cached
  std::uint64_t calls = 0;
  std::uint64_t runs = 0;  // of neighbouring blocks on both sides: the least number of calls
  std::uint64_t bytes = 0;
  double reserve_us = 0;
  double write_us = 0;
  double complete_us = 0;
  double total_us = 0;
};

}  // namespace kvpool
