"""Messages between an engine and its helper over torch.distributed: gloo, in the place of a pipe (process.py).

    header    8 bytes of length, 32 of HMAC-SHA256     messages are unpickled, so the HMAC key authenticates the sender
    payload   bytes

Between two processes of one machine a pipe is faster and needs none of this; PEARL's released code
uses torch.distributed, which also reaches other machines. Both ends meet in a file that one of them owns, at addresses
of this machine; a group stays dead once a peer is gone, so every helper gets its own.
"""

from __future__ import annotations

import hmac
import threading
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_HEADER, _LENGTH = 40, 8
_CONNECTING = timedelta(seconds=60)
_SENDING = timedelta(seconds=2)  # of one part of a message: a peer that is stopped reads no more
_EVER = timedelta(days=3650)  # an engine may be idle for as long as it likes


def available() -> bool:
    """Whether the installed torch has gloo."""
    return dist.is_available() and dist.is_gloo_available()


class GlooChannel:
    """One end of a channel of two; it has the methods of ``multiprocessing``'s ``Connection`` that a helper uses.

    Gloo cannot poll, so a thread receives the messages, and :meth:`poll` waits for the thread.

    Args:
        rank: 0 or 1.
        path: of the file where the two meet; it is not there before, and may be deleted once both have met.
        key: of both.
    """

    def __init__(self, rank: int, path: str, key: bytes) -> None:
        self._peer, self._key = 1 - rank, key
        self._changed = threading.Condition()
        self._group: Any = None
        self._inbox: deque[bytes] = deque()
        self._ended = False
        self._receiver = threading.Thread(target=self._receive, args=(rank, path), name="foretoken-gloo", daemon=True)
        self._receiver.start()

    def connected(self, seconds: float) -> bool:
        """Wait until both ends have met; False: they have not in this time."""
        with self._changed:
            self._changed.wait_for(lambda: self._group is not None or self._ended, seconds)
            return self._group is not None and not self._ended

    def poll(self, timeout: float = 0.0) -> bool:
        """Whether ``recv_bytes`` would return, or raise, at once; waits so many seconds for that."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._inbox) or self._ended, timeout)

    def recv_bytes(self) -> bytes:
        """The next message.

        Raises:
            EOFError: none will come.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._inbox) or self._ended)
            if not self._inbox:
                raise EOFError
            return self._inbox.popleft()

    def send_bytes(self, payload: bytes) -> None:
        """Send a message.

        Raises:
            BrokenPipeError: the other end is gone, or does not read.
        """
        if not self.connected(_CONNECTING.total_seconds()):
            raise BrokenPipeError("the other end is not there")
        self._send(self._header(payload))
        self._send(payload)

    def join(self, seconds: float) -> None:
        """Wait until nothing is received any more: the other end has to be gone."""
        self._receiver.join(seconds)

    # ------------------------------------------------------------------ parts of a message

    def _header(self, payload: bytes) -> bytes:
        return len(payload).to_bytes(_LENGTH, "little") + hmac.digest(self._key, payload, "sha256")

    def _send(self, part: bytes) -> None:
        assert self._group is not None
        try:
            self._group.send([_tensor(part)], self._peer, 0).wait(_SENDING)
        except RuntimeError as error:
            raise BrokenPipeError(str(error)) from error

    def _receive(self, rank: int, path: str) -> None:
        try:
            group = _group(rank, path)
            with self._changed:
                self._group = group
                self._changed.notify_all()
            while True:
                header = self._part(group, _HEADER)
                length = int.from_bytes(header[:_LENGTH], "little")
                payload = self._part(group, length)
                if not hmac.compare_digest(header, self._header(payload)):
                    return
                with self._changed:
                    self._inbox.append(payload)
                    self._changed.notify_all()
        except RuntimeError:  # torch's error when a peer has gone
            return
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _part(self, group: Any, length: int) -> bytes:
        found = torch.empty(length, dtype=torch.uint8)
        group.recv([found], self._peer, 0).wait(_EVER)
        return found.numpy().tobytes()


def _group(rank: int, path: str) -> Any:
    """A group of its own: the program's default one stays the program's."""
    torch_s: Any = dist  # its stubs lack most of this
    options = torch_s.ProcessGroupGloo._Options()
    options._devices = [torch_s.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = _CONNECTING
    return torch_s.ProcessGroupGloo(torch_s.FileStore(path, 2), rank, 2, options)


def _tensor(part: bytes) -> Tensor:
    return torch.frombuffer(bytearray(part), dtype=torch.uint8)
