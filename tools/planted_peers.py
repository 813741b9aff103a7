"""Bugs between two pools, from the sockets to the ranks of logical instances, for `make planted`."""

from __future__ import annotations

from typing import Final

from tools.planted_kit import Bug, in_cpp

__all__ = ["PEER_BUGS"]

PEER_BUGS: Final = (
    Bug(
        "tag-of-content-unchecked",
        "net",
        "content that was changed on its way is taken for good",
        in_cpp(
            "net/frame_reader.cpp",
            "theirs.empty() || equal_secret(tag.data(), theirs.data(), theirs.size());",
            "theirs.empty() || equal_secret(tag.data(), tag.data(), theirs.size());",
        ),
        ("sock_fault_test.cpp", "sock_link_test.cpp", "frame_fuzz_test.cpp"),
    ),
    Bug(
        "body-too-long",
        "net",
        "a peer says how much memory this side takes for a frame",
        in_cpp(
            "net/frame_tag.cpp", "if (header.body_bytes <= most) return;", "if (header.body_bytes / 2 <= most) return;"
        ),
        ("frame_fuzz_test.cpp", "strange_frames_test.cpp", "sock_link_test.cpp"),
    ),
    Bug(
        "content-not-kept",
        "net",
        "what the socket does not take at once is read from memory that its owner has taken back",
        in_cpp("net/frame_writer.cpp", "leave_rest(current_.copy_rest());", "leave_rest(1);"),
        ("sock_both_ways_test.cpp",),
    ),
    Bug(
        "parts-to-one-place",
        "routes",
        "every part of a large write goes to the first blocks: wrong bytes, reported as success",
        in_cpp(
            "routes/write_in_parts.cpp",
            "request_.to.subspan(part.first_block, part.blocks)",
            "request_.to.subspan(0, part.blocks)",
        ),
        ("memory_route_test.cpp", "cma_route_test.cpp"),
    ),
    Bug(
        "late-write-placed",
        "transfer",
        "what a paused sender writes after its reservation's end lands in blocks that are another's (5)",
        in_cpp(
            "transfer/receiver_place.cpp",
            "return lent != lent_.end() && lent->second == Lent::kHeld;",
            "return lent == lent_.end() || lent->second == Lent::kHeld;",
        ),
        ("receiver_test.cpp", "receiver_content_test.cpp", "given_up_test.cpp"),
    ),
    Bug(
        "incomplete-completed",
        "transfer",
        "a transfer of which bytes are missing is delivered as a whole",
        in_cpp(
            "transfer/receiver_complete.cpp",
            "if (!incoming.one_sided) check_content(",
            "if (body.bytes == 0) check_content(",
        ),
        ("receiver_content_test.cpp", "sim_test.cpp"),
    ),
    Bug(
        "reservation-for-ever",
        "transfer",
        "blocks that were reserved for a sender which is silent stay reserved (2, 3)",
        in_cpp(
            "transfer/receiver.cpp",
            "if (!current->second.ended) end(current, /*writers_gone=*/false);",
            "if (current->second.ended) end(current, /*writers_gone=*/false);",
        ),
        ("receiver_test.cpp", "sim_test.cpp"),
    ),
    Bug(
        "quarantine-by-one-proof",
        "peers",
        "blocks are used again when one of two ways in which a dead peer wrote is proved closed (5)",
        in_cpp(
            "peers/writer_quarantine.cpp",
            "return quarantined_peer.missing == 0 && !quarantined_peer.fencing;\n  });\n  let",
            "return true;\n  });\n  let",
        ),
        ("writer_quarantine_test.cpp",),
    ),
    Bug(
        "old-writes-forgotten",
        "peers",
        "a peer that comes back while its earlier writes are under way is let in (7)",
        in_cpp(
            "peers/writer_quarantine.cpp",
            "(quarantined_peer.session->writes_under_way() == 0 && !quarantined_peer.fencing))\n      continue;",
            "!quarantined_peer.fencing)\n      continue;",
        ),
        ("writer_quarantine_test.cpp", "service_peers_test.cpp"),
    ),
    Bug(
        "strips-overflow",
        "ranks",
        "the lengths of an order between ranks overflow: more is written than was asked for",
        in_cpp(
            "ranks/rank_messages.cpp",
            "if (__builtin_add_overflow(channel.bytes, strip.bytes, &channel.bytes))\n",
            "if (__builtin_add_overflow(channel.bytes, strip.bytes, &channel.bytes), strips_max == 0)\n",
        ),
        ("rank_messages_test.cpp",),
    ),
    Bug(
        "end-left-to-a-stopped-reactor",
        "net",
        "a driver that waited to read leaves the end of a link to a reactor that has stopped",
        in_cpp(
            "net/sock_read.cpp",
            "if (!link_.closing() || link_.reading_ || link_.ended_) {",
            "if (true || link_.reading_ || link_.ended_) {",
        ),
        ("sock_link_stop_test.cpp",),
    ),
    Bug(
        "race-in-reactor",
        "net",
        "a watch is changed while another thread adds one: a race that shows once in a while",
        in_cpp(
            "net/reactor.cpp",
            "const std::lock_guard lock(state_->mutex);\n  const auto found = state_->watches.find(watch);\n  if",
            "const auto found = state_->watches.find(watch);\n  if",
        ),
        ("reactor_test.cpp", "sock_both_ways_test.cpp"),
        build="thread",
    ),
    Bug(
        "freed-under-a-frame",
        "transfer",
        "a peer that is proved gone leaves a frame in the socket, and it is placed in a block that has a new owner (1)",
        in_cpp(
            "transfer/receiver.cpp",
            "late->second.being_placed = placements_.is_placed_now(late->second.addresses);",
            "late->second.being_placed = false;",
        ),
        ("recall_test.cpp", "fetch_test.cpp"),
    ),
    Bug(
        "unwatched-while-calls-end",
        "transfer",
        "a peer that is killed while the two disconnect is not watched, and the blocks of a fetch never come back (3)",
        in_cpp("transfer/session.h", "!calls_ended_.load() ||", "false ||"),
        ("fetch_test.cpp",),
    ),
    Bug(
        "returned-under-a-pass",
        "transfer",
        "a block is lent to another peer while a pass that its last borrower announced is still written into it (1)",
        in_cpp("transfer/receiver_lend.cpp", "if (placements_.is_placed_now(addresses)) {", "if (false) {"),
        ("recall_test.cpp",),
    ),
    Bug(
        "content-by-name",
        "transfer",
        "the end of a payload is counted for another transfer to which the peer has given the same number (1)",
        in_cpp(
            "transfer/receiver_place.cpp",
            "entry == incoming_.end() || entry->second.content.number != placement->content",
            "entry == incoming_.end()",
        ),
        ("receiver_content_test.cpp",),
    ),
    Bug(
        "one-of-two-frames",
        "transfer",
        "the first of two frames in a block to end sets the block free, and the other goes on writing (1)",
        in_cpp("transfer/placements.cpp", "if (--entry->second == 0) placed_in_.erase", "placed_in_.erase"),
        ("placements_test.cpp",),
    ),
    Bug(
        "counted-by-each",
        "routes",
        "what NCCL takes while several communicators are made at once is reported several times",
        in_cpp(
            "routes/nccl/nccl_cost.cpp",
            "std::max<std::int64_t>(counters.untaken - taken, 0)",
            "std::max<std::int64_t>(counters.untaken, 0)",
        ),
        ("nccl_cost_test.cpp",),
    ),
)
