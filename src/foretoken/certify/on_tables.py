"""Parts of a certificate on tables: the recipe's rules on tiny random models, enumerating every draft and decision."""

from collections.abc import Sequence
from typing import Any

import torch

from foretoken.certify.certificate import ALPHA, Section
from foretoken.certify.enumeration import (
    CHAINS,
    LAW_OF,
    STYLES,
    TREES,
    TablePair,
    random_shapes,
    target_law,
    worst_error,
)
from foretoken.certify.own_checks import NUM_SEEDS, ColderTarget, LenientTarget, batch_differences, sampler_differences
from foretoken.certify.statistics import ChiSquare, goodness_of_fit
from foretoken.certify.teeth import CAUGHT, CONTROLS, TEETH, SameNoise, Tooth
from foretoken.core.draft import Draft
from foretoken.core.laws import Laws
from foretoken.core.protocols import Verifier
from foretoken.core.randomness import Streams
from foretoken.core.tree import TokenTree

TOLERANCE = 1e-9


def closed_form(rules: Sequence[Verifier], *, quick: bool = False) -> Section:
    """Check exact distributions on tiny vocabularies: each rule under every distribution it declares, with chains and
    trees, zeros and one-hots.

    Tables are peaked and steep as well as flat: with flat, similar p and q, most mistakes have little effect.
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
        if differing := details["match"]["sampler_differences"]:
            parts.append(f"{differing} of {NUM_SEEDS} seeds yield another token than their noise")
    parts += [
        f"{name} decides differently for several requests together than for each alone"
        for name, found in details.items()
        if found.get("batch_differences")
    ]
    return Section("closed_form", passed, f"{', '.join(details)}: {'; '.join(parts)}", details)


def _match_over_seeds(rule: Verifier, num_seeds: int) -> ChiSquare:
    """Test the fit of the first two emitted tokens over many seeds, on a tiny model with a branching draft."""
    pair = TablePair(4, seed=7)
    tokens, parents = (0, 1, 2, 3), (-1, -1, 0, 1)
    contexts: list[tuple[int, ...]] = [(), (0,), (1,), (0, 2), (1, 3)]
    target = Laws(torch.stack([pair.p(c) for c in contexts]).log().float(), greedy=False, positions=[9, 10, 10, 11, 11])
    counts = torch.zeros(4, 4)
    draft = Draft(TokenTree(tokens, parents))
    for seed in range(num_seeds):
        verdict = rule.verify(draft, target, Streams(seed))
        emitted = [*(tokens[node] for node in verdict.path), verdict.extra]
        if len(emitted) < 2:  # the next step, at the next position, without a draft
            law = Laws(pair.p((emitted[0],)).log().float()[None], greedy=False, positions=[10])
            emitted.append(rule.verify(Draft(TokenTree(())), law, Streams(seed)).extra)
        counts[emitted[0], emitted[1]] += 1
    return goodness_of_fit(counts.flatten().tolist(), target_law(pair, 2).flatten().tolist())


def teeth(rules: Sequence[Verifier] = ()) -> Section:
    """Check that every rule with a known bias is caught, and its unmodified twin is not.

    Args:
        rules: the recipe's own rules: each is also modified and must then fail its own check. `greedy` has no
            distribution to bias: its text is compared on the real model.
    """
    control = max(twin.bias() for twin in CONTROLS)
    bias = {tooth.name: tooth.bias() for tooth in TEETH}
    for rule in rules:
        for title, tampered in (("half the temperature", ColderTarget), ("a draft a tenth likelier", LenientTarget)):
            if rule.name == "match":
                if tampered is ColderTarget:  # the sampler is compared without a draft, so the other bias has no effect
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
