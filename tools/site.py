"""Builds the documentation site: python -m tools.site OUTPUT. Needs the extra kvpool[docs], and no network.

The pages are those of the repository, copied in its own tree so that their links hold; the reference is made from what
`import kvpool` offers, so no public name can be forgotten. A link without a target, or a docstring that cannot be read,
fails the build.
"""

from __future__ import annotations

import inspect
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import kvpool

ROOT: Final = Path(__file__).resolve().parents[1]
START: Final = "docs/start"

# The reference's pages: a title, and its names in order. A test sees that every public name is on one of them.
REFERENCE: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "pool": ("The pool", (
        "Pool", "KVLayout", "RawLayout", "Settings", "KVTensor", "PoolStats", "MediumStats", "DiskStats", "DiskWarning",
        "Address", "Medium",
        "HBM", "DRAM", "DISK", "MIXED", "block_ids", "media", "decode_address",
    )),
    "cache": ("Cached prompts", (
        "Match", "Inserted", "MatchReport", "SwappedIn", "SwapIn", "SwapOut", "BlockCopy", "EventStream", "StoredEvent",
        "RemovedEvent", "MovedEvent", "PromptIndex", "IndexBatch", "InstanceIndex", "KeyedCache", "KeyedIndex",
        "KeyedMatch",
    )),
    "space": ("Several models in one memory", ("Space", "SpaceStats", "SpaceTier", "ModelQuota", "TierQuota")),
    "peers": ("Peers and transfer", (
        "Peers", "Inbox", "Batch", "Transfer", "TransferStream", "TransferSpec", "TransferStats", "TransferTotals",
        "Received", "ReceivedCallback", "PeerMatch", "PeerKeyMatch", "PeerInfo", "PeerEvent", "PeerCallback",
        "RouteCost", "RouteReport", "RecallResult",
    )),
    "cluster": ("Clusters and ranks", (
        "Cluster", "Attachment", "Member", "MemberEvent", "MemberCallback", "Load", "Registration", "Ranks",
        "RankArena", "RankInfo", "ParallelConfig",
    )),
    "attention": ("Attention", ("KVSequence", "Attend", "PartialAttention", "AttendPlan", "SequencePlan")),
    "errors": ("Errors", tuple(
        sorted(
            name
            for name in kvpool.__all__
            if inspect.isclass(getattr(kvpool, name)) and issubclass(getattr(kvpool, name), kvpool.Error)
        )
    )),
}  # fmt: skip

_CONFIGURATION: Final = """\
import sys
sys.path.insert(0, {root!r})
from tools.site_docstrings import read_as_rst
from tools.site_shortcuts import navigate_by_titles, stem_once

project = "kvpool"
version = release = {version!r}
author = "The kvpool authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = {start!r}
html_theme = "furo"
html_title = "kvpool {version}"
html_copy_source = html_show_sourcelink = False
html_last_updated_fmt = None
myst_heading_anchors = 4
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
suppress_warnings = ["myst.header", "misc.highlighting_failure"]


def setup(app):
    app.connect("autodoc-process-docstring", read_as_rst, priority=100)  # before napoleon
    app.connect("html-page-context", navigate_by_titles, priority=100)  # before the theme
    app.connect("html-page-context", stem_once)
"""


def main() -> int:
    """Builds the site; 1 if something is wrong with it."""
    from sphinx.cmd.build import build_main

    output = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "docs").resolve()
    source = output.parent / (output.name + "-source")
    shutil.rmtree(source, ignore_errors=True)
    gather(source)
    status = build_main(["-q", "-W", "--keep-going", "-b", "html", str(source), str(output)])
    (output / "index.html").write_text(f'<meta http-equiv="refresh" content="0; url={START}.html">\n')
    return int(status)


def gather(source: Path) -> None:
    """Writes what Sphinx reads: the pages, what they link to, the reference and the configuration."""
    for page in pages():
        _copy(page, source)
        for linked in _linked(page):
            if linked.is_file():
                _copy(linked, source)
    for name, (title, names) in REFERENCE.items():
        place = source / "docs" / "api" / f"{name}.rst"
        place.write_text(f"{title}\n{'=' * len(title)}\n\n" + "\n".join(map(_entry, names)))
    with (source / f"{START}.md").open("a") as start:
        start.write("\n".join(_contents()))
    (source / "conf.py").write_text(_CONFIGURATION.format(root=str(ROOT), version=kvpool.__version__, start=START))


def pages() -> list[Path]:
    """The pages of the site."""
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "bench/README.md")]
    found += [page for folder in ("docs", "examples", "deploy") for page in sorted((ROOT / folder).rglob("*.md"))]
    return [page for page in found if page.is_file()]


def _copy(file: Path, source: Path) -> None:
    place = source / file.relative_to(ROOT)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, place)
    if file.suffix == ".md":
        place.write_text(re.sub(r"\[([^]]+)\]\(([^)#\s]+)\)", lambda link: _kept(link, file), file.read_text()))


def _kept(link: re.Match[str], page: Path) -> str:
    """The link; or its text alone if it leads to a folder, which a site cannot show."""
    return link[1] if (page.parent / link[2]).is_dir() else link[0]


def _linked(page: Path) -> Iterator[Path]:
    """The files in the repository that a page links to, pictures among them."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not re.match(r"[a-z]+:|#", target):
            file = (page.parent / target.partition("#")[0]).resolve()
            if ROOT in file.parents:
                yield file


def _contents() -> Iterator[str]:
    """The tables of contents, which the site shows beside every page."""
    others = [page for page in pages() if ROOT / "docs" not in page.parents and page != ROOT / "README.md"]
    listed = {
        "First": ["start", "../README"],
        "To do": _names("how-to"),
        "Reference": ["api/README", *(f"api/{name}" for name in REFERENCE), "wire", "traces", "glossary"],
        "To understand": ["architecture", "invariants", *_names("internals")],
        "Decisions": _names("adr"),
        "Project": ["README", *(f"../{page.relative_to(ROOT).with_suffix('')}" for page in others)],
    }
    for caption, names in listed.items():
        yield f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n"
        yield from (("self" if name == "start" else name) for name in names)
        yield "```\n"


def _names(folder: str) -> list[str]:
    return sorted(f"{folder}/{page.stem}" for page in (ROOT / "docs" / folder).glob("*.md"))


def _entry(name: str) -> str:
    thing = getattr(kvpool, name)
    if not inspect.isclass(thing) and not inspect.isroutine(thing):
        return f".. autodata:: kvpool.{name}\n"
    if not inspect.isclass(thing):
        return f".. autofunction:: kvpool.{name}\n"
    if issubclass(thing, kvpool.Error):
        return f".. autoexception:: kvpool.{name}\n   :members:\n   :show-inheritance:\n"
    inherited = ":inherited-members: int, tuple, object, Protocol, Generic, Enum, IntEnum, BaseException"
    return f".. autoclass:: kvpool.{name}\n   :members:\n   {inherited}\n"


if __name__ == "__main__":
    sys.exit(main())
