"""Putting a recipe together: a ``speculative_config``, checked against the catalogue and the target.

``speculative_config`` keys: ``method``, ``verifier``, ``num_speculative_tokens``, the fields of the drafter's own
Config, and those of the verifier's, if it has one; a name that both have is written with its owner's before it
(``judge.threshold``, ``kangaroo.threshold``). Without ``verifier`` a drafter that brings a rule of its own
(``own_verifier``) gets that, every other the strongest lossless one, as with ``verifier='auto'``. ``verification.*``
says what the target may leave out when it verifies (methods/sparse/config.py). Everything is checked here, never in the
middle of a run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretoken import catalog
from foretoken.core.errors import ConfigError, ModelError, nearest
from foretoken.core.protocols import Drafter, Verifier
from foretoken.engine.recipe import PlanMaker, Recipe, verifier_named
from foretoken.methods.sparse import config as verifications
from foretoken.methods.sparse.config import VerificationConfig
from foretoken.methods.sparse.confirm import SparseDraft
from foretoken.methods.sparse.dense_refresh import DenseRefresh
from foretoken.methods.sparse.plan import SparseVerification
from foretoken.models.dense import DensePlan

OWN_KEYS = ("method", "verifier", "num_speculative_tokens")
MAX_ADAPTIVE_NODES = 16
_MAX_NODES = 256
_DRAFTER = ("name", "laws", "branches", "propose", "observe", "release")
_RULE = ("name", "promise", "laws", "trees", "verify")


def _options(plug_in: Any) -> list[str]:
    """The names of a method's own options; none where it has no Config."""
    config = getattr(plug_in, "Config", None)
    return [field.name for field in dataclasses.fields(config)] if dataclasses.is_dataclass(config) else []


def _owner(key: str) -> str:
    """A remedy, where the key is an option of verifiers: to name one of them."""
    names = [entry.name for entry in catalog.entries("verifier") if key in _options(entry.load())]
    return f" (an option of verifier {', '.join(map(repr, names))}: add verifier=...)" if names else ""


def build(settings: Mapping[str, Any] | None, target: Any) -> Recipe:
    """Check a ``speculative_config`` against the catalogue and the target, and make the recipe.

    Args:
        settings: the mapping; None or empty is plain decoding. ``method`` and ``verifier`` are names or instances.
        target: the loaded target (drafters compare vocabularies with it).
    Raises:
        ConfigError: unknown method, verifier or key (nearest name offered), or a rule that the draft does not fit.
    """
    if settings is not None and not isinstance(settings, Mapping):
        raise ConfigError(f"speculative_config must be a mapping, not {type(settings).__name__}")
    settings = dict(settings or {})
    verification = verifications.take(settings)
    method = settings.pop("method", None)
    if method is None:
        method = "draft_model" if "model" in settings else "none"
    asked = settings.pop("verifier", None)
    count = settings.pop("num_speculative_tokens", None)
    if count in (None, "auto"):
        num_nodes, adaptive = MAX_ADAPTIVE_NODES, True
    elif isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= _MAX_NODES:
        num_nodes, adaptive = count, False
    else:
        raise ConfigError(
            f"num_speculative_tokens={count!r} must be an integer between 0 and {_MAX_NODES}, or 'auto' for adaptive"
        )
    if method == "none":
        num_nodes, adaptive = 0, False
    if asked is None:  # a drafter may have a rule of its own; 'auto' is lossless
        asked = getattr(
            catalog.find(method, "drafter").load() if isinstance(method, str) else method, "own_verifier", None
        )
    verifier = None if asked in (None, "auto") else _rule(asked, settings, method, target)
    drafter = _named(method, settings, target, verifier) if isinstance(method, str) else _instance(method, settings)
    if verifier is not None:
        _check_fit(drafter.name, drafter, verifier)
    if adaptive and hasattr(drafter, "max_nodes"):  # it has a rule of its own for when to stop
        num_nodes, adaptive = drafter.max_nodes, False
    plan: PlanMaker = DensePlan
    refresh = None
    if verification.sparse:
        _check_budget(verifier, verification)
        plan = SparseVerification(verification, target)
        refresh = DenseRefresh(target, verification.refresh) if verification.refresh else None
    elif verification.confirm:
        drafter = _confirmed(drafter, verification, target, num_nodes)
        if verifier is not None:
            _check_fit(drafter.name, drafter, verifier)
        num_nodes, adaptive = verification.confirm, False
    return Recipe(drafter.name, drafter, verifier, num_nodes, adaptive, verification, plan, refresh)


def _confirmed(drafter: Drafter, verification: VerificationConfig, target: Any, num_nodes: int) -> Drafter:
    """The sparse target drafts on top of the drafter, and the dense target verifies."""
    return SparseDraft(
        drafter,
        target,
        SparseVerification(verification, target),
        dense_below=0 if verification.attention == "off" else verification.dense_below,
        length=verification.confirm,
        inner_length=num_nodes,
    )


def _named(method: str, settings: Mapping[str, Any], target: Any, verifier: Verifier | None) -> Drafter:
    """A drafter of the catalogue with its options; what they leave open may depend on the verifier."""
    drafter_class = catalog.find(method, "drafter").load()
    known = _options(drafter_class)
    settings = _without_owner(settings, method, known)
    for key in settings:
        if key not in known:
            names = [*known, *OWN_KEYS, verifications.KEY, *_options(verifier)]
            raise ConfigError(f"unknown option '{key}' for method '{method}'{_owner(key)}: {nearest(key, names)}")
    try:
        config = drafter_class.Config(**settings)
    except TypeError as error:
        raise ConfigError(f"method '{method}': {str(error).split('__init__() ')[-1]}") from None
    if hasattr(config, "suited_to"):
        config = config.suited_to(verifier)
    drafter: Drafter = drafter_class(config, target)
    return drafter


