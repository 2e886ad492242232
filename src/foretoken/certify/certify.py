"""A certificate for a recipe: does its output keep the promise? Six parts, each of which can fail.

* ``closed_form``: the recipe's rules on tiny random models, with every draft and decision enumerated: error at most
  1e-9.
* ``teeth``: rules with a known bias go through the same enumeration and must be caught.
* ``draft_law``: for sampled drafts, drafter and rule on the real models, with every draw and decision enumerated, under
  scripted stop rules; the same recipe with a selection among its draws must be caught.
* ``greedy_text``: on the real model, by default in float32, the text at temperature 0 equals plain decoding's, token by
  token.
* ``sampled_law``: on the real model, recipe against plain sampling, a group-sequential two-sample test on the first
  tokens, between two brackets: plain against plain with other seeds must pass, plain against another temperature must
  fail.
* ``same_stream``: if promised, seeded requests yield the same tokens as without speculation.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from foretoken import catalog
from foretoken.certify.certificate import Certificate
from foretoken.certify.on_models import check_room, draft_law, drafts, greedy_text, same_stream, tokens_of
from foretoken.certify.on_tables import closed_form, teeth
from foretoken.certify.sampled_law import sampled_law
from foretoken.core.draft import PointMass, Tabulated
from foretoken.core.errors import ConfigError
from foretoken.core.metrics import Metrics
from foretoken.core.protocols import Verifier
from foretoken.core.threads import one_thread
from foretoken.engine.recipe import BEST_OF_TREES
from foretoken.options.model import ModelOptions

_NUM_NODES = 4  # draft nodes per step on the real model, unless the recipe sets them
# shares of a proof's time, for the bundled pair on one processor; they predict the remaining time
_SHARES = {
    "closed form": 2,
    "teeth": 2,
    "greedy text": 1,
    "sampled distribution": 12,
    "draft distribution": 4,
    "same stream": 1,
}

_IN_FLOAT32 = ModelOptions(dtype="float32")


def certify(
    method: str,
    settings: Mapping[str, Any] | None = None,
    *,
    model: str = "zoo:base",
    loading: ModelOptions = _IN_FLOAT32,
    quick: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Certificate:
    """Prove a recipe's promise, or find where it fails.

    Args:
        method: name of the drafter.
        settings: the other keys of ``speculative_config``.
        model: the real model.
        loading: options for loading it; with dtype "int8" or "int4" the promise concerns the rounded model.
        quick: fewer models, prompts and samples: the same parts with less power.
        progress: called with a line before each part.
    Raises:
        ConfigError: the recipe is invalid, or has no promise to prove.
    """
    from foretoken.engine.llm import LLM  # only this function needs a real model

    began = time.perf_counter()
    say = progress or (lambda line: None)
    settings = dict(settings or {})
    _check_lossless(method, settings)
    say(f"loading {model} in {loading.dtype}")
    plain_llm = LLM(model, speculative_config=None, max_num_seqs=64, max_rows_per_step=1024, **asdict(loading))
    check_room(plain_llm, quick=quick)
    # an adaptive length may decide against drafting here, which would prove nothing; the distribution is the same for
    # any
    # length
    recipe_llm = plain_llm.with_method({"method": method, "num_speculative_tokens": _NUM_NODES, **settings})
    recipe = recipe_llm.recipe
    if recipe.promise == "approximate":
        raise ConfigError(
            f"{recipe.why_approximate} is approximate by design: this recipe is not lossless and gets no "
            "certificate; leave it out for a lossless recipe"
        )
    if method != "none" and recipe.num_nodes == 0:
        raise ConfigError("num_speculative_tokens=0 disables drafting, so there is nothing to prove: leave it out")
    rules = rules_of(recipe)
    samples = any(rule.name != "greedy" for rule in rules)
    drafted = Metrics()
    plain, speculative = tokens_of(plain_llm, Metrics()), tokens_of(recipe_llm, drafted)
    draws = any(issubclass(law, Tabulated) for law in recipe.drafter.laws)

    parts = ["closed form", "teeth", "greedy text", *(["sampled distribution"] if samples else [])]
    parts += ["draft distribution"] if samples and draws else []
    parts += ["same stream"] if recipe.promise == "same stream" else []
    part = _Parts(parts, say)

    sections = []
    with one_thread():
        part("closed form", f"enumerating {', '.join(rule.name for rule in rules)}")
        sections.append(closed_form(rules, quick=quick))
        part("teeth", "biased rules must be caught")
        sections.append(teeth(rules))
    part("greedy text", "token by token against plain decoding")
    sections.append(greedy_text(plain, speculative, quick=quick))
    if samples:
        part("sampled distribution", "two-sample tests on the real model")
        # plain decoding samples like `match`; the other arm uses another sampler
        naive = tokens_of(plain_llm.with_method({"method": "none", "verifier": "naive"}), Metrics())
        if not draws:
            sections.append(sampled_law(naive, speculative, quick=quick))
        else:  # the end of a draft is the usual place where draws are kept or dropped for their value
            adaptive_llm = plain_llm.with_method({"method": method, **settings, "num_speculative_tokens": "auto"})
            sections.append(sampled_law(naive, tokens_of(adaptive_llm, drafted, scripted=True), quick=quick))
            part("draft distribution", "enumerating what drafter and rule do on the real model")
            sections.append(draft_law(plain_llm, adaptive_llm, quick=quick))
    if recipe.promise == "same stream":
        part("same stream", "seeded requests with and without speculation")
        sections.append(same_stream(plain, speculative, quick=quick))
    if method != "none":
        sections.append(drafts(drafted))
    certified = str(model) if loading.revision is None else f"{model} at {loading.revision}"
    certified += "" if loading.dtype == "float32" else f" in {loading.dtype}"
    if loading.kv_cache_dtype != "auto":
        certified += f", keys and values in {loading.kv_cache_dtype}"
    return Certificate(method, settings, certified, recipe.promise, quick, tuple(sections), time.perf_counter() - began)


class _Parts:
    """Reports the current part of a proof, and the estimated remaining time.

    Args:
        names: names of the parts, in order.
        say: called with a line.
    """

    def __init__(self, names: Sequence[str], say: Callable[[str], None]) -> None:
        self._names, self._say = names, say
        self._began = time.perf_counter()

    def __call__(self, name: str, what: str) -> None:
        place = self._names.index(name)
        done = sum(_SHARES[each] for each in self._names[:place])
        left = ""
        if done:
            seconds = (time.perf_counter() - self._began) * sum(_SHARES[each] for each in self._names[place:]) / done
            left = f", about {seconds:.0f} s left" if seconds < 90 else f", about {seconds / 60:.0f} min left"
        self._say(f"{place + 1} of {len(self._names)}{left}: {name}: {what}")


def _check_lossless(method: str, settings: Mapping[str, Any]) -> None:
    """Refuse a lossy rule, requested or the drafter's own, before any model is loaded."""
    own = catalog.find(method, "drafter").load().declared.own_verifier
    asked = settings.get("verifier") or own
    if asked in (None, "auto"):
        return
    rule = catalog.find(asked, "verifier") if isinstance(asked, str) else asked
    if rule.promise == "approximate":
        remedy = "leave the verifier out" if own is None else "use verifier='auto'"
        raise ConfigError(
            f"verifier='{rule.name}' is approximate by design: this recipe is not lossless and gets no certificate; "
            f"{remedy} for a lossless recipe, or use the distortion that every run reports"
        )


def rules_of(recipe: Any) -> list[Verifier]:
    """Return the verifiers that a recipe may use: the requested one, else the candidates for its drafts."""
    if recipe.verifier is not None:
        return [recipe.verifier]
    names = ["greedy", "match"]
    if any(not issubclass(law, PointMass) for law in recipe.drafter.laws):
        names.append("block")
        if recipe.drafter.branches:
            names += [BEST_OF_TREES[law] for law in recipe.drafter.laws if law in BEST_OF_TREES]
    return [catalog.find(name, "verifier").load()() for name in names]
