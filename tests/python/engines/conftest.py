"""Engines of vLLM's kind in a cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster.kit import LocalPlace
from engines.vllm_members_kit import MemberEngine, engines


@pytest.fixture
def url() -> Iterator[str]:
    place = LocalPlace()
    yield place.url
    place.close()


@pytest.fixture(params=[False, True], ids=["whole", "by layer"])
def pair(request, url) -> Iterator[list[MemberEngine]]:
    """One that sends, and one that gets."""
    with engines(url, "prefill-0", "decode-0", by_layer=request.param) as made:
        yield made