def _instance(drafter: Any, settings: Mapping[str, Any]) -> Drafter:
    """A drafter of your own; it has been configured by whoever made it."""
    missing = [name for name in _DRAFTER if not hasattr(drafter, name)]
    if isinstance(drafter, type) or missing:
        raise ConfigError(
            f"method={drafter!r} is neither a name nor a drafter ({', '.join(missing) or 'it is a class'}): "
            "give a name of the catalogue, or an instance with the members of core.protocols.Drafter"
        )
    for key in settings:
        raise ConfigError(f"unknown option '{key}'{_owner(key)} beside a drafter that is passed as an instance")
    own: Drafter = drafter
    return own


def _rule(asked: Any, settings: dict[str, Any], method: Any, target: Any) -> Verifier:
    """A verifier by name, or one of your own; takes its options out of ``settings``."""
    if isinstance(asked, str):
        return (
            _with_options(asked, settings, method, target)
            if _options(catalog.find(asked, "verifier").load())
            else verifier_named(asked)
        )
    missing = [name for name in _RULE if not hasattr(asked, name)]
    if isinstance(asked, type) or missing:
        raise ConfigError(
            f"verifier={asked!r} is neither a name nor a verifier ({', '.join(missing) or 'it is a class'}): "
            "give a name of the catalogue, or an instance with the members of core.protocols.Verifier"
        )
    own: Verifier = asked
    return own


def _with_options(name: str, settings: dict[str, Any], method: Any, target: Any) -> Verifier:
    """A verifier of the catalogue that has options of its own, with its head if it has learned something."""
    entry = catalog.find(name, "verifier")
    verifier_class = entry.load()
    known = _options(verifier_class)
    theirs = _options(catalog.find(method, "drafter").load()) if isinstance(method, str) else []
    for key in known:
        if key in settings and key in theirs:
            raise ConfigError(
                f"option '{key}' belongs to method '{method}' and to verifier '{name}': write '{name}.{key}' for the "
                f"verifier's, '{method}.{key}' for the method's"
            )
    typed = {key: settings.pop(key) for key in list(settings) if key in known or _bare(key, name) in known}
    try:
        config = verifier_class.Config(**_without_owner(typed, name, known))
    except TypeError as error:
        raise ConfigError(f"verifier '{name}': {str(error).split('__init__() ')[-1]}") from None
    verifier: Verifier
    if entry.head:
        verifier = verifier_class(config, _head(entry, config.head, target), target.special_ids)
    else:
        verifier = verifier_class(config)
    return verifier


def _bare(key: str, owner: str) -> str:
    """An option's name without its owner's: ``judge.threshold`` is the ``threshold`` of judge."""
    return key.removeprefix(f"{owner}.")


def _without_owner(settings: Mapping[str, Any], owner: str, known: list[str]) -> dict[str, Any]:
    """The owner's options under their bare names; others as they are."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        bare = _bare(key, owner)
        name = bare if bare in known else key
        if name in found:
            raise ConfigError(f"'{name}' and '{owner}.{name}' are one option: keep one")
        found[name] = value
    return found


def _head(entry: catalog.Entry, given: Any, target: Any) -> Any:
    """What a verifier has learned: from the folder that is asked for, or the one beside the target's weights.

    Raises:
        ModelError: there is none, it is damaged, or it was trained for another target.
    """
    try:
        place = Path(given).expanduser() if given else Path(target.source) / entry.name
    except RuntimeError:
        raise ConfigError(f"head={given!r}: there is no such home folder") from None
    if not place.is_dir():
        raise ModelError(
            f"no head of verifier '{entry.name}' for '{target.name}' in {place}: make one with 'foretoken train "
            f"{entry.name} --target {target.name} --draft DRAFT --out DIR' and give --set head=DIR"
        )
    head = entry.load_head().load(place)
    head.check_target(target)
    return head


def _check_budget(verifier: Verifier | None, verification: VerificationConfig) -> None:
    """A budget is counted against the target's law, which a sparse verification does not know."""
    budget = getattr(getattr(verifier, "config", None), "max_distortion", None)
    if budget is not None:
        raise ConfigError(
            f"max_distortion={budget:g} cannot be kept with sparse verification ({verification.in_words}): how far a "
            "sparse step is from the target is not known; leave one of them out"
        )


def _check_fit(method: str, drafter: Drafter, verifier: Verifier) -> None:
    if drafter.branches and not verifier.trees:
        raise ConfigError(
            f"verifier='{verifier.name}' verifies chains, but method '{method}' is set to propose trees: "
            "use verifier='recursive' or 'match', or let the method propose chains"
        )
    if getattr(verifier, "trusts_judge", False) and not getattr(drafter, "judges", False):
        raise ConfigError(
            f"verifier='{verifier.name}' leaves tokens untested where the drafter's own judge approves, but method "
            f"'{method}' has none: use method='sprinter', or another verifier"
        )
    for law in drafter.laws:
        if law not in verifier.laws:
            raise ConfigError(
                f"verifier='{verifier.name}' is not valid for drafts of kind {law.__name__}, "
                f"which '{method}' proposes: leave the verifier out to get one that is"
            )
