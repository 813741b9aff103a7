"""The reference and the site: every public name with its signature and docstring, at run time and on a page."""

from __future__ import annotations

import html.parser
import importlib.util
import inspect
import pydoc
import subprocess
import sys
import zlib
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

import kvpool
from tools.site import REFERENCE, START, pages

ROOT = Path(__file__).resolve().parents[2]


def _classes() -> list[type]:
    return [thing for thing in map(kvpool.__dict__.get, kvpool.__all__) if inspect.isclass(thing)]


def _methods() -> list[tuple[str, object]]:
    """The public methods of public classes, those in C++ among them."""
    return [
        (f"{owner.__name__}.{name}", getattr(owner, name))
        for owner in _classes()
        for base in owner.__mro__
        if base.__module__.startswith("kvpool")
        for name, value in vars(base).items()
        if not name.startswith("_") and not isinstance(value, property) and callable(getattr(owner, name))
    ]


METHODS = _methods()


def test_the_pages_of_the_reference_have_each_public_name_once():
    listed = [name for _, names in REFERENCE.values() for name in names]
    assert sorted([*listed, "__version__"]) == sorted(kvpool.__all__)


def test_methods_are_found():
    names = {name for name, _ in METHODS}
    assert {"Pool.alloc", "Pool.match", "Pool.fetch", "Peers.listen", "Transfer.wait", "KeyedCache.put"} <= names
    assert len(names) > 180


@pytest.mark.parametrize(("name", "method"), METHODS, ids=[name for name, _ in METHODS])
def test_every_public_method_has_a_signature_and_a_docstring(name, method):
    text = inspect.getdoc(method)
    assert text
    named = list(inspect.signature(method).parameters)
    assert not set(named) & {"args", "kwargs", "arg0"}, named
    if isinstance(vars(kvpool._core).get(name.partition(".")[0]), type) or name.startswith("Pool."):
        assert ": object" not in text.splitlines()[0]
        assert "kvpool._core" not in text.splitlines()[0]


def test_help_shows_the_types_that_the_stub_has():
    text = pydoc.render_doc(kvpool.Pool.alloc, renderer=pydoc.plaintext)
    assert "alloc(n: int, medium: MediumChoice = HBM, evict: bool = True, *, instance: str | None = None" in text
    assert "-> NDArray[uint64]" in text
    assert "Contiguous runs are preferred" in text
    assert "alloc(self, n, medium=1, evict=True, *, instance=None, timeout=None, stream=None)" in text
    assert "object" not in text


def test_a_signature_of_several_overloads_knows_what_may_be_left_out():
    parameters = inspect.signature(kvpool.Pool.transfer).parameters
    assert list(parameters)[:3] == ["self", "peer", "addrs"]
    assert parameters["layerwise"].default is False
    assert parameters["strategy"].default == "auto"
    assert parameters["strategy"].kind is inspect.Parameter.KEYWORD_ONLY
    first = inspect.getdoc(kvpool.Pool.transfer).splitlines()[0]
    assert "layerwise: bool = False" in first
    assert first.endswith("-> Transfer | TransferStream")


def test_a_class_and_a_bound_method_have_no_self():
    assert list(inspect.signature(kvpool.InstanceIndex).parameters) == ["block_tokens", "blocks_max"]
    assert list(inspect.signature(kvpool.PromptIndex().peek).parameters) == ["tokens", "namespace"]


def test_a_static_method_has_no_self():
    assert list(inspect.signature(kvpool.PartialAttention.from_lse).parameters)[:2] == ["out", "lse"]


# ---- the site, built once


class _Page(html.parser.HTMLParser):
    """The ids and the local links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids.add(given.get("id") or "")
        for name in ("href", "src"):
            if given.get(name):
                self.links.append(given[name])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if importlib.util.find_spec("sphinx") is None:
        pytest.skip("Sphinx is not installed: kvpool[docs]")
    output = tmp_path_factory.mktemp("site") / "docs"
    run = subprocess.run(
        [sys.executable, "-m", "tools.site", str(output)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return output


def test_the_site_has_every_page(site):
    missing = [page for page in pages() if not (site / page.relative_to(ROOT)).with_suffix(".html").is_file()]
    assert missing == []
    assert f"{START}.html" in (site / "index.html").read_text()


def test_the_reference_renders_every_public_name(site):
    _, _, rest = (site / "objects.inv").read_bytes().partition(b"zlib.\n")
    objects = {line.split(" ")[0] for line in zlib.decompress(rest).decode().splitlines()}
    wanted = {f"kvpool.{name}" for name in kvpool.__all__ if name != "__version__"}
    wanted |= {f"kvpool.{name}" for name, method in METHODS if not isinstance(method, type)}
    assert wanted - objects == set()


def test_the_verbs_stand_there_with_their_types(site):
    text = (site / "docs" / "api" / "pool.html").read_text()
    for verb in ("alloc", "match", "insert", "swap_in", "transfer", "fetch"):
        assert f'id="kvpool.Pool.{verb}"' in text
    assert "MediumChoice" in text
    assert "TokenVector" in text


def test_links_between_the_pages_of_the_site_have_targets(site):
    read = {path: _Page(path.read_text()) for path in site.rglob("*.html")}
    broken = []
    for path, page in read.items():
        for link in page.links:
            target, anchor = urldefrag(link)
            if ":" in target or (link.startswith("#") and not anchor):
                continue
            file = (path.parent / unquote(target.partition("?")[0])).resolve() if target else path
            if not file.exists() or (anchor and file in read and unquote(anchor) not in read[file].ids):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []
