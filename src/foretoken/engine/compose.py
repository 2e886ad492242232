"""Putting a recipe together: a ``speculative_config``, checked against the catalogue and the target.

``speculative_config`` keys: ``method``, ``verifier``, ``num_speculative_tokens``, ``executor``, ``lane``, ``plan``, the
fields of the drafter's own Config, and those of the verifier's, if it has one; a name that both have is written with
its owner's before it (``judge.threshold``, ``kangaroo.threshold``). Without ``verifier`` a drafter that declares a rule
of its own gets that, every other the strongest lossless one, as with ``verifier='auto'``. The settings of a plan begin
with its key (``verification.ffn``). The needs of one part and the offers of another are matched here, once, never in
the middle of a run.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from foretoken import catalog, zoo
from foretoken.core.errors import ConfigError, nearest
from foretoken.core.files import check_name
from foretoken.core.needs import Declared, Needs, Offers
from foretoken.core.plain import plain, without_idle
from foretoken.core.protocols import Drafter, PlanMaker, Verifier
from foretoken.drafters.extended import ExtendedDrafter
from foretoken.drafting import learned_part
from foretoken.engine.executors.remote.target import RemoteDrafter
from foretoken.engine.executors.worker_thread import split
from foretoken.engine.intake.vllm_options import METHODS, SPECULATION, UNASKED_SPECULATION
from foretoken.engine.method_of_model import method_of_model
from foretoken.engine.recipe import MAX_NODES, Recipe, verifier_named
from foretoken.forward.dense import DensePlans
from foretoken.options.option import declared
from foretoken.options.recipe import RecipeOptions

OWN_KEYS = tuple(each.name for each in declared(RecipeOptions))
_DENSE = "dense"


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
    settings = without_idle({key: plain(value) for key, value in (settings or {}).items()}, UNASKED_SPECULATION)
    for key in settings:
        if not isinstance(key, str):
            raise ConfigError(f"speculative_config has the key {key!r:.60}: keys are names of options")
        if isinstance(settings[key], str):
            check_name(settings[key], f"{key:.60}=")
    own = RecipeOptions(**{key: value for key, value in settings.items() if key in OWN_KEYS})
    plan = plan_of(settings, target)
    given = set(settings)
    if settings.get("num_speculative_tokens") is not None and not settings.keys() & {"method", "model"}:
        raise ConfigError("num_speculative_tokens is given without a method: add 'method', for example 'suffix'")
    for key in OWN_KEYS:
        settings.pop(key, None)
    method, wanted, executor, lane = own.method, own.verifier, own.executor, own.lane
    if method is None:
        method = method_of_model(settings["model"], given) if "model" in settings else "none"
    if isinstance(method, str):
        method = METHODS.get(method, method)
    _check_lane(lane, executor, method)
    num_nodes, adaptive = _length(own.num_speculative_tokens, method)
    if wanted is None:  # a drafter may have a rule of its own; 'auto' is lossless
        wanted = _class_of(method).declared.own_verifier
    verifier = None if wanted in (None, "auto") else _rule(wanted, settings, method, target)
    if isinstance(method, str):
        drafter, config = _named(method, settings, target, verifier)
    else:
        drafter, config = _instance(method, settings), None
    if own.extend is not None:
        if not adaptive:
            raise ConfigError(
                f"extend='{own.extend}' appends copies while they are measured to pay: leave num_speculative_tokens out"
            )
        if verifier is not None and (verifier.needs.evidence is not None or verifier.offers.takes_turns):
            raise ConfigError(
                f"verifier='{verifier.name}' looks at more of a draft than its tokens and their distribution, which a "
                "copy does not have: leave extend out"
            )
        drafter = ExtendedDrafter(drafter)
    if verifier is not None:
        _match(drafter, verifier, plan)
    may_skip_drafting = adaptive
    if adaptive and drafter.offers.length is not None:  # it has a rule of its own for when to stop
        num_nodes, adaptive = drafter.offers.length, False
        may_skip_drafting = drafter.offers.may_skip_drafting and (verifier is None or verifier.promise != "approximate")
    wrapped, count = plan.wrap(drafter, num_nodes)
    if wrapped is not drafter and verifier is not None:
        _match(wrapped, verifier, plan)
    if count is not None:
        num_nodes, adaptive, may_skip_drafting = count, False, False
    if num_nodes == 0 and verifier is not None and verifier.offers.takes_turns:
        raise ConfigError(
            f"num_speculative_tokens=0 with verifier='{verifier.name}' leaves no turn to the drafter: leave it out, or "
            "use method='none' for the target alone"
        )
    recipe = Recipe(
        wrapped.name, wrapped, verifier, num_nodes, adaptive, may_skip_drafting and num_nodes > 0, plan, executor
    )
    reason = "" if executor == "serial" else _why_serial(recipe)
    if reason and executor == "auto":
        return dataclasses.replace(recipe, executor="serial", explanation=f"executor=serial, because {reason}")
    if reason:
        raise ConfigError(f"executor='{executor}' does not go with this recipe: {reason}; use executor='serial'")
    if lane == "process":
        return dataclasses.replace(recipe, drafter=RemoteDrafter(drafter, config, target, split()[1]))
    return recipe


def _check_lane(lane: Any, executor: str, method: Any) -> None:
    """Refuse a place for drafting ahead that is not available, or where nothing is drafted ahead."""
    if lane == "process" and executor == "serial":
        raise ConfigError(f"lane='{lane}' does nothing with executor='serial': use executor='pearl' or 'auto'")
    if lane == "process" and not isinstance(method, str):
        raise ConfigError("lane='process' makes the drafter anew, and yours is an instance: use lane='thread'")


def _why_serial(recipe: Recipe) -> str:
    """Why the drafter cannot propose while the target computes; "" where it can."""
    drafter, verifier = recipe.drafter, recipe.verifier
    if recipe.num_nodes == 0:
        return "nothing is drafted"
    if drafter.offers.resumes or drafter.needs.hidden_layers is not None:
        return f"method '{drafter.name}' drafts with what the target computes, and has to wait for it"
    if not drafter.offers.ahead:
        return (
            f"method '{drafter.name}' does not offer to draft ahead: its drafts cost too little to be hidden, or "
            "follow from more than tokens"
        )
    if drafter.branches:
        return f"method '{drafter.name}' is set to propose trees, and a draft made ahead continues the end of a chain"
    if not recipe.plan.exact:
        return f"{recipe.plan.reason} verifies sparsely"
    if verifier is not None and (verifier.offers.probes or verifier.offers.takes_turns or verifier.needs.evidence):
        return f"verifier '{verifier.name}' looks at more of a draft than its tokens and their distribution"
    return ""


def _length(count: Any, method: Any) -> tuple[int, bool]:
    """Draft nodes per step at most, and whether the controller decides how many."""
    if count in (None, "auto"):
        return (0, False) if method == "none" else (MAX_NODES, True)
    if method == "none" and count:
        raise ConfigError(
            f"num_speculative_tokens={count} with method 'none', which drafts nothing: name a method, for example "
            "'suffix', or leave the number out"
        )
    return count, False


def plan_of(settings: dict[str, Any], target: Any) -> PlanMaker:
    """The requested plan, by name or by settings, taken out of ``settings``; without any, that of the target.

    ``{"verification": {"ffn": 0.05}}`` and ``{"verification.ffn": 0.05}`` are the same.

    Raises:
        ConfigError: there is no such plan, or two that do not go together.
    """
    makers = {entry.name: entry.load() for entry in catalog.entries("plan")}
    fitting = next((maker_class for maker_class in makers.values() if maker_class.suits(target)), None)
    own = _DENSE if fitting is None else fitting.name
    named = {name: each for name, each in makers.items() if not each.settings_key or each is fitting}
    wanted = settings.pop("plan", own)
    if wanted not in (own, _DENSE, *named):
        key = makers[wanted].settings_key if wanted in makers else ""
        remedy = f"it is switched on by its settings, {key}.*" if key else nearest(str(wanted), [_DENSE, *named])
        raise ConfigError(f"unknown plan '{wanted}': {remedy}")
    if fitting is not None and wanted != own:
        raise ConfigError(f"plan='{wanted}' lacks a part of model '{target.name}': leave it out for '{own}'")
    base: PlanMaker = DensePlans() if wanted == _DENSE else named[wanted].arranged({}, target)
    for maker_class in makers.values():
        given = settings_of(maker_class.settings_key, settings) if maker_class.settings_key else {}
        if given and (maker := maker_class.arranged(given, target)) is not None:
            found: PlanMaker = maker if wanted == own else maker.over(base)
            return found
    return base


def settings_of(key: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings below a key, in either spelling, without it."""
    inner = settings.pop(key, None)
    if inner is not None and not isinstance(inner, Mapping):
        raise ConfigError(
            f"{key}={inner!r} must be a mapping of options to values; on the command line write --set {key}.NAME=VALUE"
        )
    given = dict(inner or {})
    for name in [name for name in settings if name.startswith(f"{key}.")]:
        bare = name.removeprefix(f"{key}.")
        if bare in given:
            raise ConfigError(f"'{name}' is given twice: keep one")
        given[bare] = settings.pop(name)
    return given


