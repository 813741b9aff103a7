"""The plots of MELL's study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import plots

_SHOWN = ("MELL", "LB", "BF", "WF")


def draw_all(out: Path, series: dict[str, Any]) -> list[str]:
    """Draws what there is; returns the files' names."""
    return [*_cells(out, series), *_rest(out, series)]


def _cells(out: Path, series: dict[str, Any]) -> list[str]:
    """Fig 11 to 15: a panel a figure, for each cell."""
    cells = series["cells"]
    short = [f"{'13B' if '13B' in cell['hardware'] else '7B'}\n{_brief(cell['workload'])}" for cell in cells]

    def bars(axes: Any, key: str, title: str) -> None:
        for number, policy in enumerate(_SHOWN):
            heights = [cell["policies"][policy][key]["median"] for cell in cells]
            low = [cell["policies"][policy][key]["min"] for cell in cells]
            high = [cell["policies"][policy][key]["max"] for cell in cells]
            spread = [
                [height - least for height, least in zip(heights, low, strict=True)],
                [most - height for height, most in zip(heights, high, strict=True)],
            ]
            places = [place + 0.2 * number - 0.3 for place in range(len(cells))]
            axes.bar(
                places, heights, 0.19, yerr=spread, label=policy, color=plots.shade(number, 4), error_kw={"lw": 0.7}
            )
        axes.set_xticks(range(len(cells)), short, fontsize=5)
        axes.set_title(title, fontsize=9)

    def over_bound(axes: Any) -> None:
        bars(axes, "over_bound", "mean GPUs over the lower bound, %  (Fig 11)")
        axes.legend(fontsize=7)

    def moves(axes: Any) -> None:
        bars(axes, "request_moves_s", "requests migrated a second  (Fig 12)")

    def utilisation(axes: Any) -> None:
        bars(axes, "utilisation", "utilisation, %  (Fig 14)")
        axes.set_ylim(50, 100)

    def over_time(axes: Any) -> None:
        for number, policy in enumerate(_SHOWN):
            gpus = series["gpus_over_time"][policy]
            axes.plot(
                [5 * place for place in range(len(gpus))], gpus, label=policy, color=plots.shade(number, 4), lw=0.9
            )
        axes.set_title("GPUs over time, s: 13B, Poisson 1.1/s  (Fig 15)", fontsize=9)

    def saved(axes: Any) -> None:
        heights = []
        for cell in cells:
            batched, single = (cell["policies"][name]["moves_s"]["median"] for name in ("MELL", "MELL, one by one"))
            heights.append(100 * (1 - batched / single))
        axes.bar(range(len(cells)), heights, 0.6, color=plots.shade(0, 4))
        axes.set_xticks(range(len(cells)), short, fontsize=5)
        axes.set_title("moves of MELL that batching saves, %  (Fig 13)", fontsize=9)

    return plots.draw(out / "mell.png", "MELL, BF, WF and LB", over_bound, moves, saved, utilisation, over_time)


def _brief(name: str) -> str:
    return name.replace("Poisson ", "").replace("Azure arrivals", "Azure").replace("Azure, own lengths", "Azure\nown")


def _rest(out: Path, series: dict[str, Any]) -> list[str]:
    """The curve of GPUs against moves, twice; Fig 6; the links."""

    def curve(axes: Any, key: str, title: str) -> None:
        for number, (policy, points) in enumerate(series["curve"][0]["points"].items()):
            axes.plot(
                [point[key] for point in points],
                [point["over_bound"] for point in points],
                "o-",
                label=f"{policy}, by {'slack and reserve' if policy == 'MELL' else 'when it drains'}",
                color=plots.shade(number, 3),
            )
        axes.set_xlabel(title)
        axes.set_ylabel("GPUs over the lower bound, %")
        axes.legend(fontsize=7)

    def moves(axes: Any) -> None:
        curve(axes, "request_moves_s", "requests migrated a second (13B, Poisson 1.1/s)")

    def bytes_moved(axes: Any) -> None:
        curve(axes, "moved_gb_s", "KV cache migrated, GB/s")

    def fleet(axes: Any) -> None:
        entries = series["fleet"]
        axes.plot(
            [entry["gpus"] for entry in entries], [entry["with"] for entry in entries], "o-", label="with migration"
        )
        axes.plot([entry["gpus"] for entry in entries], [entry["without"] for entry in entries], "s-", label="without")
        axes.set_xlabel("GPUs of a fixed fleet  (Fig 6)")
        axes.set_ylabel("requests served to their end")
        axes.legend(fontsize=7)

    def links(axes: Any) -> None:
        entries = series["links"]
        base = [0.0] * len(entries)
        for number, way in enumerate(("pcie", "network", "tokens", "ended first", "waits at the end")):
            parts = [entry[way] for entry in entries]
            axes.bar(range(len(entries)), parts, 0.7, base, label=way, color=plots.shade(number, 5))
            base = [before + part for before, part in zip(base, parts, strict=True)]
        names = [
            f"{'13B' if '13B' in entry['hardware'] else '7B'}{', near' if entry['near_first'] else ''}"
            f"\n{'and tokens' if entry['token_path'] else 'links'}"
            for entry in entries
        ]
        axes.set_xticks(range(len(entries)), names, fontsize=5)
        axes.set_title("how moves went, % (5.5/s)", fontsize=9)
        axes.legend(fontsize=6)

    return plots.draw(out / "mell-curves.png", "MELL: moves, fixed fleets, links", moves, bytes_moved, fleet, links)
