"""The tests of transfer, unchanged, with the device tier on a GPU."""

from __future__ import annotations

import pytest
from gpu_suites import TRANSFER, run_on_gpu
from kit import LONG

# A minute of tests, those that move bytes or lose a side; KVPOOL_LONG runs all. What a file leaves out, by pytest's -k.
SHORT = {
    "transfer/test_blocks.py": "",
    "transfer/test_insert.py": "",
    "transfer/test_layouts.py": "",
    "transfer/test_limits.py": "",
    "transfer/test_parting.py": "parting_ends or killed or stopped or fork or dropped",
    "transfer/test_regressions.py": "",
    "transfer/test_waiting.py": "",
}


@pytest.mark.parametrize("file", TRANSFER if LONG else SHORT)
def test_the_transfer_suite_passes_on_a_gpu(fake_cuda, fake_nccl, file):
    fakes = {"KVPOOL_CUDA_LIBRARY": str(fake_cuda), "KVPOOL_NCCL": str(fake_nccl)}
    only = "" if LONG else SHORT[file]
    outcome = run_on_gpu(file, timeout=280, only=only, KVPOOL_LONG="", **fakes)
    outcome.check(file, nccl=True, all_of_it=not only)
