"""Which requests get drafts, in simulated batches: never much slower than plain decoding, faster where it pays."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field

import pytest

from foretoken.core.draft import Draft
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict
from foretoken.engine.draft_length.controller import Controller
from foretoken.engine.draft_length.draft_ledger import DraftLedger

MOST = 16
DULL = (0.05,) * 8 + (0.2, 0.3)


@dataclass
class Answer:
    """A request: what the controller sees of one, and how much of it the drafter has read."""

    tokens: list[int]
    tokens_left: int
    num_prompt: int
    ledger: DraftLedger = field(default_factory=DraftLedger)
    num_read: int = 0
    stands: float = 0.0
    request_id: int = 0


@dataclass(frozen=True)
class Machine:
    """Milliseconds of a step: ``base`` and ``row`` for each row of it."""

    base: float
    row: float


@dataclass(frozen=True)
class Drafts:
    """What drafting takes, in milliseconds, and how often a node stands.

    Attributes:
        asking: of a step with a call of the drafter.
        reading: of a token of the text.
        node: of a drafted token.
        stands: probability of a node given its parent, one drawn per draft.
        steady: it is drawn once per answer instead.
        length: of a draft, for a drafter with a rule of its own; None: as the controller says.
    """

    asking: float
    reading: float
    node: float
    stands: tuple[float, ...]
    length: int | None = None
    steady: bool = False


DEAR_ROWS, CHEAP_ROWS = Machine(0.5, 4.5), Machine(4.8, 0.2)
MODEL = Drafts(0.1, 0.7, 0.8, (0.35, 0.5, 0.6, 0.75, 0.95))
BAD_MODEL = Drafts(0.1, 0.7, 0.8, (0.1, 0.2))
LOOKUP = Drafts(0.02, 0.002, 0.005, (0.05,) * 8 + (0.5, 0.9))
DULL_LOOKUP = Drafts(0.02, 0.002, 0.005, DULL)
UNEVEN = Drafts(0.05, 0.02, 0.05, (0.1, 0.2, 0.3, 0.6, 0.9), steady=True)
EARLY_EXIT = Drafts(0.1, 0.5, 1.5, (0.5, 0.6, 0.7), length=3)


class Batches:
    """A controller that serves one batch after the other."""

    def __init__(self, machine: Machine, drafts: Drafts, seed: int = 0) -> None:
        self.machine = machine
        self.drafts = drafts
        self.rng = random.Random(seed)
        self.controller = Controller(drafts.reading / (machine.base + machine.row))
        self.num_read = self.num_rested = self.num_steps = self.num_requests = 0

    def serve(
        self, size: int, count: int = 1, *, prompt: int = 60, answer: int = 100, even: bool = False, late: float = 0.0
    ) -> float:
        """Plain decoding's time over ours, prompts included.

        Args:
            even: all answers of a batch are equally long.
            late: share of steps that take ten times as long.
        """
        machine, rng = self.machine, self.rng
        ours = plain = 0.0
        for _ in range(count):
            lengths = [
                (rng.randint(prompt // 2, prompt * 3 // 2), answer if even else rng.randint(answer // 3, answer))
                for _ in range(size)
            ]
            running = [
                Answer([0] * begin, room, begin, stands=rng.choice(self.drafts.stands), request_id=self._new_id())
                for begin, room in lengths
            ]
            reading = machine.row * sum(begin for begin, _ in lengths)
            ours += reading
            plain += reading
            for step in range(answer):
                alive = sum(room > step for _, room in lengths)
                plain += machine.base * (alive > 0) + machine.row * alive
            while running:
                ours += self._step(running, late)
                for each in running:
                    if not each.tokens_left:
                        self.controller.ended(len(each.tokens) - each.num_prompt)
                running = [each for each in running if each.tokens_left]
        return plain / ours

    def _new_id(self) -> int:
        self.num_requests += 1
        return self.num_requests

    def _step(self, running: list[Answer], late: float) -> float:
        drafts, rng = self.drafts, self.rng
        resting = self.controller.rests(len(running), max(each.request_id for each in running))
        self.num_rested += resting
        self.num_steps += 1
        rules = [None] * len(running) if resting else self.controller.choose(running, len(running))
        draft = drafts.asking * any(rules)
        nodes = 0
        for each, rule in zip(running, rules, strict=True):
            length = stood = 0
            if rule is not None:
                draft += drafts.reading * (len(each.tokens) - each.num_read)
                self.num_read += len(each.tokens) - each.num_read
                each.num_read = len(each.tokens)
                stands = each.stands if drafts.steady else rng.choice(drafts.stands)
                most = min(MOST if drafts.length is None else drafts.length, each.tokens_left - 1)
                while length < most and (drafts.length or rule.worthwhile(stands**length, stands, length)):
                    length += 1
                while stood < length and rng.random() < stands:
                    stood += 1
                if length:
                    tree = TokenTree(list(range(length)))
                    verdict = Verdict(tuple(range(stood)), 0)
                    self.controller.learn(Draft(tree, confidence=(stands,) * length), verdict, each.ledger)
            draft += drafts.node * length
            nodes += length
            each.ledger.count(length, stood)
            each.tokens += [0] * (stood + 1)
            each.tokens_left -= stood + 1
        verify = self.machine.base + self.machine.row * (len(running) + nodes)
        total = (draft + verify) * rng.uniform(0.93, 1.07)
        seen = total * 10 if rng.random() < late else total
        if not resting:
            self.controller.measure(num_requests=len(running), nodes=nodes, draft=draft * seen / total, total=seen)
        return total


@pytest.mark.covering(1)
@pytest.mark.parametrize("machine", [DEAR_ROWS, CHEAP_ROWS], ids=["expensive rows", "cheap rows"])
@pytest.mark.parametrize(
    "drafts", [BAD_MODEL, DULL_LOOKUP, EARLY_EXIT, MODEL], ids=["bad model", "dull lookup", "early exit", "model"]
)
@pytest.mark.parametrize("size", [1, 8, 32])
def test_it_is_never_much_slower_than_plain_decoding(machine, drafts, size):
    """From the first request on, whatever has to be found out: two percent, in the mean over seeds."""
    found = [Batches(machine, drafts, seed).serve(size, 48 // size + 2) for seed in range(3)]
    assert sum(found) / len(found) > 0.98


@pytest.mark.parametrize("size", [8, 32])
def test_a_single_batch_pays_for_no_trial_that_it_is_too_short_for(size):
    """Two batches of one size are all there is, and reading a prompt for a trial takes ten steps of one."""
    found = [Batches(CHEAP_ROWS, MODEL, seed).serve(size, 16 // size + 1, answer=60) for seed in range(8)]
    assert sum(found) / len(found) > 0.985


def test_the_luck_of_a_few_drafts_decides_nothing():
    """A drafter that pays, and 20 engines that find it out: none of them is left with plain decoding."""
    machine, drafts = Machine(0.88, 0.12), Drafts(0.1, 0.02, 0.25, (0.35, 0.5, 0.6, 0.75, 0.95, 0.95, 0.95))
    found = [Batches(machine, drafts, seed).serve(1, 30, answer=60) for seed in range(20)]
    assert min(found) > 1.04


def test_reading_that_is_cheaper_than_by_arithmetic_is_found_out_in_the_first_trial():
    """A prompt is read in one pass, which may take a tenth of what its arithmetic says next to a step of one row."""
    batches = Batches(Machine(0.88, 0.12), Drafts(0.1, 0.002, 0.05, (0.5, 0.6)))
    controller = batches.controller = Controller(0.3)
    batches.serve(1)
    assert controller._reading.token(1.0) < 0.05


@pytest.mark.parametrize("base", [2.0, 3.0, 6.4])
def test_a_draining_batch_gains_nothing_from_requests_that_end_early(base):
    """Equally long answers, of which some are easy to draft: the batch takes as long as the hardest of them."""
    found = [Batches(Machine(base, 0.16), UNEVEN, seed).serve(8, 6, answer=64, even=True) for seed in range(3)]
    assert sum(found) / len(found) > 0.98


@pytest.mark.parametrize(
    ("drafts", "size", "least"),
    [(MODEL, 1, 1.1), (LOOKUP, 1, 1.3), (LOOKUP, 8, 1.05)],
    ids=["model", "lookup", "eight"],
)
def test_it_drafts_where_that_pays(drafts, size, least):
    batches = Batches(CHEAP_ROWS, drafts)
    batches.serve(size, 3)
    assert batches.serve(size, 24 // size + 4) > least


def test_a_text_that_becomes_predictable_is_found_out():
    batches = Batches(CHEAP_ROWS, BAD_MODEL)
    batches.serve(1, 30)
    batches.drafts = MODEL
    batches.serve(1, 60)
    assert batches.serve(1, 20) > 1.1


def test_a_drafter_that_becomes_bad_is_left_alone():
    batches = Batches(CHEAP_ROWS, MODEL)
    assert batches.serve(1, 20) > 1.05
    batches.drafts = BAD_MODEL
    batches.serve(1, 4)
    assert batches.serve(1, 30) > 0.98


def test_a_batch_size_is_remembered_while_others_run():
    batches = Batches(CHEAP_ROWS, LOOKUP)
    first = batches.serve(1, 8)
    batches.serve(32, 2)
    assert batches.serve(1, 8) > first - 0.15
    assert batches.serve(1, 8) > 1.2


def test_a_long_prompt_is_not_read_where_that_cannot_pay():
    """A hundred tokens at most are to come, and reading costs a seventh of a token for each of 3,000."""
    batches = Batches(CHEAP_ROWS, MODEL)
    batches.serve(1, 10)
    before = batches.num_read
    batches.serve(1, 4, prompt=3000)
    assert batches.num_read == before
    batches.serve(1, 4)
    assert batches.num_read > before


def test_most_of_the_text_is_never_read_where_drafting_does_not_pay():
    batches = Batches(DEAR_ROWS, BAD_MODEL)
    batches.serve(8, 8)
    assert 0 < batches.num_read < 8 * 8 * 60 * 0.1


def test_late_steps_change_nothing_much():
    """One step in fifty takes ten times as long: the machine was busy with something else."""
    found = []
    for late in (0.0, 0.02):
        runs = [Batches(CHEAP_ROWS, MODEL, seed) for seed in range(4)]
        found.append(sum(run.serve(1, 30, late=late) for run in runs) / len(runs))
    assert found[1] > 0.93 * found[0]


def test_no_request_drafts_before_plain_steps_are_timed():
    controller = Controller()
    request = Answer([1, 2, 3], 50, 3)
    for _ in range(3):
        assert controller.choose([request], 1) == [None]
        controller.measure(num_requests=1, nodes=0, draft=0.0, total=1.0)
    assert controller.choose([request], 1) != [None]


@pytest.mark.parametrize(("drafts", "least", "most"), [(BAD_MODEL, 0.7, 1.0), (MODEL, 0.0, 0.05)], ids=["bad", "good"])
def test_the_controller_rests_where_drafting_does_not_pay_and_only_there(drafts, least, most):
    """Alone, where rows are cheap: the good model pays there, and the bad one does not."""
    batches = Batches(CHEAP_ROWS, drafts)
    batches.serve(1, 20)
    before = batches.num_rested, batches.num_steps
    batches.serve(1, 20)
    share = (batches.num_rested - before[0]) / (batches.num_steps - before[1])
    assert least <= share <= most


def test_a_rest_ends_when_the_batch_changes():
    batches = Batches(CHEAP_ROWS, BAD_MODEL)
    batches.serve(1, 20)
    controller = batches.controller
    while not controller.rests(1):
        controller.choose([Answer([1], 50, 1)], 1)
        controller.measure(num_requests=1, nodes=0, draft=0.0, total=5.0)
    assert controller.rests(1)
    assert not controller.rests(2)


def test_a_rest_goes_on_while_about_as_many_requests_run_and_each_of_their_tokens_is_counted():
    """Where requests end at every other step, their number alone is no news."""
    controller, requests = Controller(), [Answer([0] * 10, 1000, 10) for _ in range(8)]
    for _ in range(60):
        asks = not controller.rests(8) and controller.choose(requests, 8) != [None] * 8
        if not controller.resting:
            controller.measure(num_requests=8, nodes=0, draft=0.1 * asks, total=0.01 + 0.1 * asks)
    while controller.rests(8):
        pass
    controller.choose(requests, 8)
    assert controller.rests(8)
    assert controller.rests(15)
    assert controller.rests(9)
    before = controller._regime(8).savings
    assert controller.rests(10)
    assert controller._regime(8).savings - before == pytest.approx(10 / 128)
    assert not controller.rests(7)


# ---------------------------------------------------------------------- one request's ledger, and what trials cost


def step(controller: Controller, *requests: Answer, gained: float = 0.0) -> list[bool]:
    """One step of one second without drafting: which requests get drafts, if each gains so much."""
    rules = controller.choose(requests, 1)
    asked = [rule is not None for rule in rules]
    for each in requests:
        each.ledger.count(0, 0)
        each.ledger.gained = max(0.0, gained)
    draft = max(0.0, -gained) * any(asked) + controller._reading.token(1.0) * controller._backlog
    controller.measure(num_requests=1, nodes=0, draft=draft, total=1.0 + draft)
    return asked


def unread(count: int, tokens_left: int = 100_000) -> Answer:
    return Answer([0] * count, tokens_left, count)


def started(reading: float = 0.0) -> Controller:
    controller = Controller(reading)
    for _ in range(3):
        controller.choose([], 1)
        controller.measure(num_requests=1, nodes=0, draft=0.0, total=1.0)
    return controller


def test_the_first_trial_is_of_the_request_that_has_least_to_read_and_of_it_alone():
    controller = started(reading=0.1)
    long, short, middle = unread(300), unread(100), unread(200)
    assert step(controller, long, short, middle) == [False, True, False]
    assert step(controller, long, short, middle) == [False, True, False]


@pytest.mark.parametrize(("tokens", "asked"), [(490, True), (510, False)])
def test_what_costs_more_to_read_than_half_of_the_steps_to_come_is_not_tried(tokens, asked):
    assert step(started(reading=0.1), unread(tokens, tokens_left=100)) == [asked]
    controller = started(reading=0.1)
    controller.ended(100)  # answers end, however many tokens they may still have
    assert step(controller, unread(tokens)) == [asked]


def test_a_gain_is_believed_after_sixteen_drafts_or_eight_tokens_lost():
    for gained, drafts in ((-0.2, 20), (-5.0, 3)):
        controller, request = started(), unread(10, tokens_left=50)
        asked = [step(controller, request, gained=gained)[0] for _ in range(40)]
        assert asked[: drafts - 1] == [True] * (drafts - 1)
        assert sum(asked) <= drafts + 1


def test_a_new_request_tries_a_cheap_drafter_at_once_whatever_others_lost():
    controller, old = started(), unread(10)
    for _ in range(300):
        step(controller, old, gained=-0.02)
    assert controller._regime(1).gain.value < 0.0
    assert step(controller, unread(10, tokens_left=100), gained=-0.02) == [True]


def test_a_request_goes_on_after_drafts_that_paid_and_stops_after_losses():
    controller, old = started(), unread(10)
    for _ in range(300):
        step(controller, old, gained=-0.1)
    copying, other = unread(10, tokens_left=100), unread(10, tokens_left=100)
    assert sum(step(controller, copying, gained=2.0)[0] for _ in range(20)) == 20
    for _ in range(300):
        step(controller, old, gained=-0.1)
    assert sum(step(controller, other, gained=-0.1)[0] for _ in range(20)) < 5


@pytest.mark.parametrize("gained", [-0.1, -0.5, -3.0])
def test_in_the_long_run_trials_lose_no_more_than_their_share(gained):
    controller, request = started(), unread(10)
    asked = 0
    for _ in range(20_000):
        asked += step(controller, request, gained=gained)[0]
        request.tokens.append(0)
    assert 0 < asked * -gained < 20_000 * (1 / 128 + 1 / 512) + 16 * -gained + 16


def test_where_drafting_pays_it_is_used_but_for_every_64th_step():
    controller, request = started(), unread(10)
    asked = 0
    for _ in range(650):
        rules = controller.choose([request], 1)
        asked += rules[0] is not None
        nodes = 2 * (rules[0] is not None)
        request.ledger.count(nodes, nodes)
        controller.measure(num_requests=1, nodes=nodes, draft=0.01 * nodes, total=1.0 + 0.02 * nodes)
    assert asked == 640


def test_a_request_drafts_where_its_gain_exceeds_its_reading_cost():
    controller = started(reading=0.1)
    request = unread(10)
    for _ in range(30):
        step(controller, request, gained=1.0)
    asked = step(controller, unread(400, tokens_left=60), unread(400, tokens_left=30), unread(200, tokens_left=30))
    assert asked == [True, False, True]
    assert request.ledger.num_read == 10
    request.tokens += [0] * 20
    request.tokens_left = 3
    assert step(controller, request) == [True]  # tokens that were read cost nothing again


def quiet(controller, answer, steps, seconds):
    """Steps in which nothing repeats."""
    for _ in range(steps):
        assert controller.choose([answer], 1) == [None]
        controller.measure(num_requests=1, nodes=0, draft=0.0, total=seconds)


def copying(found):
    """A controller that knows the cost of a row, a tenth of a step, and has seen some steps without a draft."""
    controller = Controller(copying=True, foretell=lambda context: found[0])
    costs = controller._regime(1).costs
    for rows in (1, 1, 1, 9, 1, 9):
        costs.measure(rows, 1.0 + 0.1 * (rows - 1))
    quiet(controller, Answer([0] * 60, 100, 60), 20, 1.0)
    return controller


def test_times_of_steps_in_which_nothing_repeats_are_taken_in_when_a_draft_is_weighed_against_them():
    found = [0.0]
    controller, answer = copying(found), Answer([0] * 60, 100, 60)
    quiet(controller, answer, 100, 3.0)
    found[0] = 0.9
    assert controller.choose([answer], 1) != [None]
    assert controller._regime(1).costs.base == pytest.approx(3.0, rel=0.1)


def test_a_step_in_which_nothing_repeats_takes_few_calls():
    controller, answer = copying([0.0]), Answer([0] * 60, 100, 60)
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        controller.choose([answer], 1)
        controller.measure(num_requests=1, nodes=0, draft=0.0, total=1.0)
    finally:
        sys.setprofile(None)
    assert calls <= 25  # 46 where all is booked at once


def test_a_request_that_ends_before_its_next_trial_is_hopeless():
    controller = started(reading=1.0)
    assert not controller.hopeless(unread(10, tokens_left=1), 1)
    request = unread(1)
    for _ in range(40):
        step(controller, request, gained=-5.0)
    assert controller.hopeless(unread(1000, tokens_left=100), 1)
    assert not controller.hopeless(unread(10, tokens_left=100_000), 1)


def weights(rooms: list[int], share: float, *, answer: int = 1000, queued: bool = False) -> list[float]:
    """What a token is worth to each request, where a row takes so large a share of a plain step's."""
    controller, requests = Controller(), [unread(0, room) for room in rooms]
    costs = controller._regime(len(rooms)).costs
    for number in range(400):
        costs.measure(len(rooms) + 8 * (number % 2), 1.0 + 8 * (number % 2) * share / len(rooms))
    controller.ended(answer)
    controller.choose(requests, len(requests), queued=queued)
    return [each.ledger.weight for each in requests]


