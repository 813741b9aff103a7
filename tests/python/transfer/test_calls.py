"""How many calls each strategy makes, on every route: counted, never timed."""

from __future__ import annotations

import numpy as np
import pytest
from transfer.kit import BLOCK_ROUTES, ON_GPU, content, fill, pair_of, small_layout

LAYERS, BLOCKS = 3, 6
PIECES = 2 * LAYERS * BLOCKS
GATHERS = ("sock", "cma")  # the others write each piece in place

pytestmark = pytest.mark.skipif(ON_GPU, reason="the routes of the host")


def layouts(order):
    layout = small_layout(order=order, layers=LAYERS)
    return {"a": {"layout": layout}, "b": {"layout": layout}}


def sent(pair, strategy, own, lent):
    """The calls of a transfer of scattered blocks, all of which arrive as they were."""
    expected = fill(pair.a, own)
    done = pair.a.transfer(pair.to_b, own, to=lent, strategy=strategy).wait()
    assert pair.b("content(pool, addrs)", addrs=lent) == expected
    return done.stats.calls


def scattered(pair):
    own, lent = np.sort(pair.a.alloc(BLOCKS)), np.sort(pair.a.alloc(BLOCKS, instance=pair.to_b))
    return own, lent[::-1]


@pytest.mark.parametrize("route", BLOCK_ROUTES)
def test_small_pieces_of_a_layer_are_one_call_where_the_route_can_gather(route):
    gathers = route.partition("-")[0] in GATHERS
    with pair_of(route, **layouts("discrete")) as pair:
        own, lent = scattered(pair)
        assert sent(pair, "by_layer", own, lent) == PIECES
        assert sent(pair, "by_layer_agg", own, lent) == (LAYERS if gathers else PIECES)
        assert sent(pair, "by_request", own, lent) == PIECES
        assert sent(pair, "by_request_agg", own, lent) == (1 if gathers else PIECES)
        pair.a.free(np.concatenate([own, lent]))


@pytest.mark.parametrize("route", BLOCK_ROUTES)
def test_an_aggregated_block_is_at_most_one_call(route):
    gathers = route.partition("-")[0] in GATHERS
    with pair_of(route, **layouts("aggregated")) as pair:
        own, lent = scattered(pair)
        assert sent(pair, "by_request_agg", own, lent) == (1 if gathers else BLOCKS)
        assert sent(pair, "by_request", own, lent) == PIECES
        assert content(pair.a, own)
        pair.a.free(np.concatenate([own, lent]))


@pytest.mark.parametrize("route", BLOCK_ROUTES)
def test_layers_that_are_sent_one_by_one_are_gathered_too(route):
    gathers = route.partition("-")[0] in GATHERS
    with pair_of(route, **layouts("discrete")) as pair:
        own, lent = scattered(pair)
        expected = fill(pair.a, own)
        for strategy, calls in (("by_layer", PIECES), ("by_layer_agg", LAYERS if gathers else PIECES)):
            with pair.a.transfer(pair.to_b, own, to=lent, strategy=strategy, layerwise=True) as stream:
                for layer in range(LAYERS):
                    stream.send_layer(layer)
            done = stream.transfer.wait()
            assert done.stats.calls == calls
            assert pair.b("content(pool, addrs)", addrs=lent) == expected
        pair.a.free(np.concatenate([own, lent]))
