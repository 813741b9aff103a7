"""An engine of a release that was not tested is refused, unless the user says otherwise."""

from __future__ import annotations

import pytest

import kvpool
from kvpool.engines.versions import ANY_VERSION, check_version


@pytest.mark.parametrize("version", ["5.19", "5.19.0", "5.19.1.dev0", "5.19.2+cpu", "5.19rc1"])
def test_a_tested_release_is_taken(version: str) -> None:
    check_version("transformers", version, "5.19")


@pytest.mark.parametrize("version", ["5.18.2", "5.190.0", "6.0", "5", "unknown", ""])
def test_another_release_is_refused_unless_the_user_takes_the_risk(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(kvpool.Unsupported, match=rf"tested with 5\.19\.x.*{ANY_VERSION}"):
        check_version("transformers", version, "5.19")
    monkeypatch.setenv(ANY_VERSION, "1")
    check_version("transformers", version, "5.19")
    kvpool.Pool(kvpool.KVLayout(1, 1, 8), dram_blocks=1, huge_pages="never").close()  # it is no setting misspelt
