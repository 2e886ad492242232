"""What the decision of ``auto`` has learned, kept between runs: one small file a model, recipe and machine.

    auto-<hash of the key>.json    {"key": {...}, "learned": {...}}    in the user's cache folder

A record is a prior, not a decision: all of it weighs as much as a few observations, so that a few steps of another kind
of text outweigh it. ``FORETOKEN_KEPT_GB=0`` reads and writes none.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from time import monotonic
from typing import Any

import torch

from foretoken.core.errors import ForetokenError
from foretoken.core.files import own_cache_folder, write_whole
from foretoken.core.provenance import cpu_name
from foretoken.engine.draft_length.controller import Controller
from foretoken.engine.recipe import Recipe
from foretoken.models.fingerprint import fingerprint_of
from foretoken.native import variants
from foretoken.native.kept_tiles import most_kept

FORMAT = 1
_MOST_FILES, _MOST_BYTES = 64, 1 << 16
_PAUSE = 60.0  # seconds between two writes

log = logging.getLogger(__name__)


def machine_of(target: Any) -> dict[str, Any]:
    """What the cost of a row depends on, besides the model."""
    variant = "general" if target.native_decoder is None else variants.of_this_machine()[0].name
    return {"processor": cpu_name(), "variant": variant, "threads": torch.get_num_threads()}


class Record:
    """The file of one model, recipe and machine; none for recipes that do not decide by themselves what drafts.

    Args:
        target: the loaded model.
        recipe: over it.
    """

    def __init__(self, target: Any, recipe: Recipe) -> None:
        self._path = None
        self._learned_at, self._new = monotonic(), False
        drafter = recipe.drafter
        if not (drafter.declared.finds_model and recipe.may_skip_drafting and most_kept() > 0):
            return
        with suppress(ForetokenError):  # a model without a folder
            own = [repr(drafter.config), drafter.sources, recipe.verifier and recipe.verifier.name]
            model = [fingerprint_of(target.source), target.precision, target.kv_cache_dtype]
            key = {"format": FORMAT, "version": version("foretoken"), "model": model, "recipe": own}
            self._key = json.dumps({**key, **machine_of(target)}, sort_keys=True)
            folder = own_cache_folder()
            if folder is None:
                log.warning("what auto learns is not kept: there is no cache folder that only this user can write to")
            else:
                self._path = folder / f"auto-{hashlib.sha256(self._key.encode()).hexdigest()[:20]}.json"

    def taught(self, make: Callable[[], Controller]) -> Controller:
        """A controller that begins with the record, if there is one."""
        found = make()
        if self._path is None:
            return found
        try:
            with self._path.open("rb") as file:
                found.recall(json.loads(file.read(_MOST_BYTES))["learned"])
        except FileNotFoundError:
            return found
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("%s is damaged (%s: %s): auto begins anew", self._path, type(error).__name__, error)
            return make()
        return found

    def keep(self, controller: Controller) -> None:
        """Take in that an answer has ended; writes once a minute at most."""
        self._new = True
        if monotonic() - self._learned_at > _PAUSE:
            self.write(controller)

    def write(self, controller: Controller) -> None:
        """Write the record, if an answer has ended since the last time."""
        if self._path is None or not self._new:
            return
        self._learned_at, self._new = monotonic(), False
        try:
            write_whole(self._path, json.dumps({"key": json.loads(self._key), "learned": controller.learned()}))
        except ForetokenError as error:
            log.warning("what auto learns is not kept: %s", error)
            self._path = None
            return
        with suppress(OSError):  # another process may remove them, too
            files = sorted(self._path.parent.glob("auto-*.json"), key=os.path.getmtime)
            for path in files[:-_MOST_FILES]:
                path.unlink()
