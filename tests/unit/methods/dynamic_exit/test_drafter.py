"""DEL: statistics and choice by hand and by brute force; re-read states equal computed ones; it follows a change."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.core.draft import NO_DRAFT, Draft
from foretoken.core.errors import ConfigError
from foretoken.core.protocols import Budget, Context, Features, Outcome
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict
from foretoken.drafting.draft_columns import DraftColumns
from foretoken.drafting.early_exit import EarlyExitBuilder
from foretoken.engine.llm import LLM
from foretoken.methods.dynamic_exit import drafter as dynamic_exit
from foretoken.methods.dynamic_exit.costs import Costs, head_in_layers
from foretoken.methods.dynamic_exit.drafter import LONGEST, PROBE_EVERY, DynamicExitDrafter, Statistics, best_exit
from foretoken.models.language_model import Output
from foretoken.options.sampling import SamplingParams
from helpers.golden import Session, tokens_of
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.watching import Watch, fresh_rows, fresh_states
from helpers.zoo_llms import PROMPTS, assert_idle, greedy, ids, prompt_ids, target, with_drafter

EXACT = target().native_decoder is not None


def drafter_of(**options: Any) -> DynamicExitDrafter:
    return DynamicExitDrafter(DynamicExitDrafter.Config(**options), target())


def llm_of(drafter: Any = None, **options: Any) -> LLM:
    return with_drafter(drafter or drafter_of(**options), num_nodes=LONGEST, max_num_seqs=4)


# ------------------------------------------------------------------ statistics, by hand


def test_statistics_by_hand() -> None:
    statistics = Statistics.empty(3)
    assert statistics.alpha(2) is None
    assert statistics.threshold(2) == 1.0
    statistics.learn(2, 0.5, [True, True, False], [0.9, 0.7, 0.4])
    assert statistics.alpha(2) == pytest.approx(2 / 3)
    assert statistics.threshold(2) == pytest.approx(((0.9 + 0.7) / 2 + 0.4) / 2)
    statistics.learn(2, 0.5, [True], [0.5])
    matched, missed = 0.5 * 2 + 1, 0.5 * 1
    assert statistics.alpha(2) == pytest.approx(matched / (matched + missed))
    hit = (0.5 * (0.9 + 0.7) + 0.5) / matched
    assert statistics.threshold(2) == pytest.approx((hit + 0.5 * 0.4 / missed) / 2)
    assert statistics.alpha(1) is statistics.alpha(3) is None


def test_thresholds_without_a_hit_or_without_a_miss() -> None:
    statistics = Statistics.empty(2)
    statistics.learn(1, 0.95, [False, False], [0.9, 0.8])
    assert statistics.alpha(1) == 0.0
    assert statistics.threshold(1) == 1.0
    statistics.learn(2, 0.95, [True, True], [0.9, 0.7])
    assert statistics.alpha(2) == 1.0
    assert statistics.threshold(2) == pytest.approx(0.4)


class Table:
    """Stands in for the target: row c of depth d says ``table[d - 1][c]``, with a confidence that names the place."""

    num_layers = 4
    vocab_size = 10

    def __init__(self, table: list[list[int]]) -> None:
        self.table = table

    def score(self, rows_TD: Tensor, *, top: int) -> Output:
        assert top == 1
        places = [(int(depth), int(column)) for depth, column in rows_TD.tolist()]
        best = [self.table[depth - 1][column] for depth, column in places]
        shares = [depth / 10 + column / 100 for depth, column in places]
        return Output(torch.zeros(len(best), 1), best, [0.0] * len(best), best, shares)


def hand_made(table: list[list[int]], said: list[int], exit_layer: int) -> Any:
    """A drafter in the moment after verification: 1 + N columns of every depth, N tokens drafted by the exit."""
    drafter: Any = DynamicExitDrafter.__new__(DynamicExitDrafter)
    drafter.config = DynamicExitDrafter.Config()
    drafter._hopeful = range(1, 4)
    drafter._target, drafter._layers, drafter._fixed = Table(table), 4, False
    drafter._columns = DraftColumns(drafter._target, None, Table.vocab_size)
    drafter._exits, drafter._round, drafter._exit = range(1, 4), 1, exit_layer
    columns = len(table[0])
    rows = {depth: torch.tensor([[depth, column] for column in range(columns)]) for depth in range(1, 5)}
    state = dynamic_exit._State(Statistics.empty(4))
    growing = EarlyExitBuilder(SimpleNamespace(request_id=0), Budget(9, 9), kept=[rows])  # type: ignore[arg-type]
    growing.tokens = list(said)
    state.drafted, state.best_of_exit, state.exit = growing, list(said), exit_layer
    state.hidden = {depth: values for depth, values in rows.items() if depth > exit_layer}
    state.best = table[3]
    drafter._states = {0: state}
    return drafter


def observe(drafter: Any) -> Statistics:
    state = drafter._states[0]
    draft = Draft(TokenTree(state.best_of_exit), resume=state.drafted.resume_point(drafter._exit))
    drafter.observe([Outcome(0, draft, Verdict((), 0), (0,))])
    found: Statistics = state.statistics
    return found


#            columns: 0  1  2  3  (root and three drafted tokens)
TABLE = [[5, 6, 9, 9], [5, 6, 7, 9], [5, 0, 7, 8], [5, 6, 7, 8]]


def test_where_no_exit_could_pay_nothing_is_read_again() -> None:
    """As measured costs may say on a busy machine: the request goes on."""
    drafter = hand_made(TABLE, TABLE[0][:3], 1)
    drafter._hopeful = []
    assert observe(drafter).alpha(1) is None


@pytest.mark.parametrize(
    ("exit_layer", "valid"),
    [(1, 3), (2, 4), (3, 2)],  # the first wrong column is the last valid one; exit 2 drafted 5 6 7: all columns count
)
def test_columns_after_the_first_wrong_one_do_not_count(exit_layer: int, valid: int) -> None:
    statistics = observe(hand_made(TABLE, TABLE[exit_layer - 1][:3], exit_layer))
    for depth in range(1, 4):
        matches = [TABLE[depth - 1][column] == TABLE[3][column] for column in range(valid)]
        shares = [depth / 10 + column / 100 for column in range(valid)]
        assert statistics.matched[depth - 1] == sum(matches)
        assert statistics.missed[depth - 1] == valid - sum(matches)
        hits = sum(share for share, match in zip(shares, matches, strict=True) if match)
        assert statistics.sure_when_matched[depth - 1] == pytest.approx(hits)
        assert statistics.sure_when_missed[depth - 1] == pytest.approx(sum(shares) - hits)


# ------------------------------------------------------------------ the choice, by brute force


def brute_force(
    alphas: list[list[float | None]], exits: list[int], layers: int, head: float, longest: int
) -> tuple[float, set[tuple[int, int]]]:
    """The best value of expected tokens over layers, and all that have it; requests that know an exit speak for all."""
    values: dict[tuple[int, int], float] = {}
    for exit_layer in exits:
        known = [row[exit_layer - 1] for row in alphas if row[exit_layer - 1] is not None]
        for length in range(longest + 1):
            tokens = [sum(float(alpha) ** power for power in range(length + 1)) for alpha in known]  # type: ignore[arg-type]
            if length == 0:
                value = len(alphas) / (layers + head)
            elif not known:
                continue
            else:
                value = sum(tokens) / len(known) * len(alphas) / (length * (exit_layer + head) + layers + head)
            values[exit_layer, length] = value
    best = max(values.values())
    return best, {key for key, value in values.items() if value >= best - 1e-12}


def statistics_of(alphas: list[float | None]) -> Statistics:
    found = Statistics.empty(len(alphas))
    for i, alpha in enumerate(alphas):
        if alpha is not None:
            found.matched[i], found.missed[i] = alpha * 20, (1 - alpha) * 20
    return found


@pytest.mark.parametrize("seed", range(60))
def test_the_best_exit_is_that_of_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    layers, batch = rng.randint(2, 12), rng.choice([1, 1, 3])
    head, longest = rng.choice([0.0, 0.5, 2.5]), rng.choice([1, 4, 17])
    exits = list(range(rng.randint(1, layers - 1), layers))
    kinds = [None, 0.0, 1.0, 1 - 1e-9, 0.9, 0.5]
    alphas = [[rng.choice([*kinds, rng.random()]) for _ in range(layers)] for _ in range(batch)]
    found = best_exit([statistics_of(row) for row in alphas], exits, Costs(layers, head), longest)
    best, allowed = brute_force(alphas, exits, layers, head, longest)
    assert found in allowed or (found[1] == 0 and any(length == 0 for _, length in allowed)), best


def test_what_drafts_that_stop_come_to() -> None:
    """Ten columns, eight matches; six would have gone on, all of them matches; one miss more is assumed."""
    sums = ([8.0], [2.0], [0.0], [0.0], [6.0], [6.0])
    accepted, drafted = Statistics(*sums).with_stop(1) or (0.0, 0.0)
    assert accepted == pytest.approx((8 / 11) / (1 - 6 / 11))
    assert drafted == pytest.approx(1 / (1 - 6 / 10))
    assert Statistics.empty(1).with_stop(1) is None
    always = Statistics([8.0], [0.0], [8.0], [0.0], [8.0], [8.0])
    assert (always.with_stop(1) or (0.0, 0.0))[0] == pytest.approx(8.0)


def test_what_a_step_costs() -> None:
    """In layers; then a drafting layer takes twice the time of one of a plain pass, and a verifying pass half as much
    again."""
    costs = Costs(8, 2.0)
    assert (costs.step(3, 0), costs.step(3, 2)) == (10.0, 2 * (3 + 2.0) + 8 + 2.0)
    costs.drafted(3, 2, 2.0)
    costs.passed(1.5, drafts=True)
    assert costs.step(3, 2) == pytest.approx(10 * 0.2 * 10 / 1.5 + 10)  # a pass with drafts stands for a plain one
    costs.passed(1.0, drafts=False)
    assert (costs.step(3, 2), costs.step(3, 0)) == pytest.approx((2 * 10 + 15, 10))
    costs.forget()
    assert costs.step(3, 2) == 20.0


def test_a_pause_hardly_counts() -> None:
    """The machine did something else for a thousand steps; ten steps later the costs are nearly those from before."""
    costs = Costs(8, 2.0)
    for _ in range(20):
        costs.passed(1.0, drafts=False)
        costs.passed(1.2, drafts=True)
    costs.passed(1000.0, drafts=True)
    assert costs.step(3, 2) < 10 + 1.5 * 12
    for _ in range(10):
        costs.passed(1.2, drafts=True)
    assert costs.step(3, 2) == pytest.approx(10 + 12, rel=0.06)


def test_costs_are_learned_while_it_runs() -> None:
    """From the second step after the prompt on, and not where the option asks for layers."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    learned, in_layers = drafter_of(), drafter_of(cost="layers")
    for drafter in (learned, in_layers):
        llm_of(drafter).generate([PROMPTS[0]], params)
    assert learned._costs.layer_seconds > 0
    assert learned._costs.verifying_seconds + learned._costs.plain_seconds > 0
    assert in_layers._costs == in_layers._layer_costs


