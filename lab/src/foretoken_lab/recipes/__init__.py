"""One file per model of the zoo, or per stage of its training; this table finds them by name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from foretoken.core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from foretoken.train.recipe import Recipe

NAMES = (
    "base",
    "base-tasks",
    "base-tasks-2",
    "base-tasks-3",
    "base-tasks-4",
    "base-reflect",
    "draft",
    "moe",
    "hybrid",
    "mamba",
    "diffusion",
    "long",
    "base-ee",
)


def find(name: str) -> Recipe:
    """The recipe of a zoo model, or of a later stage of one.

    Raises:
        ConfigError: there is none of this name; the message offers the nearest.
    """
    if name not in NAMES:
        raise ConfigError(f"--recipe {name}: {nearest(name, NAMES)}")
    recipe: Recipe = import_module(f"foretoken_lab.recipes.{name.replace('-', '_')}").RECIPE
    return recipe
