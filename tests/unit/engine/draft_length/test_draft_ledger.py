"""Which requests get drafts, in simulated batches: never much slower than plain decoding, faster where it pays."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from foretoken.core.draft import Draft
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict
from foretoken.engine.draft_length.controller import Controller
from foretoken.engine.draft_length.draft_ledger import DraftLedger, Worth
from foretoken.engine.draft_length.step_costs import Reading, StepCosts

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
        self.num_read = self.num_rested = self.num_steps = 0

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
                Answer([0] * begin, room, begin, stands=rng.choice(self.drafts.stands)) for begin, room in lengths
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

    def _step(self, running: list[Answer], late: float) -> float:
        drafts, rng = self.drafts, self.rng
        resting = self.controller.rests(len(running))
        self.num_rested += resting
        self.num_steps += 1
        rules = [None] * len(running) if resting else self.controller.choose(running, len(running))
        draft = drafts.asking * any(rules)
        nodes = accepted = 0
        gained = 0.0
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
                    self.controller.learn(Draft(tree, confidence=(stands,) * length), verdict)
            draft += drafts.node * length
            nodes += length
            accepted += stood
            gained += stood * each.ledger.weight
            each.tokens += [0] * (stood + 1)
            each.tokens_left -= stood + 1
        verify = self.machine.base + self.machine.row * (len(running) + nodes)
        total = (draft + verify) * rng.uniform(0.93, 1.07)
        seen = total * 10 if rng.random() < late else total
        if not resting:
            self.controller.measure(
                num_requests=len(running),
                nodes=nodes,
                accepted=accepted,
                gained=gained,
                draft=draft * seen / total,
                total=seen,
            )
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
        controller.measure(num_requests=1, nodes=0, accepted=0, draft=0.0, total=1.0)
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
        controller.measure(num_requests=1, nodes=0, accepted=0, draft=0.0, total=5.0)
    assert controller.rests(1)
    assert not controller.rests(2)


def test_a_rest_goes_on_while_about_as_many_requests_run_and_each_of_their_tokens_is_counted():
    """Where requests end at every other step, their number alone is no news."""
    controller, requests = Controller(), [Answer([0] * 10, 1000, 10) for _ in range(8)]
    for _ in range(60):
        asks = not controller.rests(8) and controller.choose(requests, 8) != [None] * 8
        if not controller.resting:
            controller.measure(num_requests=8, nodes=0, accepted=0, draft=0.1 * asks, total=0.01 + 0.1 * asks)
    while controller.rests(8):
        pass
    controller.choose(requests, 8)
    assert controller.rests(8)
    assert controller.rests(15)
    assert controller.rests(9)
    before = controller._worth._budget(8)
    assert not controller.rests(7)
    assert controller._worth._budget(8) - before == pytest.approx((8 + 15 + 9) / 128)


# ---------------------------------------------------------------------- the books, entry by entry


class Book:
    """A second a plain step of one request, rows for nothing, and drafts that gain what the test says."""

    def __init__(self, reading: float = 0.0) -> None:
        self.costs = StepCosts()
        for _ in range(3):
            self.costs.measure(1, 0, 1.0)
        for _ in range(400):
            self.costs.measure(1, 8, 1.0)
        assert self.costs.row(1) == pytest.approx(0.0, abs=1e-5)
        self.worth = Worth(Reading(reading))

    def step(self, *requests: Answer, gained: float = 0.0, typical: bool = True) -> list[bool]:
        asked = self.worth.choose(requests, 1, self.costs)
        drafting = self.worth.num_asked > 0
        assert self.worth.num_asked == sum(asked)
        self.worth.measure(
            1,
            self.costs,
            nodes=8 * drafting,
            accepted=2 * drafting,
            draft=2.0 - gained if drafting else 0.0,
            total=1.0,
            typical=typical,
        )
        return asked

    def steps(self, count: int, *requests: Answer, gained: float = 0.0, typical: bool = True) -> int:
        """In how many of so many steps the first request gets a draft."""
        return sum(self.step(*requests, gained=gained, typical=typical)[0] for _ in range(count))


def unread(count: int, tokens_left: int = 100_000) -> Answer:
    return Answer([0] * count, tokens_left, count)


def test_the_first_trial_is_of_the_request_that_has_least_to_read_and_of_it_alone():
    book = Book(reading=0.1)
    long, short, middle = unread(300), unread(100), unread(200)
    assert book.step(long, short, middle) == [False, True, False]
    assert book.step(long, short, middle) == [False, True, False]
    read = unread(500)
    read.ledger.num_read = 450
    assert Book(reading=0.1).step(unread(300), unread(100), read) == [False, False, True]


def test_a_request_that_would_gain_nothing_is_passed_over():
    """Nothing is to come of the first, which has less to read."""
    assert Book(reading=0.1).step(unread(50, tokens_left=3), unread(90, tokens_left=1000)) == [False, True]


def test_a_trial_lasts_sixteen_steps_while_little_is_known():
    book = Book()
    request = unread(10)
    for trial in range(15, -1, -1):
        book.step(request, typical=False)
        assert request.ledger.trial == trial


@pytest.mark.parametrize(("tokens", "asked"), [(490, True), (510, False)])
def test_what_costs_more_to_read_than_half_of_the_steps_to_come_is_not_tried(tokens, asked):
    assert Book(reading=0.1).step(unread(tokens, tokens_left=100)) == [asked]
    book = Book(reading=0.1)
    book.worth.ended(100)  # answers end, however many tokens they may still have
    assert book.step(unread(tokens)) == [asked]


def test_a_gain_is_believed_after_sixteen_steps_or_so_many_tokens_lost():
    lost_a_little, lost_much = Book(), Book()
    assert lost_a_little.steps(100, unread(10), gained=-0.2) == 16
    assert lost_much.steps(100, unread(10), gained=-5.0) == 5  # the first is one of reading


def test_a_loss_is_earned_back_by_one_128th_of_the_time_before_the_next_trial():
    book, request = Book(), unread(10)
    book.steps(100, request, gained=-0.5)
    again = book.steps(2000, request, gained=-0.5)  # a second one when nothing is owed: one alone is not believed
    assert 1 <= again <= 16
    debt = -book.worth._budget(1)
    needed = (debt + 16 * 0.5) * 128  # the debt, and the cost of a trial
    assert book.steps(int(0.97 * needed), request, gained=-0.5) == 0
    assert book.steps(int(0.06 * needed), request, gained=-0.5) > 0


def among_eight(worth: Worth, steps: int, lost: float) -> int:
    """In how many of so many steps one of eight requests gets a draft, if drafting loses so many tokens."""
    costs = StepCosts()
    for _ in range(3):
        costs.measure(8, 0, 8.0)
    num_asked, request = 0, unread(10)
    for _ in range(steps):
        worth.choose([request], 8, costs)
        asked = worth.num_asked
        num_asked += asked
        worth.measure(8, costs, nodes=0, accepted=0, draft=lost * asked, total=8.0, typical=True)
    return num_asked


def test_gains_of_one_request_pay_for_no_trials_among_eight():
    book = Book()
    book.steps(400, unread(10), gained=1.0)
    assert book.worth.affords(256.0)
    lost = 0.5 * among_eight(book.worth, 1000, lost=0.5)
    assert lost == pytest.approx(1000 * 8 / 128, rel=0.2)
    assert not book.worth.affords(16.0)
    book.step(unread(10), gained=1.0)
    assert book.worth.affords(256.0)  # and it is still there


def test_nothing_goes_on_credit_while_anything_is_owed():
    book = Book()
    asked = book.steps(100, unread(10), gained=-5.0)
    owed = 5.0 * asked - 100 / 128
    to_come = int(owed / (1 / 128))  # steps of one request until that is earned
    assert among_eight(book.worth, to_come // 8 - 10, lost=0.5) == 0
    assert among_eight(book.worth, 20, lost=0.5) > 0


def test_a_request_that_ends_before_its_next_trial_is_hopeless():
    """By one 128th of the time of all running requests; not before the gain is known, and not if drafting pays."""
    book = Book()
    assert not book.worth.hopeless(unread(10, tokens_left=1), 1)
    book.steps(100, unread(10), gained=-5.0)
    missing = 16 * 5.0 - book.worth._budget(1)
    assert missing > 16 * 5.0 + 1.0  # something is owed, too
    for steps, hopeless in ((0.98 * 128 * missing, True), (1.02 * 128 * missing, False)):
        assert book.worth.hopeless(unread(10, tokens_left=int(steps)), 1) is hopeless
    assert not book.worth.hopeless(unread(10, tokens_left=1), 8)
    for _ in range(20):
        book.worth.ended(5)  # answers end, however many tokens they may still have
    assert book.worth.hopeless(unread(10), 1)
    among = Worth(Reading(0.0))
    among_eight(among, 200, lost=2.0)
    missing = 16 * 2.0 - among._budget(8)
    assert missing > 1.0
    for steps, hopeless in ((0.95 * 16 * missing, True), (1.05 * 16 * missing, False)):
        assert among.hopeless(unread(10, tokens_left=int(steps)), 8) is hopeless
    paying = Book()
    paying.steps(100, unread(10), gained=1.0)
    assert not paying.worth.hopeless(unread(10, tokens_left=1), 1)


@pytest.mark.parametrize("gained", [-0.1, -0.5, -3.0])
def test_in_the_long_run_trials_lose_no_more_than_their_share(gained):
    book, request = Book(), unread(10)
    asked = book.steps(20_000, request, gained=gained)
    left = 20_000 / 128 - asked * -gained
    assert -0.2 * 20_000 / 128 < left < 16 * -gained + 16  # less than another trial


def test_where_drafting_pays_it_is_used_but_for_every_64th_step():
    book, request = Book(), unread(10)
    assert book.steps(640, request, gained=1.0) == 640 - 10


def test_a_request_drafts_where_its_gain_exceeds_its_reading_cost():
    book = Book(reading=0.1)
    book.steps(30, unread(10), gained=1.0)
    assert book.step(unread(400, tokens_left=60), unread(400, tokens_left=30), unread(200, tokens_left=30)) == [
        True,
        False,
        True,
    ]
    for _ in range(10):
        book.worth.ended(30)
    assert book.step(unread(400, tokens_left=60), unread(200, tokens_left=60), unread(200, tokens_left=10)) == [
        False,
        True,
        False,
    ]


def test_what_a_drafter_has_read_costs_nothing_again():
    book, request = Book(reading=0.1), unread(400)
    book.steps(30, request, gained=1.0)
    assert request.ledger.num_read == 400
    request.tokens_left = 30
    request.tokens += [0] * 20
    assert book.step(request) == [True]


def test_the_backlog_counts_unread_tokens_of_requests_that_skipped_a_step():
    book = Book(reading=0.01)
    first, second = unread(40), unread(30)
    book.step(first)
    assert book.worth.backlog == 40
    first.tokens += [0] * 3
    book.step(first, gained=1.0)
    assert book.worth.backlog == 0
    book.steps(20, first, gained=1.0)
    first.tokens += [0] * 5
    book.step(first, second, gained=1.0)
    assert book.worth.backlog == 30
    book.worth.choose([second], 1, book.costs)
    first.tokens += [0] * 2
    book.step(first, second, gained=1.0)
    assert book.worth.backlog == 2
    book.step(unread(7), first, unread(9), gained=1.0)
    assert book.worth.backlog == 7 + 9


def test_the_budget_holds_256_tokens_at_most_and_allows_all_of_them():
    book, request = Book(reading=0.1), unread(10)
    assert book.worth.affords(0.0)
    assert not book.worth.affords(0.1)
    book.steps(256, unread(10, tokens_left=0), gained=0.0)  # no request drafts at its end
    assert book.worth.affords(1.99)
    assert not book.worth.affords(2.01)
    book.steps(400, request, gained=1.0)
    assert book.worth.affords(256.0)
    assert not book.worth.affords(256.1)


def test_gains_of_a_probe_go_into_the_budget_and_not_into_other_estimates():
    book, request = Book(), unread(10)
    book.steps(12, request, gained=-0.01, typical=False)
    assert not book.worth.affords(0.0)
    book.steps(400, request, gained=1.0)  # still not known, and tried again as soon as nothing is owed
    assert book.worth.affords(200.0)


def test_gains_are_those_of_a_like_number_of_requests():
    """Of two or three together, as their number has as many binary digits."""
    book, request = Book(), unread(10)
    book.steps(100, request, gained=1.0)
    for requests, known in ((1, True), (2, False)):
        assert (book.worth._gain(requests).weight > 0) == known
    assert book.worth._gain(2) is book.worth._gain(3)
    assert book.worth._gain(3) is not book.worth._gain(4)


def rows_at(share: float, num_requests: int) -> StepCosts:
    """A second a step, of which a row takes so large a share."""
    costs = StepCosts()
    for _ in range(3):
        costs.measure(num_requests, 0, 1.0)
    for _ in range(400):
        costs.measure(num_requests, 8, 1.0 + 8 * share / num_requests)
    return costs


def weights(rooms: list[int], costs: StepCosts, *, answer: int = 1000, queued: bool = False) -> list[float]:
    requests, worth = [unread(0, room) for room in rooms], Worth(Reading(0.0))
    worth.ended(answer)
    worth.choose(requests, len(requests), costs, queued=queued)
    return [each.ledger.weight for each in requests]


def test_a_token_is_worth_more_to_the_longest_requests():
    """Half of a step of four grows with the rows; two of them end within two tokens of each other."""
    costs = rows_at(0.5, 4)
    assert weights([30, 50, 48, 47], costs) == pytest.approx([0.5, 1.5, 1.5, 0.5], rel=1e-2)
    assert weights([30, 51, 48, 47], costs) == pytest.approx([0.5, 2.5, 0.5, 0.5], rel=1e-2)
    assert weights([9], rows_at(0.5, 1)) == pytest.approx([1.0])


def test_a_token_is_worth_the_same_to_all_where_lengths_are_unknown():
    costs = rows_at(0.5, 4)
    assert weights([30, 50, 48, 47], costs, queued=True) == [1.0] * 4  # a place that is given up is taken at once
    assert weights([30, 50, 48, 47], costs, answer=20) == pytest.approx([1.0] * 4)  # they end before their limit
    unknown = StepCosts()
    for _ in range(3):
        unknown.measure(4, 0, 1.0)
    assert weights([30, 50, 48, 47], unknown) == [1.0] * 4


def test_a_row_that_costs_nothing_and_one_that_costs_a_step_are_bounded():
    assert weights([30, 50], rows_at(0.0, 2)) == pytest.approx([1 / 64, 2 - 1 / 64], rel=1e-2)
    assert weights([30, 50], rows_at(2.0, 2)) == pytest.approx([1.0, 1.0])


def test_a_step_without_eligible_requests_drafts_nothing():
    for gained in (0.0, 1.0, -1.0):  # not known to pay, paying, and not paying
        book = Book()
        book.steps(100 if gained else 0, unread(10), gained=gained)
        for _ in range(70):
            assert book.worth.choose([], 1, book.costs) == []
            assert book.worth.num_asked == 0
            book.worth.measure(1, book.costs, nodes=0, accepted=0, draft=0.0, total=1.0, typical=True)


def test_the_gain_of_a_step_is_a_request_s():
    costs = StepCosts()
    for _ in range(3):
        costs.measure(4, 0, 4.0)  # a second for each of four requests
    worth, requests = Worth(Reading(0.0)), [unread(0) for _ in range(4)]
    for request in requests:
        request.ledger.trial = 10
    for _ in range(2):
        assert worth.choose(requests, 4, costs) == [True] * 4
        worth.measure(4, costs, nodes=2, accepted=8, draft=1.0, total=4.0, typical=True)
    # a row is believed to take a second, as the requests' own
    assert worth._gain(4).value == pytest.approx((8 - 1.0 - 2 * 1.0) / 4)
    assert worth._gain(4).weight == pytest.approx(8.0, rel=0.1)  # two steps of four requests are eight to learn from
