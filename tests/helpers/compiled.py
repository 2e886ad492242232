"""C programs and libraries of the tests, compiled once for these sources, this compiler and this processor.

They lie in the folder of the compiled decoder: compiling them takes most of the time of the tests that run them.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from foretoken.core.files import own_cache_folder
from foretoken.native import build, variants

HERE = Path(__file__).parent
_UNUSED = 7 * 24 * 3600  # seconds after which a file of former sources is removed


def compiled(
    source: Path, compiler: Sequence[str], options: Sequence[str], *, changed: Mapping[str, str] | None = None
) -> Path:
    """Compile a file, or find what an earlier run has compiled of the same text with the same options.

    Args:
        source: may include ``unit.c`` (see variants.unit), sources of the decoder, and headers of this folder.
        options: without places, so that they name the same result in every checkout.
        changed: other texts of files of the decoder, by name; ``source`` is one of its files.
    """
    texts = [each.read_text(encoding="utf-8") for each in (source, *sorted(HERE.glob("*.h")))]
    changed = changed or {}
    key = build._key(list(compiler), [*options, *texts, *changed.values()])
    folder = (own_cache_folder() or Path(tempfile.mkdtemp(prefix="foretoken-"))) / "tests"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = folder / f"{source.stem}-{key}"
    with (folder / "lock").open("w") as lock:  # one process compiles for all that share the tests
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                Path(scratch, "unit.c").write_text(variants.unit(), encoding="utf-8")
                sources = variants.HERE
                if changed:  # a file includes those that lie next to it
                    sources = Path(shutil.copytree(variants.HERE, Path(scratch, "changed")))
                    for name, text in changed.items():
                        Path(sources, name).write_text(text, encoding="utf-8")
                    source = sources / source.name
                places = [f"-I{scratch}", f"-I{HERE}", f"-I{sources}"]
                half = Path(scratch, "half")
                command = [*compiler, *options, *places, str(source), "-lm", "-o", str(half)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stderr[-2000:]
                half.rename(target)
            for each in folder.glob(f"{source.stem}-*"):
                if each.stat().st_mtime < time.time() - _UNUSED:
                    each.unlink()
        target.touch()
    return target