def _options(plug_in: Any) -> list[str]:
    """The names of a method's own options."""
    return [field.name for field in dataclasses.fields(plug_in.Config)]


def _owner(key: str) -> str:
    """A remedy, where the key is an option of verifiers: to name one of them."""
    names = [entry.name for entry in catalog.entries("verifier") if key in _options(entry.load())]
    return f" (an option of verifier {', '.join(map(repr, names))}: add verifier=...)" if names else ""


def _named(method: str, settings: Mapping[str, Any], target: Any, verifier: Verifier | None) -> tuple[Drafter, Any]:
    """A drafter of the catalogue and its options; open choices may depend on the verifier."""
    entry = catalog.find(method, "drafter")
    drafter_class = entry.load()
    known = _options(drafter_class)
    settings = _without_owner(settings, method, known)
    if "model" in settings and "model" not in known and drafter_class.declared.learned_part is not None:
        option = catalog.imported(drafter_class.declared.learned_part).option  # vLLM's name for it is 'model'
        if option in settings:
            raise ConfigError(f"'{option}' and 'model' are one option of method '{method}': keep one")
        settings[option] = settings.pop("model")
    for key in settings:
        if key not in known:
            plans = filter(None, (entry.load().settings_key for entry in catalog.entries("plan")))
            names = [*known, *OWN_KEYS, *plans, *(_options(verifier) if verifier is not None else ())]
            remedy = SPECULATION.get(key) or nearest(key, names)
            raise ConfigError(f"unknown option '{key}' for method '{method}'{_owner(key)}: {remedy}")
    wants_draft = drafter_class.declared.draft_model and not drafter_class.declared.finds_model
    if wants_draft and settings.get("model") is None and zoo.drafts_for(zoo.DRAFT, target.name):
        settings["model"] = zoo.DRAFT  # found for its target, as a head next to the target's weights is
    for field in dataclasses.fields(drafter_class.Config):
        if field.name not in settings and field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"method '{method}': '{field.name}' is missing; it needs {entry.needs}")
    try:
        config = drafter_class.Config(**settings)
    except TypeError as error:
        raise ConfigError(f"method '{method}': {str(error).split('__init__() ')[-1]}") from None
    config = drafter_class.settle(config, verifier)
    return drafter_class(config, target), config


