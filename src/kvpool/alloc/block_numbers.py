"""Block numbers of addresses, to index a tensor with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpool import _core
from kvpool.types.addresses import AddressLike, checked_block_ids

__all__ = ["block_ids"]


def block_ids(addresses: AddressLike) -> npt.NDArray[np.int64]:
    """The block number of each address within its medium, as int64, ready to index a tensor: `kv[block_ids(addrs)]`.

    It is the number in the pool to which the address belongs; a borrowed block is not in the borrower's tensor. The
    function does not know the tensor's pool, so it refuses only lists with addresses of several pools. A pool's own
    addresses may have instance 0, from before it had peers, and its instance.

    Raises:
        ArgumentError: A number cannot be an address; or the addresses are of several instances.
        ArgumentTypeError: Not an array of unsigned integers or a sequence of ints.
    """
    ids = _core._block_ids_if_alike(addresses)
    return checked_block_ids(addresses) if ids is None else ids
