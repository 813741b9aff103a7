"""What a run has shown, as a table for the terminal."""

from __future__ import annotations

from long_context.story import Result


def summary(result: Result) -> str:
    """The blocks of every process, the tokens, and which promises were kept."""
    return "\n".join([*_blocks(result), "", *_tokens(result), "", *_promises(result), ""])


def _blocks(result: Result) -> list[str]:
    size, held = result.size, result.at_end.blocks
    rows: list[tuple[str, ...]] = [("process", "its pool", "holds of the request", "in use then", "in the end")]
    for name, count in held.items():
        rows.append((name, *_in_blocks(size.pool_blocks, count, result.in_use[name], result.left_over[name])))
    sums = (sum(blocks.values()) for blocks in (held, result.in_use, result.left_over))
    rows.append(("together", *_in_blocks(len(held) * size.pool_blocks, *sums)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def _in_blocks(*counts: int) -> tuple[str, ...]:
    return tuple(f"{count:,} blocks" for count in counts)


def _tokens(result: Result) -> list[str]:
    served, lost = result.at_end.tokens, result.lost_tokens
    times = served / result.size.pool_tokens
    share = result.recomputed / result.at_death.tokens
    rows = {
        "served": f"{served:,} tokens, {times:.2f} times the {result.size.pool_tokens:,} that a pool holds",
        "lost": f"{lost:,} tokens",
        "computed again": f"{result.recomputed:,} of {result.at_death.tokens:,} tokens ({share:.0%}), "
        f"in {result.recompute_s:.1f} s",
        "bit-identical": _identical(result),
    }
    return [f"{name:<15} {text}" for name, text in rows.items()]


def _identical(result: Result) -> str:
    together, alone = result.together, result.alone
    same = sum(a == b for a, b in zip(together.tokens, alone.tokens, strict=True))
    equal = sum(a.tobytes() == b.tobytes() for a, b in zip(together.logits, alone.logits, strict=True))
    count = len(alone.tokens)
    word = "yes" if same == equal == count else "NO"
    return f"{word}: {same} of {count} tokens, and the logits of {equal} of them"


def _promises(result: Result) -> list[str]:
    return [f"{'yes' if kept else 'NO ':<4}{text}" for text, kept in result.promises.items()]
