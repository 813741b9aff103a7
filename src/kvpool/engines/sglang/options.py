"""What a user may set: ``linker_extra_config``, or ``hicache-storage-backend-extra-config``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from kvpool.engines.given import check_amount, check_cluster, check_known, check_memory, how_many
from kvpool.errors import ArgumentError, ArgumentTypeError

__all__ = ["HiCacheOptions", "LinkerOptions", "Options"]

_Own = TypeVar("_Own", bound="Options")


_WHERE: Final = "the configuration"
_OF_MEMBERS: Final = ("name", "model", "cluster_options", "listen", "fetch_timeout_s")


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
        return how_many(_WHERE, self.dram_gib, page_bytes, "a page of this model")


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


@dataclass(frozen=True)
class HiCacheOptions(Options):
    """The options of a HiCache.

    Attributes:
        name: Of this engine among the members of the cluster; each of its stores adds its own ending.
        cluster: The URL of a cluster: what is missing here is looked for at the other members, and fetched.
        cluster_options: More for `Cluster.join`, such as ``tls_ca``, or ``lease``, which is 15 seconds by default.
        listen: The addresses for other members, as for `Pool.attach`.
        model: A fingerprint of the model. A cluster needs it: members that say something else are refused.
        fetch_timeout_s: Seconds that a fetch may take.
    """

    name: str | None = None
    cluster: str | None = None
    cluster_options: Mapping[str, Any] = field(default_factory=dict)
    listen: str | list[str] | None = None
    model: str = ""
    fetch_timeout_s: float = 5.0

    @classmethod
    def parse(cls, extra: Mapping[str, Any], others: Collection[str] = ()) -> HiCacheOptions:
        """As Options.parse. Raises ArgumentError for a member without a model, too."""
        options = super().parse(extra, others)
        check_amount(_WHERE, "fetch_timeout_s", options.fetch_timeout_s, (int, float))
        check_cluster(_WHERE, extra, _OF_MEMBERS)
        if not isinstance(options.model, str):
            raise ArgumentTypeError(f"{_WHERE}: model must be a text")
        if options.cluster and not options.model:
            raise ArgumentError(
                f"{_WHERE}: a member of a cluster needs model. SGLang's keys do not say all that pages depend on: give "
                "another text for each revision, quantization and setting of the model, and for each attention backend"
            )
        return options