def test_the_head_is_counted_before_the_weights_are_packed() -> None:
    """8,192 x 384 next to layers of 1.57 M; once packed, a layer's modules own nothing but its norms."""
    assert head_in_layers(target()) == pytest.approx(2.0, abs=0.01)


def test_the_ends_of_the_scale() -> None:
    exits = range(1, 8)
    always = [statistics_of([1.0] * 8)]
    assert best_exit(always, exits, Costs(8, 0.0)) == (1, LONGEST - 1)
    never = [statistics_of([0.0] * 8)]
    assert best_exit(never, exits, Costs(8, 0.0))[1] == 0
    unknown = [Statistics.empty(8)]
    assert best_exit(unknown, exits, Costs(8, 0.0))[1] == 0
    only_5 = [statistics_of([None, None, None, None, 0.99, None, None, None])]
    assert best_exit(only_5, exits, Costs(8, 0.0))[0] == 5
    # a expensive head makes cheap layers less of a gain
    shallow = [statistics_of([0.55, 0.9, *[0.95] * 6])]
    assert best_exit(shallow, exits, Costs(8, 0.0))[0] < best_exit(shallow, exits, Costs(8, 40.0))[0]


def follow(decay: float) -> list[int]:
    """The exit chosen after each of 160 rounds: first exit 2 agrees with the model, from round 80 on only exit 5."""
    rng = random.Random(0)
    statistics = Statistics.empty(8)
    chosen = []
    for number in range(160):
        right = 2 if number < 80 else 5
        length = max(1, best_exit([statistics], range(1, 8), Costs(8, 0.0))[1])
        for depth in range(1, 8):
            alpha = 0.9 if depth >= right else 0.1
            columns = min(length + 1, 4)
            statistics.learn(depth, decay, [rng.random() < alpha for _ in range(columns)], [0.5] * columns)
        chosen.append(best_exit([statistics], range(1, 8), Costs(8, 0.0))[0])
    return chosen


