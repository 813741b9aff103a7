"""The tests of the local API, unchanged, with the device tier on a GPU."""

from __future__ import annotations

import pytest
from gpu_suites import LOCAL, run_on_gpu


@pytest.mark.parametrize("file", LOCAL)
def test_the_local_suite_passes_on_a_gpu(fake_cuda, file):
    # Not their long forms: hours, on the CPU.
    outcome = run_on_gpu(file, timeout=280, KVPOOL_CUDA_LIBRARY=str(fake_cuda), KVPOOL_LONG="")
    outcome.check(file, nccl=False)
