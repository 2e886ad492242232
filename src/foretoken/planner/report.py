"""The screen of ``foretoken plan``: at most 25 lines of 80 columns, for readers without knowledge of the methods."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from foretoken import catalog
from foretoken.planner.candidates import NO_PART, Candidate
from foretoken.planner.costs import DraftCosts
from foretoken.planner.plan import SAME, Plan

WIDTH, LINES = 80, 25
_BAR, _NAME = 7, 30
_RANKED, _LOSERS = 5, 5
_HEAD_TOKENS, _HEAD_SHARE = 4, 0.1  # of a part that is not trained yet


def screen(plan: Plan, saved: str = "") -> list[str]:
    """The lines of the report.

    Args:
        saved: the plan's file; "": it was not saved.
    """
    usable = [each for each in plan.candidates if each.rate > 0.0]
    ranked = usable[:_RANKED]
    lines = [*_heading(plan), "", *_ranking(plan, ranked)]
    losers = _losers(plan, usable[_RANKED:], [each for each in plan.candidates if each.rate <= 0.0])
    changes = [*_changes(plan, ranked), *_trained(plan)]
    tail = _saved(plan, saved)
    left = LINES - len(lines) - len(tail)
    changes = _wrapped(changes)[: max(0, min(len(changes) + 2, left // 2))]
    losers = losers[: max(0, left - len(changes) - 2)]
    lines += [*(["why the others lose"] if losers else []), *losers]
    lines += [*(["what would change it (predicted, without the time of prompts)"] if changes else []), *changes, *tail]
    return [line[:WIDTH].rstrip() for line in lines]


def _heading(plan: Plan) -> list[str]:
    target, machine, work = plan.target, plan.machine, plan.workload
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    some = (
        f"{work['prompts']} prompts"
        if work["prompts"] == work["given"]
        else (f"{work['prompts']} of {work['given']} prompts")
    )
    forward = plan.costs.forward[1]
    context = forward.contexts[0]
    one, eight = (forward(rows, context) for rows in (1, 8))
    row = (eight / one - 1.0) / 7
    beyond = (forward(16, context) - eight) / one / 8
    return [
        f"{target['name']}, {target['dtype']}, {threads}, {machine['processor']}",
        f"{some}, {work['tokens']:,} tokens, temperature {work['params']['temperature']:g}, "
        f"in {_minutes(plan.seconds)}",
        f"plain decoding: {plan.plain:.0f} tokens/s; no draft can make it more than "
        f"{plan.costs.ceiling:.1f} times as fast:",
        f"to check a draft token takes {row:.0%} of a step, {beyond:.0%} beyond the first 8",
    ]


def _minutes(seconds: float) -> str:
    return f"{int(seconds // 60)} min {int(seconds % 60)} s" if seconds >= 60 else f"{seconds:.0f} s"


def _ranking(plan: Plan, ranked: Sequence[Candidate]) -> list[str]:
    """One line a candidate: times plain decoding, predicted and measured, with a bar."""
    if not ranked:
        return ["no method can draft for this model"]
    best = max(each.rate for each in ranked)
    lines = [f"{'times plain decoding':<{_NAME}}length  {'predicted':<13}{'measured':<17}tokens/step"]
    for number, each in enumerate(ranked, start=1):
        name = f"{short_name(each):<{_NAME + 1}}{each.length or 'auto':>4}"
        predicted = f"{each.predicted:.2f} +- {each.error:.2f}" if each.predicted else "-"
        low, high = each.spread or (0.0, 0.0)
        measured = "-" if each.measured is None else f"{each.measured:.2f} ({low:.2f}-{high:.2f})"
        bar = "#" * round(_BAR * each.rate / max(best, 1.0))
        lines.append(f"{number} {name} {predicted:<13}{measured:<17}{each.tokens_per_step:<5.1f}{bar}")
    notes = [
        f"{number} was not predicted well: trust the measurement"
        for number, each in enumerate(ranked, 1)
        if each.differs
    ]
    close = [
        str(number)
        for number, each in enumerate(ranked[1:], 2)
        if ranked[0].rate - each.rate < max(ranked[0].error, each.error)
    ]
    notes += [f"{', '.join(close)} may be as fast as 1: the difference is within the error"] if close else []
    if plan.busy:
        notes.append("other programs kept this machine busy: repeat it when that is over")
    if plan.chosen is None:
        notes.append("nothing gains 2 %: plain decoding is chosen")
    return [*lines, *_wrapped(notes)]


def _losers(plan: Plan, usable: Sequence[Candidate], others: Sequence[Candidate]) -> list[str]:
    winner = plan.chosen
    lines = [f"  {short_name(each):<{_NAME + 1}}{each.rate:<5.2f}{_why(each, winner)}" for each in usable[:_LOSERS]]
    if len(usable) > _LOSERS:
        lines.append(f"  {len(usable) - _LOSERS} more forms of these, down to {usable[-1].rate:.2f} (--json)")
    reasons: dict[str, dict[str, None]] = {}
    for each in others:
        if each.plain_form is not None and each.reason == SAME:
            continue
        form = [f"{key}={value}" for key, value in each.config.items() if key in ("dtype", "tree") and each.plain_form]
        reasons.setdefault(each.reason, {})[" ".join([each.config["method"], *form])] = None
    for reason, names in sorted(reasons.items(), key=lambda pair: len(pair[1])):
        lines += _wrapped([f"{', '.join(names)}: {reason}"])[:2]
    return lines


def _why(each: Candidate, winner: Candidate | None) -> str:
    """Why a candidate loses, a clause."""
    if not each.replayed:
        return f"{each.tokens_per_step:.1f} tokens a step, in a real run"
    if each.tokens_per_step < each.needed:
        return f"{each.tokens_per_step:.1f} tokens a step, and needs {each.needed:.1f} to gain"
    cost = f"drafting: {each.draft_share:.0%} of a step"
    if winner is None or winner is each:
        return cost
    less = winner.tokens_per_step - each.tokens_per_step
    return f"{cost}, {abs(less):.1f} tokens {'less' if less > 0 else 'more'}"


def _changes(plan: Plan, ranked: Sequence[Candidate]) -> list[str]:
    """The gain over contexts and numbers of requests, and the leader at each."""
    found = []
    for title, name in (("context in tokens", "by_context"), ("requests at once", "by_requests")):
        places = sorted({place for each in ranked for place in getattr(each, name)})
        if len(places) < 2:
            continue
        words = []
        for place in places:
            leader = max(ranked, key=lambda each: getattr(each, name).get(place, 0.0))
            gain = getattr(leader, name)[place]
            if gain <= 1.0:
                words.append(f"{place:,} no gain")
                break
            words.append(f"{place:,} {leader.config['method']} {gain:.1f}")
        found.append(f"{title}: " + " · ".join(words))
    return found


def _trained(plan: Plan) -> list[str]:
    """The tokens that a trained part must bring, where one may be trained for this model."""
    names = [
        each.config["method"]
        for each in plan.candidates
        if each.reason == NO_PART and catalog.find(each.config["method"], "drafter").training
    ]
    if not names:
        return []
    context = plan.costs.forward[1].contexts[0]
    share = _HEAD_SHARE * plan.costs.step(0, context, DraftCosts())
    needed = plan.costs.break_even(_HEAD_TOKENS, context, DraftCosts((0,), (share,)))
    best = 1.0 if plan.chosen is None else plan.chosen.rate
    return [
        f"a draft network of your own (foretoken train {' | '.join(names)}) wins if it brings "
        f"{best * needed:.1f} tokens a step ({_HEAD_TOKENS} draft tokens in {_HEAD_SHARE:.0%} of a step)"
    ]


def short_name(each: Candidate, most: int = _NAME) -> str:
    """The method and its options in so many characters, a folder by its last name."""
    method, draft = each.config["method"], str(each.config.get("model", ""))
    draft = draft if draft.startswith("zoo:") else Path(draft).name
    words = {True: "tree", False: "chain"}
    options = [
        words.get(value, str(value)) if key in ("tree", "dtype") else f"{key}={value}"
        for key, value in each.config.items()
        if key not in ("method", "verifier", "model")
    ]
    name = " ".join([f"{method}+{draft}" if draft else method, *options])
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _wrapped(lines: Sequence[str]) -> list[str]:
    return [
        part for line in lines for part in textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent="    ")
    ]


def _saved(plan: Plan, saved: str) -> list[str]:
    if saved:
        whole = f'saved {saved}: --plan {saved}, in Python {{"plan": "{saved}"}}'
        return [whole] if len(whole) <= WIDTH else [f"saved {saved}", "use it with --plan, or in speculative_config"]
    if plan.chosen is None:
        return ["use: --method none"]
    sets = " ".join(
        f"--set {key}={value}" for key, value in plan.chosen.settings.items() if key not in ("method", "model")
    )
    draft = f" --draft-model {plan.chosen.config['model']}" if "model" in plan.chosen.config else ""
    return [f"use: --method {plan.chosen.config['method']}{draft} {sets}   (--out plan.json saves it for --plan)"]