def _instance(drafter: Any, settings: Mapping[str, Any]) -> Drafter:
    """A drafter of your own; it has been configured by whoever made it."""
    _check_members(drafter, "method", "drafter", Drafter)
    for key in settings:
        raise ConfigError(f"unknown option '{key}'{_owner(key)} next to a drafter that is passed as an instance")
    own: Drafter = drafter
    return own


def _check_members(thing: Any, key: str, kind: str, protocol: type) -> None:
    """Refuse an instance of your own that lacks a member of its protocol.

    Raises:
        ConfigError: names the missing part.
    """
    members = {*protocol.__annotations__, *(name for name in vars(protocol) if not name.startswith("_"))}
    missing = sorted(members - set(dir(thing)))
    if isinstance(thing, type) or missing:
        lacks = ", ".join([*missing[:4], *(["…"] if missing[4:] else [])])
        raise ConfigError(
            f"{key}={thing!r:.60} is neither a name nor a {kind} ({lacks or 'it is a class'}): give a name of "
            f"the catalogue, or an instance of a class that inherits from core.protocols.{protocol.__name__}, which "
            "has defaults for most members"
        )
    laws = thing.laws
    if not isinstance(laws, tuple) or not laws or not all(isinstance(each, type) for each in laws):
        raise ConfigError(
            f"{kind} '{thing.name}' has laws={laws!r:.60}: a tuple of kinds of q, as in (PointMass,), see core/draft.py"
        )
    for name, found, wanted in (
        ("needs", thing.needs, Needs),
        ("offers", thing.offers, Offers),
        ("declared", thing.declared, Declared),
    ):
        if not isinstance(found, wanted):
            raise ConfigError(
                f"{kind} '{thing.name}' has {name}={found!r:.60}: an instance of core.needs.{wanted.__name__} is wanted"
            )


