"""What the simulated benches of Infinite-LLM share: one cost model, said on each."""

from __future__ import annotations

from kvpool.sim.lending_study import HARDWARE

NOTE = (
    f"Assumed hardware, nothing measured: {HARDWARE} by its data sheet, with the efficiencies of kvpool.sim.hardware. "
    "The other assumptions stand in kvpool.sim.lending_study."
)
LABEL = "assumed hardware"
