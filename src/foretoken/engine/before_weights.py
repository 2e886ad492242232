"""What can be refused before any weight is read: what configs, tokenizers and the names of files say.

Loading a model takes up to minutes; a mistake in its other options is reported before that. The parts that need these
checks repeat them with the loaded model, and nothing here may refuse a value that they would accept.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

from foretoken import catalog, zoo
from foretoken.core.errors import MismatchError
from foretoken.drafting import learned_part
from foretoken.drafting.published.folder import method_for
from foretoken.engine.intake.vllm_options import METHODS
from foretoken.engine.method_of_model import method_of_model
from foretoken.models.load import load_config, load_tokenizer, source_of
from foretoken.models.vocabulary import different_vocabulary


@dataclass(frozen=True)
class Prospect:
    """A model that is not loaded yet: what learned parts look at to be found."""

    name: str
    source: str
    config: Any


def check(model: str, settings: Mapping[str, Any] | None, **origin: Any) -> None:
    """Refuse a draft model of another vocabulary, and a learned part that is missing or another target's.

    Args:
        model: the target, as typed.
        settings: the ``speculative_config``; engine/compose.py checks the options themselves.
        origin: of the target: ``ModelOptions.origin``.
    Raises:
        ConfigError, ModelError, MismatchError: as the loaded model would be refused.
    """
    settings = dict(settings or {}) if isinstance(settings, Mapping) else {}
    method = settings.get("method") or (
        method_of_model(settings["model"], settings) if settings.get("model") else "none"
    )
    method = METHODS.get(method, method) if isinstance(method, str) else None
    drafter = _class_of(method, "drafter")
    verifier = _class_of(settings.get("verifier"), "verifier")
    if drafter is not None:
        own = {each.name for each in fields(drafter.Config)}
        with contextlib.suppress(TypeError):  # a required option is missing: for engine/compose.py to report
            drafter.Config(**{name: value for name, value in settings.items() if name in own})
    if drafter is not None and drafter.declared.finds_model and settings.get("model"):
        method = method_for(settings["model"])  # a folder of a head, say
        drafter = _class_of(method, "drafter")
    if drafter is not None and drafter.declared.draft_model:
        draft = settings.get("model") or (zoo.DRAFT if zoo.drafts_for(zoo.DRAFT, model) else None)
        translated = "vocabulary" in own and settings.get("vocabulary") != "same"
        if isinstance(draft, str) and not translated:
            check_vocabulary(model, draft, **origin)
    alone = drafter is not None and not drafter.declared.draft_model and not drafter.declared.brought
    config = partial(load_config, model, **origin)
    if alone and drafter.declared.learned_part is not None:
        _check_part(drafter.declared.learned_part, str(method), settings, model, config, also="model")
    if verifier is not None and verifier.declared.learned_part is not None:
        _check_part(verifier.declared.learned_part, str(settings["verifier"]), settings, model, config)


def check_vocabulary(target: str, draft: str, **origin: Any) -> None:
    """Refuse a draft model with another vocabulary than the target's.

    Args:
        origin: of the target: ``ModelOptions.origin``; a draft model has no revision.
    Raises:
        ConfigError, ModelError: one of them cannot be read.
        MismatchError: the vocabularies differ.
    """
    ours, theirs = load_tokenizer(target, **origin), load_tokenizer(draft, **{**origin, "revision": None})
    reason = different_vocabulary(ours, theirs)
    if reason is not None:
        raise MismatchError(
            f"draft model '{draft}' has another vocabulary than '{target}' ({reason}): use a draft with the target's "
            "tokenizer"
        )


def _class_of(name: Any, kind: Literal["drafter", "verifier"]) -> Any:
    """The class of a method of the catalogue; None of others, which are refused or taken later."""
    if not isinstance(name, str) or name not in {entry.name for entry in catalog.entries(kind)}:
        return None
    return catalog.find(name, kind).load()


def _check_part(
    place: str, owner: str, settings: Mapping[str, Any], model: str, config: Callable[[], Any], also: str | None = None
) -> None:
    """Refuse a learned part that is not there, or that says it is another target's.

    Args:
        owner: of the option that names its folder.
        also: another name of the option.
    """
    kind = catalog.imported(place)
    keys = [kind.option, f"{owner}.{kind.option}", *([also] if also else [])]
    given = next((settings[key] for key in keys if settings.get(key)), None)
    source = source_of(model)
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # for the loaded part to say
        learned_part.check_present(kind, given, Prospect(model, source, config()))
