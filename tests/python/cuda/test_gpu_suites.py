"""The tools of the suites: an unknown skip fails, and a GPU's memory is read and written as NumPy's."""

from __future__ import annotations

import pytest
from gpu_suites import NO_NCCL, NOT_ON_GPU, Outcome

FILE = "transfer/test_routes.py"
KNOWN = {f"not for a GPU: {what} is for the host": {name} for name, what in NOT_ON_GPU[FILE].items() if what == "cma"}
KNOWN |= {"not for a GPU: ucx is for the host": {name for name, what in NOT_ON_GPU[FILE].items() if what == "ucx"}}


def test_a_file_passes_with_its_expected_skips():
    Outcome(0, "", 8, dict(KNOWN)).check(FILE, nccl=True)
    Outcome(0, "", 8, KNOWN | {NO_NCCL: {"test_any"}}).check(FILE, nccl=False)
    Outcome(0, "", 3, {}).check(FILE, nccl=True, all_of_it=False)
    Outcome(0, "", 3, {}).check("test_swap.py", nccl=False)


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (Outcome(1, "a test failed", 8, dict(KNOWN)), "a test failed"),
        (Outcome(0, "nothing ran", 0, dict(KNOWN)), "nothing ran"),
        (Outcome(0, "", 8, KNOWN | {"not for a GPU: why not": {"test_any"}}), "test_any was skipped: not for a GPU"),
        (Outcome(0, "", 8, KNOWN | {NO_NCCL: {"test_any"}}), "test_any was skipped: NCCL"),
        (Outcome(0, "", 8, {}), "are not for a GPU, and ran"),
    ],
)
def test_a_file_fails_with_any_other_skip_and_without_its_expected_one(outcome, text):
    with pytest.raises(AssertionError, match=text):
        outcome.check(FILE, nccl=True)


def test_the_suites_read_gpu_memory_by_copies_of_the_driver_as_numpy_would(on_fake):
    """Reading a real GPU, beside the fake's memory in this process."""
    on_fake("""
from gpu_memory import DeviceArray, fake_array
dice = np.random.default_rng(1)
for order in ("aggregated", "discrete"):
    with small_pool(6, 2, small_layout(order=order, layers=3, dtype="float16"), device="cuda:1") as pool:
        view = pool.tensor(HBM)
        copied, there = DeviceArray(view), fake_array(view)
        there[...] = dice.integers(0, 1000, there.shape)
        before = there.copy()
        indices = [0, 5, -1, slice(None), slice(1, 4), (2, 1), (2, ..., 0), (slice(None), 1, 0), (0, 0, 0, 0, 0, 0),
                   (slice(5, 1, -2), slice(None), 1), np.array([4, 0, 3]), [1, 1]]
        for index in indices:
            assert np.array_equal(copied[index], there[index]), index
            wanted = there.copy()
            value = dice.integers(0, 1000, wanted[index].shape) if not isinstance(index, list) else 7
            wanted[index] = value
            copied[index] = value
            assert np.array_equal(there, wanted), index  # and nothing else
        copied[:] = before
        assert np.array_equal(there, before) and len(copied) == 6 and copied.shape == there.shape
        del copied, there, view
""")
