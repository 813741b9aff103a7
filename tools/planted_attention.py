"""Bugs of attention, here and at peers, for `make planted`."""

from __future__ import annotations

from typing import Final

from tools.planted_kit import Bug, in_cpp, in_python

__all__ = ["ATTENTION_BUGS"]


def in_triton(name: str, failure: str, old: str, new: str, file: str = "kernels") -> Bug:
    """A bug of the kernels for GPUs, which run in Triton's interpreter."""
    tests = ("python/cuda/test_attention_kernels.py",)
    return Bug(name, "attend_gpu", failure, ((f"cuda/attention/{file}.py", old, new),), tests, build="python")


ATTENTION_BUGS: Final[tuple[Bug, ...]] = (
    Bug(
        "nothing-with-nothing",
        "attention",
        "a row that saw no token in two parts becomes NaN when they are merged",
        in_cpp(
            "attention/merge_rows.cpp",
            "return own_max == kNothing ? 0.0F : exp2_of_difference(own_max - max);",
            "return exp2_of_difference(own_max - max);",
        ),
        ("attention_partial_test.cpp",),
    ),
    Bug(
        "natural-lse",
        "attention",
        "the natural logarithm that an engine passes on is taken for a binary one: parts are weighted wrongly",
        in_cpp(
            "attention/partial.cpp",
            "return base == LseBase::kTwo ? lse : static_cast<float>(static_cast<double>(lse) / kLn2);",
            "return base == LseBase::kTwo ? lse : lse;",
        ),
        ("attention_foreign_test.cpp",),
    ),
    Bug(
        "part-twice",
        "attention",
        "a part that arrives twice counts twice: a plausible, wrong result",
        in_cpp(
            "attention/token_range.cpp",
            "if (count > 0 && ascending[count - 1].overlaps(range)) refuse_shared(ascending[count - 1], range);",
            "if (count > 1 && ascending[count - 1].overlaps(range)) refuse_shared(ascending[count - 1], range);",
        ),
        ("attention_partial_test.cpp",),
    ),
    Bug(
        "unwritten-tail",
        "attention",
        "tokens behind the last one of a sequence are read: what their memory held before shows in the result",
        in_cpp(
            "attention/leaf_kernel.h",
            "for (int i = 0; i < tile.tokens; ++i) {",
            "for (int i = 0; i < kTileTokens; ++i) {",
        )
        + in_cpp(
            "attention/leaf_kernel.h",
            "for (int i = tile.tokens; i < kTileTokens; ++i) {",
            "for (int i = kTileTokens; i < kTileTokens; ++i) {",
        )
        + in_cpp(
            "attention/leaf_kernel.h",
            "static_cast<int>(end - tile.begin) : tile.tokens;",
            "static_cast<int>(end - tile.begin) : kTileTokens;",
        ),
        ("attention_kernel_test.cpp",),
    ),
    Bug(
        "maximum-not-carried",
        "attention",
        "what was accumulated is not scaled down when a later token has a higher score",
        in_cpp(
            "attention/leaf_kernel.h",
            "const typename V::F weight = exp2_of<V>(V::set(old - tile_max));",
            "const typename V::F weight = exp2_of<V>(V::set(old - old));",
        ),
        ("attention_kernel_test.cpp",),
    ),
    Bug(
        "values-are-keys",
        "attention",
        "V is read where K lies",
        in_cpp("attention/attend_work.cpp", "job.v_offset = kv.v_offset;", "job.v_offset = kv.k_offset;"),
        ("attention_kernel_test.cpp",),
    ),
    Bug(
        "read-block-reused",
        "sequences",
        "a block that an attention still reads is given to another owner: a plausible, wrong result",
        in_cpp(
            "sequences/sequence_blocks.cpp",
            "if (readings_.any_before(one.before)) return false;",
            "if (readings_.any_before(0)) return false;",
        ),
        ("sequence_blocks_test.cpp",),
    ),
    Bug(
        "answer-of-another-layer",
        "views",
        "an answer for one layer is taken for that of another: a plausible, wrong result",
        in_cpp("views/view_messages.cpp", "if (body.layer != asked.layer) malformed", "if (body.layer > 99) malformed"),
        ("view_messages_test.cpp",),
    ),
    Bug(
        "view-leaked",
        "views",
        "blocks that a borrower viewed stay held when it dies: the creditor's memory runs out",
        in_cpp("views/peer_views.cpp", "return !entry.second.by_mapping;", "return false;"),
        ("peer_views_test.cpp",),
    ),
    Bug(
        "attention-waits-unheld",
        "views",
        "blocks are reused while an attention over them waits for its turn: a plausible, wrong result",
        in_cpp(
            "views/peer_views.cpp",
            "request.entries.push_back({blocks->read(), {}});",
            "request.entries.push_back({{blocks->read().runs, nullptr, nullptr}, {}});",
        ),
        ("sim_test.cpp",),
    ),
    Bug(
        "recall-leaves-views",
        "transfer",
        "recalled blocks stay held by the borrower's view: the owner does not get its memory back",
        in_cpp(
            "transfer/session_recall.cpp",
            "count_read(asked->result, reads->on_recalled(asked->addresses));",
            "count_read(asked->result, 0);",
        ),
        ("remote_views_test.cpp", "recall_test.cpp"),
    ),
    Bug(
        "rejected-token-at-a-peer",
        "distributed",
        "an engine takes speculated tokens back into a block that a creditor has: it writes one that nobody reads",
        in_cpp("distributed/sequence.cpp", "if (tokens < tokens_) {", "if (tokens + 1 == 0) {"),
        ("remote_views_test.cpp",),
    ),
    Bug(
        "copy-of-rejected-tokens",
        "distributed",
        "a block moves whose tokens were rejected while it was copied: the old ones are attended to",
        in_cpp(
            "distributed/sequence.cpp",
            "low == set_backs_.end() ? tokens_ : std::min(tokens_, low->tokens)",
            "low == set_backs_.end() ? tokens_ : std::max(tokens_, low->tokens)",
        ),
        ("remote_views_test.cpp",),
    ),
    Bug(
        "lent-attention-counts-on",
        "views",
        "calls of peers that were answered count for ever: a creditor refuses all when it has computed for a while",
        in_cpp("views/lent_attends.cpp", "  --under_way_;\n", ""),
        ("remote_attend_test.cpp",),
    ),
    Bug(
        "attention-cannot-be-stopped",
        "attention",
        "a pool that closes waits until it has computed what its peers asked for, and a deadline is not looked at",
        in_cpp("attention/attend_work.cpp", "  if (stopped()) return;\n", ""),
        ("attention_attend_test.cpp",),
    ),
    Bug(
        "loss-without-tokens",
        "distributed",
        "a creditor dies, and the error does not say which tokens are lost: the engine computes the whole prompt again",
        in_cpp(
            "distributed/attend.cpp",
            "ErrorCode::kPeerLost;\n  let_go(part);\n  end_part(failure ? &*failure",
            "ErrorCode::kClosed;\n  let_go(part);\n  end_part(failure ? &*failure",
        ),
        ("remote_attend_test.cpp",),
    ),
    Bug(
        "reactor-blocked",
        "views",
        "attention for a peer is computed in the thread that reads links: leases and other peers wait for it",
        in_cpp(
            "views/lent_attends.cpp",
            "run_later(peer, priority, [this, job = std::move(job)] { carry_out(*job); });",
            "static_cast<void>(priority);\n  carry_out(*job);",
        ),
        ("remote_attend_test.cpp",),
    ),
    Bug(
        "mapped-view-dropped",
        "views",
        "the end of a link is taken for proof that a stopped peer reads no more: it wakes, and reads another's tokens",
        in_cpp(
            "views/peer_views.cpp",
            "std::erase_if(views_, [](const auto& entry) { return !entry.second.by_mapping; });",
            "views_.clear();",
        ),
        ("peer_views_test.cpp",),
    ),
    Bug(
        "lend-cap-ignored",
        "pool",
        "two borrowers that ask at once together get more than the pool lends: its own requests find no block",
        in_cpp("pool/pool_allocator.cpp", "if (lent + wanted <= most) return;", "if (wanted <= most) return;"),
        ("lend_limit_test.cpp",),
    ),
    Bug(
        "staging-reused",
        "control",
        "the next chunk of a prompt is computed into blocks that are still being sent to a creditor: wrong bytes",
        in_python("control/lending/prefilling.py", "while len(self._sent) > 1:", "while len(self._sent) > 2:"),
        ("python/test_lending.py",),
        build="python",
    ),
    Bug(
        "gpu-before-the-engine",
        "sequences",
        "the GPU attends to the newest tokens before the engine's stream has written them",
        in_cpp("sequences/attend_task.cpp", "    if (!is_ready) follow(stop);\n", ""),
        ("gpu_attend_pool_test.cpp",),
    ),
    Bug(
        "gpu-pieces-apart",
        "sequences",
        "what a peer computed on its GPU and its CPU is answered as pieces that nobody asked for: the link ends",
        in_cpp("sequences/attend_task.cpp", "    of_range->join_pieces();\n", ""),
        ("gpu_attend_pool_test.cpp",),
    ),
    Bug(
        "view-before-written",
        "views",
        "a peer attends to cached blocks that the creditor's GPU is still to fill",
        in_cpp(
            "views/peer_views.cpp",
            "    await_content(body, by_mapping_ && body.by_mapping, call);\n",
            "    static_cast<void>(call);\n",
        ),
        ("gpu_attend_pool_test.cpp",),
    ),
    Bug(
        "view-counted-late",
        "views",
        "a recall during the wait of a view is counted twice: the peer's views never fit again",
        in_cpp("views/peer_views.cpp", "    blocks_ += body.addresses.size();\n", ""),
        ("gpu_attend_pool_test.cpp",),
    ),
    Bug(
        "gpu-leaf-behind-the-query",
        "attend_gpu",
        "of several query tokens, later ones see the first tokens of leaves that lie behind all of them",
        in_cpp(
            "attend_gpu/leaf_plan.cpp",
            "std::clamp(seen, -kSeenMax, kSeenMax)",
            "std::clamp(seen, std::int64_t{0}, kSeenMax)",
        ),
        ("attend_gpu_test.cpp",),
    ),
    Bug(
        "gpu-levels-together",
        "attend_gpu",
        "every level of merges is given the pairs of the lowest one: results are plausible, and wrong",
        in_cpp("attend_gpu/gpu_attention.cpp", "    pairs.pairs += count * sizeof(MergePair);\n", ""),
        ("attend_gpu_test.cpp",),
    ),
    in_triton(
        "gpu-natural-exponential",
        "scores in base 2 are taken for natural logarithms: tokens are weighted wrongly",
        "p = tl.exp2(scores - base[:, None])",
        "p = tl.exp(scores - base[:, None])",
    ),
    in_triton(
        "gpu-nothing-in-a-leaf",
        "a row that sees no token of a tile becomes NaN",
        'base = tl.where(risen == float("-inf"), 0.0, risen)',
        "base = risen",
    ),
    in_triton(
        "gpu-nothing-with-nothing",
        "a row that saw no token in two leaves becomes NaN when they are merged",
        'return tl.where(own == float("-inf"), 0.0, exp2_of_difference(own - most))',
        "return exp2_of_difference(own - most)",
    ),
    in_triton(
        "gpu-heads-apart",
        "query heads take turns at KV heads, where neighbours belong to one: plausible, wrong results for GQA",
        "q_row = (row % query_tokens) * query_heads + head * group + row // query_tokens",
        "q_row = (row % query_tokens) * query_heads + head + row // query_tokens * (query_heads // group)",
    ),
    in_triton(
        "gpu-scale-twice",
        "scores are scaled twice: every token has nearly the same weight",
        'scores = tl.dot(queries, keys, input_precision="ieee") * scale_log2e',
        'scores = tl.dot(queries, keys, input_precision="ieee") * scale_log2e * scale_log2e',
    ),
    in_triton(
        "gpu-maximum-not-carried",
        "what was accumulated is not scaled down when a later token has a higher score",
        "acc = acc * weight[:, None]",
        "acc = acc * 1.0",
    ),
    in_triton(
        "gpu-bfloat16-as-float16",
        "bfloat16 is read as float16: plausible, wrong results",
        '"bfloat16": ("bf16", 2)',
        '"bfloat16": ("fp16", 2)',
        "variants",
    ),
    in_triton(
        "gpu-unwritten-tail",
        "tokens behind the last one are attended to",
        "there = (token >= first) & (token < end)",
        "there = token >= first",
    ),
    in_triton(
        "gpu-one-weight-for-both",
        "a merge weighs both sides by the left one's maximum",
        "weight_b = weight_of(b, most)",
        "weight_b = weight_of(a, most)",
    ),
)