def test_the_exit_follows_a_change_within_twenty_rounds_or_so() -> None:
    chosen = follow(0.95)
    assert set(chosen[20:80]) == {2}
    assert set(chosen[103:]) == {5}
    assert 2 in follow(1.0)[103:]  # what does not forget does not follow


# ------------------------------------------------------------------ with the target


class Spy(DynamicExitDrafter):
    """Records the logits that tokens were drafted with, and checks re-read rows against them and a fresh forward."""

    checked = 0

    def _extend(self, draft: EarlyExitBuilder, output: Output, row: int) -> None:
        state: Any = self._states[draft.context.request_id]
        drawn = self.__dict__.setdefault("drawn", {})
        if not draft.tokens:
            drawn[draft.context.request_id] = []
        drawn[draft.context.request_id].append(output.logits_MV[row].clone())
        super()._extend(draft, output, row)
        assert state.best_of_exit[-1] == int(output.logits_MV[row].argmax())

    def observe(self, outcomes: Any) -> None:
        for outcome in outcomes:
            state: Any = self._states[outcome.request_id]
            drafted = state.drafted
            tokens = list(drafted.context.tokens)[: -len(outcome.tokens)]
            text = [*tokens, *outcome.draft.tree.tokens]
            exit_layer = state.exit  # where several exits draft, not every draft is gone on from
            for column, logits in enumerate(self.__dict__["drawn"][outcome.request_id]):
                again = self._target.score(drafted.hidden(exit_layer)[column : column + 1]).logits_MV[0]
                assert same(again, logits)
            session = Session(self._target)
            plain = session.chunk(session.cache.acquire(), text)[len(tokens) - 1 :]
            for depth, expected in fresh_states(self._target, text, range(1, 9)).items():
                rows = state.hidden[depth] if depth > exit_layer else drafted.hidden(depth)
                assert len(rows) == 1 + len(outcome.draft)
                assert same(rows, expected[len(tokens) - 1 :])
            assert same(self._target.score(state.hidden[8]).logits_MV, plain)
            assert list(state.best) == plain.argmax(-1).tolist()
            Spy.checked += 1
        super().observe(outcomes)


