"""Convert ``--methods`` to the rows of a benchmark."""

import re
from collections.abc import Sequence
from typing import Any

from foretoken.bench.harness import BASELINE, Method
from foretoken.cli.shared.settings import find_method, parse_setting, parse_settings, speculative_config, split_settings
from foretoken.core.errors import ConfigError, nearest
from foretoken.drafting.published.folder import method_for, takes

_KEY = re.compile(r"[A-Za-z_]\w*")


def parse_methods(text: str, sets: Sequence[str], *, target: str, draft_model: str | None = None) -> list[Method]:
    """Return the methods of a benchmark, the baseline first.

    ``ngram,draft_model+num_speculative_tokens=4`` names two methods, the second with its own option; ``sets`` holds
    ``METHOD.key=value`` as defaults for all entries of that method.
    """
    shared = _parse_method_sets(sets)
    pieces = [piece.strip() for piece in text.split(",")]
    if not all(pieces):
        raise ConfigError(f"--methods '{text}': write comma-separated names, for example ngram,suffix")
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
            continue  # the baseline is always present and first
        settings = {**shared.get(name, {}), **own_settings}
        # the method's own draft model overrides the common one
        given = draft_model is not None and "model" not in settings
        draft = draft_model if given and takes(name, find_method(name).load(), draft_model) else None
        config = speculative_config(name, settings, target=target, draft_model=draft)
        if any(config == other.config for other in methods):
            raise ConfigError(f"--methods names '{label}' twice: keep one")
        methods.append(Method(label, config))
    return methods


def check_draft_is_used(draft_model: str | None, methods: Sequence[Method]) -> None:
    """Refuse ``--draft-model`` if no method uses it."""
    if draft_model is not None and all(method.config.get("model") != draft_model for method in methods):
        own = method_for(draft_model)
        raise ConfigError(f"--draft-model does not apply to any of --methods: leave it out, or add {own}")


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
