"""The folder of the public corpora for training and evaluating the bundled models.

It is not part of the package: ``--data`` or ``FORETOKEN_DATA`` sets it.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from foretoken.core.errors import ConfigError

ENVIRONMENT = "FORETOKEN_DATA"


def data_root(explicit: Path | None = None) -> Path:
    """Return the data folder: the argument, else ``FORETOKEN_DATA``.

    Raises:
        ConfigError: neither is set, or the path is not a folder.
    """
    value = os.environ.get(ENVIRONMENT)
    named = explicit or (Path(value) if value else None)
    if named is None:
        raise ConfigError(
            f"this needs the folder of the corpora: use --data DIR, or set {ENVIRONMENT}; training also "
            "accepts your own text (--corpus FILE) or generated tasks (--corpus generated)"
        )
    if not named.is_dir():
        given = f"{ENVIRONMENT}={named}" if explicit is None else f"--data {named}"
        raise ConfigError(f"{given}: there is no such folder")
    return named


def check_one_text(data: Path | None, corpus: Sequence[str] | None) -> None:
    """Refuse a data folder that would have no effect, because there is a corpus.

    Raises:
        ConfigError: both are set.
    """
    if data is not None and corpus:
        raise ConfigError(
            f"--data {data} and --corpus {corpus[0]}: the data is either the folder's mixture or your files: keep one"
        )
