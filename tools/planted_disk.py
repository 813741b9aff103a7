"""Bugs of the store on disk, for `make planted`."""

from __future__ import annotations

from typing import Final

from tools.planted_kit import Bug, in_cpp

__all__ = ["DISK_BUGS"]

_CRASH: Final = ("disk_crash_test.cpp",)
_CORE: Final = ("disk_core_test.cpp",)

DISK_BUGS: Final = (
    Bug(
        "record-before-its-data",
        "disk",
        "after a loss of power the journal names blocks whose bytes never reached the drive",
        in_cpp(
            "disk/core_commits.cpp",
            "const int error = group.puts.first != nullptr ? blocks_->flush() : 0;",
            "const int error = 0;",
        ),
        _CRASH,
    ),
    Bug(
        "piece-checksum-not-looked-at",
        "disk",
        "a block that has rotted on the drive is served as good",
        in_cpp("disk/core_io.cpp", "if (found != checksums[piece]) {", "if (found != checksums[piece] && part.bad) {"),
        _CORE,
    ),
    Bug(
        "slot-reused-before-its-free-record",
        "disk",
        "after a loss of power the journal still has the old entry, and its slot another one's bytes",
        in_cpp(
            "disk/core.cpp",
            "    slots_[op.slot].busy = true;\n    op.started = true;\n",
            "    op.started = true;\n",
        ),
        (*_CRASH, *_CORE),
    ),
    Bug(
        "slot-rewritten-under-its-reader",
        "disk",
        "a read of a block gets bytes of the one that takes its slot",
        in_cpp("disk/slots.h", "return !busy && readers == 0;", "return !busy;"),
        _CORE,
    ),
    Bug(
        "read-of-a-block-that-is-being-overwritten",
        "disk",
        "a slot whose entry was erased, and that is being written again, is read as if the entry was there",
        in_cpp(
            "disk/core.cpp",
            "op.holds = slot.live && slot.generation == op.generation;",
            "op.holds = slot.generation == op.generation;",
        ),
        _CORE,
    ),
    Bug(
        "forked-child-keeps-the-lock",
        "disk",
        "a store whose process was killed cannot be opened before the children of that process have ended",
        in_cpp("disk/posix_files.cpp", "    close_in_children(fd.fd());\n", ""),
        ("disk_open_test.cpp",),
    ),
    Bug(
        "first-pages-told-by-their-generation",
        "pool",
        "a page whose predecessor has generation 0 is found as the first of a prompt after a restart",
        in_cpp(
            "pool/disk_record.cpp",
            "out.push_back(parent ? kLater : kFirst);",
            "out.push_back(parent && parent->generation != 0 ? kLater : kFirst);",
        ),
        ("disk_record_test.cpp",),
    ),
    Bug(
        "found-records-not-made-durable",
        "disk",
        "what a killed process had written, and not made durable, is counted on, and lost with the power",
        in_cpp(
            "disk/journal.cpp",
            "  const int error = directory.open(name, DiskOpen::kThere, file);\n"
            "  return error != 0 ? error : file->flush();\n",
            "  return directory.open(name, DiskOpen::kThere, file);\n",
        ),
        _CRASH,
    ),
)
