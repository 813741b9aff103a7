"""Sending a prompt's blocks layer by layer, as they are computed."""

from __future__ import annotations

from kvpool._core import Transfer
from kvpool.errors import StateError

__all__ = ["TransferStream"]


class TransferStream:
    """A transfer whose layers are sent as soon as each is complete. `Pool.open_transfer` makes it.

    Leaving a ``with`` finishes it, or, on an exception, cancels it; it does not wait:

        with pool.open_transfer("decode-0", addrs) as stream:
            for layer in range(layers):
                compute(layer)
                stream.send_layer(layer)
        stream.wait()

    Attributes:
        transfer: The Transfer, to wait for, to ask for its progress, or to cancel.
    """

    def __init__(self, transfer: Transfer, stream: object = None) -> None:
        """Use `Pool.open_transfer`."""
        self.transfer = transfer
        self._stream = stream
        self._finished = False

    def send_layer(self, layer: int, *, stream: object = None) -> None:
        """Sends one layer of all blocks, K and V: its content is complete. Layers may come in any order, each once.

        Does not wait for the bytes; they must not change until the transfer is done.

        Args:
            layer: From 0 on.
            stream: Of a pool on a GPU: the layer is complete when the work that this CUDA stream was given so far has
                ended. None: the stream of open_transfer; without that, all work of the GPU.

        Raises:
            ArgumentError: There is no such layer, or it was sent before; the stream is of something else.
            StateError: The stream was finished.
            PeerLost, DeadlineExceeded, Cancelled, ...: The transfer has failed meanwhile; this is why.
        """
        if self._finished:
            raise StateError("the stream was finished: no layer can follow")
        self.transfer._send_layer(layer, self._stream if stream is None else stream)

    def finish(self) -> Transfer:
        """Says that all layers were sent. Does not wait. Idempotent.

        Returns:
            The transfer.

        Raises:
            StateError: A layer is missing.
        """
        if not self._finished:
            self.transfer._finish()
            self._finished = True
        return self.transfer

    def wait(self, timeout: float | None = None) -> Transfer:
        """Waits until the transfer is done: all layers were sent, and the receiver has them. Ctrl-C ends the wait.

        It cannot be done before ``finish()``, which another thread may call meanwhile.

        Args:
            timeout: Seconds; None waits as long as the transfer's own deadline lets it live.

        Returns:
            The transfer.

        Raises:
            TimeoutError: ``timeout`` passed; the transfer goes on.
            PeerLost, DeadlineExceeded, Cancelled, ...: It failed, as `Transfer.wait` says.
        """
        return self.transfer.wait(timeout)

    def done(self) -> bool:
        """Whether the transfer has ended, one way or another. Does not wait."""
        return self.transfer.done()

    def __enter__(self) -> TransferStream:
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finishes, or cancels."""
        if kind is None:
            self.finish()
        elif not self._finished:
            self.transfer.cancel()
