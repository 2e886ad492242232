"""The bundled small models: ordinary Hugging Face folders beside this file, ``zoo:NAME`` wherever a model is asked."""

from __future__ import annotations

from pathlib import Path

from foretoken.core.errors import ConfigError, nearest

PREFIX = "zoo:"
_HERE = Path(__file__).resolve().parent
_DESCRIPTIONS = {
    "base": "the target of the first pair: Llama layout, 8 layers, width 384, 15.7 M parameters, chat template",
    "draft": "the draft of the first pair: Llama layout, 2 layers, width 192, 2.4 M parameters, same tokenizer",
}


def names() -> list[str]:
    """The bundled models: every folder beside this file that holds a ``config.json``."""
    return sorted(folder.parent.name for folder in _HERE.glob("*/config.json"))


def path(name: str) -> Path:
    """The folder of a bundled model, by ``NAME`` or ``zoo:NAME``.

    Raises:
        ConfigError: there is no such model; the message offers the nearest name.
    """
    short = name.removeprefix(PREFIX)
    if short not in names():
        raise ConfigError(f"unknown zoo model '{short}': {nearest(short, names())}")
    return _HERE / short


def describe(name: str) -> str:
    """One line about a bundled model."""
    return _DESCRIPTIONS.get(path(name).name, "see the README beside it")
