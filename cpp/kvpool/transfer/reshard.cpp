#include "kvpool/transfer/reshard.h"

#include <algorithm>
#include <initializer_list>
#include <string>

#include "kvpool/base/check.h"
#include "kvpool/base/error.h"

namespace kvpool {
namespace {

// What one receiving rank wants from sending ranks that hold the same: a range of layers and of heads. It is `runs`
// stretches of `run_bytes`, each `stride` behind the one before: one for each piece of a layer (K and V, or both
// fused), or, where tokens come before heads (NHD), one for each token of these.
struct Part {
  std::uint32_t to_rank;
  std::uint64_t runs;
  std::uint64_t run_bytes;
  std::uint64_t from;  // offset of the first run in the sender's content
  std::uint64_t from_stride;
  std::uint64_t to;
  std::uint64_t to_stride;

  std::uint64_t bytes() const noexcept { return runs * run_bytes; }
};

[[noreturn]] void fail_differing(const char* name, const std::string& sender, const std::string& receiver,
                                 std::initializer_list<ErrorField> fields = {}) {
  throw Error(ErrorCode::kLayoutMismatch,
              std::string(name) + " is " + sender + " at the sender and " + receiver +
                  " at the receiver: their blocks do not hold the same",
              fields);
}

void check_field(const char* name, std::uint32_t sender, std::uint32_t receiver) {
  if (sender == receiver) return;
  fail_differing(name, std::to_string(sender), std::to_string(receiver), {{"sender", sender}, {"receiver", receiver}});
}

void check_same_shape(const KVShape& sender, const KVShape& receiver) {
  check_field("layers", sender.layers, receiver.layers);
  check_field("kv_heads", sender.kv_heads, receiver.kv_heads);
  check_field("head_dim", sender.head_dim, receiver.head_dim);
  check_field("block_tokens", sender.block_tokens, receiver.block_tokens);
  if (sender.dtype != receiver.dtype) {
    fail_differing("dtype", dtype_name(sender.dtype), dtype_name(receiver.dtype));
  }
  if (sender.tokens_first != receiver.tokens_first) {
    const auto order = [](const KVShape& shape) { return std::string(shape.tokens_first ? "NHD" : "HND"); };
    fail_differing("the order of heads and tokens", order(sender), order(receiver));
  }
  if (sender.fused != receiver.fused) {
    const auto kind = [](const KVShape& shape) { return std::string(shape.fused ? "fused" : "split"); };
    fail_differing("the page format", kind(sender), kind(receiver));
  }
}

class Planner {
 public:
  Planner(const Sharding& from, const Sharding& to)
      : from_(from),
        to_(to),
        runs_per_piece_(from.shape().tokens_first ? from.shape().block_tokens : 1),
        runs_per_layer_(runs_per_piece_ * from.shape().pieces_per_layer()),
        head_bytes_(from.shape().head_bytes() / runs_per_piece_) {}

  std::vector<ReshardPair> plan() {
    for (std::uint32_t first = 0; first < from_.ranks(); first += from_.replicas()) share(first);
    return std::move(pairs_);
  }

 private:
  // Divides what the ranks [first, first + replicas) hold alike among them: all that anybody wants of it, laid in a
  // row, is cut into as many equal lengths.
  void share(std::uint32_t first) {
    const std::vector<Part> parts = wanted_of(from_.slice(first));
    std::uint64_t total = 0;
    for (const Part& part : parts) total += part.bytes();
    std::uint64_t begin = 0;
    for (std::uint32_t replica = 0; replica < from_.replicas(); ++replica) {
      const std::uint64_t end = cut(parts, total, replica + 1);
      emit(first + replica, parts, begin, end);
      begin = end;
    }
  }

