"""Common to the two prefix trees of SGLang, which answer the same questions."""

from __future__ import annotations

import importlib
import importlib.machinery
import random
import sys
import types
from array import array
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any, Protocol

from bench.measure import time_calls
from bench.workload import Prompts

Key = Any  # sglang's RadixKey
_NEW_FROM = 10**7  # numbers of prompts that were not there when the tree was built


class Tree(Protocol):
    """The operations of a tree, as SGLang's scheduler calls them."""

    def insert(self, tokens: array[int]) -> object: ...
    def match(self, tokens: array[int]) -> int: ...
    def match_and_collect(self, tokens: array[int]) -> Any: ...
    def evict(self, tokens: int) -> int: ...


class Allocator:
    """In place of SGLang's: counts what is given back."""

    device = "cpu"

    def __init__(self) -> None:
        self.freed = 0

    def free(self, values: Any) -> None:
        self.freed += len(values)

    def free_segment(self, values: Any, start_pos: int = 0) -> None:
        self.freed += len(values)


class TreeSubject:
    """Answers the questions of bench/api/index.py about a tree of SGLang."""

    def __init__(self, make: Callable[[int], Tree]) -> None:
        """`make(page)` makes an empty tree."""
        self._make = make
        self._new = _NEW_FROM

    def version(self) -> str:
        try:
            return metadata.version("sglang")
        except metadata.PackageNotFoundError:
            import sglang

            return str(getattr(sglang, "__version__", "0.5.23"))

    def build(self, prompts: int, tokens: int, shared: int) -> None:
        self._prompts = Prompts(tokens, shared)
        self._count = prompts
        self._tree = self._make(16)
        for number in range(prompts):
            self._tree.insert(self._tokens(number))

    def match_random(self, n: int, seed: int) -> list[float]:
        return time_calls(self._tree.match, self._some(n, seed))

    def collect_random(self, n: int, seed: int) -> list[float]:
        return time_calls(self._tree.match_and_collect, self._some(n, seed))

    def match_same(self, n: int) -> list[float]:
        return time_calls(self._tree.match, [self._tokens(0)] * n)

    def collect_same(self, n: int) -> list[float]:
        return time_calls(self._tree.match_and_collect, [self._tokens(0)] * n)

    def insert_new(self, n: int) -> list[float]:
        first, self._new = self._new, self._new + n
        return time_calls(self._tree.insert, [self._tokens(number) for number in range(first, first + n)])

    def evict_leaf(self, n: int) -> list[float]:
        leaf = self._prompts.tokens - self._prompts.shared
        return time_calls(lambda _: self._tree.evict(leaf), range(n))

    def check(self) -> None:
        """That the tree finds a whole prompt, and its indices."""
        tokens = self._tokens(0)
        if self._tree.match(tokens) != len(tokens) or len(self._tree.match_and_collect(tokens)) != len(tokens):
            raise RuntimeError("SGLang does not find a prompt that was inserted")

    def _some(self, n: int, seed: int) -> Iterable[array[int]]:
        choose = random.Random(seed)
        return [self._tokens(choose.randrange(self._count)) for _ in range(n)]

    def _tokens(self, number: int) -> array[int]:
        tokens = array("q")
        tokens.frombytes(self._prompts.prompt(number).astype("int64").tobytes())
        return tokens


def stub_torchvision() -> None:
    """Lets sglang be imported where torchvision is not: only its image code needs it."""
    try:
        importlib.import_module("torchvision")
    except Exception:
        # These must learn first that it is missing.
        importlib.import_module("transformers.image_utils")
        importlib.import_module("transformers.image_processing_utils")
        below = ("", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional", ".io")
        for name in below:
            module = _Anything("torchvision" + name)
            module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=True)
            module.__path__ = []
            sys.modules[module.__name__] = module


class _Anything(types.ModuleType):
    """A module that has every name, each an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})
