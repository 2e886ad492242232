"""From what was typed to a ``speculative_config``: ``--set`` values, draft models, and the methods of a benchmark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foretoken import catalog, zoo
from foretoken.bench.harness import BASELINE, Method
from foretoken.core.errors import ConfigError, nearest
from foretoken.core.files import check_name

DEFAULT_MODEL = "zoo:base"
DEFAULT_METHOD = "suffix"
DEFAULT_DRAFT = zoo.DRAFT
_KEY = re.compile(r"[A-Za-z_]\w*")
_NEXT_SETTING = re.compile(r"\+(?=[A-Za-z_][\w.]*=)")  # a key may have parts: judge.threshold, verification.ffn


def split_settings(text: str) -> list[str]:
    """A name and the ``key=value`` that are written behind it: ``ngram+max_ngram=4``."""
    return _NEXT_SETTING.split(text)


def parse_setting(text: str, option: str = "--set") -> tuple[str, Any]:
    """``key=value`` with the value read as JSON where it is JSON (4, 0.5, true, null), else as a string."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"{option} '{text}': write key=value, for example num_speculative_tokens=4")
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        parsed = value
    return key, parsed if not isinstance(parsed, dict) else value


def parse_settings(texts: Sequence[str], option: str = "--set") -> dict[str, Any]:
    """Several ``key=value``; a key given twice is an error."""
    settings: dict[str, Any] = {}
    for text in texts:
        key, value = parse_setting(text, option)
        if key in settings:
            raise ConfigError(f"{option} gives '{key}' twice: keep one")
        settings[key] = value
    return settings


def speculative_config(
    method: str, settings: Mapping[str, Any], *, target: str, draft_model: str | None = None
) -> dict[str, Any]:
    """The ``speculative_config`` of one method, with its draft model filled in.

    Keys and values are checked by the method's own Config when the engine is built; here only what can be said
    without importing it.

    Args:
        method: a drafter of the catalogue.
        settings: what ``--set`` gave.
        target: the model, as typed.
        draft_model: what ``--draft-model`` gave.
    Raises:
        ConfigError: unknown method, contradictory options, or a draft model that is missing or not wanted.
    """
    entry = _find_method(method)
    config: dict[str, Any] = {"method": method, **settings}
    if "method" in settings:
        raise ConfigError("--set method=...: use --method")
    wants_draft = entry.load().declared.draft_model
    if draft_model is not None:
        if not wants_draft:
            raise ConfigError(f"--draft-model does not go with method '{method}', which needs {entry.needs}")
        if config.setdefault("model", draft_model) != draft_model:
            raise ConfigError(f"--draft-model {draft_model} contradicts --set model={config['model']}: keep one")
    if wants_draft and not config.get("model"):
        if not zoo.drafts_for(DEFAULT_DRAFT, target):
            raise ConfigError(f"method '{method}' needs {entry.needs}: add --draft-model PATH, or try --method suffix")
        config["model"] = DEFAULT_DRAFT
    for key, value in config.items():
        if isinstance(value, str):
            check_name(value, f"{key:.60}=")
    return config


def chosen_recipe(
    method: str | None, sets: Sequence[str] | None, *, target: str, draft_model: str | None
) -> dict[str, Any]:
    """The ``speculative_config`` of a command with ``--method``, ``--set`` and ``--draft-model``.

    Without a method, a draft model drafts if there is one, else the text's own suffixes do.
    """
    if method is not None and not method.strip():
        raise ConfigError("--method is empty: name one of 'foretoken methods', or leave it out")
    name = method or (DEFAULT_METHOD if draft_model is None else "draft_model")
    return speculative_config(name, parse_settings(sets or []), target=target, draft_model=draft_model)


def parse_numbers(text: str, option: str, kind: Callable[[str], Any]) -> list[Any]:
    """``A,B,…`` as numbers, none twice."""
    values = []
    for piece in text.split(","):
        try:
            value = kind(piece.strip())
        except ValueError:
            what = "whole numbers" if kind is int else "numbers"
            raise ConfigError(f"{option} '{text}': write {what} with commas between them, for example 1,2") from None
        if value in values:
            raise ConfigError(f"{option} names {piece.strip()} twice: keep one")
        values.append(value)
    return values


