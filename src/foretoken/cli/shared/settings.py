"""Convert ``--method``, ``--set`` and ``--draft-model`` to a ``speculative_config``."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from foretoken import catalog, zoo
from foretoken.core.errors import ConfigError
from foretoken.core.files import check_name, check_readable
from foretoken.drafting.published.folder import method_for, takes
from foretoken.drafting.published.layouts import DRAFT_MODEL
from foretoken.engine.method_of_model import method_of_model
from foretoken.options.option import Option

DEFAULT_MODEL = "zoo:base"
DEFAULT_METHOD = "auto"
DEFAULT_DRAFT = zoo.DRAFT
DRAFT_MODEL_HELP = "Draft checkpoint, or the folder of a published draft head; the default for zoo:base is zoo:draft."
_NEXT_SETTING = re.compile(r"\+(?=[A-Za-z_][\w.]*=)")  # a key may have parts: judge.threshold, verification.ffn


def split_settings(text: str) -> list[str]:
    """Split a name and the ``key=value`` pairs after it: ``ngram+max_ngram=4``."""
    return _NEXT_SETTING.split(text)


def parse_setting(text: str, option: str = "--set") -> tuple[str, Any]:
    """Parse ``key=value``; the value is JSON (4, 0.5, true, null) if it parses, else a string."""
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
    """Parse several ``key=value``; a repeated key is an error."""
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
    """Return the ``speculative_config`` of one method, with its draft model.

    The method's own Config checks keys and values when the engine is built; this function checks only what needs no
    import of the method.

    Args:
        method: a drafter of the catalogue.
        settings: the values of ``--set``.
        target: the name of the model.
        draft_model: the value of ``--draft-model``.
    Raises:
        ConfigError: unknown method, contradictory options, or a missing or superfluous draft model.
    """
    entry = find_method(method)
    config: dict[str, Any] = {"method": method, **settings}
    if "method" in settings:
        raise ConfigError("--set method=...: use --method")
    declared = entry.load().declared
    wants_draft = declared.draft_model
    if draft_model is not None:
        own = method_for(draft_model)
        part = declared.learned_part is not None and own == DRAFT_MODEL  # its folder may be missing: it says so itself
        if not part and not takes(method, entry.load(), draft_model):
            named = "" if own == DRAFT_MODEL else f"; {draft_model} is for method '{own}'"
            raise ConfigError(f"--draft-model does not apply to method '{method}', which needs {entry.needs}{named}")
        if config.setdefault("model", draft_model) != draft_model:
            raise ConfigError(f"--draft-model {draft_model} contradicts --set model={config['model']}: keep one")
    if wants_draft and not declared.finds_model and not config.get("model"):
        if not zoo.drafts_for(DEFAULT_DRAFT, target):
            raise ConfigError(f"method '{method}' needs {entry.needs}: add --draft-model PATH, or try --method suffix")
        config["model"] = DEFAULT_DRAFT
    for key, value in config.items():
        if isinstance(value, str):
            check_name(value, f"{key:.60}=")
    return config


@dataclass(frozen=True, kw_only=True)
class RecipeFlags:
    """The flags from which a command makes its ``speculative_config``."""

    method: Annotated[str | None, Option("Drafting method; 'foretoken methods' lists them.", says_default="auto")] = (
        None
    )
    sets: Annotated[
        Sequence[str] | None,
        Option(
            "An option of the method, num_speculative_tokens, verifier, or verification.*.",
            name="set",
            metavar="KEY=VALUE",
        ),
    ] = None
    draft_model: Annotated[str | None, Option(DRAFT_MODEL_HELP, metavar="MODEL")] = None
    plan: Annotated[
        Path | None,
        Option("Method and options as 'foretoken plan --out FILE' chose them for this model.", metavar="FILE"),
    ] = None

    def config(self, target: str) -> dict[str, Any]:
        """Return the ``speculative_config`` for a target.

        The default method is auto; with a draft model, see :func:`foretoken.engine.method_of_model.method_of_model`.
        """
        if self.plan is not None:
            for option, value in (("--method", self.method), ("--set", self.sets), ("--draft-model", self.draft_model)):
                if value:
                    raise ConfigError(f"--plan {self.plan} decides method and options: leave {option} out, or --plan")
            check_readable(self.plan, "--plan")
            return {"plan": str(self.plan.resolve())}
        if self.method is not None and not self.method.strip():
            raise ConfigError("--method is empty: use a name from 'foretoken methods', or leave it out")
        settings, draft = parse_settings(self.sets or []), self.draft_model
        name = self.method or (DEFAULT_METHOD if draft is None else method_of_model(draft, settings))
        return speculative_config(name, settings, target=target, draft_model=draft)


def parse_numbers(text: str, option: str, kind: Callable[[str], Any], *, least: int | None = None) -> list[Any]:
    """Parse ``A,B,…`` as numbers; duplicates, and values below ``least``, are an error."""
    values = []
    for piece in text.split(","):
        try:
            value = kind(piece.strip())
        except ValueError:
            what = "whole numbers" if kind is int else "numbers"
            raise ConfigError(f"{option} '{text}': write {what} with commas between them, for example 1,2") from None
        if least is not None and value < least:
            raise ConfigError(f"{option} {value}: at least {least} is needed")
        if value in values:
            raise ConfigError(f"{option} names {piece.strip()} twice: keep one")
        values.append(value)
    return values


def find_method(name: str) -> catalog.Entry:
    """Return the drafter of this name.

    Raises:
        ConfigError: there is none, or it is a verifier or a plan; the message has the option for it.
    """
    kinds = {
        entry.kind for entry in catalog.entries() if entry.name == name
    }  # a drafter and a verifier may have the same name
    if kinds == {"verifier"}:
        raise ConfigError(f"'{name}' is a verifier, not a method: write --method NAME --set verifier={name}")
    if kinds == {"plan"}:
        how = catalog.find(name, "plan").needs.removesuffix(", with any method")
        raise ConfigError(f"'{name}' is not a method: write {how}")
    return catalog.find(name, "drafter")
