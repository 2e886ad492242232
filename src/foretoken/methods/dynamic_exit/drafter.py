"""DEL: draft with the first E layers of the target; E and the length follow what every exit would have said.

    draft     layers [0, E) ── final norm ── head          E layers a token, the target's own weights
    verify    layers [E, L) over all drafted rows
    re-read   every exit's hidden states, which are there anyway, through norm and head: shadow tokens
    learn     alpha[e] = how often exit e agreed with the whole model, with decay
    choose    E, n = argmax of (1 + alpha + ... + alpha^n) / cost of a step with n drafts from exit E

Letters: T packed rows, D width, L layers, X exits that are re-read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from foretoken.core.draft import NO_DRAFT, Draft, GreedyLaws, Law, Sampled
from foretoken.core.errors import ConfigError
from foretoken.core.needs import Declared, HiddenLayers, Needs, Offers, Variant
from foretoken.core.protocols import Budget, Context, Drafter, Features, Outcome
from foretoken.drafting.early_exit import EarlyExit, EarlyExitBuilder
from foretoken.drafting.exit_costs import Costs, head_in_layers
from foretoken.models.language_model import LanguageModel, Output

LONGEST = 18  # draft tokens a step (paper, section 4)
PRIOR = 8.0  # columns that what earlier requests ended with counts for, in a new one (ours)
PROBE_EVERY = 16  # steps without a draft before one token is drafted all the same (ours)


@dataclass(slots=True)
class Statistics:
    """Decayed sums of one request, per exit: agreement with the whole model, and the exit's confidence then.

    Index 0 is exit 1 (one layer). Equations of the paper's section 3; ``threshold`` is its dynamic draft exit. The last
    two (ours) count the columns where drafting would have gone on, and the matches among them.
    """

    matched: list[float]
    missed: list[float]
    sure_when_matched: list[float]
    sure_when_missed: list[float]
    going_on: list[float]
    going_on_matched: list[float]

    @classmethod
    def empty(cls, exits: int) -> Statistics:
        return cls(*([0.0] * exits for _ in range(6)))

    def handed_on(self) -> Statistics:
        """The same shares and confidences, at the weight of a few columns: what a new request starts from."""
        weights = [min(1.0, PRIOR / max(a + b, 1e-9)) for a, b in zip(self.matched, self.missed, strict=True)]
        sums = (getattr(self, each.name) for each in fields(self))
        return Statistics(*([value * weight for value, weight in zip(each, weights, strict=True)] for each in sums))

    def learn(self, exit_layer: int, decay: float, matches: Sequence[bool], shares: Sequence[float]) -> None:
        """Take in one round of one exit: whether it agreed at each valid column, and how sure it was."""
        i = exit_layer - 1
        bar = self.threshold(exit_layer)
        goes_on = [match for share, match in zip(shares, matches, strict=True) if share >= bar]
        self.going_on[i] = decay * self.going_on[i] + len(goes_on)
        self.going_on_matched[i] = decay * self.going_on_matched[i] + sum(goes_on)
        hits = [share for share, match in zip(shares, matches, strict=True) if match]
        misses = [share for share, match in zip(shares, matches, strict=True) if not match]
        self.matched[i] = decay * self.matched[i] + len(hits)
        self.missed[i] = decay * self.missed[i] + len(misses)
        self.sure_when_matched[i] = decay * self.sure_when_matched[i] + sum(hits)
        self.sure_when_missed[i] = decay * self.sure_when_missed[i] + sum(misses)

    def alpha(self, exit_layer: int) -> float | None:
        """Share of agreement; None if the exit was never seen."""
        i = exit_layer - 1
        total = self.matched[i] + self.missed[i]
        return self.matched[i] / total if total else None

    def with_stop(self, exit_layer: int) -> tuple[float, float] | None:
        """What a draft that stops below the threshold comes to: accepted tokens expected, and drafted ones (ours).

        Drafting goes on with probability s. A token stands with probability a where it does and b where it stops, so
        f = s a (1 + f) + (1 - s) b tokens are accepted, and 1 / (1 - s) are drafted. One miss more than was seen is
        assumed: an exit that was right a few times would else seem always right.
        """
        i = exit_layer - 1
        total = self.matched[i] + self.missed[i]
        if not total:
            return None
        both = self.going_on_matched[i] / (total + 1.0)  # s a
        s = min(self.going_on[i] / total, 1.0 - 1.0 / LONGEST)
        return self.matched[i] / (total + 1.0) / (1.0 - min(both, s)), 1.0 / (1.0 - s)

    def threshold(self, exit_layer: int) -> float:
        """Drafting stops below this confidence: half-way between what it was at hits and at misses.

        Without a miss yet half of the confidence at hits, without a hit 1 (ours; the code compares with NaN).
        """
        i = exit_layer - 1
        if not self.matched[i]:
            return 1.0
        hit = self.sure_when_matched[i] / self.matched[i]
        miss = self.sure_when_missed[i] / self.missed[i] if self.missed[i] else 0.0
        return (hit + miss) / 2


def best_exit(
    statistics: Sequence[Statistics], exits: Sequence[int], costs: Costs, longest: int = LONGEST - 1
) -> tuple[int, int]:
    """Exit and draft length with the most expected tokens per cost (the paper's TPL), for a batch.

    One exit serves all requests of a step: expected tokens are added over those that have seen the exit (ours).

    Args:
        exits: to choose from.
    Returns:
        the exit, and the length; length 0 is a step without a draft.
    """
    best, chosen = 1.0 / costs.plain, (exits[0], 0)
    for exit_layer in exits:
        known = [alpha for each in statistics if (alpha := each.alpha(exit_layer)) is not None]
        if not known:
            continue
        expected, power, value = 1.0, [1.0] * len(known), 0.0
        for length in range(1, longest + 1):
            power = [p * alpha for p, alpha in zip(power, known, strict=True)]
            expected += sum(power) / len(known)
            before, value = value, expected / costs.step(exit_layer, length)
            if value < before:  # one more token is worth less and less
                break
            if value > best:
                best, chosen = value, (exit_layer, length)
    return chosen


def best_exit_with_stop(statistics: Sequence[Statistics], exits: Sequence[int], costs: Costs) -> tuple[int, int]:
    """The same for drafts that stop below the threshold, whose length nobody plans (ours).

    Returns:
        the exit, and the longest draft: 0 or the cap.
    """
    best, chosen = 1.0 / costs.plain, (exits[0], 0)
    for exit_layer in exits:
        known = [found for each in statistics if (found := each.with_stop(exit_layer)) is not None]
        if not known:
            continue
        accepted, drafted = (sum(each) / len(known) for each in zip(*known, strict=True))
        value = (1.0 + accepted) / costs.step(exit_layer, drafted)
        if value > best:
            best, chosen = value, (exit_layer, LONGEST)
    return chosen


def _at_best(costs: Costs, exit_layer: int) -> float:
    """Expected tokens per cost of an exit that is always right, at its best length."""
    return max((length + 1) / costs.step(exit_layer, length) for length in range(1, LONGEST))


@dataclass(slots=True)
class _State:
    """One request: what was learnt, and its hidden states of the step under way, depth -> [rows, D]."""

    statistics: Statistics
    drafted: EarlyExitBuilder | None = None
    said: list[int] = field(default_factory=list)  # most probable token of the drafting exit, per drafted row
    shares: list[float] = field(default_factory=list)  # and its probability
    rounds: int = 0
    informed: bool = False  # by earlier requests: its prompt need not be learnt from
    hidden: dict[int, Tensor] = field(default_factory=dict)
    best: Sequence[int] = ()


class DynamicExitDrafter(Drafter):
    """Self-speculation whose exit layer and length are chosen before every step from what all exits would have said.

    Paper:   arXiv:2504.05598 (DEL), on LayerSkip's self-speculation, arXiv:2404.16710.
    Exact:   chains carry the q of the exit that drew them (a point mass at temperature 0). The exit is fixed before a
             step from the past, the stop looks at a drafted token that is verified all the same: lossless under any
             lossless verifier of chains.
    Differs: one exit for a batch; a planned length of 0 is honoured, with one probing token every 16 steps; the cost is
             measured unless asked for in layers, and then counts norm and head; shadow tokens are re-read only every
             ``reread_every`` steps, since the head, cheap beside the layers of a large model, is dear beside those of a
             small one (between them the drafting exit is learnt from alone), and in steps without a draft only when
             probing; with the dynamic stop the exit is chosen by what such drafts come to, since nobody plans their
             length (the paper plans as if it were fixed); a request starts from what the one before it ended with, at
             the weight of 8 columns, and only the first ones from their prompts and with one token from the shallowest
             exit; the threshold compares plain confidences with plain ones when sampling.
    """

    name = "del"
    laws: tuple[type[Law], ...] = (Sampled,)
    flops = 0.0  # there is no model of its own
    declared = Declared(
        variants=(
            Variant(),
            Variant(options={"exit_layer": 3, "draft_length": 3}, one_rule=True),
            Variant(options={"draft_length": "planned", "head_cost": 0}, one_rule=True),
            Variant(options={"exit_layer": 2, "reread_every": 2}, one_rule=True),
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of DEL.

        Attributes:
            exit_layer: None: chosen before every step; a number of layers: always this one (LayerSkip).
            draft_length: None: the confidence threshold decides; 'planned': the length that goes with the chosen
                exit (the paper's ablation without dynamic exit); a number: always so many tokens.
            decay: of the statistics, per step in which an exit was seen.
            reread_every: steps between two re-readings of all exits; 1 as published, for where the head is cheap.
            prompt_rows: last rows of a prompt that the exits are judged by before there was any request; 32 as
                published, where it is done for every request.
            cost: what the objective divides by: 'measured' milliseconds on this machine, or 'layers' loaded.
            head_cost: with cost='layers': norm and head in layers; None: by their parameters. The paper has 0.
            min_exit: shallowest exit to consider.
        """

        exit_layer: int | None = None
        draft_length: int | str | None = None
        decay: float = 0.95
        reread_every: int = 16
        prompt_rows: int = 8
        cost: str = "measured"
        head_cost: float | None = None
        min_exit: int = 1

        def __post_init__(self) -> None:
            for name, least in (
                ("exit_layer", 1),
                ("draft_length", 0),
                ("reread_every", 1),
                ("prompt_rows", 1),
                ("min_exit", 1),
            ):
                value = getattr(self, name)
                if value is None or (name == "draft_length" and value == "planned"):
                    continue
                if not isinstance(value, int) or isinstance(value, bool) or value < least:
                    kinds = " or 'planned'" if name == "draft_length" else ""
                    raise ConfigError(f"{name}={value!r} must be an integer of at least {least}{kinds}")
            if isinstance(self.draft_length, int) and self.draft_length > 64:
                raise ConfigError(f"draft_length={self.draft_length} must be at most 64")
            if not isinstance(self.decay, int | float) or not 0 < self.decay <= 1:
                raise ConfigError(f"decay={self.decay!r} must be above 0 and at most 1")
            if self.cost not in ("measured", "layers"):
                raise ConfigError(f"cost={self.cost!r} must be 'measured' or 'layers'")
            cost = self.head_cost
            if cost is not None and (not isinstance(cost, int | float) or not 0 <= cost < math.inf):
                raise ConfigError(f"head_cost={self.head_cost!r} must be 0 or more layers")

    def __init__(self, config: Config, target: LanguageModel) -> None:
        self.config = config
        self.early_exit = EarlyExit(target)
        self._target = target
        self._layers = target.num_layers
        for name in ("exit_layer", "min_exit"):
            value = getattr(config, name)
            if value is not None and value >= self._layers:
                raise ConfigError(
                    f"{name}={value} is out of range: '{target.name}' has {self._layers} layers, so exits are 1 to "
                    f"{self._layers - 1}"
                )
        self._fixed = config.exit_layer is not None and isinstance(config.draft_length, int)
        self._exits = range(config.min_exit, self._layers)
        # what is never learnt from need not be seen
        depths = tuple(range(1, self._layers + 1))
        self._blind = Needs(hidden_layers=HiddenLayers((), 0))
        self._all = Needs(hidden_layers=HiddenLayers(depths, config.prompt_rows))
        self.needs = self._blind if self._fixed else self._all  # of the next forward
        length = config.draft_length if isinstance(config.draft_length, int) else LONGEST
        self.offers = Offers(evidence=(GreedyLaws,), length=length)
        self._costs = (
            Costs.in_layers(self._layers, head_in_layers(target) if config.head_cost is None else config.head_cost)
            if config.cost == "layers" or self._fixed
            else Costs.measured(target)
        )
        # an exit that would not pay if it were always right is not worth re-reading
        plain = 1.0 / self._costs.plain
        self._hopeful = [each for each in self._exits if _at_best(self._costs, each) > plain]
        self._states: dict[int, _State] = {}
        self._prior: Statistics | None = None
        self._round = 0
        self._exit = self._exits[0]

    def attach(self, cache: Any) -> None:
        self.early_exit.attach(cache)

    def on_forward(self, features: Sequence[Features]) -> None:
        """Keep the hidden states of this step's rows; a prompt's last rows are learnt from at once."""
        if self._fixed:
            return
        for each in features:
            state = self._states.get(each.context.request_id)
            if state is None:
                state = self._begin(each.context)
            state.hidden, state.best = dict(each.hidden), each.best
            if each.draft.resume or not each.hidden:
                continue
            rows = len(each.hidden[self._layers])
            at_end = each.begin + rows == len(each.context.tokens)  # not the middle of a prompt
            if at_end and not (state.informed and each.begin + rows == each.context.num_prompt):
                self._reread(state, range(rows))

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Draft with the exit chosen for this step; every token is one forward of the first layers for the batch."""
        growing = [
            EarlyExitBuilder(
                context, replace(budget, max_nodes=min(budget.max_nodes, budget.max_depth), stop_rule=None)
            )
            for context, budget in zip(contexts, budgets, strict=True)
            if min(budget.max_nodes, budget.max_depth) > 0
        ]
        self._round += 1
        exit_layer, length = self._plan([draft.context for draft in growing])
        self._exit = exit_layer
        for draft in growing:
            draft.budget = replace(draft.budget, max_depth=min(draft.budget.max_depth, length))
        active = growing if length else []
        taps = tuple(range(1, exit_layer + 1)) if self.needs is self._all else (exit_layer,)
        with torch.inference_mode():
            while active:
                output = self.early_exit.read(active, exit_layer, taps, scored=True)
                for row, draft in enumerate(active):
                    self._extend(draft, output, row)
                closing = [draft for draft in active if not draft.frontier]
                active = [draft for draft in active if draft.frontier]
                if closing:
                    self.early_exit.read(closing, exit_layer, taps, scored=False)
        drafts = {draft.context.request_id: self._finish(draft) for draft in growing}
        return [drafts.get(context.request_id, NO_DRAFT) for context in contexts]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from the columns that the drafting exit was right about, and the first where it was not."""
        for outcome in outcomes:
            state = self._states.get(outcome.request_id)
            if state is None or state.drafted is None:
                continue
            drafted, state.drafted = state.drafted, None
            state.rounds += 1
            if self._fixed:
                continue
            assert outcome.draft.resume is not None
            exit_layer = outcome.draft.resume.depth
            wrong = next((i for i, token in enumerate(state.said) if state.best[i] != token), len(state.said))
            if state.hidden:
                below = {depth: drafted.hidden(depth) for depth in range(1, exit_layer + 1)}
                state.hidden = {**state.hidden, **below}
                self._reread(state, range(wrong + 1))
            else:  # what the drafting exit said is known all the same
                count = min(wrong + 1, len(state.said))
                matches = [column < wrong for column in range(count)]
                state.statistics.learn(exit_layer, self.config.decay, matches, state.shares[:count])

    def release(self, request_id: int) -> None:
        state = self._states.pop(request_id, None)
        if state is not None and state.rounds:
            self._prior = state.statistics.handed_on()
        if not self._states and not self._fixed:
            self.needs = self._all  # the next forward may be a prompt's

    def _begin(self, context: Context) -> _State:
        """Start a request, from what earlier ones ended with if there are any."""
        prior = self._prior
        state = _State(
            Statistics.empty(self._layers) if prior is None else prior.handed_on(), informed=prior is not None
        )
        self._states[context.request_id] = state
        return state

    # ------------------------------------------------------------------ planning

    def _plan(self, contexts: Sequence[Context]) -> tuple[int, int]:
        """Exit and longest draft of this step."""
        config = self.config
        states = [self._states.get(context.request_id) for context in contexts]
        for context, state in zip(contexts, states, strict=True):
            if state is None:
                self._begin(context)
        if self._fixed:
            assert config.exit_layer is not None
            assert isinstance(config.draft_length, int)
            return config.exit_layer, config.draft_length
        started = [state.statistics for state in states if state is not None and (state.rounds or state.informed)]
        exits = (self._hopeful or self._exits) if config.exit_layer is None else [config.exit_layer]
        self.needs = self._all if len(started) < len(states) or self._round % config.reread_every == 0 else self._blind
        if not started:  # the first round: the shallowest exit, one token
            return exits[0], 1
        choose = best_exit_with_stop if config.draft_length is None else best_exit
        exit_layer, length = choose(started, exits, self._costs)
        if isinstance(config.draft_length, int):
            return exit_layer, config.draft_length
        if not length:
            probing = self._round % PROBE_EVERY == 0
            self.needs = self._all if probing else self._blind
            return exit_layer, int(probing)
        return exit_layer, length

    def _extend(self, draft: EarlyExitBuilder, output: Output, row: int) -> None:
        """One more token; unsure tokens are kept and verified, but not continued."""
        node = draft.draw(output, row, self.name)
        stop = not draft.has_room(node)
        state = self._states[draft.context.request_id]
        state.said[node:], state.shares[node:] = [output.best[row]], [output.top_shares[row]]
        if not stop and self.config.draft_length is None:
            token = draft.tokens[node]
            plain = output.best[row] == token
            share = output.top_shares[row] if plain else float(torch.softmax(output.logits_MV[row], -1)[token])
            stop = bool(state.rounds or state.informed) and share < state.statistics.threshold(self._exit)
        draft.frontier = [] if stop else [node]

    def _finish(self, draft: EarlyExitBuilder) -> Draft:
        if not draft.tokens:
            return NO_DRAFT
        self._states[draft.context.request_id].drafted = draft
        return draft.finish(Sampled, draft.resume_point(self._exit))

    # ------------------------------------------------------------------ learning

    def _reread(self, state: _State, columns: range) -> None:
        """Re-read the exits at these rows in one call of the head, and update every exit's statistics."""
        exits = self._hopeful if self.config.exit_layer is None else [self.config.exit_layer]
        depths = [depth for depth in exits if depth in state.hidden]
        whole = [] if state.best else [self._layers]  # a prompt's rows were not scored
        rows_TD = torch.cat([state.hidden[depth][columns.start : columns.stop] for depth in [*depths, *whole]])
        output = self._target.score(rows_TD, top=1)
        count = len(columns)
        if whole:
            truth = list(output.best[len(depths) * count :])
        else:
            truth = [state.best[column] for column in columns]
        for place, depth in enumerate(depths):
            rows = slice(place * count, (place + 1) * count)
            matches = [said == true for said, true in zip(output.best[rows], truth, strict=True)]
            state.statistics.learn(depth, self.config.decay, matches, output.top_shares[rows])
