"""The words of the project are those of its field: no invented word comes back, and no riddle.

A word counts wherever it stands: as a part of an identifier (`NcclLane`, `open_lane`), in a comment, in a message, in a
page. Where the field itself uses a word, as a GPU has lanes, EXCEPTIONS names the files.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Final

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROSE = (
    "cpp",
    "bindings",
    "cuda",
    "src",
    "docs",
    "examples",
    "bench",
    "tests",
    "tools",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
)
SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".py", ".pyi", ".md"}

# Each word that was invented here once, and what the project calls the thing now.
WORDS: Final = {
    "beacon": "Heartbeat",
    "card": "PeerMetadata",
    "door": "the offer of a server, its local socket",
    "ghost": "WriterQuarantine, RetainedMemory",
    "greeting": "ServerHandshake, ClientHandshake",
    "hall": "Listener",
    "inbound": "PendingSwapIn",
    "keeper": "LeaseRenewer",
    "landing": "StagingBuffer",
    "lane": "RankChannel, NcclPipe",
    "parted": "disconnected, departed",
    "passage": "SideChannel, NcclInbox",
    "rival": "another connection of the same peer",
    "strand": "SerialExecutor",
    "tender": "MembershipLoop",
    "turnover": "the counts of inserted and freed blocks",
}
# As identifiers only: as words of a sentence they mean what they mean everywhere.
NAMES: Final = {
    "board": "LoadTable, MembershipView",
    "looks": "PollBackoff, Backoff",
    "settle": "what is done: advance, hand_over_role, set_prior",
}
RIDDLES: Final = ("whoever", "whomever", "what it is that", "is none", "are none", "of its own")

# Files in which a word is the field's own.
EXCEPTIONS: Final[dict[str, dict[str, str]]] = {
    "lane": {
        "bindings/adopt.cpp": "DLPack: values in one element",
        "bindings/cpu_tensor.cpp": "DLPack: values in one element",
        "bindings/machine.cpp": "UCX",
        "cpp/kvpool/base/crc32c.cpp": "SIMD",
        "cpp/kvpool/cuda/kernel_plan.h": "threads of a warp",
        "cpp/kvpool/cuda/table.h": "threads of a warp",
        "cpp/kvpool/cuda/tile.h": "threads of a warp",
        "cpp/kvpool/routes/ucx/ucx_context.cpp": "UCX",
        "cpp/kvpool/routes/ucx/ucx_route.cpp": "UCX",
        "cpp/kvpool/routes/ucx/ucx.h": "UCX",
        "cpp/kvpool/routes/ucx/ucx_route.h": "UCX",
        "cuda/access.cuh": "threads of a warp",
        "docs/internals/cuda.md": "threads of a warp",
        "src/kvpool/_core.pyi": "UCX",
        "src/kvpool/cli/info.py": "UCX",
        "tests/cpp/digest_test.cpp": "SIMD",
        "tests/cpp/ucx_process_test.cpp": "UCX",
        "tests/cpp/ucx_test.cpp": "UCX",
        "tests/cpp/ways.h": "UCX",
        "tests/gpu/test_views.py": "DLPack: values in one element",
        "tests/python/gpu_suites.py": "UCX",
        "tests/python/ptx.py": "threads of a warp",
        "tests/python/ptx_machine.py": "threads of a warp",
        "tests/python/test_attention_arguments.py": "DLPack: values in one element",
        "tests/python/test_cli.py": "UCX",
        "tests/python/transfer/test_routes.py": "UCX",
    },
    "settle": {
        "bench/distattention/fragments.py": "debts",
        "bench/lending/settlement.py": "debts",
        "docs/how-to/lending.md": "debts",
        "docs/internals/lending.md": "debts",
        "src/kvpool/control/lending/lending.py": "debts",
        "src/kvpool/policy/lending/__init__.py": "debts",
        "src/kvpool/policy/lending/coordinator.py": "debts",
        "src/kvpool/policy/lending/settle.py": "debts",
        "src/kvpool/sim/lending_market.py": "debts",
        "src/kvpool/sim/lending_study.py": "debts",
        "tests/multiprocess/test_settling_kill.py": "debts",
        "tests/python/control/lending_kit.py": "debts",
        "tests/python/control/test_lending_records.py": "debts",
        "tests/python/control/test_lending_settling.py": "debts",
        "tests/python/policy/lending_cluster.py": "debts",
        "tests/python/policy/settling_kit.py": "debts",
        "tests/python/policy/test_lending_settlement.py": "debts",
        "tests/python/sim/lending_kit.py": "debts",
        "tests/python/test_lending_settling.py": "debts",
    },
}


def files() -> list[str]:
    """The text files of PROSE that git tracks, except this one, which has to name the words."""
    listed = subprocess.run(["git", "ls-files", "--", *PROSE], cwd=ROOT, capture_output=True, text=True, check=True)
    named = (name for name in listed.stdout.splitlines() if name != "tests/python/test_words.py")
    return [name for name in named if Path(name).suffix in SUFFIXES and (ROOT / name).is_file()]


def words_of(text: str) -> set[str]:
    """The words of a text in lower case, those of identifiers one by one; plurals count as their singulars."""
    found = {word.lower() for word in set(re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", text))}
    return found | {word.removesuffix("s") for word in found}


def names_of(text: str) -> set[str]:
    """The words of identifiers of more than one word, and of what is called or defined."""
    names = re.findall(r"\b\w*[a-z0-9]_\w+|\b[A-Za-z]*[a-z][A-Z]\w*|\b\w+(?=\()|(?<=class )\w+", text)
    each = " ".join(set(names))
    return words_of(each) | {part.lower() for part in re.findall(r"[A-Z]?[a-z]+", each)}


def prose_of(text: str) -> str:
    """One line of text, without the marks of comments: a riddle may stand at the end of one line and the next."""
    return " ".join(re.sub(r"\n\s*(//|#|\*)?", " ", text).split())


def found_in(name: str, text: str) -> set[str]:
    words, names, prose = words_of(text), names_of(text), prose_of(text)
    found = {word for word in WORDS if word in words and name not in EXCEPTIONS.get(word, {})}
    found |= {word for word in NAMES if word in names and name not in EXCEPTIONS.get(word, {})}
    lower = prose.lower()  # most riddles are in no file, and to look for one as it is takes little
    return found | {
        riddle
        for riddle in RIDDLES
        if riddle in lower and re.search(rf"\b{riddle}\b", prose, flags=re.I if "none" not in riddle else 0)
    }


def test_no_invented_word_and_no_riddle_comes_back():
    found = {name: words for name in files() if (words := sorted(found_in(name, (ROOT / name).read_text())))}
    said = WORDS | NAMES
    assert not found, "\n".join(
        f"{name}: {[f'{word}: say {said[word]}' if word in said else word for word in words]}"
        for name, words in sorted(found.items())
    )


def test_exceptions_are_still_needed():
    unused = [
        (word, name) for word, named in EXCEPTIONS.items() for name in named
        if not (ROOT / name).is_file() or word not in words_of((ROOT / name).read_text())
    ]  # fmt: skip
    assert not unused, unused


def test_the_glossary_names_files_that_exist():
    named = re.findall(r"`([a-z_0-9/]+\.(?:h|py))`", (ROOT / "docs" / "glossary.md").read_text())
    assert len(named) > 50
    folders = (ROOT / "cpp" / "kvpool", ROOT / "src" / "kvpool", ROOT)
    assert [name for name in named if not any((folder / name).is_file() for folder in folders)] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("class NcclLane:", {"lane"}),
        ("open_door()", {"door"}),
        ("// Whoever\n// waits", {"whoever"}),
        ("a thread of its\n    own", {"of its own"}),
        ("# of its\n# own", {"of its own"}),
        ("if this is None: # there is none", {"is none"}),
        ("the page looks well, and we settle it", set()),
        ("const Looks looks; Looks::now_ns(); poll_looks", {"looks"}),
        ("keepers, cards", {"keeper", "card"}),
        ("discard(); plane; doorstep = indoors", set()),
    ],
)
def test_what_is_found(text, expected):
    assert found_in("some/file.py", text) == expected
