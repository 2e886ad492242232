"""A recipe: which drafter, which verifier, how long, and what that promises.

``speculative_config`` keys: ``method``, ``verifier``, ``num_speculative_tokens``, and the fields of the drafter's own
Config. Everything is checked here, at construction, never in the middle of a run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foretoken import catalog
from foretoken.core.draft import Draft, PointMass
from foretoken.core.errors import ConfigError, nearest
from foretoken.core.protocols import Drafter, Verifier
from foretoken.core.sampling import SamplingParams

OWN_KEYS = ("method", "verifier", "num_speculative_tokens")
MAX_ADAPTIVE_NODES = 16
_MAX_NODES = 256


@dataclass(frozen=True, slots=True)
class Recipe:
    """A checked composition.

    Attributes:
        method: name of the drafter.
        drafter: the instance.
        verifier: the verifier that was asked for; None chooses per draft.
        num_nodes: draft nodes per step, at most.
        adaptive: whether the controller decides the draft length (up to ``num_nodes``).
    """

    method: str
    drafter: Drafter
    verifier: Verifier | None
    num_nodes: int
    adaptive: bool

    def verifier_for(self, draft: Draft, params: SamplingParams) -> Verifier:
        """The asked-for verifier, else the strongest lossless rule for this draft.

        * temperature 0: `greedy`.
        * point-mass drafts, the empty one included: `match`. Accepting exactly when the target's own sample is among
          the proposals has acceptance equal to the proposals' target mass, which is optimal, and keeps the stream.
        * chains drawn from q: `block`, which never accepts less than token by token.
        * trees drawn from q: `recursive`.
        """
        if self.verifier is not None:
            return self.verifier
        if params.greedy:
            return _verifier("greedy")
        if isinstance(draft.law, PointMass) or not len(draft):
            return _verifier("match")
        return _verifier("block" if draft.tree.is_chain else "recursive")

    @property
    def promise(self) -> str:
        """What this recipe promises about sampled output; at temperature 0 every lossless recipe gives the same text."""
        if self.verifier is not None:
            return self.verifier.promise
        return "same stream" if self.drafter.laws == (PointMass,) else "same law"

    def promise_for(self, params: SamplingParams) -> str:
        """The promise for one request."""
        promise = self.promise
        return "same text" if params.greedy and promise != "approximate" else promise

    def check(self, params: SamplingParams) -> None:
        """Refuse a request that the verifier cannot honour.

        Raises:
            ConfigError: the `greedy` verifier was asked to sample.
        """
        if self.verifier is not None and self.verifier.name == "greedy" and not params.greedy:
            raise ConfigError(
                f"verifier='greedy' cannot honour temperature={params.temperature:g}: "
                "use temperature 0, or leave the verifier out to get the strongest lossless rule"
            )


_loaded: dict[str, Verifier] = {}


def _verifier(name: str) -> Verifier:
    """Verifiers have no state, so one instance of each serves everybody."""
    if name not in _loaded:
        _loaded[name] = catalog.find(name, "verifier").load()()
    return _loaded[name]


def build(settings: Mapping[str, Any] | None, target: Any) -> Recipe:
    """Check a ``speculative_config`` against the catalogue and the target, and make the recipe.

    Args:
        settings: the mapping; None or empty is plain decoding.
        target: the loaded target (drafters compare vocabularies with it).
    Raises:
        ConfigError: unknown method, verifier or key (nearest name offered), or a rule that the draft does not fit.
    """
    settings = dict(settings or {})
    method = settings.pop("method", None) or ("draft_model" if "model" in settings else "none")
    if not isinstance(method, str):
        raise ConfigError(f"method={method!r} must be a name: {nearest('', [e.name for e in catalog.entries('drafter')])}")
    verifier_name = settings.pop("verifier", None)
    count = settings.pop("num_speculative_tokens", None)
    drafter_class = catalog.find(method, "drafter").load()
    known = [f.name for f in dataclasses.fields(drafter_class.Config)]
    for key in settings:
        if key not in known:
            raise ConfigError(f"unknown option '{key}' for method '{method}': {nearest(key, [*known, *OWN_KEYS])}")
    if count in (None, "auto"):
        num_nodes, adaptive = MAX_ADAPTIVE_NODES, True
    elif isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= _MAX_NODES:
        num_nodes, adaptive = count, False
    else:
        raise ConfigError(
            f"num_speculative_tokens={count!r} must be an integer between 0 and {_MAX_NODES}, or 'auto' for adaptive"
        )
    verifier = None if verifier_name in (None, "auto") else _verifier(str(verifier_name))
    try:
        config = drafter_class.Config(**settings)
    except TypeError as error:
        raise ConfigError(f"method '{method}': {str(error).split('__init__() ')[-1]}") from None
    drafter = drafter_class(config, target)
    if verifier is not None:
        _check_fit(method, drafter, verifier)
    return Recipe(method, drafter, verifier, num_nodes, adaptive)


def _check_fit(method: str, drafter: Drafter, verifier: Verifier) -> None:
    if drafter.branches and not verifier.trees:
        raise ConfigError(
            f"verifier='{verifier.name}' verifies chains, but method '{method}' is set to propose trees: "
            "use verifier='recursive' or 'match', or let the method propose chains"
        )
    for law in drafter.laws:
        if law not in verifier.laws:
            raise ConfigError(
                f"verifier='{verifier.name}' is not valid for drafts of kind {law.__name__}, which '{method}' proposes: "
                "leave the verifier out to get one that is"
            )
