"""Nothing that comes from outside is ever run, and nothing listens beyond this machine unless asked to.

Other systems were taken over by unpickling what a peer had sent, and by services that listened on every interface. So
the package has none of the means: this reads its source. What is planted below must be found.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvpool

PACKAGE = Path(inspect.getfile(kvpool)).parent

# Modules that make objects, and so code, of bytes.
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
FORBIDDEN_BUILTINS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_CALLS = {("torch", "load"), ("yaml", "load"), ("yaml", "unsafe_load"), ("zmq", "recv_pyobj")}
FORBIDDEN_METHODS = {"recv_pyobj", "send_pyobj"}
EVERYWHERE = {"0.0.0.0", "::", "[::]", "*"}


def findings(source: str) -> Iterator[str]:
    """The faults of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        yield from (f"imports {name}" for name in names if name.partition(".")[0] in FORBIDDEN_MODULES)
        if isinstance(node, ast.Call):
            yield from _of_call(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            host = node.value.rpartition("//")[2].removeprefix("tcp:").rpartition(":")[0] or node.value
            if host in EVERYWHERE - {"*"} or (host == "*" and "://" in node.value):
                yield f"speaks of {node.value!r}"


def _of_call(call: ast.Call) -> Iterator[str]:
    function = call.func
    if isinstance(function, ast.Name) and function.id in FORBIDDEN_BUILTINS:
        yield f"calls {function.id}"
    if isinstance(function, ast.Attribute):
        owner = function.value.id if isinstance(function.value, ast.Name) else ""
        if (owner, function.attr) in FORBIDDEN_CALLS or function.attr in FORBIDDEN_METHODS:
            yield f"calls {owner}.{function.attr}"
    if any(keyword.arg == "allow_pickle" for keyword in call.keywords):
        yield "allows pickles"


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_the_package_runs_no_code_that_it_was_sent_and_listens_nowhere_unasked(file):
    assert list(findings(file.read_text())) == []


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "from pickle import loads",
        "import cloudpickle as json",
        "def take(frame):\n    return eval(frame)",
        "exec(frame)",
        "weights = torch.load(path)",
        "import numpy\nnumpy.load(path, allow_pickle=True)",
        "message = socket.recv_pyobj()",
        'def serve(host="0.0.0.0"): pass',
        'pool.peers.listen("tcp:0.0.0.0:0")',
        'publish("tcp://*:5557")',
        'bind("[::]:80")',
    ],
)
def test_planted_code_is_found(planted):
    assert len(list(findings(planted))) == 1


def test_listeners_that_nobody_asked_for_listen_on_this_machine_only():
    with kvpool.Pool(kvpool.RawLayout(block_bytes=64), 1, secret="s") as pool:
        assert pool.peers.listen().startswith("tcp:127.0.0.1:")
