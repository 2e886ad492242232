"""Part of a certificate: recipe against plain sampling on the real model, a group-sequential two-sample test."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foretoken.certify.certificate import ALPHA, Section
from foretoken.certify.on_models import SETTINGS, Generate
from foretoken.certify.statistics import detectable_distance, homogeneity
from foretoken.options.sampling import SamplingParams

LOOKS = (250, 500, 1000, 2000)  # requests per arm at each look
QUICK_LOOKS = (100, 330)
WATCHED = 5  # number of first tokens of each request to compare
# repetition gives lookup drafters matches, and the text can continue in many ways
SAMPLED_PROMPT = "The man said that the man and the woman went to the house. The woman said that the"


def sampled_law(plain: Generate, speculative: Generate, *, quick: bool = False) -> Section:
    """Compare the recipe with plain sampling on the real model, between a null bracket and a contrast.

    Each of the three is a group-sequential test (Pocock 1977, doi:10.1093/biomet/64.2.191; Bonferroni's bound in place
    of his constant, since it holds for any dependence between looks): samples grow to the sizes in ``LOOKS``, each look
    may spend an equal share of ``ALPHA``, the first significant look decides, and a distribution that stays
    inconspicuous at the last look passes. A large bias is therefore found after some hundred requests, and a sound
    recipe fails with probability at most ``ALPHA`` per setting.
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
    """Run the three sequential tests at one setting, against the same plain arm.

    The null bracket is more plain sampling: the recipe is compared with both plain arms together.
    """
    # towards moderate temperatures: both distributions then have cells with many observations, which gives the test its
    # power
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
        if differs & {"recipe", "null"}:  # more samples would not change the result
            break
    reasons = {
        "recipe": ("recipe" in differs, "the recipe's distribution is not plain sampling's"),
        "null": ("null" in differs, "plain sampling differs from itself: the set-up is unsound"),
        "contrast": ("contrast" not in differs, f"temperature {other:g} was not distinguished: the test has no power"),
    }
    reason = "; ".join(text for wrong, text in reasons.values() if wrong)
    last = found["recipe"][-1]
    return {
        "params": dict(setting),
        **found,
        "contrast_temperature": other,
        # n against 2 n has the same power as 4/3 n against 4/3 n
        "detectable_total_variation": detectable_distance(4 * last["num_each"] // 3, last["df"], share),
        "passed": not reason,
        "reason": reason,
    }


def _first_tokens(source: Generate, setting: Mapping[str, float], seeds: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the first tokens of one request per seed."""
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
    views["tokens 1 and 2"] = lambda ids: ids[:2]  # for distributions so flat that triples occur only once
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
