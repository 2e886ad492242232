"""The folder of the public corpora that the bundled models are trained on and judged by.

It is not part of the package: it is named with ``--data``, or by ``FORETOKEN_DATA``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from foretoken.core.errors import ConfigError

ENVIRONMENT = "FORETOKEN_DATA"


def data_root(explicit: Path | None = None) -> Path:
    """The data folder: the one named, else ``FORETOKEN_DATA``.

    Raises:
        ConfigError: neither is given, or what is given is no folder.
    """
    value = os.environ.get(ENVIRONMENT)
    named = explicit or (Path(value) if value else None)
    if named is None:
        raise ConfigError(
            f"this needs the folder of the corpora: name it with --data DIR, or set {ENVIRONMENT}; training can do "
            "with text of yours (--corpus FILE) or with tasks that are generated (--corpus generated)"
        )
    if not named.is_dir():
        given = f"{ENVIRONMENT}={named}" if explicit is None else f"--data {named}"
        raise ConfigError(f"{given}: there is no such folder")
    return named


def check_one_text(data: Path | None, corpus: Sequence[str] | None) -> None:
    """Refuse a data folder that would not be looked at, because files are named.

    Raises:
        ConfigError: both are given.
    """
    if data is not None and corpus:
        raise ConfigError(
            f"--data {data} and --corpus {corpus[0]}: the folder's mixture is read, or your files are: keep one"
        )
