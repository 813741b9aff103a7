"""Messages of a migration as bytes, and the way that a request goes."""

from __future__ import annotations

import numpy as np
import pytest
from policy.migration_kit import ID, exchange, fetch, pair, progress

import kvpool
from kvpool.policy import cost, mell
from kvpool.policy import migration as policy

# ---- bytes


def same(left, right):
    return type(left) is type(right) and all(
        np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b
        for a, b in zip(vars(left).values(), vars(right).values(), strict=True)
    )


def test_messages_survive_as_bytes():
    source, destination = pair()
    fetch(destination)
    exchange(source, destination, 1)
    source.hand_over(progress(10), b"\0state\xff")
    for said in (source.says(), destination.says(3), destination.says(4)):
        assert same(policy.decode(policy.encode(said)), said)


BROKEN = (
    (b'"phase":"', b'"phase":"x'),
    (b'"number":', b'"number":-'),
    (b'"id":[1,', b'"id":['),
    (b"KVMIG\1", b"KVMIG\2"),
    (b'"way":"kv"', b'"way":"no"'),
    (b'"whole"', b'"hole"'),
)


def test_bytes_that_are_no_message_are_refused():
    source, destination = pair()
    for said in (source.says(), destination.says(1)):
        good = policy.encode(said)
        for at in range(len(good)):
            with pytest.raises(kvpool.ArgumentError):
                policy.decode(good[:at])
        for old, new in BROKEN:
            with pytest.raises(kvpool.ArgumentError):
                policy.decode(_resized(good.replace(old, new)))
    with pytest.raises(kvpool.ArgumentError, match="1048576 are allowed"):
        policy.encode(policy.SourceSays(ID, 1, "handed", state=bytes(1 << 20)))


def _resized(message):
    """With the length of its object as it is now."""
    length = message.rindex(b"}") + 1 - 10
    return message[:6] + length.to_bytes(4, "little") + message[10:]


# ---- ways


def costs(**changes):
    shape = cost.ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=256)
    profile = mell.BoundaryProfile(
        shape, cost.Machine("test", "", 1), 64,
        {"near": [mell.LinkSample(1000, 2e-3), mell.LinkSample(1001000, 3e-3)],
         "far": [mell.LinkSample(1000, 0.1), mell.LinkSample(1001000, 10.1)]},
        [mell.IterationSample(1, 0, 0.01), mell.IterationSample(1, 100, 0.02),
         mell.IterationSample(8, 0, 0.1), mell.IterationSample(8, 100, 0.2)],
    )  # fmt: skip
    return policy.WayCosts(profile, **{"links": {"b": "near", "c": "far"}} | changes)


def test_a_request_goes_the_way_that_takes_less():
    measured = costs()
    assert measured.choose("b", 500, 1).way == "kv"
    assert measured.choose("c", 500, 1).way == "tokens"
    assert measured.choose("nobody measured", 500, 1) == ("tokens", float("inf"), measured.choose("b", 500, 1).tokens_s)
    assert measured.choose("c", 500, 9).way == "kv"  # a batch beyond those measured leaves no room to prefill
    assert measured.choose("b", 1000, 1).kv_s > measured.choose("b", 500, 1).kv_s
    with pytest.raises(kvpool.ArgumentError, match="not measured"):
        costs(link="none")
    with pytest.raises(kvpool.ArgumentError, match="share"):
        costs(share=0)


def test_bytes_are_spread_over_time_and_none_are_saved_up():
    pace = policy.Pace(1000)
    assert [pace.wait_s(500, 10.0), pace.wait_s(500, 10.0), pace.wait_s(100, 10.7)] == [0, 0.5, pytest.approx(0.3)]
    assert pace.wait_s(500, 99.0) == 0
    assert policy.Pace(None).wait_s(1 << 40, 0.0) == 0
