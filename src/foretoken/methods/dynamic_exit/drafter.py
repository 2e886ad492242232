"""DEL: draft with the first E layers of the target; the acceptance of every exit determines E and the length.

    1 choose     E, n = argmax of (1 + alpha + ... + alpha^n) / cost of a step with n drafts from exit E
    2 draft      layers [0, E) ── final norm ── head, n times: E layers a token, the target's own weights
    3 verify     the engine runs layers [E, L) over all drafted rows
    4 re-read    hidden states of every exit, from steps 2 and 3, through norm and head: shadow tokens
    5 learn      alpha[e] = how often exit e agreed with the whole model, with decay

``propose`` performs steps 1 and 2, ``observe`` 4 and 5. statistics.py computes alpha and the best exit.

Letters: T packed rows, D width, L layers, X exits that are re-read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
from torch import Tensor

from foretoken.core.draft import NO_DRAFT, Draft, GreedyLaws, Law, Sampled
from foretoken.core.errors import ConfigError
from foretoken.core.needs import Declared, HiddenLayers, Needs, Offers, Variant
from foretoken.core.protocols import Budget, Context, Drafter, Features, Outcome
from foretoken.drafting import draft_vocabulary
from foretoken.drafting.draft_columns import DraftColumns
from foretoken.drafting.early_exit import EarlyExit, EarlyExitBuilder
from foretoken.methods.dynamic_exit.costs import Costs, head_in_layers
from foretoken.methods.dynamic_exit.statistics import LONGEST, Statistics, at_best, best_exit, best_exit_with_stop
from foretoken.models.language_model import LanguageModel, Output
from foretoken.options.option import Checked, Option

_DEAREST = 10_000  # upper bound of head_cost in layers: above it the layers would be negligible
PROBE_EVERY = 16  # one of this many steps without a draft proposes a probing token (ours)


@dataclass(slots=True)
class _State:
    """One request: its statistics, and its hidden states of the current step, depth -> [rows, D]."""

    statistics: Statistics
    drafted: EarlyExitBuilder | None = None
    best_of_exit: list[int] = field(default_factory=list)  # most probable token of the drafting exit, per drafted row
    shares: list[float] = field(default_factory=list)  # and its probability
    rounds: int = 0
    informed: bool = False  # started from the statistics of earlier requests, so its prompt is not re-read
    exit: int = 0  # of the current draft
    own: bool = False  # plans from its own history only
    own_rounds: int = 0  # steps in which a draft was requested
    # length at the last of them; a repeated request for the same root, after a neighbour's fault, is not another step
    root: int = -1
    learnt: int = 0  # rows without a draft before this one are in the statistics; a forward may return them again
    looks: bool = True  # whether to learn from hidden states of the next forward
    hidden: dict[int, Tensor] = field(default_factory=dict)
    best: Sequence[int] = ()


class DynamicExitDrafter(Drafter):
    """Self-speculation; the acceptance of all exits determines exit layer and length before every step.

    Paper:   arXiv:2504.05598 (DEL), on LayerSkip's self-speculation, arXiv:2404.16710.
    Exact:   chains carry the q of the exit that sampled them (a point mass at temperature 0). The exit is chosen before
             a step, and the token that triggers the stop is verified, too: lossless under any lossless verifier of
             chains.
    Differs: Choice: one exit for a batch. A planned length of 0 is plain decoding, with one probing token every 16
             steps; there are no drafts where plain decoding was faster. The cost is in layers including norm and
             head, corrected by the times of steps as they run. With the dynamic stop, an exit is chosen by the
             expected length of drafts with that stop; the paper plans with a fixed length.
             Re-reading: only every ``reread_every`` steps, because the head is expensive compared with the layers of a
             small model; between re-readings only the statistics of the drafting exit are updated. In steps without a
             draft only when probing.
             Start: a request starts from the statistics of the previous request, at the weight of 8 columns; only the
             first requests learn from their prompts and draft one token from the shallowest exit.
             Threshold: when sampling it compares probabilities at temperature 1 with probabilities at temperature 1.
             Seeded requests with draft-dependent tokens have their own exit and length, from their own history and
             from costs in layers, and start without statistics. If several exits draft in one step, the verification
             resumes from the exit of most drafts, and computes the other drafts from the first layer.
    """

    name = "del"
    laws: tuple[type[Law], ...] = (Sampled,)
    flops = 0.0  # there is no separate model
    declared = Declared(
        variants=(
            Variant(),
            Variant(options={"exit_layer": 3, "draft_length": 3}, one_rule=True),
            Variant(options={"draft_length": "planned", "head_cost": 0}, one_rule=True),
            Variant(options={"exit_layer": 2, "reread_every": 2}, one_rule=True),
        )
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(Checked):
        """Options of DEL."""

        exit_layer: Annotated[
            int | None, Option("None: chosen before every step; a number of layers: a fixed exit (LayerSkip).", least=1)
        ] = None
        draft_length: Annotated[
            int | str | None,
            Option(
                "None: the confidence threshold decides; 'planned': the optimal length of the chosen exit (the paper's "
                "ablation without dynamic exit); a number: a fixed number of tokens.",
                least=0,
                most=64,
                choices=("planned",),
            ),
        ] = None
        decay: Annotated[
            float, Option("Decay of an exit's statistics per step that updates them.", above=0, most=1)
        ] = 0.95
        reread_every: Annotated[
            int, Option("Steps between two re-readings of all exits; 1 in the paper, for a cheap head.", least=1)
        ] = 16
        prompt_rows: Annotated[
            int,
            Option(
                "Last rows of a prompt from which the first requests learn the statistics of the exits; 32 in the "
                "paper, for every request.",
                least=1,
            ),
        ] = 8
        cost: Annotated[
            str,
            Option(
                "Unit of the objective's cost: 'layers' loaded, or 'measured': corrected by the times of steps.",
                choices=("measured", "layers"),
            ),
        ] = "measured"
        head_cost: Annotated[
            float | None,
            Option(
                "With cost='layers': cost of norm and head in layers; None: from parameter counts. 0 in the paper.",
                least=0,
                most=_DEAREST,
            ),
        ] = None
        min_exit: Annotated[int, Option("Shallowest exit to consider.", least=1)] = 1
        draft_vocab: Annotated[str | Path | None, draft_vocabulary.OPTION] = None

    def __init__(self, config: Config, target: LanguageModel) -> None:
        self.config = config
        self.early_exit = EarlyExit(target)
        self._target = target
        self._columns = DraftColumns(target, draft_vocabulary.find(config.draft_vocab, target), target.vocab_size)
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
        # without learning no hidden states are needed
        depths = tuple(range(1, self._layers + 1))
        self._blind = Needs(hidden_layers=HiddenLayers((), 0))
        self._all = Needs(hidden_layers=HiddenLayers(depths, config.prompt_rows))
        self.needs = self._blind if self._fixed else self._all  # of the next forward
        length = config.draft_length if isinstance(config.draft_length, int) else LONGEST
        may_skip_drafting = not isinstance(config.draft_length, int)
        self.offers = Offers(evidence=(GreedyLaws,), length=length, may_skip_drafting=may_skip_drafting, resumes=True)
        head_cost = head_in_layers(target) if config.head_cost is None else config.head_cost
        in_layers = self._layers, head_cost, len(self._columns) / target.vocab_size
        self._costs, self._layer_costs = Costs(*in_layers), Costs(*in_layers)
        self._hopeful = self._own_hopeful = self._worth_rereading(self._layer_costs)
        self._timed = config.cost == "measured" and not self._fixed
        self._last: tuple[int, ...] = ()  # requests of the step before this one
        self._drafted, self._ended = False, 0.0  # whether it had drafts, and when they were made
        self._states: dict[int, _State] = {}
        self._prior: Statistics | None = None
        self._round = 0

    def _worth_rereading(self, costs: Costs) -> list[int]:
        """Return the exits that would pay if they were always right."""
        return [each for each in self._exits if at_best(costs, each) > 1.0 / costs.plain]

    def attach(self, cache: Any) -> None:
        self.early_exit.attach(cache)

    def on_forward(self, features: Sequence[Features]) -> None:
        """Keep the hidden states of this step's rows; update statistics from a prompt's last rows (steps 4 and 5)."""
        if self._fixed:
            return
        reading = False
        for each in features:
            state = self._states.get(each.context.request_id)
            if state is None:
                state = self._begin(each.context)
            state.hidden, state.best = dict(each.hidden) if state.looks else {}, each.best
            if len(each.draft) or not state.hidden:
                continue
            rows = len(each.hidden[self._layers])
            at_end = each.begin + rows == len(each.context.tokens)  # not the middle of a prompt
            reading |= each.begin + rows < each.context.num_prompt
            if state.learnt == each.begin + rows:
                continue
            if at_end and not (state.informed and each.begin + rows == each.context.num_prompt):
                self._reread(each.context.request_id, state, range(rows))
                state.learnt = each.begin + rows
        if not reading:  # until the next choice requests hidden states
            self.needs = self._blind

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Choose an exit for this step (step 1) and draft with it (step 2), a forward of the batch for each token."""
        growing = [
            EarlyExitBuilder(
                context, replace(budget, max_nodes=min(budget.max_nodes, budget.max_depth), stop_rule=None)
            )
            for context, budget in zip(contexts, budgets, strict=True)
            if min(budget.max_nodes, budget.max_depth) > 0
        ]
        self._round += 1
        self._time_the_last_pass(contexts)
        # 1. choose E and n; drafts of one exit form a group
        groups = self._groups(growing)
        # 2. draft n tokens from layers [0, E)
        self._columns.begin([draft.context for draft in growing])
        for exit_layer, group in groups.items():
            began = perf_counter()
            self._grow(group, exit_layer)
            if self._timed:
                self._costs.drafted(exit_layer, max(1, *(len(each.tokens) for each in group)), perf_counter() - began)
        # 3. in the engine: layers [E, L), for the exit of most drafts
        resumed = max(groups, key=lambda each: (len(groups[each]), each), default=0)
        drafts = {draft.context.request_id: self._finish(draft, resumed) for draft in growing}
        self._drafted, self._ended = bool(groups), perf_counter()
        return [drafts.get(context.request_id, NO_DRAFT) for context in contexts]

    def _time_the_last_pass(self, contexts: Sequence[Context]) -> None:
        """Learn what the pass since the last drafts took, if it read no prompt and requests are as many."""
        now, before = tuple(each.request_id for each in contexts), self._last
        self._last = now
        if not self._timed:
            return
        if len(now) != len(before):
            self._costs.forget()
        elif now == before and all(len(each.tokens) > each.num_prompt + 1 for each in contexts):
            self._costs.passed(perf_counter() - self._ended, drafts=self._drafted)
        if self._round % self.config.reread_every == 0:
            self._hopeful = self._worth_rereading(self._costs)

    def _groups(self, growing: Sequence[EarlyExitBuilder]) -> dict[int, list[EarlyExitBuilder]]:
        """Choose for every draft: exit -> its drafts, with the chosen length in their budgets."""
        groups: dict[int, list[EarlyExitBuilder]] = {}
        own = [draft for draft in growing if draft.budget.history_only and not self._fixed]
        shared = [draft for draft in growing if not draft.budget.history_only or self._fixed]
        plans = []
        if shared:
            plan = self._plan([draft.context for draft in shared])
            plans = [(draft, *plan) for draft in shared]
        elif not self._fixed:
            self.needs = self._blind  # only seeded requests draft, and each has its own ``looks``
        plans += [(draft, *self._plan_own(draft.context)) for draft in own]
        if any(self._states[draft.context.request_id].looks for draft in own):
            self.needs = self._all
        for draft, exit_layer, length in plans:
            self._states[draft.context.request_id].exit = exit_layer
            draft.budget = replace(draft.budget, max_depth=min(draft.budget.max_depth, length))
            if length:
                groups.setdefault(exit_layer, []).append(draft)
        return groups

    def _grow(self, active: list[EarlyExitBuilder], exit_layer: int) -> None:
        """Sample the drafts of one exit, one token of each at a time."""
        taps = tuple(range(1, exit_layer + 1)) if self.needs is self._all else (exit_layer,)
        with torch.inference_mode():
            while active:
                output = self.early_exit.read(active, exit_layer, taps, scored=True, head=self._columns.rows)
                for row, draft in enumerate(active):
                    own = draft.budget.history_only
                    self._extend(draft, *self._columns.view(output, row, row + 1, draft.context, top=1, own=own))
                closing = [draft for draft in active if not draft.frontier and len(draft.unread)]
                active = [draft for draft in active if draft.frontier]
                if closing:
                    self.early_exit.read(closing, exit_layer, taps, scored=False)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Update statistics from the columns where the drafting exit was right, and the first where it was wrong."""
        self._columns.observe(outcomes)
        for outcome in outcomes:
            state = self._states.get(outcome.request_id)
            if state is None or state.drafted is None:
                continue
            drafted, state.drafted = state.drafted, None
            state.rounds += 1
            if self._fixed:
                continue
            exit_layer = state.exit
            drafted_best = state.best_of_exit
            wrong = next((i for i, token in enumerate(drafted_best) if state.best[i] != token), len(drafted_best))
            if state.hidden:  # 4. re-read every exit, 5. learn
                if outcome.draft.resume is not None:
                    below = {depth: drafted.hidden(depth) for depth in range(1, exit_layer + 1)}
                    state.hidden = {**state.hidden, **below}
                self._reread(outcome.request_id, state, range(wrong + 1))
            else:  # 5. update the drafting exit: its tokens are known without re-reading
                count = min(wrong + 1, len(drafted_best))
                matches = [column < wrong for column in range(count)]
                state.statistics.learn(exit_layer, self.config.decay, matches, state.shares[:count])

    def release(self, request_id: int) -> None:
        self._columns.release(request_id)
        state = self._states.pop(request_id, None)
        if state is not None and state.rounds:
            self._prior = state.statistics.handed_on()
        if not self._states and not self._fixed and self._prior is None:
            self.needs = self._all  # the next forward may contain a prompt to learn from

    def _begin(self, context: Context) -> _State:
        """Start a request, from the statistics of earlier ones if there are any."""
        prior = self._prior
        state = _State(
            Statistics.empty(self._layers) if prior is None else prior.handed_on(), informed=prior is not None
        )
        self._states[context.request_id] = state
        return state

    # ------------------------------------------------------------------ planning

    def _plan(self, contexts: Sequence[Context]) -> tuple[int, int]:
        """Return exit and longest draft of this step."""
        config = self.config
        states = [self._states.get(context.request_id) or self._begin(context) for context in contexts]
        if self._fixed:
            assert config.exit_layer is not None
            assert isinstance(config.draft_length, int)
            return config.exit_layer, config.draft_length
        started = [state.statistics for state in states if state.rounds or state.informed]
        exits = (self._hopeful or self._exits) if config.exit_layer is None else [config.exit_layer]
        self.needs = self._all if len(started) < len(states) or self._round % config.reread_every == 0 else self._blind
        if not started:  # the first round: the shallowest exit, one token
            return exits[0], 1
        exit_layer, length = self._best(started, exits, self._costs)
        if not length and config.draft_length != 0:
            length = int(self._round % PROBE_EVERY == 0)
            self.needs = self._all if length else self._blind
        return exit_layer, length

    def _plan_own(self, context: Context) -> tuple[int, int]:
        """Return exit and longest draft of one request, from its own history and from costs in layers."""
        config = self.config
        state = self._states.get(context.request_id)
        if state is None or not state.own:  # statistics of its prompt depend on other requests
            state = self._states[context.request_id] = _State(Statistics.empty(self._layers), own=True)
        state.own_rounds += len(context.tokens) != state.root
        state.root = len(context.tokens)
        exits = self._own_hopeful if config.exit_layer is None else [config.exit_layer]
        state.looks = not state.rounds or state.own_rounds % config.reread_every == 0
        if not state.rounds:
            return exits[0], 1
        exit_layer, length = self._best([state.statistics], exits, self._layer_costs)
        if not length and config.draft_length != 0:
            state.looks = state.own_rounds % PROBE_EVERY == 0
            length = int(state.looks)
        return exit_layer, length

    def _best(self, statistics: Sequence[Statistics], exits: Sequence[int], costs: Costs) -> tuple[int, int]:
        """Return the best exit and its longest draft, 0 where none pays; the option ``draft_length`` may fix it."""
        fixed = self.config.draft_length
        exit_layer, length = (best_exit_with_stop if fixed is None else best_exit)(statistics, exits, costs)
        return exit_layer, fixed if isinstance(fixed, int) else length

    def _extend(self, draft: EarlyExitBuilder, output: Output, row: int) -> None:
        """Sample one more token; a token below the threshold is kept and verified, but not continued."""
        node = draft.draw(output, row, self.name)
        if node is None:
            draft.frontier = []
            return
        stop = not draft.has_room(node)
        state = self._states[draft.context.request_id]
        state.best_of_exit[node:], state.shares[node:] = [output.best[row]], [output.top_shares[row]]
        if not stop and self.config.draft_length is None:
            token = draft.tokens[node]
            plain = output.best[row] == token
            column = token if output.columns is None else output.columns.of(token)
            share = output.top_shares[row] if plain else float(torch.softmax(output.logits_MV[row], -1)[column])
            stop = bool(state.rounds or state.informed) and share < state.statistics.threshold(state.exit)
        draft.frontier = [] if stop else [node]

    def _finish(self, draft: EarlyExitBuilder, resumed: int) -> Draft:
        """Return the draft; verification resumes from its exit if that is the exit of the whole step."""
        if not draft.tokens:
            return NO_DRAFT
        state = self._states[draft.context.request_id]
        state.drafted = draft
        return draft.finish(Sampled, draft.resume_point(resumed) if state.exit == resumed else None)

    # ------------------------------------------------------------------ learning

    def _reread(self, request_id: int, state: _State, columns: range) -> None:
        """Steps 4 and 5: score the exits at these rows in one call of the head, and update every exit's statistics."""
        hopeful = self._own_hopeful if state.own else self._hopeful
        exits = hopeful if self.config.exit_layer is None else [self.config.exit_layer]
        depths = [depth for depth in exits if depth in state.hidden]
        if not depths:  # no exit would pay even if it were always right
            return
        count, rows = len(columns), slice(columns.start, columns.stop)
        truth = list(state.best[rows])
        if not state.best:  # a prompt's rows were not scored
            truth = list(self._target.score(state.hidden[self._layers][rows], top=1).best)
        output = self._columns.score(torch.cat([state.hidden[depth][rows] for depth in depths]), request_id)
        for place, depth in enumerate(depths):
            rows = slice(place * count, (place + 1) * count)
            matches = [token == true for token, true in zip(output.best[rows], truth, strict=True)]
            state.statistics.learn(depth, self.config.decay, matches, output.top_shares[rows])
