"""Whom to draft for, in simulated batches: never much slower than plain decoding, and faster where drafting pays."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from foretoken.core.draft import Draft
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict
from foretoken.engine.controller import Controller
from foretoken.engine.worth import Standing

MOST = 16
DULL = (0.05,) * 8 + (0.2, 0.3)


@dataclass
class Answer:
    """A request: what the controller sees of one, and how much of it the drafter has read."""

    tokens: list[int]
    room: int
    num_prompt: int
    standing: Standing = field(default_factory=Standing)
    num_read: int = 0


@dataclass(frozen=True)
class Machine:
    """Milliseconds of a step: ``base`` and ``row`` for each row of it."""

    base: float
    row: float


@dataclass(frozen=True)
class Drafts:
    """What drafting takes, in milliseconds, and how often a node stands.

    Attributes:
        asking: of a step in which anybody is asked.
        reading: of a token of the text.
        node: of a drafted token.
        stands: probability of a node given its parent, one drawn per draft.
        length: of a draft, for a drafter with a rule of its own; None: as the controller says.
    """

    asking: float
    reading: float
    node: float
    stands: tuple[float, ...]
    length: int | None = None


DEAR_ROWS, CHEAP_ROWS = Machine(0.5, 4.5), Machine(4.8, 0.2)
MODEL = Drafts(0.1, 0.7, 0.8, (0.35, 0.5, 0.6, 0.75, 0.95))
BAD_MODEL = Drafts(0.1, 0.7, 0.8, (0.1, 0.2))
LOOKUP = Drafts(0.02, 0.002, 0.005, (0.05,) * 8 + (0.5, 0.9))
DULL_LOOKUP = Drafts(0.02, 0.002, 0.005, DULL)
EARLY_EXIT = Drafts(0.1, 0.5, 1.5, (0.5, 0.6, 0.7), length=3)


class Batches:
    """A controller that serves one batch after the other."""

    def __init__(self, machine: Machine, drafts: Drafts, seed: int = 0) -> None:
        self.machine = machine
        self.drafts = drafts
        self.rng = random.Random(seed)
        self.controller = Controller(drafts.reading / (machine.base + machine.row))
        self.num_read = self.num_rested = self.num_steps = 0

    def serve(self, size: int, count: int = 1, *, prompt: int = 60, answer: int = 100, late: float = 0.0) -> float:
        """Plain decoding's time over ours, prompts included; ``late``: share of steps that take ten times as long."""
        machine, rng = self.machine, self.rng
        ours = plain = 0.0
        for _ in range(count):
            lengths = [
                (rng.randint(prompt // 2, prompt * 3 // 2), rng.randint(answer // 3, answer)) for _ in range(size)
            ]
            running = [Answer([0] * begin, room, begin) for begin, room in lengths]
            reading = machine.row * sum(begin for begin, _ in lengths)
            ours += reading
            plain += reading
            for step in range(answer):
                alive = sum(room > step for _, room in lengths)
                plain += machine.base * (alive > 0) + machine.row * alive
            while running:
                ours += self._step(running, late)
                for each in running:
                    if not each.room:
                        self.controller.ended(len(each.tokens) - each.num_prompt)
                running = [each for each in running if each.room]
        return plain / ours

    def _step(self, running: list[Answer], late: float) -> float:
        drafts, rng = self.drafts, self.rng
        resting = self.controller.rests(len(running))
        self.num_rested += resting
        self.num_steps += 1
        rules = [None] * len(running) if resting else self.controller.choose(running, len(running))
        draft = drafts.asking * any(rules)
        nodes = accepted = 0
        for each, rule in zip(running, rules, strict=True):
            length = stood = 0
            if rule is not None:
                draft += drafts.reading * (len(each.tokens) - each.num_read)
                self.num_read += len(each.tokens) - each.num_read
                each.num_read = len(each.tokens)
                stands = rng.choice(drafts.stands)
                most = min(MOST if drafts.length is None else drafts.length, each.room - 1)
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
            each.tokens += [0] * (stood + 1)
            each.room -= stood + 1
        verify = self.machine.base + self.machine.row * (len(running) + nodes)
        total = (draft + verify) * rng.uniform(0.93, 1.07)
        seen = total * 10 if rng.random() < late else total
        if not resting:
            self.controller.measure(
                num_requests=len(running), nodes=nodes, accepted=accepted, draft=draft * seen / total, total=seen
            )
        return total


@pytest.mark.parametrize("machine", [DEAR_ROWS, CHEAP_ROWS], ids=["dear rows", "cheap rows"])
@pytest.mark.parametrize(
    "drafts", [BAD_MODEL, DULL_LOOKUP, EARLY_EXIT, MODEL], ids=["bad model", "dull lookup", "early exit", "model"]
)
@pytest.mark.parametrize("size", [1, 8, 32])
def test_it_is_never_much_slower_than_plain_decoding(machine, drafts, size):
    """From the first request on, whatever has to be found out: two percent, in the mean over seeds."""
    found = [Batches(machine, drafts, seed).serve(size, 48 // size + 2) for seed in range(3)]
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


def test_what_is_known_of_a_batch_is_remembered_over_others():
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
    calm, shaken = Batches(CHEAP_ROWS, MODEL), Batches(CHEAP_ROWS, MODEL)
    calm.serve(1, 10)
    shaken.serve(1, 10, late=0.02)
    assert shaken.serve(1, 20, late=0.02) > 0.93 * calm.serve(1, 20)


def test_nobody_is_asked_before_it_is_known_what_plain_steps_take():
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
