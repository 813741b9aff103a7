"""The processes of a run: starts them, has them meet, kills one, and starts it again."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Final

from process import Instance

from long_context.member import Member

_START_S: Final = 60.0  # until a process is up
_WAIT_S: Final = 20.0


class Fleet:
    """Members by name. Ends all of them with the `with`."""

    def __init__(self) -> None:
        """None has been started."""
        self._running = ExitStack()
        self._members: dict[str, Instance] = {}
        self._secret = secrets.token_hex(32)  # made for this run: processes that do not know it cannot connect
        self._addresses = 0

    def start(self, blocks: Mapping[str, int]) -> None:
        """Starts members, with pools of so many blocks. They come up side by side."""
        for name, count in blocks.items():
            member = self._members[name] = Instance(name, Member, blocks=count, secret=self._secret)
            self._running.callback(member.close)
        for name in blocks:
            self._members[name].answer(_START_S)

    def connect(self, name: str, peer: str) -> None:
        """Has a member meet a peer, which listens from now on."""
        self._addresses += 1
        address = f"unix:@kvpool-long-context-{os.getpid()}-{self._addresses}"
        self._members[name].ask("connect", self._members[peer].ask("listen", address), _WAIT_S)

    def __getitem__(self, name: str) -> Instance:
        return self._members[name]

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.close()