  // By tensor-parallel rank of the receiver, then by stage: so a sender that gets one of several equal shares serves
  // the same tensor-parallel rank of each stage, and its own number where both sides are alike.
  std::vector<Part> wanted_of(const RankSlice& held) const {
    std::vector<Part> parts;
    if (held.layers == 0) return parts;
    const std::uint32_t heads_end = held.head_first + held.heads;
    const std::uint32_t layers_end = held.layer_first + held.layers;
    const std::uint32_t stage_first = to_.stage_of(held.layer_first);
    const std::uint32_t stage_end = to_.stage_of(layers_end - 1) + 1;
    const std::uint32_t tp_first = held.head_first / to_.rank_heads() * to_.replicas();
    const std::uint32_t tp_end = (heads_end - 1) / to_.rank_heads() * to_.replicas() + to_.replicas();
    for (std::uint32_t tp_rank = tp_first; tp_rank < tp_end; ++tp_rank) {
      for (std::uint32_t stage = stage_first; stage < stage_end; ++stage) {
        const RankSlice want = to_.slice(stage * to_.tp() + tp_rank);
        const std::uint32_t layer = std::max(held.layer_first, want.layer_first);
        const std::uint32_t layer_end = std::min(layers_end, want.layer_first + want.layers);
        const std::uint32_t head = std::max(held.head_first, want.head_first);
        const std::uint32_t head_end = std::min(heads_end, want.head_first + want.heads);
        if (layer >= layer_end) continue;  // a stage without layers
        KVPOOL_DCHECK(head < head_end);
        parts.push_back({.to_rank = want.rank,
                         .runs = (layer_end - layer) * runs_per_layer_,
                         .run_bytes = (head_end - head) * head_bytes_,
                         .from = offset(held, layer, head),
                         .from_stride = held.heads * head_bytes_,
                         .to = offset(want, layer, head),
                         .to_stride = want.heads * head_bytes_});
      }
    }
    return parts;
  }

  // Of the first piece of a layer and of a head of the model, in the content of a rank that holds both.
  std::uint64_t offset(const RankSlice& slice, std::uint32_t layer, std::uint32_t head) const noexcept {
    const std::uint64_t runs = (layer - slice.layer_first) * runs_per_layer_;
    return (runs * slice.heads + (head - slice.head_first)) * head_bytes_;
  }

  // Where the shares of the first `shares` senders end. The exact place may move by 1/64 of a share to where a receiver
  // or a run ends anyway, so that no sliver is cut off there; otherwise it moves down to a whole row.
  std::uint64_t cut(const std::vector<Part>& parts, std::uint64_t total, std::uint32_t shares) const noexcept {
    if (shares == from_.replicas()) return total;
    const std::uint64_t share = total / from_.replicas();
    const std::uint64_t exact = share * shares + total % from_.replicas() * shares / from_.replicas();
    const std::uint64_t slack = share / 64;
    std::uint64_t begin = 0;  // of the part that the exact place lies in
    for (const Part& part : parts) {
      const std::uint64_t end = begin + part.bytes();
      if (exact > end) {
        begin = end;
        continue;
      }
      if (end - exact <= slack) return end;
      if (exact - begin <= slack) return begin;
      const std::uint64_t into_run = (exact - begin) % part.run_bytes;
      if (into_run <= slack) return exact - into_run;
      if (part.run_bytes - into_run <= slack) return exact + part.run_bytes - into_run;
      break;
    }
    return exact - exact % from_.shape().row_bytes();
  }

  // Gives `rank` the bytes [begin, end) of the parts in a row.
  void emit(std::uint32_t rank, const std::vector<Part>& parts, std::uint64_t begin, std::uint64_t end) {
    const std::size_t first_pair = pairs_.size();
    std::uint64_t part_begin = 0;
    for (const Part& part : parts) {
      const std::uint64_t part_end = part_begin + part.bytes();
      const std::uint64_t low = std::max(begin, part_begin);
      const std::uint64_t high = std::min(end, part_end);
      if (low < high) {
        pairs_.push_back({rank, part.to_rank, high - low, strips_of(part, low - part_begin, high - part_begin)});
      }
      part_begin = part_end;
    }
    std::sort(pairs_.begin() + static_cast<std::ptrdiff_t>(first_pair), pairs_.end(),
              [](const ReshardPair& left, const ReshardPair& right) { return left.to_rank < right.to_rank; });
  }

