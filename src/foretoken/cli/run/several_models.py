"""The file of ``foretoken serve --models``: a table for each model, with the options of the command under their names.

["qwen"]
model = "./qwen3-4b"
method = "suffix"
dtype = "int8"
served_model_name = ["gpt-4o"]
lora = { sql = "./sql-adapter" }
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.cli.shared.options import check_model_name, named_folders
from foretoken.cli.shared.settings import RecipeFlags
from foretoken.core.errors import ConfigError, ForetokenError, nearest
from foretoken.options.model import EngineOptions, ModelOptions
from foretoken.serve.tool_formats import check_parser

if TYPE_CHECKING:  # it imports what loads models
    from foretoken.serve.model_pool import ModelSettings

REASONING = {"auto": None, "on": True, "off": False}
_OWN = {  # name of an option -> the types of its value
    **dict.fromkeys(("model", "method", "draft_model", "plan", "reasoning", "tool_parser"), (str,)),
    "served_model_name": (str, list),
    "set": (dict,),
    "lora": (dict,),
}
_KINDS = (ModelOptions, EngineOptions)
_OPTIONS = {each.name: kind for kind in _KINDS for each in fields(kind) if each.name != "threads"}  # of the process


def read_models(path: Path, given: ModelSettings) -> list[ModelSettings]:
    """Read the settings of all models.

    Args:
        given: by the command line, for models that do not set them.
    Raises:
        ConfigError: the file cannot be read, two models have one name, or an option is unknown or out of range.
    """
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        tables = toml.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--models {path}: {error}") from None
    found: list[ModelSettings] = []
    for name, table in tables.items():
        try:
            found.append(_settings(name, table, given))
        except ForetokenError as error:
            raise ConfigError(f"--models {path}, [{name}]: {error}") from None
    names = [name for each in found for name in (*each.names, *each.adapters)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"--models {path}: '{twice}' names two models or adapters: rename one")
    if not found:
        raise ConfigError(f"--models {path} names no model: write a table for each, with model = PATH")
    return found


def _settings(name: str, table: Any, given: ModelSettings) -> ModelSettings:
    if not isinstance(table, dict) or "model" not in table:
        raise ConfigError("a model is a table with model = PATH and options")
    if "*" in name:
        raise ConfigError("the name of a table is that of /v1/models: write it without *, which aliases may have")
    for key, value in table.items():
        if key not in _OWN and key not in _OPTIONS:
            raise ConfigError(f"{key}: {nearest(key, [*_OWN, *_OPTIONS])}")
        if key in _OWN and not isinstance(value, _OWN[key]):
            kinds = " or ".join({str: "a text", list: "a list", dict: "a table"}[kind] for kind in _OWN[key])
            raise ConfigError(f"{key} = {value!r:.60} must be {kinds}")
    options = {**given.options, **{key: value for key, value in table.items() if key in _OPTIONS}}
    for kind in _KINDS:
        checked = kind(**{key: options[key] for key, of in _OPTIONS.items() if of is kind and key in options})
        options |= {key: value for key, value in asdict(checked).items() if key in options}
    check_model_name(table["model"], "model =")
    reasoning, aliases, plan = table.get("reasoning", "auto"), table.get("served_model_name", []), table.get("plan")
    if reasoning not in REASONING:
        raise ConfigError(f"reasoning = {reasoning}: {nearest(reasoning, REASONING)}")
    check_parser(table.get("tool_parser", "auto"))
    config, values = given.config, table.get("set", {}).items()
    if {"method", "set", "draft_model", "plan"} & set(table):
        flags = RecipeFlags(
            method=table.get("method"),
            sets=[f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values],
            draft_model=table.get("draft_model"),
            plan=None if plan is None else Path(plan),
        )
        config = flags.config(table["model"])
    return replace(
        given,
        model=table["model"],
        config=config,
        names=tuple(dict.fromkeys([name, *([aliases] if isinstance(aliases, str) else map(str, aliases))])),
        options=options,
        reasoning=REASONING[reasoning] if "reasoning" in table else given.reasoning,
        tool_parser=table.get("tool_parser", given.tool_parser),
        adapters=named_folders(f"{key}={value}" for key, value in table.get("lora", {}).items()),
    )
