"""Predicts the cost of a prefill: exec(x, y), and decisions based on it (MemServe §5.3).

profile = cost.Profile.from_json(...)              # measured by kvpool.control.profile_ops
model = cost.CostModel.fit(profile)
model.exec_s(tokens=4096, cached=1024)             # seconds
model.spread(cost.Parallel(tp=2)).exec_s(4096)     # without measuring again
cost.fit_steps(shape, steps)                       # of a running engine, from the times of its steps
cost.fetch_or_recompute(model, transfer, tokens=4096, cached=1024, elsewhere=3072).fetch
"""

from kvpool.policy.cost.architecture import ArchitectureModel
from kvpool.policy.cost.choice import ExecModel, FetchChoice, fetch_or_recompute
from kvpool.policy.cost.compiled import Fits
from kvpool.policy.cost.fit import ErrorReport
from kvpool.policy.cost.link import KVTransfer, Link
from kvpool.policy.cost.model import CostModel
from kvpool.policy.cost.operators import OPERATORS, Matmul, Operator, Work, matmul_of
from kvpool.policy.cost.profile import Machine, Profile, Sample
from kvpool.policy.cost.shape import ModelShape, Parallel
from kvpool.policy.cost.steps import Step, fit_steps
from kvpool.policy.cost.waves import WaveModel

__all__ = [
    "OPERATORS",
    "ArchitectureModel",
    "CostModel",
    "ErrorReport",
    "ExecModel",
    "FetchChoice",
    "Fits",
    "KVTransfer",
    "Link",
    "Machine",
    "Matmul",
    "ModelShape",
    "Operator",
    "Parallel",
    "Profile",
    "Sample",
    "Step",
    "WaveModel",
    "Work",
    "fetch_or_recompute",
    "fit_steps",
    "matmul_of",
]