  // The bytes [begin, end) of one part.
  std::vector<BlockStrip> strips_of(const Part& part, std::uint64_t begin, std::uint64_t end) {
    const bool in_a_row = part.run_bytes == part.from_stride && part.run_bytes == part.to_stride;
    const std::uint64_t first_run = begin / part.run_bytes;
    const std::uint64_t last_run = (end - 1) / part.run_bytes;
    count(in_a_row ? 1 : last_run - first_run + 1);
    if (in_a_row) return {{part.from + begin, part.to + begin, end - begin}};
    std::vector<BlockStrip> strips;
    strips.reserve(last_run - first_run + 1);
    for (std::uint64_t run = first_run; run <= last_run; ++run) {
      const std::uint64_t low = run == first_run ? begin - run * part.run_bytes : 0;
      const std::uint64_t high = run == last_run ? end - run * part.run_bytes : part.run_bytes;
      strips.push_back({part.from + run * part.from_stride + low, part.to + run * part.to_stride + low, high - low});
    }
    return strips;
  }

  // A peer's configuration is input like any other: it must not make us build a plan of any size.
  void count(std::uint64_t strips) {
    strips_ += strips;
    if (strips_ <= kPlanStripsMax) return;
    throw Error(ErrorCode::kArgument,
                "a plan from TP " + std::to_string(from_.tp()) + " PP " + std::to_string(from_.pp()) + " to TP " +
                    std::to_string(to_.tp()) + " PP " + std::to_string(to_.pp()) + " for " +
                    std::to_string(from_.shape().layers) + " layers has more than " + std::to_string(kPlanStripsMax) +
                    " strips",
                {{"maximum", static_cast<std::int64_t>(kPlanStripsMax)}});
  }

  const Sharding& from_;
  const Sharding& to_;
  std::uint64_t runs_per_piece_;
  std::uint64_t runs_per_layer_;
  std::uint64_t head_bytes_;  // of a head in a run
  std::uint64_t strips_ = 0;
  std::vector<ReshardPair> pairs_;
};

// S1 and S2: within each receiver the strips, sorted by where they land, follow each other without gap or overlap from
// the first byte to the last.
[[maybe_unused]] bool writes_each_byte_once(const ReshardPlan& plan) {
  std::vector<std::vector<BlockStrip>> staging_buffer(plan.to.ranks());
  for (const ReshardPair& pair : plan.pairs) {
    for (const BlockStrip& strip : pair.strips) {
      if (strip.bytes == 0 || strip.from + strip.bytes > plan.from.rank_bytes(pair.from_rank)) return false;
      staging_buffer[pair.to_rank].push_back(strip);
    }
  }
  for (std::uint32_t rank = 0; rank < plan.to.ranks(); ++rank) {
    std::ranges::sort(staging_buffer[rank], {}, &BlockStrip::to);
    std::uint64_t at = 0;
    for (const BlockStrip& strip : staging_buffer[rank]) {
      if (strip.to != at) return false;
      at += strip.bytes;
    }
    if (at != plan.to.rank_bytes(rank)) return false;
  }
  return true;
}

}  // namespace

std::span<const ReshardPair> ReshardPlan::of_sender(std::uint32_t from_rank) const noexcept {
  const auto found = std::ranges::equal_range(pairs, from_rank, {}, &ReshardPair::from_rank);
  return {found.begin(), found.end()};
}

std::size_t ReshardPlan::strips() const noexcept {
  std::size_t strips = 0;
  for (const ReshardPair& pair : pairs) strips += pair.strips.size();
  return strips;
}

ReshardPlan plan_reshard(const Sharding& from, const Sharding& to) {
  check_same_shape(from.shape(), to.shape());
  ReshardPlan plan{from, to, Planner(from, to).plan()};
  KVPOOL_DCHECK(writes_each_byte_once(plan));
  return plan;
}

std::vector<BlockStrip> clip_strips(std::span<const BlockStrip> strips, std::uint64_t begin, std::uint64_t end) {
  const auto ends_by = [begin](const BlockStrip& strip) { return strip.from + strip.bytes <= begin; };
  std::vector<BlockStrip> clipped;
  for (auto at = std::ranges::partition_point(strips, ends_by); at != strips.end() && at->from < end; ++at) {
    const std::uint64_t low = std::max(begin, at->from);
    const std::uint64_t high = std::min(end, at->from + at->bytes);
    if (low < high) clipped.push_back({low, at->to + (low - at->from), high - low});
  }
  return clipped;
}

}  // namespace kvpool
