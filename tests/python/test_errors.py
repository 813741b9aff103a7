import pickle
import re
from pathlib import Path

import pytest

from kvpool import errors

ROOT = Path(__file__).resolve().parents[2]
ALL = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_is_an_error_of_kvpool(kind):
    assert issubclass(kind, errors.Error)
    assert kind.__doc__


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.ArgumentError, ValueError),
        (errors.ArgumentTypeError, TypeError),
        (errors.OutOfMemory, MemoryError),
        (errors.ClosedError, errors.StateError),
        (errors.DeadlineExceeded, TimeoutError),
    ],
)
def test_an_error_is_caught_as_its_builtin_type_too(kind, builtin):
    with pytest.raises(builtin):
        raise kind("wrong")


def test_which_errors_are_state_errors():
    state_errors = {errors.StateError, errors.ClosedError, errors.Fenced, errors.Suspended}
    assert {kind for kind in ALL if issubclass(kind, errors.StateError)} == state_errors


def test_fields_become_attributes():
    error = errors.OutOfBlocks("8 asked, 3 free", requested=8, free=3)
    assert str(error) == "8 asked, 3 free"
    assert (error.requested, error.free) == (8, 3)
    assert error.fields == {"requested": 8, "free": 3}
    assert not hasattr(error, "capacity")


@pytest.mark.parametrize("kind", ALL)
def test_an_error_survives_pickling_with_its_fields(kind):
    copy = pickle.loads(pickle.dumps(kind("text", address=7)))
    assert type(copy) is kind
    assert str(copy) == "text"
    assert copy.fields == {"address": 7}
    assert copy.address == 7


def test_the_tree_at_the_top_of_the_file_names_every_error():
    for name in errors.__all__:
        assert name in (errors.__doc__ or "")


@pytest.mark.parametrize("kind", [errors.OutOfMemory, errors.DeviceLost, errors.Unsupported, errors.RouteFailed])
def test_the_cuda_drivers_code_is_declared_on_every_error_that_may_have_it(kind):
    """CudaDriver::require (cuda/driver.cpp) fills it, and write_by (routes/route_choice.cpp) hands it on."""
    assert "driver_code" in kind.__annotations__


NAMED_OTHERWISE = {"Deadline": "DeadlineExceeded"}


def test_every_field_that_the_core_fills_is_declared():
    """The core writes Error(ErrorCode::kClass, "text", {{"field", value}, ...}); type checkers learn them from here."""
    found = 0
    for path in (ROOT / "cpp").rglob("*.*"):
        for code, call in re.findall(r"ErrorCode::k(\w+),(.*?)\);", path.read_text(), re.DOTALL):
            name = NAMED_OTHERWISE.get(code, code)
            kind = next(kind for kind in ALL if kind.__name__ in (name, f"{name}Error"))
            declared = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}
            fields = set(re.findall(r'\{\s*"(\w+)",', call))
            found += len(fields)
            assert fields <= declared, f"{path.name}: declare {fields - declared} in errors.{kind.__name__}"
    assert found
