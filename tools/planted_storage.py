"""Bugs of shared storage, for `make planted`."""

from __future__ import annotations

from typing import Final

from tools.planted_kit import Bug, in_python

__all__ = ["STORAGE_BUGS"]

_STORE: Final = ("python/storage/test_directory_store.py",)
_STORE_FAULTS: Final = ("python/storage/test_directory_faults.py",)
_TRIM: Final = ("python/storage/test_directory_trim.py",)
_LIMITS: Final = ("python/storage/test_storage_limits.py",)
_FAULTS: Final = ("python/storage/test_storage_faults.py",)

STORAGE_BUGS: Final = (
    Bug(
        "checksum-not-looked-at",
        "storage",
        "a stored block that has rotted on its disk is served as good",
        in_python(
            "storage/block_file.py",
            "return None if checksum == _checksum(content) else",
            "return None if checksum else",
        ),
        _STORE_FAULTS,
        build="python",
    ),
    Bug(
        "named-before-its-data",
        "storage",
        "a block has its name while it is still being written: others read half of it, and a crash leaves it so",
        in_python("storage/files.py", 'new = f".{secrets.token_hex(16)}.new"', "new = name"),
        (*_STORE, "multiprocess/test_storage_kill.py"),
        build="python",
    ),
    Bug(
        "budget-of-some-writers",
        "storage",
        "saves that the application names are left out of the budget: a drive is written to faster than it may be",
        in_python(
            "storage/saving.py",
            "        size = self._shared.memory.block_bytes\n",
            "        size = 0 if self._held else self._shared.memory.block_bytes\n",
        ),
        ("python/storage/test_write_behind.py",),
        build="python",
    ),
    Bug(
        "key-without-the-rank-slice",
        "storage",
        "the ranks of an instance read each other's heads: they have the same keys",
        in_python("storage/keys.py", "            rank_slice,\n        )", "        )"),
        ("python/storage/test_content_keys.py", "python/storage/test_storage.py"),
        build="python",
    ),
    Bug(
        "freed-under-a-late-read",
        "storage",
        "the blocks of a load that is late are given to others while its reader still writes to them",
        in_python(
            "storage/loading.py",
            "addrs = [part.addrs for part in parts if part.ended]",
            "addrs = [part.addrs for part in parts]",
        ),
        _FAULTS,
        build="python",
    ),
    Bug(
        "links-are-followed",
        "storage",
        "a link in a store leads out of its folder: a file elsewhere is read, or opened without an end",
        in_python(
            "storage/folders.py",
            "_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC",
            "_READ: Final = os.O_RDONLY | os.O_CLOEXEC",
        ),
        _STORE_FAULTS,
        build="python",
    ),
    Bug(
        "saved-before-it-came",
        "storage",
        "blocks are saved while their content is still to come: all pools load zeros under a key that is right",
        in_python(
            "storage/memory.py",
            "            if self._is_unfilled(int(addrs[at])):",
            "            if False:",
        ),
        ("python/storage/test_storage.py",),
        build="python",
    ),
    Bug(
        "copy-of-anothers-block",
        "storage",
        "a block that was evicted while it was copied is saved under its key with another prompt's content",
        in_python("storage/memory.py", "if at < len(now) and now[at] == addrs[at]", "if at < len(addrs)"),
        ("python/storage/test_write_behind.py",),
        build="python",
    ),
    Bug(
        "late-and-healthy",
        "storage",
        "a store that is gone and keeps its deadlines is taken for well: every request waits for it",
        in_python("storage/loading.py", "late or self._cut)", "late)"),
        _LIMITS,
        build="python",
    ),
    Bug(
        "pins-outlive-the-deadline",
        "storage",
        "what a save has named stays pinned after its deadline, as long as the store hangs: the pool runs full",
        in_python("storage/saving.py", "if self._held is not None:", "if self._held is not None and error is None:"),
        _LIMITS,
        build="python",
    ),
    Bug(
        "answers-not-counted",
        "storage",
        "a store that answers for too few blocks leaves a load without an end",
        in_python("storage/answers.py", "if len(answers) != count:", "if len(answers) > count + 9:"),
        _LIMITS,
        build="python",
    ),
    Bug(
        "good-file-removed",
        "storage",
        "a good block that was written while a bad one was read is removed in its place",
        in_python("storage/directory.py", "self._folders.remove(key, only=status)", "self._folders.remove(key)"),
        _STORE_FAULTS,
        build="python",
    ),
    Bug(
        "the-hosts-own-clock",
        "storage",
        "one host whose clock is ahead removes all that the others have just stored",
        in_python("storage/folders.py", "return time.time_ns() + self._ahead_ns", "return time.time_ns()"),
        _TRIM,
        build="python",
    ),
    Bug(
        "age-before-the-lock",
        "storage",
        "the file of a writer that lives is removed, because it seems old by a clock that is wrong",
        in_python(
            "storage/files.py",
            "    except BlockingIOError:\n        return False\n",
            "    except BlockingIOError:\n        return True\n",
        ),
        _TRIM,
        build="python",
    ),
    Bug(
        "no-breaker",
        "storage",
        "a store that is gone costs every request its whole budget",
        in_python("storage/storage.py", "if whole or not shared.reading.allows():", "if whole:"),
        _FAULTS,
        build="python",
    ),
)
