"""Parts of a certificate on the real models: texts token by token, and the distribution of short texts, enumerated."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from foretoken.certify.certificate import Section
from foretoken.certify.recipe_law import Choosy, HashedStops, text_law
from foretoken.core.errors import ConfigError
from foretoken.core.metrics import Metrics
from foretoken.options.sampling import SamplingParams

ROUNDING = 1e-5
"""Tolerance of an enumeration on real models: without the native decoder, their rows differ in the last bits. Planted
biases must exceed ten times that; they are about 1e-2.
"""
STOP_SEEDS = (0, 1, 2, 3)  # seeds of the scripts that stop drafts; the first two with --quick

PROMPTS = (
    "Maria picks 18 pears in the morning and 27 pears in the afternoon. How many pears does she have?",
    "The history of the city begins with a small harbour at the mouth of the river.",
    'def mean(values):\n    """Return the arithmetic mean of a list of numbers."""\n',
    "Question: What is the capital of France? Answer: Paris. Question: What is the capital of Italy? Answer:",
    "one two three four one two three four one two three four one two",
    "A",
)
ENUMERATED_PROMPT = "The man"  # short, because it is processed once for every possible text
SETTINGS: tuple[dict[str, float], ...] = (
    {"temperature": 1.0, "top_k": 12},
    {"temperature": 0.3, "top_p": 0.95},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 1.0, "top_p": 0.9},
)

Generate = Callable[[Sequence[str], Sequence[SamplingParams]], list[list[int]]]
"""Return an engine's token ids for prompts with their parameters."""


def check_room(llm: Any, *, quick: bool) -> None:
    """Refuse a model with a context too short for the prompts and their answers.

    Raises:
        ConfigError: the message has the required number of tokens.
    """
    longest = max(len(llm.tokenizer(prompt)["input_ids"]) for prompt in PROMPTS) + _answer_tokens(quick)
    if llm.target.max_length < longest:
        raise ConfigError(
            f"a certificate needs a context of {longest} tokens; '{llm.target.name}' has {llm.target.max_length} here"
        )


def _answer_tokens(quick: bool) -> int:
    """Return the maximum tokens of a greedy text."""
    return 32 if quick else 128


def tokens_of(llm: Any, counted: Metrics, *, scripted: bool = False) -> Generate:
    """Return token ids from an engine; ``scripted`` lets a script stop the drafts of seeded requests."""

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


def greedy_text(plain: Generate, speculative: Generate, *, quick: bool = False) -> Section:
    """Compare token ids at temperature 0 with and without speculation."""
    prompts = PROMPTS[:3] if quick else PROMPTS
    params = [SamplingParams(max_tokens=_answer_tokens(quick))] * len(prompts)
    differences = _differences(prompts, plain(prompts, params), speculative(prompts, params))
    num_tokens = params[0].max_tokens
    summary = f"{len(prompts) - len(differences)} of {len(prompts)} prompts equal, up to {num_tokens} tokens each"
    return Section("greedy_text", not differences, summary, {"num_prompts": len(prompts), "differences": differences})


def same_stream(plain: Generate, speculative: Generate, *, quick: bool = False) -> Section:
    """Compare token ids of seeded sampled requests with and without speculation."""
    prompts = [prompt for prompt in (PROMPTS[:3] if quick else PROMPTS) for _ in SETTINGS]
    length = 32 if quick else 96
    params = [
        SamplingParams(seed=100 + number, max_tokens=length, **SETTINGS[number % len(SETTINGS)])  # type: ignore[arg-type]
        for number in range(len(prompts))
    ]
    differences = _differences(prompts, plain(prompts, params), speculative(prompts, params))
    summary = f"{len(prompts) - len(differences)} of {len(prompts)} seeded requests equal, up to {length} tokens each"
    return Section("same_stream", not differences, summary, {"num_requests": len(prompts), "differences": differences})


def _differences(prompts: Sequence[str], first: list[list[int]], second: list[list[int]]) -> list[dict[str, Any]]:
    found = []
    for prompt, a, b in zip(prompts, first, second, strict=True):
        if a != b:
            place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            found.append({"prompt": prompt, "position": place, "plain": a[place:][:1], "speculative": b[place:][:1]})
    return found


def draft_law(plain_llm: Any, recipe_llm: Any, *, quick: bool = False) -> Section:
    """Compare the exact distribution of the recipe's texts on the real models with that of plain sampling.

    Texts have four tokens out of two for chains, and three out of three for trees, which have siblings on one level. A
    second enumeration includes a rare token. The same drafter wrapped in :class:`Choosy` must be caught; a rule with
    the same stream for any draft does not use the declared distribution, and must not be affected.

    Args:
        plain_llm: plain decoding.
        recipe_llm: a recipe with sampled drafts, adaptive if possible; its engine must not run afterwards.
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
        plain_rare = enumerated(plain_llm.with_method(None), rare=True)
        found_rare = enumerated(recipe_llm, rare=True)
        choosy = enumerated(recipe_llm, wrap=Choosy)
    except RuntimeError as error:
        return Section("draft_law", False, str(error))
    errors = [*(each.distance(plain) for each in found), found_rare.distance(plain_rare)]
    bias, believes = choosy.distance(plain), recipe_llm.recipe.promise != "same stream"
    lengths = sorted(set().union(*(each.lengths for each in found)))
    drafted = sum(each.num_drafted for each in found)
    summary = (
        f"{sum(each.num_branches for each in found)} ways to {width}^{length} texts under {len(cases)} stop rules and "
        f"with a rare token, drafts of {lengths[0]} to {lengths[-1]} nodes: largest error {max(errors):.1e} "
        f"(allowed {ROUNDING:.0e}); "
        f"selecting among the draws is off by {bias:.1e}{'' if believes else ' (allowed as much)'}"
    )
    details = {"errors": errors, "bias": bias, "lengths": lengths, "drafted": drafted, "stops": cases}
    passed = drafted > 0 and max(errors) <= ROUNDING and (bias > 10 * ROUNDING if believes else bias <= ROUNDING)
    return Section("draft_law", passed, summary, details)


def drafts(counted: Metrics) -> Section:
    """Return whether the parts above exercised the verifier: it accepted some draft tokens and rejected some."""
    proposed, stood = counted.num_draft_tokens, counted.num_accepted_tokens
    summary = f"{proposed} draft tokens were verified on the real model, {stood} accepted"
    return Section("drafts", 0 < stood < proposed, summary, {"proposed": proposed, "accepted": stood})
