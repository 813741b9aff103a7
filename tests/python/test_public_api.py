"""Pins what `import kvpool` offers. A change here is a change for every user: note it in CHANGELOG.md."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import kvpool
import kvpool._core
import kvpool.storage

ROOT = Path(__file__).resolve().parents[2]

PUBLIC = [
    "DISK",
    "DRAM",
    "HBM",
    "MIXED",
    "Address",
    "ArgumentError",
    "ArgumentTypeError",
    "Attachment",
    "Attend",
    "AttendPlan",
    "AuditError",
    "AuthError",
    "Batch",
    "Busy",
    "BlockCopy",
    "Cancelled",
    "ClosedError",
    "Cluster",
    "DeadlineExceeded",
    "DeviceLost",
    "DiskStats",
    "DiskWarning",
    "Error",
    "EventStream",
    "Fenced",
    "ForkError",
    "Inbox",
    "IndexBatch",
    "Inserted",
    "InstanceIndex",
    "KVLayout",
    "KVSequence",
    "KVTensor",
    "KeyedCache",
    "KeyedIndex",
    "KeyedMatch",
    "LayoutMismatch",
    "Load",
    "Match",
    "MatchReport",
    "Medium",
    "MediumStats",
    "Member",
    "MemberCallback",
    "MemberEvent",
    "ModelQuota",
    "MovedEvent",
    "NotOwner",
    "OutOfBlocks",
    "OutOfMemory",
    "OutOfQuota",
    "ParallelConfig",
    "PeerCallback",
    "PeerEvent",
    "PeerInfo",
    "PartialAttention",
    "PeerLost",
    "PeerKeyMatch",
    "PeerMatch",
    "Peers",
    "Pool",
    "PoolStats",
    "PromptIndex",
    "ProtocolError",
    "RankArena",
    "RankInfo",
    "Ranks",
    "RawLayout",
    "RecallResult",
    "Received",
    "ReceivedCallback",
    "Registration",
    "RemovedEvent",
    "RouteCost",
    "RouteFailed",
    "RouteReport",
    "Settings",
    "Space",
    "SpaceStats",
    "SpaceTier",
    "SequencePlan",
    "StaleAddress",
    "StateError",
    "StoreFailed",
    "Suspended",
    "StoredEvent",
    "SwapIn",
    "SwapOut",
    "SwappedIn",
    "TierQuota",
    "Transfer",
    "TransferSpec",
    "TransferStats",
    "TransferStream",
    "TransferTotals",
    "Unsupported",
    "__version__",
    "block_ids",
    "decode_address",
    "media",
]


def test_the_exported_names_are_these():
    assert sorted(kvpool.__all__) == sorted(PUBLIC)
    assert [name for name in PUBLIC if not hasattr(kvpool, name)] == []


STORAGE = [
    "Admission", "Always", "Content", "ContentKeys", "DirectoryStore", "Loaded", "OnSecondUse", "Saved", "Storage",
    "StorageHandle", "StorageStats", "Store", "StoreStats", "Trimmed",
]  # fmt: skip


def test_the_names_of_storage_are_these():
    """It is imported by name."""
    assert sorted(kvpool.storage.__all__) == sorted(STORAGE)


def test_every_class_and_function_has_a_docstring():
    silent = []
    for name in [*PUBLIC, *STORAGE]:
        thing = getattr(kvpool if name in PUBLIC else kvpool.storage, name)
        if inspect.isclass(thing) or callable(thing):
            silent += [] if inspect.getdoc(thing) else [name]
        if inspect.isclass(thing) and thing.__module__.startswith("kvpool") and not issubclass(thing, Exception):
            members = ((member, value) for member, value in vars(thing).items() if not member.startswith("_"))
            silent += [
                f"{name}.{member}"
                for member, value in members
                if (inspect.isfunction(value) or isinstance(value, (property, classmethod, staticmethod)))
                and not inspect.getdoc(value)
            ]
    assert silent == []


def test_the_version_is_stated_once():
    assert kvpool.__version__ == metadata.version("kvpool")
    assert f'\nversion = "{kvpool.__version__}"\n' in (ROOT / "pyproject.toml").read_text()


def test_import_brings_no_policy_that_no_pool_needs():
    """Such as cost models and placement: a space of models needs their quotas alone."""
    code = (
        "import sys, kvpool; print(*sorted({n.split('.')[2] for n in sys.modules if n.startswith('kvpool.policy.')}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["quotas"]


def test_importing_kvpool_imports_numpy_and_nothing_else_foreign():
    code = "import sys, kvpool; print(*{name.split('.')[0] for name in sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {
        "torch",
        "cupy",
        "vllm",
        "matplotlib",
        "rich",
        "prometheus_client",
        "zmq",
        "msgpack",
        "obstore",
        "typing_extensions",
    } & set(run.stdout.split()) == set()


def test_the_package_ships_its_types():
    package = Path(inspect.getfile(kvpool)).parent
    assert (package / "py.typed").is_file()
    assert (package / "_core.pyi").is_file()


def test_the_stub_of_the_core_is_complete():
    package = Path(inspect.getfile(kvpool)).parent
    stub = _names(ast.parse((package / "_core.pyi").read_text()).body)
    core = {name: value for name, value in vars(kvpool._core).items() if _public(name)}
    assert set(stub) == set(core)
    for name, members in stub.items():
        if members is not None:
            assert inspect.isclass(core[name]), name
            assert {m for m in members if _public(m)} == {m for m in vars(core[name]) if _public(m)}, name


def _public(name: str) -> bool:
    return name == "__version__" or not name.startswith("_")


def _is_alias(node: ast.AnnAssign) -> bool:
    """A stub may name types that it alone uses."""
    return isinstance(node.annotation, ast.Name) and node.annotation.id == "TypeAlias"


def _names(body: list[ast.stmt]) -> dict[str, set[str] | None]:
    """The names that a stub defines; for a class, the names in it."""
    found: dict[str, set[str] | None] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = set(_names(node.body))
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = None
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not _is_alias(node):
            found[node.target.id] = None
    return {name: members for name, members in found.items() if _public(name) or members is not None}


POOL = [
    "adopt", "alloc", "arena", "attach", "attend", "audit", "batch", "close", "closed", "copy", "delete", "evict",
    "explain_match", "fetch", "fetch_with_insert", "filled", "flush", "forget", "free", "inbox", "insert", "load",
    "match", "peers", "ranks", "resume", "save", "sequence", "stats", "subscribe", "suspend", "suspended", "swap_in",
    "swap_out", "tensor", "transfer", "transfer_with_insert",
]  # fmt: skip


def test_a_pool_has_these_names_and_no_others():
    assert sorted(name for name in dir(kvpool.Pool) if not name.startswith("_")) == POOL
    with kvpool.Pool(kvpool.RawLayout(64), 1) as pool:
        assert {name for name in vars(pool) if not name.startswith("_")} == {"kv_layout", "settings"}
