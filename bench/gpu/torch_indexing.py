"""The same copies by plain torch: `cache[index]` on the device, and `.cpu()` or a pinned copy of it."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

Rates = dict[tuple[str, int], dict[str, float]]  # by case and bytes of a piece: GB/s by name


def rates(quick: bool) -> Rates | str:
    """Medians, or the reason why they are missing. Frees the device memory that it used."""
    try:
        import torch
    except ImportError:
        return "torch is not installed: its indexing is left out"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU: its indexing is left out"
    found: Rates = {}
    for piece in (2 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20):
        found.update(_rates_of(torch, piece, quick))
    torch.cuda.empty_cache()
    return found


def _rates_of(torch: Any, piece: int, quick: bool) -> Rates:
    bytes_ = (256 << 20) if quick else (1 << 30)
    count = bytes_ // piece
    cache = torch.zeros((2 * count, piece // 2), dtype=torch.bfloat16, device="cuda")
    run = torch.zeros((count, piece // 2), dtype=torch.bfloat16, device="cuda")
    index = 2 * torch.randperm(count, device="cuda")
    rounds = 5 if quick else 15

    def scatter() -> None:
        cache[index] = run

    found: Rates = {
        ("gather", piece): {"torch cache[idx]": 2 * _rate(torch, bytes_, rounds, lambda: cache[index])},
        ("scatter", piece): {"torch cache[idx] = run": 2 * _rate(torch, bytes_, rounds, scatter)},
    }
    if 4 << 10 <= piece <= 256 << 10:
        few = index[: max(1, (64 << 20) // piece)]
        moved = len(few) * piece
        pinned = torch.zeros((len(few), piece // 2), dtype=torch.bfloat16, pin_memory=True)

        def to_device() -> None:
            cache[few] = pinned.to("cuda", non_blocking=True)

        def to_host() -> None:
            cache[few].cpu()

        def to_pinned() -> None:
            pinned.copy_(cache[few], non_blocking=True)

        found["device to pinned", piece] = {
            "torch cache[idx].cpu()": _rate(torch, moved, rounds, to_host),
            "torch pinned.copy_(cache[idx])": _rate(torch, moved, rounds, to_pinned),
        }
        found["pinned to device", piece] = {"torch cache[idx] = pinned": _rate(torch, moved, rounds, to_device)}
    return found


def _rate(torch: Any, bytes_: int, rounds: int, work: Callable[[], object]) -> float:
    """GB/s by events on the current stream: the median of so many runs after two."""
    times: list[float] = []
    for number in range(rounds + 2):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        before.record()
        work()
        after.record()
        after.synchronize()
        if number >= 2:
            times.append(float(before.elapsed_time(after)))
    return bytes_ / median(times) / 1e6
