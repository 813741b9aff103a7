"""The routes between GPUs that a pool does not use, and what to install for them."""

from __future__ import annotations

import logging

from kvpool import _core
from kvpool.config import Settings
from kvpool.transfer.libraries import nccl_library, ucx_library
from kvpool.types import HBM

__all__ = ["nccl_extra", "tell_unused", "ucx_extra"]

_log = logging.getLogger("kvpool.peers")


def ucx_extra() -> str:
    """The extra with a UCX for GPUs of the CUDA that this build is for."""
    return f"kvpool[cuda{_cuda_major()}]"


def nccl_extra() -> str:
    """The same with NCCL."""
    return f"kvpool[nccl{_cuda_major()}]"


def tell_unused(pool: _core.Pool, settings: Settings) -> None:
    """Logs, at INFO, which routes between GPUs this pool does not use. Logs nothing for a pool without a GPU.

    Without these routes, blocks still travel by cuda_ipc within a host, but to other hosts by sock, through host
    memory. A route that is named and not available is an error instead.
    """
    device = pool._arena(int(HBM))["device"]
    if not device.startswith("cuda"):
        return
    for route, setting, library, extra in (
        ("ucx", settings.ucx, ucx_library(settings.ucx), ucx_extra()),
        ("nccl", settings.nccl, nccl_library(settings.nccl), nccl_extra()),
    ):
        if route in settings.routes:
            continue
        missing = setting == "wheel" and library == setting
        _log.info(
            "blocks on %s do not travel by %s: %sname it in the setting routes",
            device,
            route,
            f"install {extra}, and " if missing else "",
            extra={"route": route, "device": device, "installed": not missing},
        )


def _cuda_major() -> str:
    return _core.build_info()["cuda_compiler"].split(".")[0] or "13"
