"""Folders that are computed once and kept in the user's cache."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from foretoken.core.files import own_cache_folder


def folder_made_once(name: str, write: Callable[[Path], None]) -> Path:
    """A folder of the cache, filled by ``write`` if it is not there yet; no reader ever finds it half full.

    Args:
        name: under the cache folder; identifies its content completely, since it is never written again.
        write: fills the empty folder that it is given.
    """
    place = (own_cache_folder() or Path(tempfile.mkdtemp(prefix="foretoken-"))) / name
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
        unfinished = Path(scratch) / place.name
        unfinished.mkdir()
        write(unfinished)
        try:
            os.replace(unfinished, place)
        except OSError:
            if not place.is_dir():  # else another process was faster: either folder is right
                raise
    return place
