"""What a user may set: ``linker_extra_config``, or ``hicache-storage-backend-extra-config``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kvpool.engines.given import check_known, check_memory
from kvpool.errors import ArgumentError, ArgumentTypeError

__all__ = ["GIB", "LinkerOptions", "Options"]

GIB = 1 << 30

_Own = TypeVar("_Own", bound="Options")


_WHERE: Final = "the configuration"


@dataclass(frozen=True)
class Options:
    """The options of a linker or a HiCache.

    Attributes:
        dram_gib: Host memory for the cache, in GiB, of each rank.
        dram_pages: The same in pages of SGLang; takes the place of `dram_gib`.
    """

    dram_gib: float = 4.0
    dram_pages: int | None = None

    @classmethod
    def parse(cls: type[_Own], extra: Mapping[str, Any], others: Collection[str] = ()) -> _Own:
        """Reads the configuration.

        Args:
            extra: What the user has set.
            others: What may stand there for SGLang.

        Raises:
            ArgumentError: An option is unknown or out of range; or the memory is given twice.
            ArgumentTypeError: An option has the wrong type.
        """
        own = {name: value for name, value in extra.items() if name not in others}
        check_known(_WHERE, own, list(cls.__dataclass_fields__))
        check_memory(_WHERE, own, "dram_pages")
        return cls(**own)

    def pages(self, page_bytes: int) -> int:
        """How many pages the cache holds.

        Args:
            page_bytes: Of one page in all stores together.

        Raises:
            ArgumentError: Not even one fits.
        """
        if self.dram_pages is not None:
            return self.dram_pages
        pages = int(self.dram_gib * GIB) // page_bytes
        if not pages:
            raise ArgumentError(
                f"dram_gib is {self.dram_gib}, and a page of this model has {page_bytes} bytes", page_bytes=page_bytes
            )
        return pages


@dataclass(frozen=True)
class LinkerOptions(Options):
    """The options of a linker.

    Attributes:
        keep_on_flush: Keep what is stored when SGLang flushes its cache, which it also does after its weights have been
            changed: what is stored then belongs to the old ones.
    """

    keep_on_flush: bool = False

    @classmethod
    def parse(cls, extra: Mapping[str, Any], others: Collection[str] = ()) -> LinkerOptions:
        """As Options.parse."""
        options = super().parse(extra, others)
        if not isinstance(options.keep_on_flush, bool):
            raise ArgumentTypeError("keep_on_flush must be true or false")
        return options
