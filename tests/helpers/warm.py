"""Commands as processes that begin with the libraries imported: forks of one process, which save seconds each.

A fork is a process like any other to its test: pipes, signals, exit code. It is no child of the process that made it,
but of the test's own (``PR_SET_CHILD_SUBREAPER``), which waits for it. Where that is not possible, the command starts
as usual. Tests of what a command imports, and of its start, start it as usual, too.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h
_PYTHON = sys.executable
_TOO_LONG = 2**20  # bytes of a command
_MOST_STREAMS = 8  # files that a command inherits


class Popen(subprocess.Popen[Any]):
    """``subprocess.Popen`` of ``[sys.executable, "-m", MODULE, …]`` or ``[sys.executable, "-c", CODE, …]``."""

    def _execute_child(
        self, args: Sequence[str], executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
        env: Mapping[str, str] | None, startupinfo: Any, creationflags: Any, shell: Any,
        *rest: Any,
    ) -> None:  # fmt: skip
        if sys.platform != "linux" or args[0] != _PYTHON:
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, *rest
            )
            return
        pipes = p2cread, _, _, c2pwrite, _, errwrite = rest[:6]
        assert preexec_fn is None, "a fork runs no function of this process before its code"
        environment = dict(os.environ if env is None else env)
        numbers = [0, 1, 2, *pass_fds]
        asked = json.dumps([list(args[1:]), str(cwd or os.getcwd()), environment, numbers, bool(rest[11])])
        streams = [given if given != -1 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        parent, _ = _parent()
        socket.send_fds(parent, [asked.encode()], [*streams, *pass_fds])
        self.pid = int(parent.recv(64))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run(
    command: Sequence[str], *, text: str = "", timeout: float = 300, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` of such a command that reads a text, with its output as text."""
    pipe = subprocess.PIPE
    with Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env) as process:
        out, err = process.communicate(text, timeout)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@functools.cache
def _parent() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the process that forks, and return the connection to it and the process, which ends with this one."""
    if ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0):
        raise OSError("prctl(PR_SET_CHILD_SUBREAPER) failed")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", __name__, str(theirs.fileno())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours, process


def _serve(connection: socket.socket) -> None:
    import foretoken.cli.main
    import foretoken.engine.llm
    import foretoken.models.load
    import foretoken.serve.app  # noqa: F401

    while True:
        message, streams, _, _ = socket.recv_fds(connection, _TOO_LONG, _MOST_STREAMS)
        if not message:
            return
        out, into = os.pipe()
        between = os.fork()  # it ends at once, so that the test's process becomes the command's parent
        if not between:
            command = os.fork()
            if not command:
                connection.close()
                os.close(out)
                os.close(into)
                _become(*json.loads(message), streams)
            os.write(into, str(command).encode())
            os._exit(0)
        os.waitpid(between, 0)
        connection.send(os.read(out, 64))
        for each in (*streams, out, into):
            os.close(each)


def _become(
    arguments: list[str], folder: str, environment: dict[str, str], numbers: list[int], alone: bool, streams: list[int]
) -> None:
    apart = [fcntl.fcntl(stream, fcntl.F_DUPFD, 1 + max(numbers)) for stream in streams]  # away from all numbers
    for number, stream in zip(numbers, apart, strict=True):
        os.dup2(stream, number)
    for stream in {*apart, *streams} - {*numbers}:
        os.close(stream)
    if alone:
        os.setsid()
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kind, what, *sys.argv[1:] = arguments
    code = 1
    try:
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            sys.argv[0] = "-c"
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else end.code is not None
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 120
    os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