def same(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(ours, theirs) if EXACT else torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_re_read_states_equal_the_computed_ones(temperature: float) -> None:
    Spy.checked = 0
    llm = llm_of(Spy(Spy.Config(draft_length=3, reread_every=1), target()))
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=temperature, seed=1)
    outputs = llm.generate(PROMPTS[:3], params)
    assert all(output.error is None for output in outputs)
    assert Spy.checked > 5
    assert_idle(llm)


class Restless(DynamicExitDrafter):
    """Another exit and length in every step."""

    def _plan(self, contexts: Any) -> tuple[int, int]:
        super()._plan(contexts)
        rng = self.__dict__.setdefault("rng", random.Random(1))
        return rng.choice(list(self._exits)), rng.randint(0, 5)


def test_any_schedule_of_exits_gives_the_greedy_tokens_and_plain_caches() -> None:
    llm = llm_of(Restless(Restless.Config(), target()))
    lengths = (24, 7, 19, 1, 25)
    expected = [greedy(prompt)[:length] for prompt, length in zip(PROMPTS, lengths, strict=True)]
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    watch = Watch(llm, exact=EXACT)
    assert ids(llm.generate(PROMPTS, params)) == expected
    assert watch.layer_rows == watch.rows * 8
    assert len(set(watch.depths)) > 3
    watch.leave()
    assert_idle(llm)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cost": "layers", "head_cost": 0},
        {"exit_layer": 3, "draft_length": 3},
        {"draft_length": "planned", "cost": "layers", "head_cost": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [1, 4])
def test_no_layer_runs_twice_over_a_row_and_caches_are_plain(options: dict[str, Any], batch: int) -> None:
    llm = llm_of(**options)
    expected = [greedy(prompt)[:16] for prompt in PROMPTS[:batch]]
    watch = Watch(llm, exact=EXACT)
    outputs = llm.generate(PROMPTS[:batch], SamplingParams(max_tokens=16, ignore_eos=True))
    watch.leave()
    assert ids(outputs) == expected
    assert watch.layer_rows == watch.rows * 8
    prompts = sum(len(prompt_ids(prompt)) for prompt in PROMPTS[:batch])
    assert watch.rows == prompts + sum(watch.sizes) + sum(each.metrics.num_steps - 1 for each in outputs)
    assert watch.sizes


