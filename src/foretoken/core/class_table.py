"""The library's table of its models' classes, kept on disk.

transformers reads all of its model files, more than three thousand, to learn which classes they hold: twice in each
process, half a second of processor time.
"""

import contextlib
import hashlib
import marshal
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.core.files import own_cache_folder, write_whole

Table = dict[Any, Any]


def keep_table(module: Any) -> None:
    """Let ``transformers.utils.import_utils`` read the models' folder once for all processes.

    Only where it was installed from a package: files of a checkout change below their folder.
    """
    read: Callable[[str], Table] = module.create_import_structure_from_path
    models = Path(module.__file__).parents[1] / "models"
    if not {"site-packages", "dist-packages"} & set(models.parts):
        return
    kept: list[bytes] = []

    def table(path: str) -> Table:
        if Path(path) not in (models, models / "__init__.py"):
            return read(path)
        if not kept:
            kept.append(_stored(models, read))
        found: Table = marshal.loads(kept[0])  # each caller gets one of its own, to change
        return found

    module.create_import_structure_from_path = table


def _stored(models: Path, read: Callable[[str], Table]) -> bytes:
    changed = [os.stat(each).st_mtime_ns for each in (models, models.parent / "__init__.py")]
    version = hashlib.sha256(repr((str(models), changed, sys.version)).encode()).hexdigest()[:20]
    folder = own_cache_folder()
    file = None if folder is None else folder / f"classes-{version}"
    if file is not None:
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError):  # there is none, or not a whole one
            data = file.read_bytes()
            if isinstance(marshal.loads(data), dict):
                return data
    data = marshal.dumps(read(str(models)))
    if file is not None:
        with contextlib.suppress(ForetokenError):  # a full disk: it is read again next time
            write_whole(file, data)
    return data