def _class_of(method: Any) -> type[Drafter]:
    """The class of a drafter that is named, or of an instance."""
    if not isinstance(method, str):
        _check_members(method, "method", "drafter", Drafter)
        return type(method)
    found: type[Drafter] = catalog.find(method, "drafter").load()
    return found


def _rule(wanted: Any, settings: dict[str, Any], method: Any, target: Any) -> Verifier:
    """A verifier by name, or one of your own; takes its options out of ``settings``."""
    if isinstance(wanted, str):
        return (
            _with_options(wanted, settings, method, target)
            if _options(catalog.find(wanted, "verifier").load())
            else verifier_named(wanted)
        )
    _check_members(wanted, "verifier", "verifier", Verifier)
    own: Verifier = wanted
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
    typed = {key: settings.pop(key) for key in list(settings) if _bare(key, name) in known}
    try:
        config = verifier_class.Config(**_without_owner(typed, name, known))
    except TypeError as error:
        raise ConfigError(f"verifier '{name}': {str(error).split('__init__() ')[-1]}") from None
    config = verifier_class.settle(config, target)
    verifier: Verifier
    if verifier_class.declared.learned_part is not None:
        part_class = catalog.imported(verifier_class.declared.learned_part)
        verifier = verifier_class(config, learned_part.find(part_class, config.head, target), target.special_ids)
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


def _match(drafter: Drafter, verifier: Verifier, plan: PlanMaker) -> None:
    """Refuse a rule that does not fit the drafts, lacks evidence that it needs, or cannot keep its budget.

    Raises:
        ConfigError: with what fits instead.
    """
    if drafter.branches and not verifier.trees:
        raise ConfigError(
            f"verifier='{verifier.name}' verifies chains, but method '{drafter.name}' is set to propose trees: "
            "use verifier='recursive' or 'match', or let the method propose chains"
        )
    evidence = verifier.needs.evidence
    if evidence is not None and not evidence.greedy_only and evidence not in drafter.offers.evidence:
        theirs = [e.name for e in catalog.entries("drafter") if e.load().declared.own_verifier == verifier.name]
        remedy = " or ".join(f"method='{name}'" for name in theirs) or "a method that offers it"
        raise ConfigError(
            f"verifier='{verifier.name}' decides by {evidence.title}, and drafts of method '{drafter.name}' carry "
            f"none: use {remedy}, or another verifier"
        )
    for law in drafter.laws:
        if law not in verifier.laws:
            raise ConfigError(
                f"verifier='{verifier.name}' is not valid for drafts of kind {law.__name__}, "
                f"which '{drafter.name}' proposes: leave the verifier out to get one that is"
            )
    if drafter.offers.resumes and verifier.offers.probes:
        raise ConfigError(
            f"verifier='{verifier.name}' reads more than the draft, and what method '{drafter.name}' drafts the "
            "target's own first layers have read already: use method='draft_model', 'ngram' or 'suffix', or another "
            "verifier"
        )
    if not plan.exact and verifier.needs.dense:
        raise ConfigError(
            f"verifier='{verifier.name}' cannot be used with {plan.reason}: the target reads more than the draft here, "
            "densely; leave one of them out"
        )
    if not plan.exact and verifier.budget is not None:
        raise ConfigError(
            f"max_distortion={verifier.budget:g} cannot be kept with {plan.reason}: how far such a step is from the "
            "target is not known; leave one of them out"
        )
