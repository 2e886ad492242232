"""A certificate for a recipe: does its output keep the written promise? Six parts, each of which can fail.

* ``closed_form``: the recipe's rules on tiny random models, every draft and every decision enumerated: 1e-9.
* ``teeth``: rules with a known bias go through the same enumeration and must be caught.
* ``draft_law``: where drafts are drawn, drafter and rule on the real models, every draw and every decision enumerated,
  under stop rules that follow a script; the same recipe, choosing among what it drew, must be caught.
* ``greedy_text``: on the real model, in float32 unless told otherwise, the text at temperature 0 equals plain
  decoding's, token by token.
* ``sampled_law``: on the real model, recipe against plain sampling, a group-sequential two-sample test on the first
  tokens, between two brackets: plain against plain with other seeds must pass, plain against another temperature must
  fail.
* ``same_stream``: where that is promised, seeded requests give the tokens that they give without speculation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from foretoken import catalog
from foretoken.analysis.exactness.enumeration import (
    CHAINS,
    LAW_OF,
    STYLES,
    TREES,
    TablePair,
    one_thread,
    random_shapes,
    target_law,
    worst_error,
)
from foretoken.analysis.exactness.own_checks import (
    ColderTarget,
    LenientTarget,
    batch_differences,
    sampler_differences,
)
from foretoken.analysis.exactness.recipe_law import Choosy, HashedStops, text_law
from foretoken.analysis.exactness.statistics import ChiSquare, detectable_distance, goodness_of_fit, homogeneity
from foretoken.analysis.exactness.teeth import CAUGHT, CONTROLS, TEETH, SameNoise, Tooth
from foretoken.core.draft import Draft, PointMass, Tabulated
from foretoken.core.errors import ConfigError
from foretoken.core.laws import Laws
from foretoken.core.metrics import Metrics
from foretoken.core.protocols import Verifier
from foretoken.core.randomness import Streams
from foretoken.core.sampling import SamplingParams
from foretoken.core.tree import TokenTree
from foretoken.engine.recipe import BEST_OF_TREES

TOLERANCE = 1e-9
_NUM_NODES = 4  # draft nodes per step on the real model, unless the recipe says otherwise
ALPHA = 1e-4  # of one sequential test, all of its looks together
LOOKS = (250, 500, 1000, 2000)  # requests an arm at each look of a sequential test
QUICK_LOOKS = (100, 330)
WATCHED = 5  # first tokens of each request that the sampled test looks at
ROUNDING = 1e-5
"""Of an enumeration on real models: their rows differ in the last bits where the fused decoder does not compute them.
What is planted must be off by ten times that; it is by about 1e-2."""
STOP_SEEDS = (0, 1, 2, 3)  # of the scripts that stop drafts; the first two with --quick

PROMPTS = (
    "Maria picks 18 pears in the morning and 27 pears in the afternoon. How many pears does she have?",
    "The history of the city begins with a small harbour at the mouth of the river.",
    'def mean(values):\n    """Return the arithmetic mean of a list of numbers."""\n',
    "Question: What is the capital of France? Answer: Paris. Question: What is the capital of Italy? Answer:",
    "one two three four one two three four one two three four one two",
    "A",
)
# repetition gives lookup drafters something to propose, and the text goes on in many ways
SAMPLED_PROMPT = "The man said that the man and the woman went to the house. The woman said that the"
ENUMERATED_PROMPT = "The man"  # short: it is read once for every way in which a text can come about
SETTINGS: tuple[dict[str, float], ...] = (
    {"temperature": 1.0, "top_k": 12},
    {"temperature": 0.3, "top_p": 0.95},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 1.0, "top_p": 0.9},
)

Generate = Callable[[Sequence[str], Sequence[SamplingParams]], list[list[int]]]


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a certificate.

    Attributes:
        name: which part.
        passed: whether it holds; a part that does not apply to the recipe is left out of the certificate.
        summary: one line.
        details: the numbers, ready for JSON.
    """

    name: str
    passed: bool
    summary: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Certificate:
    """What was proved of one recipe, and how; docs/certify.md says what each part means."""

    method: str
    settings: dict[str, Any]
    model: str
    promise: str
    quick: bool
    sections: tuple[Section, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every part holds."""
        return all(section.passed for section in self.sections)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the fields, and ``passed``."""
        return {**asdict(self), "sections": [asdict(section) for section in self.sections], "passed": self.passed}

    def __str__(self) -> str:
        settings = " ".join(f"{key}={value}" for key, value in self.settings.items())
        lines = [f"{self.method} {settings}".rstrip() + f" on {self.model}: promises {self.promise}"]
        lines += [f"  {'pass' if each.passed else 'FAIL'}  {each.name:<12} {each.summary}" for each in self.sections]
        lines.append(f"{'passed' if self.passed else 'FAILED'} in {self.seconds:.1f} s")
        return "\n".join(lines)


def certify(
    method: str,
    settings: Mapping[str, Any] | None = None,
    *,
    model: str = "zoo:base",
    dtype: str = "float32",
    quick: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Certificate:
    """Prove what a recipe promises, or show where it fails.

    Args:
        method: name of the drafter.
        settings: the other keys of ``speculative_config``.
        model: the real model.
        dtype: it is loaded in; of "int8" and "int4" the promise is about the rounded model.
        quick: fewer models, prompts and samples: the same parts with less power.
        progress: called with a line before each part.
    Raises:
        ConfigError: the recipe cannot be built, or promises nothing that could be proved.
    """
    from foretoken.engine.llm import LLM  # only this function needs a real model

    began = time.perf_counter()
    say = progress or (lambda line: None)
    settings = dict(settings or {})
    _check_lossless(method, settings)
    say(f"loading {model} in {dtype}")
    plain_llm = LLM(model, dtype=dtype, max_num_seqs=64, max_rows_per_step=1024)
    # an adaptive length may find that drafting does not pay here, and would prove nothing: the law is the same at any
    recipe_llm = plain_llm.with_method({"method": method, "num_speculative_tokens": _NUM_NODES, **settings})
    recipe = recipe_llm.recipe
    if recipe.promise == "approximate":
        raise ConfigError(
            f"{recipe.why_approximate} is approximate by design: this recipe is not lossless and gets no "
            "certificate; leave that out for one that is"
        )
    rules = rules_of(recipe)
    samples = any(rule.name != "greedy" for rule in rules)
    drafted = Metrics()
    plain, speculative = _tokens_of(plain_llm, Metrics()), _tokens_of(recipe_llm, drafted)
    draws = any(issubclass(law, Tabulated) for law in recipe.drafter.laws)

    sections = []
    with one_thread():
        say(f"closed form: enumerating {', '.join(rule.name for rule in rules)}")
        sections.append(closed_form(rules, quick=quick))
        say("teeth: biased rules must be caught")
        sections.append(teeth(rules))
    say("greedy text: token by token against plain decoding")
    sections.append(greedy_text(plain, speculative, quick=quick))
    if samples:
        say("sampled law: two-sample tests on the real model")
        # plain decoding draws by the sampler of `match`: the arm that it is compared with has another one
        naive = _tokens_of(plain_llm.with_method({"method": "none", "verifier": "naive"}), Metrics())
        if not draws:
            sections.append(sampled_law(naive, speculative, quick=quick))
        else:  # by what a draft ends is where draws are most easily kept or dropped for their value
            adaptive_llm = plain_llm.with_method({"method": method, **settings, "num_speculative_tokens": "auto"})
            sections.append(sampled_law(naive, _tokens_of(adaptive_llm, drafted, scripted=True), quick=quick))
            say("draft law: enumerating what drafter and rule do on the real model")
            sections.append(draft_law(plain_llm, adaptive_llm, quick=quick))
    if recipe.promise == "same stream":
        say("same stream: seeded requests with and without speculation")
        sections.append(same_stream(plain, speculative, quick=quick))
    if method != "none":
        sections.append(drafts(drafted))
    return Certificate(
        method,
        settings,
        str(model) if dtype == "float32" else f"{model} in {dtype}",
        recipe.promise,
        quick,
        tuple(sections),
        time.perf_counter() - began,
    )


def _check_lossless(method: str, settings: Mapping[str, Any]) -> None:
    """Refuse a lossy rule, asked for or the drafter's own, before any model is loaded."""
    own = catalog.find(method, "drafter").load().declared.own_verifier
    asked = settings.get("verifier") or own
    if asked in (None, "auto"):
        return
    rule = catalog.find(asked, "verifier") if isinstance(asked, str) else asked
    if rule.promise == "approximate":
        remedy = "leave the verifier out" if own is None else "use verifier='auto'"
        raise ConfigError(
            f"verifier='{rule.name}' is approximate by design: this recipe is not lossless and gets no certificate; "
            f"{remedy} for one that is, or read the distortion that every run reports"
        )


def rules_of(recipe: Any) -> list[Verifier]:
    """The verifiers that a recipe may use: the one asked for, else those that it chooses among for its drafts."""
    if recipe.verifier is not None:
        return [recipe.verifier]
    names = ["greedy", "match"]
    if any(not issubclass(law, PointMass) for law in recipe.drafter.laws):
        names.append("block")
        if recipe.drafter.branches:
            names += [BEST_OF_TREES[law] for law in recipe.drafter.laws if law in BEST_OF_TREES]
    return [catalog.find(name, "verifier").load()() for name in names]


def _tokens_of(llm: Any, counted: Metrics, *, scripted: bool = False) -> Generate:
    """Token ids by an engine; ``scripted`` lets a script stop the drafts of seeded requests, each at other places."""

    def generate(prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[list[int]]:
        requests = [llm.new_requests(prompt, each)[0] for prompt, each in zip(prompts, params, strict=True)]
        for request in requests:
            if scripted:
                request.own_rule = HashedStops(request.streams.seed)
            llm.engine.add(request)
        while llm.engine.busy:
            llm.engine.step()
        for request in requests:
            if request.error is not None:
                raise RuntimeError(f"a request failed: {request.error}")
            counted.add(request.metrics)
        return [request.output_ids for request in requests]

    return generate


# ---------------------------------------------------------------------- tiny models


def closed_form(rules: Sequence[Verifier], *, quick: bool = False) -> Section:
    """Exact laws on tiny vocabularies: each rule under every law it declares, chains and trees, zeros and one-hots.

    Tables are peaked and steep as well as flat: where p and q are flat and close, most mistakes hardly show.
    """
    details: dict[str, Any] = {}
    passed = True
    for rule in rules:
        found: dict[str, Any] = {}
        shapes = (*CHAINS, *TREES, *random_shapes(0, 1 if quick else 3, 4)) if rule.trees else CHAINS
        if rule.name == "match":
            fit = _match_over_seeds(rule, 4000 if quick else 20000)
            control = _match_over_seeds(SameNoise(), 4000)
            found["over_seeds"] = {"p_value": fit.p_value, "df": fit.df, "biased_control_p_value": control.p_value}
            found["note"] = "not enumerable: its noise is a function of (seed, position); tested over seeds instead"
            found["sampler_differences"] = sampler_differences(rule)
            good = fit.p_value > ALPHA >= control.p_value and not found["sampler_differences"]
        else:
            cases = [] if rule.name == "greedy" else [("sampled", False, "never"), ("adaptive", False, "after")]
            worsts = []
            for label, greedy, stop in [*cases, ("greedy", True, "never")]:
                worst = worst_error(
                    rule,
                    num_pairs=1 if quick else 3,
                    shapes=shapes,
                    greedy=greedy,
                    stop=stop,  # type: ignore[arg-type]
                    styles=("peaked", "steep", "zeros") if quick else STYLES,
                )
                found[label] = {"max_error": worst.error, "num_cases": worst.num_cases, "worst_case": worst.case}
                worsts.append(worst.error)
            found["laws"] = [kind for kind, law in LAW_OF.items() if law in rule.laws]
            found["batch_differences"] = batch_differences(rule)
            good = max(worsts) <= TOLERANCE and not found["batch_differences"]
        details[rule.name] = found
        passed = passed and good
    errors = [
        case["max_error"]
        for found in details.values()
        for case in found.values()
        if isinstance(case, dict) and "max_error" in case
    ]
    parts = [f"largest error {max(errors):.1e} (allowed {TOLERANCE:.0e})"] if errors else []
    if "match" in details:
        parts.append(f"match over seeds p = {details['match']['over_seeds']['p_value']:.2f}")
    return Section("closed_form", passed, f"{', '.join(details)}: {'; '.join(parts)}", details)


def _match_over_seeds(rule: Verifier, num_seeds: int) -> ChiSquare:
    """Goodness of fit of the first two emitted tokens over many seeds, on a tiny model with a branching draft."""
    pair = TablePair(4, seed=7)
    tokens, parents = (0, 1, 2, 3), (-1, -1, 0, 1)
    contexts: list[tuple[int, ...]] = [(), (0,), (1,), (0, 2), (1, 3)]
    target = Laws(torch.stack([pair.p(c) for c in contexts]).log().float(), greedy=False, positions=[9, 10, 10, 11, 11])
    counts = torch.zeros(4, 4)
    draft = Draft(TokenTree(tokens, parents))
    for seed in range(num_seeds):
        verdict = rule.verify(draft, target, Streams(seed))
        emitted = [*(tokens[node] for node in verdict.path), verdict.extra]
        if len(emitted) < 2:  # the next step, without a draft, at the next position
            law = Laws(pair.p((emitted[0],)).log().float()[None], greedy=False, positions=[10])
            emitted.append(rule.verify(Draft(TokenTree(())), law, Streams(seed)).extra)
        counts[emitted[0], emitted[1]] += 1
    return goodness_of_fit(counts.flatten().tolist(), target_law(pair, 2).flatten().tolist())


def teeth(rules: Sequence[Verifier] = ()) -> Section:
    """Every rule with a known bias must be caught, and the untampered twins must not be.

    Args:
        rules: the recipe's own: each is tampered with, too, and put to the check that certifies it. `greedy` has no law
            to be biased: its text is compared on the real model.
    """
    control = max(twin.bias() for twin in CONTROLS)
    bias = {tooth.name: tooth.bias() for tooth in TEETH}
    for rule in rules:
        for title, tampered in (("half the temperature", ColderTarget), ("a draft a tenth likelier", LenientTarget)):
            if rule.name == "match":
                if tampered is ColderTarget:  # without a draft, as its sampler is compared, the other one has no effect
                    bias[f"match with {title}"] = float(sampler_differences(tampered(rule), 400))
            elif rule.name != "greedy":
                kind = next(each for each, law in LAW_OF.items() if law in rule.laws)
                bias[f"{rule.name} with {title}"] = Tooth(title, tampered(rule), kind, CHAINS[1:]).bias()
    missed = [name for name, found in bias.items() if found < CAUGHT]
    passed = not missed and control <= TOLERANCE
    summary = f"{len(bias) - len(missed)} of {len(bias)} biased rules caught; smallest bias {min(bias.values()):.1e}"
    if missed:
        summary += f"; missed: {', '.join(missed)}"
    return Section("teeth", passed, summary, {"control_error": control, "bias": bias, "missed": missed})


# ---------------------------------------------------------------------- the real model


def draft_law(plain_llm: Any, recipe_llm: Any, *, quick: bool = False) -> Section:
    """The law of the recipe's texts on the real models, in closed form, against that of plain sampling.

    Texts are four of two tokens where drafts are chains, three of three where they are trees: siblings, but one level.
    The same drafter behind :class:`Choosy` must be caught.

    Args:
        plain_llm: plain decoding.
        recipe_llm: a recipe that draws drafts, adaptive where it can be; its engine must not run afterwards.
        quick: fewer scripts.
    """
    width, length, num_nodes = (3, 3, 2) if recipe_llm.recipe.drafter.branches else (2, 4, 3)
    (request,) = plain_llm.generate(ENUMERATED_PROMPT, SamplingParams(max_tokens=1, logprobs=width))
    enumerated = partial(
        text_law,
        prompt=request.prompt_token_ids,
        tokens=[token for token, _ in request.logprobs[0].top],
        length=length,
        num_nodes=num_nodes,
    )
    cases = [None, *(STOP_SEEDS[:2] if quick else STOP_SEEDS)]
    try:
        plain = enumerated(plain_llm.with_method(None))
        found = [enumerated(recipe_llm, stops=stops) for stops in cases]
        choosy = enumerated(recipe_llm, wrap=Choosy)
    except RuntimeError as error:
        return Section("draft_law", False, str(error))
    errors = [each.distance(plain) for each in found]
    bias = choosy.distance(plain)
    lengths = sorted(set().union(*(each.lengths for each in found)))
    drafted = sum(each.num_drafted for each in found)
    summary = (
        f"{sum(each.num_branches for each in found)} ways to {width}^{length} texts under {len(cases)} stop rules, "
        f"drafts of {lengths[0]} to {lengths[-1]} nodes: largest error {max(errors):.1e} (allowed {ROUNDING:.0e}); "
        f"choosing among the draws is off by {bias:.1e}"
    )
    details = {"errors": errors, "bias": bias, "lengths": lengths, "drafted": drafted, "stops": cases}
    passed = drafted > 0 and max(errors) <= ROUNDING and bias > 10 * ROUNDING
    return Section("draft_law", passed, summary, details)


def greedy_text(plain: Generate, speculative: Generate, *, quick: bool = False) -> Section:
    """Token ids at temperature 0, with and without speculation."""
    prompts = PROMPTS[:3] if quick else PROMPTS
    params = [SamplingParams(max_tokens=32 if quick else 128)] * len(prompts)
    differences = _differences(prompts, plain(prompts, params), speculative(prompts, params))
    num_tokens = params[0].max_tokens
    summary = f"{len(prompts) - len(differences)} of {len(prompts)} prompts equal, up to {num_tokens} tokens each"
    return Section("greedy_text", not differences, summary, {"num_prompts": len(prompts), "differences": differences})


def same_stream(plain: Generate, speculative: Generate, *, quick: bool = False) -> Section:
    """Token ids of seeded sampled requests, with and without speculation."""
    prompts = [prompt for prompt in (PROMPTS[:3] if quick else PROMPTS) for _ in SETTINGS]
    length = 32 if quick else 96
    params = [
        SamplingParams(seed=100 + number, max_tokens=length, **SETTINGS[number % len(SETTINGS)])  # type: ignore[arg-type]
        for number in range(len(prompts))
    ]
    differences = _differences(prompts, plain(prompts, params), speculative(prompts, params))
    summary = f"{len(prompts) - len(differences)} of {len(prompts)} seeded requests equal, up to {length} tokens each"
    return Section("same_stream", not differences, summary, {"num_requests": len(prompts), "differences": differences})


def drafts(counted: Metrics) -> Section:
    """Whether the parts above put the verifier to work: some drafts stood and some fell."""
    proposed, stood = counted.num_draft_tokens, counted.num_accepted_tokens
    summary = f"{proposed} draft tokens were judged on the real model, {stood} stood"
    return Section("drafts", 0 < stood < proposed, summary, {"proposed": proposed, "accepted": stood})


def _differences(prompts: Sequence[str], first: list[list[int]], second: list[list[int]]) -> list[dict[str, Any]]:
    found = []
    for prompt, a, b in zip(prompts, first, second, strict=True):
        if a != b:
            place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            found.append({"prompt": prompt, "position": place, "plain": a[place:][:1], "speculative": b[place:][:1]})
    return found


def sampled_law(plain: Generate, speculative: Generate, *, quick: bool = False) -> Section:
    """Recipe against plain sampling on the real model, between a null bracket and a contrast.

    Each of the three is a group-sequential test (Pocock 1977, doi:10.1093/biomet/64.2.191; Bonferroni's bound in place
    of his constant, since it holds for any dependence between looks): samples grow to the sizes in ``LOOKS``, each look
    may spend an equal share of ``ALPHA``, the first significant look decides, and a law that stays inconspicuous at the
    last look passes. A gross bias so ends after some hundred requests, and a sound recipe is accused with probability
    ``ALPHA`` per setting at most.
    """
    looks = QUICK_LOOKS if quick else LOOKS
    tests = [
        _between_brackets(plain, speculative, setting, looks, first_seed=1_000_000 * number)
        for number, setting in enumerate(SETTINGS[:3] if quick else SETTINGS, 1)
    ]
    smallest = {arm: min(look["p_value"] for test in tests for look in test[arm]) for arm in ("recipe", "null")}
    summary = (
        f"{len(tests)} settings, looks at {', '.join(map(str, looks))} requests: smallest p {smallest['recipe']:.3g} "
        f"(null {smallest['null']:.3g}, fails below {ALPHA / len(looks):.1e}; contrast found after "
        f"{max(test['contrast'][-1]['num_each'] for test in tests)}); finds a total variation of "
        f"{max(test['detectable_total_variation'] for test in tests):.2f}"
    )
    for test in tests:
        if not test["passed"]:
            summary += f"; FAILED at {test['params']}: {test['reason']}"
    details = {"alpha": ALPHA, "looks": list(looks), "alpha_per_look": ALPHA / len(looks), "tests": tests}
    return Section("sampled_law", all(test["passed"] for test in tests), summary, details)


def _between_brackets(
    plain: Generate, speculative: Generate, setting: Mapping[str, float], looks: Sequence[int], *, first_seed: int
) -> dict[str, Any]:
    """The three sequential tests at one setting, against the same plain arm.

    The null bracket is more plain sampling: the recipe is compared with both plain arms together.
    """
    # towards moderate temperatures: both laws then have cells that are seen often, and a test has something to find
    other = setting["temperature"] * (0.5 if setting["temperature"] >= 1.0 else 2.0)
    sources = {
        "plain": (plain, setting),
        "recipe": (speculative, setting),
        "null": (plain, setting),
        "contrast": (plain, {**setting, "temperature": other}),
    }
    samples: dict[str, list[tuple[int, ...]]] = {arm: [] for arm in sources}
    found: dict[str, list[dict[str, Any]]] = {"recipe": [], "null": [], "contrast": []}
    share = ALPHA / len(looks)
    differs: set[str] = set()
    for size in looks:
        for number, (arm, (source, law)) in enumerate(sources.items()):
            if arm not in differs:
                seeds = range(first_seed + 100_000 * number + len(samples[arm]), first_seed + 100_000 * number + size)
                samples[arm] += _first_tokens(source, law, seeds)
        for arm, its_looks in found.items():
            if arm not in differs:
                reference = samples["plain"] + (samples["null"] if arm == "recipe" else [])
                its_looks.append({"num_each": size, **compare(reference, samples[arm])})
                if its_looks[-1]["p_value"] <= share:
                    differs.add(arm)
        if differs & {"recipe", "null"}:  # more samples could not take that back
            break
    reasons = {
        "recipe": ("recipe" in differs, "the recipe's law is not plain sampling's"),
        "null": ("null" in differs, "plain sampling differs from itself: the set-up is unsound"),
        "contrast": ("contrast" not in differs, f"temperature {other:g} was not told apart: the test has no power"),
    }
    reason = "; ".join(text for wrong, text in reasons.values() if wrong)
    last = found["recipe"][-1]
    return {
        "params": dict(setting),
        **found,
        "contrast_temperature": other,
        # n against 2 n has the power of 4/3 n against as many
        "detectable_total_variation": detectable_distance(4 * last["num_each"] // 3, last["df"], share),
        "passed": not reason,
        "reason": reason,
    }


def _first_tokens(source: Generate, setting: Mapping[str, float], seeds: Sequence[int]) -> list[tuple[int, ...]]:
    """The watched tokens of one request per seed."""
    params = [
        SamplingParams(seed=seed, max_tokens=WATCHED + 1, ignore_eos=True, **setting)  # type: ignore[arg-type]
        for seed in seeds
    ]
    return [tuple(ids[:WATCHED]) for ids in source([SAMPLED_PROMPT] * len(params), params)]


def compare(first: Sequence[tuple[int, ...]], second: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """Two-sample tests on the joint of the first two and three tokens and on each later position.

    Returns:
        the smallest p-value, corrected for the number of tests (Bonferroni), with its statistic and place; ``df`` is
        the largest of the tests.
    """
    views: dict[str, Callable[[tuple[int, ...]], Any]] = {"tokens 1 to 3": lambda ids: ids[:3]}
    views["tokens 1 and 2"] = lambda ids: ids[:2]  # where laws are so flat that triples are seen once
    for position in range(1, WATCHED):
        views[f"token {position + 1}"] = lambda ids, at=position: ids[at : at + 1]  # type: ignore[misc]
    results = {where: homogeneity(map(view, first), map(view, second)) for where, view in views.items()}
    where, worst = min(results.items(), key=lambda item: item[1].p_value)
    return {
        "p_value": min(1.0, worst.p_value * len(results)),
        "statistic": worst.statistic,
        "df": max(result.df for result in results.values()),
        "where": where,
    }