def test_long_prompts_leave_few_rows() -> None:
    """Thousands of tokens, in chunks: at most the last 32 rows of a chunk are handed on, and the last ones learnt."""
    sizes: list[int] = []

    class Sees(DynamicExitDrafter):
        def on_forward(self, seen: Any) -> None:
            sizes.extend(len(rows) for each in seen for rows in each.hidden.values())
            super().on_forward(seen)
            for each in seen:
                sizes.extend(len(rows) for rows in self._states[each.context.request_id].hidden.values())

    drafter = Sees(Sees.Config(prompt_rows=32, cost="layers", head_cost=0), target())
    llm = llm_of(drafter)
    tokens = tokens_of(2, 3000, 8192)
    stream = llm.stream({"prompt_token_ids": tokens}, SamplingParams(max_tokens=4, ignore_eos=True))
    next(stream)
    (state,) = drafter._states.values()
    assert max(sizes) == 32
    assert len(sizes) >= 2 * 8 * (3000 // 512)
    for depth in range(1, 8):
        assert state.statistics.matched[depth - 1] + state.statistics.missed[depth - 1] == 32
    stream.close()


def test_a_plan_without_drafts_is_probed_every_sixteenth_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """On top of the first step's token, which is drafted before anything is known."""
    monkeypatch.setattr(dynamic_exit, "best_exit_with_stop", lambda *args, **options: (2, 0))
    drafter = drafter_of()
    rounds: list[int] = []
    propose = drafter.propose

    def noted(contexts: list[Context], budgets: list[Budget]) -> list[Draft]:
        (draft,) = propose(contexts, budgets)
        if len(draft):
            assert len(draft) == 1
            rounds.append(drafter._round)
        return [draft]

    drafter.propose = noted  # type: ignore[method-assign, assignment]
    llm = llm_of(drafter)
    (output,) = llm.generate(PROMPTS[1], SamplingParams(max_tokens=48, ignore_eos=True))
    assert output.token_ids == greedy(PROMPTS[1], 48)
    assert rounds[0] == 1
    assert len(rounds) >= 3
    assert rounds[1:] == [PROBE_EVERY * (i + 1) for i in range(len(rounds) - 1)]


def test_plain_steps_are_learnt_from() -> None:
    """All layers are computed there, too. Costs are counted, so that no clock says which exits are worth a look."""
    drafter = drafter_of(cost="layers")
    drafter._round = 1
    context: Any = SimpleNamespace(request_id=7, tokens=[1, 2, 3], num_prompt=2)
    _, rows = fresh_rows(target(), [1, 2, 3])
    hidden = dict.fromkeys(range(1, 9), rows[2:])
    (best,) = target().score(rows[2:]).best
    drafter.on_forward([Features(context, 2, NO_DRAFT, hidden, [best])])
    statistics = drafter._states[7].statistics
    assert len(drafter._hopeful) > 3
    assert [statistics.alpha(depth) for depth in drafter._hopeful] == [1.0] * len(drafter._hopeful)


def test_one_failing_request_ends_no_other() -> None:
    """Called one by one after a failure, requests with their own histories must still agree on an exit."""

    class Torn(DynamicExitDrafter):
        def _plan(self, contexts: Any) -> tuple[int, int]:
            super()._plan(contexts)
            if len(contexts) == 1:  # each alone would like another exit
                return 1 + contexts[0].request_id % 7, 2
            return 2, 2

        def _extend(self, draft: EarlyExitBuilder, output: Output, row: int) -> None:
            if draft.context.num_prompt == 1 and len(draft.context.tokens) > 5:
                raise RuntimeError("the drafter crashed")
            super()._extend(draft, output, row)

    drafter = Torn(Torn.Config(draft_length=2), target())
    llm = llm_of(drafter)
    prompts = [PROMPTS[0], PROMPTS[1], "O", PROMPTS[2]]
    lengths = [len(prompt_ids(prompt)) for prompt in prompts]
    assert lengths.count(1) == 1
    outputs = llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    for prompt, length, output in zip(prompts, lengths, outputs, strict=True):
        if length == 1:
            assert output.error == "the drafter crashed"
        else:
            assert output.error is None
            assert output.token_ids == greedy(prompt)[:20]
    assert_idle(llm)


@pytest.mark.parametrize("options", [{"min_exit": None}, {"prompt_rows": None}, {"head_cost": 10**18}])
def test_options_that_would_fail_in_the_middle_of_a_run_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        DynamicExitDrafter.Config(**options)