def test_a_token_is_worth_more_to_the_longest_requests():
    """Half of a step of four grows with the rows; two of them end within two tokens of each other."""
    assert weights([30, 50, 48, 47], 0.5) == pytest.approx([0.5, 1.5, 1.5, 0.5], rel=0.05)
    assert weights([30, 51, 48, 47], 0.5) == pytest.approx([0.5, 2.5, 0.5, 0.5], rel=0.05)
    assert weights([9], 0.5) == pytest.approx([1.0])


def test_a_token_is_worth_the_same_to_all_where_lengths_are_unknown():
    assert weights([30, 50, 48, 47], 0.5, queued=True) == [1.0] * 4  # a place that is given up is taken at once
    assert weights([30, 50, 48, 47], 0.5, answer=20) == pytest.approx([1.0] * 4)  # they end before their limit


@pytest.mark.parametrize("copying", [True, False])
def test_a_new_request_is_looked_up_at_once_whatever_earlier_trials_lost(copying):
    """An engine that is hardly used: copies were tried on one answer, and nothing is believed yet."""
    controller = Controller(copying=copying)
    for _ in range(4):
        controller.measure(num_requests=1, nodes=0, draft=0.0, total=1.0)
    regime = controller._regime(1)
    regime.savings = -20.0
    assert not regime.believed
    (rule,) = controller.choose([Answer([0] * 60, 100, 60, request_id=2)], 1)
    assert (rule is not None) == copying


def test_a_trial_of_copying_costs_its_look_ups_and_not_the_copies_that_fell():
    found = {}
    for copying in (True, False):
        controller, answer = Controller(copying=copying), Answer([0] * 60, 100, 60)
        for _ in range(3):
            controller.choose([answer], 1)
            controller.measure(num_requests=1, nodes=0, draft=0.0, total=1.0)
        assert controller.choose([answer], 1)[0] is not None
        answer.ledger.count(4, 0)
        controller.measure(num_requests=1, nodes=4, draft=0.02, total=1.4)
        found[copying] = controller._regime(1).savings
    assert found[True] == pytest.approx(2 / 128 - 0.02)
    assert found[False] < -0.1


def test_a_model_is_tried_on_the_next_answer_though_its_first_call_was_slow():
    """The first call of a process takes as long as twelve tokens, and the answer ends soon after."""
    controller = started()
    first = Answer([0] * 60, 100, 60, request_id=1)
    assert controller.choose([first], 1)[0] is not None
    first.ledger.count(2, 2)
    controller.measure(num_requests=1, nodes=2, draft=12.0, total=13.0)
    assert controller._regime(1).savings < -10.0
    assert controller.choose([Answer([0] * 60, 100, 60, request_id=2)], 1)[0] is not None
