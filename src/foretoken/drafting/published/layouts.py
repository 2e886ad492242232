"""The layouts of published drafters (layouts.json), and the one that a folder has.

Names of tensors decide, keys of ``config.json`` distinguish what names leave open; the first fitting row counts.
A row with ``refused`` is known and not run: its folder is refused by name, with the reason.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from foretoken.core.errors import ModelError

EAGLE, DFLASH, PARD, DRAFT_MODEL = "eagle", "dflash", "pard", "draft_model"  # methods
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One layout.

    Attributes:
        name: the maker and the kind of network, for messages and tables.
        method: name of the method that runs it; empty: the config's ``speculators_model_type``.
        keys: keys of the config, with dots for objects within objects, and their values; no values: it is there.
        tensors: patterns; each one occurs in the name of a tensor.
        refused: why it is not run, and a remedy (``instead`` in the file, or the usual one); empty: it is run.
        renamed: beginnings of names and what the network calls them.
        ids: key of the tapped layers, or several with bars between them.
        counting: whether an id k means the input of layer k (the stream after k layers), its output (after k + 1), or
            either: the output where the first id is 1, as vLLM and SGLang read these.
    """

    name: str
    method: str = ""
    keys: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    tensors: Sequence[str] = ()
    refused: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)
    ids: str = ""
    counting: Literal["inputs", "outputs", "either"] = "inputs"

    def fits(self, config: Mapping[str, Any], names: Iterable[str]) -> bool:
        """Whether a folder with this config and these tensors has the layout."""
        for key, values in self.keys.items():
            found = value_of(config, key)
            if found is None or (values and found not in values):
                return False
        return all(any(re.search(pattern, name) for name in names) for pattern in self.tensors)

    def depths(self, ids: Iterable[int]) -> tuple[int, ...]:
        """Numbers of layers after which the target's stream is read."""
        found = tuple(ids)
        more = self.counting == "outputs" or (self.counting == "either" and found[:1] == (1,))
        return tuple(each + 1 for each in found) if more else found

    def own_names(self, tensors: Mapping[str, _Value]) -> dict[str, _Value]:
        """Return tensors by the network's names, without those that follow from the config."""
        found = {}
        for name, value in tensors.items():
            if not IGNORABLE.search(name):
                for old, new in self.renamed.items():
                    name = new + name.removeprefix(old) if name.startswith(old) else name
                found[name] = value
        return found


_ELSEWHERE = "use an EAGLE-3, DFlash or PARD drafter of the target, or a draft model"


def _read() -> tuple[Layout, ...]:
    rows = json.loads((Path(__file__).parent / "layouts.json").read_text(encoding="utf-8"))
    for row in rows:
        if "refused" in row:
            row["refused"] += f": {row.pop('instead', _ELSEWHERE)}"
    return tuple(Layout(**row) for row in rows)


LAYOUTS = _read()
"""Of layouts.json, most special first."""

MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")

IGNORABLE = re.compile(r"rotary_emb\.inv_freq$")
"""Tensors that follow from the config."""


def value_of(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key with dots for objects within objects; None where it is missing."""
    found: Any = config
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def stated(config: Mapping[str, Any], name: str, nested: str) -> Any:
    """Return the value of an option at the top or in an object of the config; None: neither has it.

    Raises:
        ValueError: they contradict each other.
    """
    top, inner = config.get(name), value_of(config, f"{nested}.{name}")
    if top is not None and inner is not None and top != inner:
        raise ValueError(f"{name}={top!r}, but {nested}.{name}={inner!r}")
    return top if inner is None else inner


def mask_token_of(config: Mapping[str, Any], nested: str) -> Any:
    """Return the token of mask rows, which has several names; None: there is none."""
    return next((value for name in MASK_KEYS if (value := stated(config, name, nested)) is not None), None)


def recognise(config: Mapping[str, Any], names: Iterable[str]) -> Layout:
    """Return the layout of a folder.

    Args:
        config: content of its ``config.json``.
        names: of its tensors.
    Raises:
        ModelError: it has none that is known, or one that is refused.
    """
    given = list(names)
    for layout in LAYOUTS:
        if layout.fits(config, given):
            if layout.refused:
                raise ModelError(f"{layout.name}: {layout.refused}")
            return layout
    shown = ", ".join(sorted(given)[:3])
    raise ModelError(f"no known drafter or language model: its tensors are {shown}, …; {_ELSEWHERE}")
