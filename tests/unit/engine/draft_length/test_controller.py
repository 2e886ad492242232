"""The adaptive draft length, in simulated worlds where the optimum is known by brute force."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import product

import pytest

from foretoken.core.draft import Draft
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict
from foretoken.engine.draft_length.confidence import Confidence, Reaches
from foretoken.engine.draft_length.controller import Controller, _Regime, _Rule
from foretoken.engine.draft_length.draft_ledger import DraftLedger
from helpers.pairwise import in_pairs

MOST = 16


@dataclass(frozen=True)
class World:
    """What drafting and verifying cost, in units of a verification of no rows, and how often a node stands.

    Attributes:
        first: seconds of drafting before the first node; spent at every call of the drafter, if ``asking`` is set.
        node: seconds of drafting per node.
        row: seconds of verification per row.
        stands: probability of a node given its parent, one drawn per step.
        says: the drafter's estimate of it; None: the true value.
    """

    first: float
    node: float
    row: float
    stands: tuple[float, ...]
    asking: bool = False
    noise: float = 0.0
    says: float | None = None

    def rate(self, threshold: float) -> float:
        """Exact tokens per second of drafting while the product of probabilities exceeds the threshold."""
        tokens = seconds = 0.0
        for stands in self.stands:
            length = self.length(stands, threshold)
            tokens += sum(stands**i for i in range(length + 1))
            drafted = length > 0 or (self.asking and threshold < 1.0)
            seconds += 1.0 + self.row * (length + 1) + (self.first if drafted else 0.0) + self.node * length
        return tokens / (seconds * (1.0 + self.noise / 2.0))

    def length(self, stands: float, threshold: float) -> int:
        return next((n for n in range(MOST) if stands ** (n + 1) <= threshold), MOST)

    def best(self) -> float:
        """The best rate of any threshold; a fixed length, in a world of one probability."""
        thresholds = {1.0, 0.0} | {stands**n * 0.999 for stands in self.stands for n in range(1, MOST + 1)}
        return max(self.rate(threshold) for threshold in thresholds)


@dataclass
class Endless:
    """A request that is never done; the controller sees no more of one."""

    tokens: list[int] = field(default_factory=lambda: [0])
    tokens_left: int = 1_000_000
    ledger: DraftLedger = field(default_factory=DraftLedger)


class Run:
    """A controller in a world, step by step."""

    def __init__(self, seed: int = 0) -> None:
        self.controller = Controller()
        self.rng = random.Random(seed)
        self.request = Endless()

    def go(self, world: World, steps: int, *, late: float = 1.0) -> tuple[float, float]:
        """Tokens per second and nodes per step; ``late`` stretches the first step, and its time does not count."""
        controller, rng = self.controller, self.rng
        tokens = seconds = nodes = 0.0
        for step in range(steps):
            resting = controller.rests(1)
            (rule,) = [None] if resting else controller.choose([self.request], 1)
            stands = rng.choice(world.stands)
            asked = rule is not None
            length, reach = 0, 1.0
            says = stands if world.says is None else world.says
            while rule is not None and length < MOST and rule.worthwhile(reach, says, length):
                length += 1
                reach *= says
            accepted = 0
            while accepted < length and rng.random() < stands:
                accepted += 1
            spent = world.first + world.node * length if length or (world.asking and asked) else 0.0
            draft = spent * (1.0 + world.noise * rng.random())
            verify = (1.0 + world.row * (length + 1)) * (1.0 + world.noise * rng.random())
            tokens += accepted + 1
            seconds += draft + verify
            nodes += length
            stretch = 1.0 if step else late
            if length:
                tree = TokenTree(list(range(length)))
                controller.learn(Draft(tree, confidence=(says,) * length), Verdict(tuple(range(accepted)), 0))
            self.request.tokens += [0] * (accepted + 1)
            if not resting:
                controller.measure(
                    num_requests=1,
                    nodes=length,
                    accepted=accepted,
                    draft=draft * stretch,
                    total=(draft + verify) * stretch,
                )
        return tokens / seconds, nodes / steps


COSTS = list(product((0.0, 0.2, 0.5), (0.0, 0.02, 0.1, 0.3), (0.0, 0.02, 0.1, 0.5, 1.0)))


@pytest.mark.parametrize("costs", in_pairs(COSTS, lambda row: row, lambda row: ()), ids=str)
def test_it_finds_the_best_fixed_length(costs):
    """Within a few percent, over acceptance rates; the mean over rates is closer, chance evens out."""
    shares = []
    for stands in (0.05, 0.3, 0.5, 0.7, 0.9, 0.97):
        world = World(*costs, (stands,), noise=0.1)
        run = Run()
        run.go(world, 300)
        shares.append(run.go(world, 1500)[0] / world.best())
    assert min(shares) > 0.9
    assert sum(shares) / len(shares) > 0.97


@pytest.mark.parametrize("says", [0.1, 0.35, 0.97, 1.0])
@pytest.mark.parametrize("stands", [0.6, 0.85])
def test_a_drafter_that_is_too_modest_or_too_sure_drafts_as_long_as_pays(stands, says):
    """Each of its nodes is misjudged, and a path of them by the product of the factors."""
    world = World(0.02, 0.15, 0.02, (stands,), noise=0.1, says=says)
    run = Run()
    run.go(world, 300)
    assert run.go(world, 1500)[0] > 0.93 * world.best()


@pytest.mark.parametrize("first", [0.0, 0.1, 0.3, 0.6])
@pytest.mark.parametrize("share", [1, 3, 6])
def test_it_drafts_where_the_text_is_predictable(first, share):
    """Some steps are predictable, some are not, and asking costs ``first`` either way."""
    world = World(first, 0.1, 0.02, (0.9,) * share + (0.15,) * (10 - share), asking=True)
    run = Run()
    run.go(world, 300)
    assert run.go(world, 3000)[0] / world.best() > 0.88


@pytest.mark.parametrize(
    "world", [World(0.3, 0.1, 0.02, (0.15,), True), World(0.0, 1.2, 0.1, (0.5,))], ids=["asking", "node"]
)
def test_it_stops_when_drafting_cannot_pay(world):
    run = Run()
    run.go(world, 300)
    rate, nodes = run.go(world, 1000)
    assert nodes < 0.15  # probes only
    assert rate > 0.93 * world.rate(1.0)


def test_it_recovers_by_probing_when_the_text_becomes_predictable():
    run = Run()
    dull, lively = World(0.05, 0.03, 0.05, (0.05,)), World(0.05, 0.03, 0.05, (0.9,))
    assert run.go(dull, 500)[1] < 0.3
    run.go(lively, 100)
    assert run.go(lively, 500)[0] > 0.93 * lively.best()


def test_it_recovers_when_drafting_becomes_cheap():
    """In its own time: what so expensive a drafter has lost is earned back first, by a share of every step."""
    run = Run()
    dear, cheap = World(2.0, 1.0, 0.05, (0.8,)), World(0.02, 0.03, 0.05, (0.8,))
    assert run.go(dear, 500)[1] < 1.0
    run.go(cheap, 4000)
    assert run.go(cheap, 500)[0] > 0.9 * cheap.best()


@pytest.mark.parametrize("late", [10.0, 100.0, 10_000.0])
def test_one_late_step_changes_nothing_much(late):
    world = World(0.05, 0.03, 0.05, (0.7,))
    run, calm = Run(), Run()
    run.go(world, 300)
    calm.go(world, 300)
    shaken = run.go(world, 100, late=late)
    assert shaken[0] > 0.9 * calm.go(world, 100)[0]


class Silent:
    """A controller and a drafter that never finds its own drafts worth their time, so that all there are are probes.

    Args:
        node: seconds of drafting per node; a plain step takes one.
        row: seconds of its verification.
    """

    def __init__(self, num_requests: int = 1, node: float = 0.001, row: float = 0.001) -> None:
        self.node, self.row = node, row
        self.controller = Controller()
        self.requests = [Endless() for _ in range(num_requests)]

    def step(self, accepted: int = 0) -> list[int]:
        """The probing request, after which the given number of its two nodes is accepted."""
        rules = self.controller.choose(self.requests, len(self.requests))
        # a node that is never reached promises nothing
        probes = [place for place, rule in enumerate(rules) if rule is not None and rule.worthwhile(0.0, 0.0, 0)]
        for place in probes:
            rule = rules[place]
            assert rule is not None
            assert [rule.worthwhile(0.0, 0.0, nodes) for nodes in (1, 2)] == [True, False]
        nodes = 2 * len(probes)
        draft, verify = self.node * nodes, 1.0 + self.row * nodes
        self.controller.measure(
            num_requests=len(self.requests),
            nodes=nodes,
            accepted=min(accepted, nodes),
            draft=draft,
            total=draft + verify,
        )
        return probes

    def until_a_probe(self, accepted: int = 0) -> tuple[int, list[int]]:
        """The number of steps without a probe, and the request that makes it."""
        for empty in range(200):
            if probes := self.step(accepted):
                return empty, probes
        raise AssertionError("no probe")


def test_after_32_empty_drafts_one_is_made_anyway_and_after_a_probe_that_fell_32_more():
    silent = Silent()
    while not silent.controller._regime(1).costs.row_known:  # before, every step that asks is a probe
        silent.step()
    assert [silent.until_a_probe()[0] for _ in range(3)] == [32, 32, 32]


@pytest.mark.parametrize(("node", "row"), [(1.5, 0.001), (0.001, 1.5)], ids=["drafting", "verifying"])
def test_a_probe_is_made_when_the_budget_covers_its_cost(node, row):
    silent = Silent(node=node, row=row)
    worth = silent.controller._worth
    while not (silent.controller._regime(1).costs.row_known and worth.affords(0.0)):
        silent.step()
    num_probes = 0
    for _ in range(2000):
        could = worth.affords(2.9)
        probes = silent.step()
        num_probes += len(probes)
        assert could or not probes
        assert worth.affords(-0.1)  # nothing is owed afterwards
    assert 3 <= num_probes <= 2000 / (3.0 * 128) + 1


def test_a_probe_that_stands_calls_for_another_one():
    silent = Silent()
    while not silent.controller._regime(1).costs.row_known:
        silent.step()
    assert silent.until_a_probe(accepted=2)[0] == 32
    assert [silent.until_a_probe(accepted)[0] for accepted in (2, 2, 1, 0)] == [0, 0, 0, 32]


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_the_outlook_predicts_the_decision(weight):
    """Of a probe, and of a draft; where a token is worth more, a node need promise less."""
    run = Run()
    probed, decided = 0, set()
    run.go(World(0.2, 0.4, 0.1, (0.85,)), 200)
    for _ in range(100):
        (rule,) = run.controller.choose([run.request], 1)
        if rule is not None:
            rule = _Rule(run.controller, weight, rule._least)
            outlook = rule.outlook()
            probed += outlook.free > 0
            for nodes, reach in ((0, 1.0), (1, 0.777), (2, 0.777), (2, 0.222)):
                least = outlook.later if nodes else outlook.first
                for tenth, stands in enumerate(outlook.stands):
                    foreseen = nodes < outlook.free or reach * stands > least
                    assert rule.worthwhile(reach, (tenth + 0.5) / 10, nodes) is foreseen
                    decided.add((nodes > 0, foreseen))
        run.controller.measure(num_requests=1, nodes=0, accepted=0, draft=0.01, total=1.0)
    assert probed > 0
    assert len(decided) == 4


def test_each_time_another_request_probes():
    silent = Silent(num_requests=3)
    found = [silent.until_a_probe()[1] for _ in range(12)]
    assert all(len(probes) == 1 for probes in found)
    assert {place for (place,) in found[-3:]} == {0, 1, 2}


def test_the_rate_is_that_of_the_last_steps():
    regime = _Regime()
    assert regime.rate == 0.0
    for _ in range(200):
        regime.add(1, 1.0)
    assert regime.rate == pytest.approx(1.0)
    regime.add(3, 1.0)
    assert regime.rate == pytest.approx(1.0 + 2 / 20, rel=0.01)  # of twenty steps, in the mean
    for _ in range(200):
        regime.add(3, 0.5)
    assert regime.rate == pytest.approx(6.0, rel=0.01)
    regime.add(3, 1000.0)
    assert regime.rate == pytest.approx(6.0 * 20 / 24, rel=0.02)  # five times as long as a step is, no longer


@pytest.mark.parametrize(("gained", "tokens"), [(None, 3), (0.5, 1.5)])
def test_the_rate_weighs_accepted_tokens_by_their_worth(gained, tokens):
    controller, expected = Controller(), _Regime()
    for _ in range(3):
        controller.measure(num_requests=1, nodes=0, accepted=0, draft=0.0, total=1.0)
        expected.add(1, 1.0)
    controller.measure(num_requests=1, nodes=2, accepted=2, gained=gained, draft=0.1, total=1.0)
    expected.add(tokens, 1.0)
    assert controller._regime(1).rate == pytest.approx(expected.rate)


def test_how_often_nodes_stand_is_forgotten_beyond_two_hundred_of_a_confidence():
    confidence = Confidence()
    sure = Draft(TokenTree([1]), confidence=(0.95,))
    assert confidence.stands(0.95) == pytest.approx(0.95)
    for _ in range(1000):
        confidence.learn(sure, Verdict((0,), 2))
    assert confidence.stands(0.95) > 0.99
    assert confidence.stands(0.85) == pytest.approx(0.85)  # of another confidence
    for _ in range(300):
        confidence.learn(sure, Verdict((), 2))
    assert confidence.stands(0.95) < 0.25
    assert confidence.seen[9] <= 200.0


def test_a_confidence_is_of_the_tenth_that_it_lies_in():
    confidence = Confidence()
    assert [confidence.stands(each) for each in (0.0, 0.1, 0.19, 0.5, 1.0)] == pytest.approx(
        [0.05, 0.15, 0.15, 0.55, 0.95]
    )
    confidence.learn(Draft(TokenTree([1]), confidence=(1.0,)), Verdict((), 2))
    assert confidence.stands(0.9) == pytest.approx(8 * 0.95 / 9)


def test_a_path_is_corrected_node_by_node():
    """Nodes of 0.35 stand nine times of ten, nodes of 0.95 as they say."""
    confidence = Confidence()
    for stood in [True] * 9 + [False]:
        for _ in range(8):
            confidence.learn(Draft(TokenTree([1]), confidence=(0.35,)), Verdict((0,) if stood else (), 2))
    modest = confidence.stands(0.35)
    assert modest > 0.8
    reaches = Reaches(confidence)
    assert reaches.stands(1.0, 0.35) == modest
    assert reaches.stands(1.0, 0.95) == pytest.approx(0.95)
    assert reaches.stands(0.35, 0.35) == modest**2
    assert reaches.stands(0.35, 0.95) == pytest.approx(modest * 0.95)
    assert reaches.stands(0.35 * 0.35, 0.35) == pytest.approx(modest**3)
    assert reaches.stands(0.95, 0.35) == pytest.approx(0.95 * modest)
    assert reaches.stands(0.2, 0.95) == pytest.approx(0.2 * 0.95)  # a path without a measurement
    assert Reaches(confidence).stands(0.35, 0.35) == pytest.approx(0.35 * modest)  # nor in this draft


def test_a_path_of_nodes_that_are_all_believed_certain_is_still_a_path():
    confidence = Confidence()
    reaches = Reaches(confidence)
    sure = confidence.stands(1.0)
    assert [reaches.stands(1.0, 1.0) for _ in range(3)] == pytest.approx([sure, sure**2, sure**3])


def test_a_drafter_without_confidences_teaches_nothing_and_breaks_nothing():
    controller = Controller()
    before = list(controller.confidence.seen)
    controller.learn(Draft(TokenTree([1, 2])), Verdict((0,), 3))
    assert controller.confidence.seen == before


def test_only_children_of_accepted_nodes_were_put_to_the_test():
    """root -> 0 -> 2 and root -> 1; node 0 was refused, 1 stood: 2 was never tried."""
    controller = Controller()
    draft = Draft(TokenTree([5, 6, 7], [-1, -1, 0]), confidence=(0.95, 0.45, 0.05))
    before = list(controller.confidence.seen)
    controller.learn(draft, Verdict((1,), 8))
    assert [after - was for after, was in zip(controller.confidence.seen, before, strict=True)] == [
        0,
        0,
        0,
        0,
        1,
        0,
        0,
        0,
        0,
        1,
    ]
