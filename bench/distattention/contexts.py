"""Table 1 and Figure 7 of Infinite-LLM: how large KV becomes, which contexts a fleet serves, and how fast.

For each context length as many requests as fit at once, with their KV there; 64 tokens are generated. Simulated, on
assumed hardware. "independent" is the paper's vLLM-v1, "one" its vLLM-v2.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from bench import plots
from bench.context import Context
from bench.distattention.assumed import LABEL, NOTE
from bench.result import Report, Row
from kvpool.sim.hardware import MODELS, weight_bytes
from kvpool.sim.lending_study import DESIGNS, SETTINGS, Design, Setting, fleet
from kvpool.sim.workload import Arrival

TITLE = f"Infinite-LLM Table 1, Fig 7: KV by context length, contexts served, tokens a second; {LABEL}"
PEERS: tuple[str, ...] = ()
_TABLE_1 = {10_000: 8.19, 100_000: 81.9, 500_000: 409.6, 1_000_000: 819.2}  # the paper's GB
_ANSWER = 64
_SHARES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 0.95)  # of the longest request
_MOST = 4000  # requests at once


def run(context: Context) -> Report:
    """See the module's text."""
    report = Report(notes=[NOTE])
    model = MODELS["llama-2-13b"]
    for tokens, paper in _TABLE_1.items():
        gb = tokens * model.kv_bytes_per_token / 1e9
        report.rows.append(Row(f"Table 1: KV of {tokens:,} tokens of Llama-2-13B", gb, "GB", details={"paper": paper}))
    report.rows.append(Row("Table 1: its weights", weight_bytes(model) / 1e9, "GB", details={"paper": 26}))
    curves = {}
    for setting in SETTINGS[:2] if context.quick else SETTINGS:
        curves[setting.name] = _curve(setting)
        report.rows += _rows(setting, curves[setting.name])
    report.series = curves
    panels = [partial(_paint, curve=curve, name=name) for name, curve in curves.items()]
    report.plots += plots.draw(
        context.out / "dist-contexts.png", f"Tokens a second by context length; {LABEL}", *panels
    )
    return report


def _curve(setting: Setting) -> dict[str, Any]:
    longest = {design: fleet(setting, design).context_max for design in DESIGNS}
    points: list[dict[str, float]] = []
    for share in _SHARES:
        tokens = int(share * longest["lending"])
        point: dict[str, float] = {"tokens": tokens}
        for design in DESIGNS:
            if design != "migrating" and tokens <= longest[design]:
                point[design] = _tokens_s(setting, design, tokens)
        points.append(point)
    return {"longest": longest, "points": points}


def _tokens_s(setting: Setting, design: Design, tokens: int) -> float:
    """Generated tokens a second of the largest batch: all that an engine holds on each, or all that the fleet does."""
    found = fleet(setting, design, chunk_tokens=0)
    each, together = found.tokens // tokens * found.engine_count, found.context_max // tokens
    request = Arrival(0.0, max(1, tokens - _ANSWER), _ANSWER)
    return max(
        fleet(setting, design, chunk_tokens=0).run([request] * min(count, _MOST)).output_tokens_s
        for count in {each, together}
        if count
    )


def _rows(setting: Setting, curve: dict[str, Any]) -> list[Row]:
    longest, points = curve["longest"], curve["points"]
    alone = longest["independent"]
    ratio = longest["lending"] / alone
    gains = [point["lending"] / point["one"] for point in points]
    beside = [point["lending"] / point["independent"] for point in points if "independent" in point]
    paper = {"paper": f"{setting.long:,} tokens"}
    return [
        Row(f"{setting.name}: longest request", longest["lending"], "tokens", setting.long, "higher",
            peers={name: longest[name] for name in ("independent", "one")}, details=paper),
        Row(f"{setting.name}: longest request, of that of an engine alone", ratio, "x",
            min(2.0, setting.long / alone), "higher", details={"paper": "2 to 19"}),
        Row(f"{setting.name}: tokens a second, times those of one large engine, best", max(gains), "x", 1.4, "higher",
            details={"paper": "1.4 to 5.3", "all": gains}),
        Row(f"{setting.name}: of those of engines alone, where these serve the context, least", min(beside), "x",
            details={"paper": "comparable", "all": beside}),
    ]  # fmt: skip


def _paint(axes: Any, curve: dict[str, Any], name: str) -> None:
    for number, design in enumerate(each for each in DESIGNS if each != "migrating"):
        points = [point for point in curve["points"] if design in point]
        axes.plot([point["tokens"] for point in points], [point[design] for point in points], "o-",
                  color=plots.shade(number, 4), label=design)  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(f"context, tokens ({name})")
    axes.set_ylabel("generated tokens/s")
    axes.legend(frameon=False, fontsize=7)