def parse_knobs(texts: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    """``RULE.OPTION=A,B,…`` as rule -> option -> values, in the order given."""
    knobs: dict[str, dict[str, list[Any]]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        rule, dot, key = name.strip().partition(".")
        if not equals or not dot or not rule or not key:
            raise ConfigError(f"--knob '{text}': write RULE.OPTION=A,B,…, for example typical.epsilon=0.05,0.1,0.3")
        parsed = [parse_setting(f"{key}={value.strip()}", "--knob")[1] for value in values.split(",")]
        if "" in parsed:
            raise ConfigError(f"--knob '{text}': write values with commas between them, for example {name}=0.1,0.3")
        if len(set(map(str, parsed))) < len(parsed):
            raise ConfigError(f"--knob '{text}' names a value twice: keep one")
        if key in knobs.setdefault(rule, {}):
            raise ConfigError(f"--knob gives '{name}' twice: put all values into one")
        knobs[rule][key] = parsed
    return knobs


def parse_methods(text: str, sets: Sequence[str], *, target: str, draft_model: str | None = None) -> list[Method]:
    """The methods of a benchmark, the baseline first.

    ``ngram,draft_model+num_speculative_tokens=4`` names two methods, the second with an option of its own; ``sets``
    holds ``METHOD.key=value`` for every entry of that method that does not say otherwise.
    """
    shared = _parse_method_sets(sets)
    pieces = [piece.strip() for piece in text.split(",")]
    if not all(pieces):
        raise ConfigError(f"--methods '{text}': write names with commas between them, for example ngram,suffix")
    parsed: list[tuple[str, str, dict[str, Any]]] = []
    for piece in pieces:
        name, *own = split_settings(piece)
        parsed.append((piece, name, parse_settings(own, f"--methods {name}+")))
    names = {name for _, name, _ in parsed}
    for name in shared:
        if name not in names:
            raise ConfigError(f"--set {name}.…: '{name}' is not among --methods; {nearest(name, names)}")
    methods = [Method(BASELINE, {"method": BASELINE})]
    for label, name, own_settings in parsed:
        if label == BASELINE:
            continue  # always there, always first
        wants = _find_method(name).load().declared.draft_model
        settings = {**shared.get(name, {}), **own_settings}
        # a draft of the method's own wins over the one for all
        draft = draft_model if wants and "model" not in settings else None
        config = speculative_config(name, settings, target=target, draft_model=draft)
        if any(config == other.config for other in methods):
            raise ConfigError(f"--methods names '{label}' twice: keep one")
        methods.append(Method(label, config))
    return methods


def check_draft_is_used(draft_model: str | None, methods: Sequence[Method]) -> None:
    """Refuse a draft model that was asked for and that no method takes."""
    if draft_model is not None and not any(method.config.get("model") for method in methods):
        raise ConfigError("--draft-model does not go with any of --methods: leave it out, or add draft_model")


def _parse_method_sets(sets: Sequence[str]) -> dict[str, dict[str, Any]]:
    shared: dict[str, dict[str, Any]] = {}
    for text in sets:
        name, dot, setting = text.partition(".")
        if not dot or not _KEY.fullmatch(name) or "=" not in setting:
            raise ConfigError(f"--set '{text}': write METHOD.key=value, for example ngram.num_speculative_tokens=4")
        key, value = parse_setting(setting)
        if key in shared.setdefault(name, {}):
            raise ConfigError(f"--set gives '{name}.{key}' twice: keep one")
        shared[name][key] = value
    return shared


def _find_method(name: str) -> catalog.Entry:
    kinds = {entry.kind for entry in catalog.entries() if entry.name == name}  # one name may be both
    if kinds == {"verifier"}:
        raise ConfigError(f"'{name}' is a verifier, not a method: write --method NAME --set verifier={name}")
    if kinds == {"plan"}:
        how = catalog.find(name, "plan").needs.removesuffix(", beside any method")
        raise ConfigError(f"'{name}' goes beside a method: write {how}")
    return catalog.find(name, "drafter")
