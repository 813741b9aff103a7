"""The errors of kvpool.

    kvpool.Error
    ├── ArgumentError (ValueError)      a value that no state of the pool would accept
    ├── ArgumentTypeError (TypeError)   a value of the wrong type
    ├── OutOfBlocks                     not enough blocks are free or can be made free
    ├── OutOfMemory (MemoryError)       an arena does not fit the machine or its cgroup
    ├── StaleAddress                    the block behind the address was freed or moved
    ├── StateError                      the block or the pool is in a state that forbids the call
    │   └── ClosedError                 the pool or handle was closed
    ├── NotOwner                        the address belongs to another instance or pool
    ├── LayoutMismatch                  memory offered does not have the layout's shape
    ├── ForkError                       called in a child process after fork
    ├── Unsupported                     this machine or build cannot do it
    └── AuditError                      an invariant is broken: a bug in kvpool or memory corruption

A call that raises one of these has changed nothing. The text tells a person what happened, with the numbers; a program
reads the same numbers as attributes (`error.requested`, `error.free`) or all of them as the dict `error.fields`.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "AuditError",
    "ClosedError",
    "Error",
    "ForkError",
    "LayoutMismatch",
    "NotOwner",
    "OutOfBlocks",
    "OutOfMemory",
    "StaleAddress",
    "StateError",
    "Unsupported",
]


class Error(Exception):
    """Base of all errors of kvpool."""

    def __init__(self, message: str, **fields: Any) -> None:
        """Makes the error; each field becomes an attribute."""
        super().__init__(message)
        self.fields: dict[str, Any] = fields
        for name, value in fields.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles with the fields, so that an error crosses to another process whole."""
        return _rebuild, (type(self), str(self), self.fields)


def _rebuild(kind: type[Error], message: str, fields: dict[str, Any]) -> Error:
    return kind(message, **fields)


# The attributes below are what an error of the class can have; each error has those that its text speaks of.


class ArgumentError(Error, ValueError):
    """A value that no state of the pool would accept."""

    address: int  # the address that is wrong, and
    position: int  # where it stands in the list
    value: int  # a number out of range, and
    maximum: int  # the largest that is possible
    source: str  # where a setting came from
    given: int  # how many there were, and
    needed: int  # how many there must be
    requested: int  # blocks asked for
    capacity: int  # of the media that could have them
    blocks: int
    blocks_max: int
    block_bytes: int
    block_tokens: int
    tokens: int
    instance: int
    largest: int
    numa_node: int


class ArgumentTypeError(Error, TypeError):
    """A value of the wrong type."""

    source: str  # where a setting came from


class OutOfBlocks(Error):
    """Not enough blocks are free, or can be made free by eviction."""

    requested: int
    free: int
    evictable: int
    active: int
    pinned: int
    capacity: int


class OutOfMemory(Error, MemoryError):
    """An arena does not fit the memory of the machine or of its cgroup."""

    needed_bytes: int
    available_bytes: int
    bytes: int
    errno: int


class StaleAddress(Error):
    """The block behind the address was freed or moved since the address was given out."""

    address: int
    position: int


class StateError(Error):
    """The block or the pool is in a state that forbids the call."""

    address: int
    position: int
    block: int
    pinned: int


class ClosedError(StateError):
    """The pool or handle was closed."""


class NotOwner(Error):
    """The address belongs to another instance or pool."""

    address: int
    position: int
    instance: int


class LayoutMismatch(Error):
    """Memory that was offered does not have the layout's shape."""

    segment: int
    other_segment: int
    offered_bytes: int
    layout_bytes: int
    position: int


class ForkError(Error):
    """Called in a child process after fork: a pool belongs to the process that made it."""


class Unsupported(Error):
    """This machine or this build cannot do it."""

    needed_bytes: int
    huge_page_bytes: int
    numa_node: int
    driver_code: int
    errno: int


class AuditError(Error):
    """An invariant is broken: a bug in kvpool, or memory corruption."""

    block: int
    found: int
    counted: int
