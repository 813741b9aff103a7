"""The tests of the local API, of transfer and of streams on a GPU, by the driver of this machine.

`make test-gpu` runs this. Nothing of it needs torch or a network. With KVPOOL_CUDA_LIBRARY and KVPOOL_NCCL the fakes of
tests/cpp answer: a rehearsal, on a machine without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from gpu_suites import LOCAL, STREAMS, TRANSFER, Outcome, run_on_gpu
from transfer.kit import nccl_setting

FILES = [*LOCAL, *STREAMS, *TRANSFER]
AT_ONCE = max(1, min(4, (os.cpu_count() or 1) // 4))  # each starts a few processes, which mostly wait


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, Future[Outcome]]]:
    with ThreadPoolExecutor(AT_ONCE) as workers:
        yield {file: workers.submit(run_on_gpu, file, timeout=240) for file in FILES}


@pytest.mark.parametrize("file", FILES)
def test_the_suites_pass_on_this_gpu(outcomes, file, record_property):
    outcome = outcomes[file].result()
    record_property("file", file)
    record_property("passed", outcome.passed)
    record_property("skipped", sum(map(len, outcome.skipped.values())))
    outcome.check(file, nccl=nccl_setting() is not None)
