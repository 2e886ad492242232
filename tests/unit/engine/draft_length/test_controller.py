"""The adaptive draft length, in simulated worlds where the optimum is known by brute force."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace

import pytest

from foretoken.core.draft import Draft
from foretoken.core.protocols import Budget
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict
from foretoken.drafters.suffix import SuffixDrafter
from foretoken.engine.draft_length.confidence import Confidence, Reaches
from foretoken.engine.draft_length.controller import Controller
from foretoken.engine.draft_length.draft_ledger import DraftLedger
from foretoken.engine.draft_length.length_rule import LengthRule, Prices
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
    request_id: int = 0
    ledger: DraftLedger = field(default_factory=DraftLedger)
    says: float = 0.0


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
                verdict = Verdict(tuple(range(accepted)), 0)
                controller.learn(Draft(tree, confidence=(says,) * length), verdict, self.request.ledger)
            self.request.ledger.count(length, accepted)
            self.request.tokens += [0] * (accepted + 1)
            if not resting:
                controller.measure(
                    num_requests=1, nodes=length, draft=draft * stretch, total=(draft + verify) * stretch
                )
        return tokens / seconds, nodes / steps


COSTS = list(product((0.0, 0.2, 0.5), (0.0, 0.02, 0.1, 0.3), (0.0, 0.02, 0.1, 0.5, 1.0)))


@pytest.mark.parametrize("costs", in_pairs(COSTS, lambda row: (), lambda row: row), ids=str)
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
    dull, lively = World(0.05, 0.03, 0.05, (0.03,)), World(0.05, 0.03, 0.05, (0.9,))
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
        for place, request in enumerate(self.requests):
            request.ledger.count(2, min(accepted, 2)) if place in probes else request.ledger.count(0, 0)
        draft, verify = self.node * nodes, 1.0 + self.row * nodes
        self.controller.measure(num_requests=len(self.requests), nodes=nodes, draft=draft, total=draft + verify)
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
def test_probes_cost_no_more_than_the_share_of_all_time(node, row):
    silent = Silent(node=node, row=row)
    for _ in range(500):
        silent.step()
    num_probes = sum(len(silent.step()) for _ in range(4000))
    assert 3 <= num_probes <= 4000 * (1 / 128 + 1 / 512) / 3.0 + 3


def test_a_probe_that_stands_calls_for_another_one():
    silent = Silent()
    while not silent.controller._regime(1).costs.row_known:
        silent.step()
    assert silent.until_a_probe(accepted=2)[0] == 32
    assert [silent.until_a_probe(accepted)[0] for accepted in (2, 2, 1, 0)] == [0, 0, 0, 32]


@pytest.mark.parametrize("weight", [1.0, 3.0])
@pytest.mark.parametrize("least", [0, 2])
def test_the_outlook_predicts_the_first_decisions(weight, least):
    """Where a token is worth more, a node need promise less; a probe's nodes need promise nothing."""
    confidence, decided = Confidence(), set()
    ledger = DraftLedger(weight=weight)
    for tenth in range(10):
        rule = LengthRule(confidence, ledger, Prices(0.2, 0.2, 0.6, 2.0), least)
        outlook = rule.outlook()
        assert outlook.free == least
        foreseen = least > 0 or outlook.stands[tenth] > outlook.first
        assert rule.worthwhile(1.0, (tenth + 0.5) / 10, 0) is foreseen
        decided.add(foreseen)
    assert len(decided) == 2 - (least > 0)


def test_a_draft_stops_where_the_rate_of_its_own_step_is_greatest():
    """Rows cost a tenth and drafting another one; the text before it changes nothing."""
    for stands in (0.3, 0.6, 0.9):
        rule = LengthRule(Confidence(), DraftLedger(), Prices(0.1, 0.1, 0.1, 99.0))
        length, says = 0, (int(stands * 10) + 0.5) / 10  # a tenth's middle is believed as it is
        while rule.worthwhile(says**length, says, length):
            length += 1
        rates = [sum(says**i for i in range(n + 1)) / (1.1 + 0.1 * max(1, n) + 0.1 * n) for n in range(60)]
        assert length == max(range(60), key=rates.__getitem__)


def test_each_time_another_request_probes():
    silent = Silent(num_requests=3)
    found = [silent.until_a_probe()[1] for _ in range(12)]
    assert all(len(probes) == 1 for probes in found)
    assert {place for (place,) in found[-3:]} == {0, 1, 2}


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
    controller.learn(Draft(TokenTree([1, 2])), Verdict((0,), 3), DraftLedger())
    assert controller.confidence.seen == before


def test_only_children_of_accepted_nodes_were_put_to_the_test():
    """root -> 0 -> 2 and root -> 1; node 0 was refused, 1 stood: 2 was never tried."""
    controller = Controller()
    draft = Draft(TokenTree([5, 6, 7], [-1, -1, 0]), confidence=(0.95, 0.45, 0.05))
    before = list(controller.confidence.seen)
    controller.learn(draft, Verdict((1,), 8), DraftLedger())
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


def test_a_request_of_many_misses_is_drafted_for_less_and_another_one_is_not():
    controller, unlucky, other = Controller(), DraftLedger(), DraftLedger()
    draft = Draft(TokenTree([5]), confidence=(0.75,))
    for _ in range(20):
        controller.learn(draft, Verdict((), 8), unlucky)
    before = controller.confidence.stands(0.75)
    assert unlucky.misses > 1.1
    assert other.misses == 1.0
    assert Reaches(controller.confidence, unlucky.misses).stands(1.0, 0.75) < before
    assert Reaches(controller.confidence, other.misses).stands(1.0, 0.75) == pytest.approx(before)


# ---------------------------------------------------------------------- copies after ordinary answers


class Server:
    """SuffixDrafter and controller, one request after the other, with the costs of a 4-bit file.

    Args:
        busy: whether a neighbour slows some stretches of steps, by half or to a third.
    """

    def __init__(self, seed: int, *, busy: bool) -> None:
        self.controller, self.rng, self.busy = Controller(), random.Random(seed), busy
        self.drafter = SuffixDrafter(SuffixDrafter.Config(tree=False))
        self.slow, self.num_requests = 1.0, 0

    def answer(self, prompt: list[int], text: list[int]) -> int:
        """The number of steps for a text that the target is going to write."""
        self.num_requests += 1
        ledger = DraftLedger()
        context = SimpleNamespace(
            request_id=self.num_requests,
            num_prompt=len(prompt),
            tokens=[*prompt, text[0]],
            tokens_left=0,
            ledger=ledger,
        )
        whole, steps = [*prompt, *text], 0
        while len(context.tokens) < len(whole):
            context.tokens_left = len(whole) - len(context.tokens)
            steps += 1
            resting = self.controller.rests(1, context.request_id)
            (rule,) = [None] if resting else self.controller.choose([context], 1)
            most = min(MOST, context.tokens_left - 1) if rule is not None else 0
            (draft,) = self.drafter.propose([context], [Budget(most, most, rule)])
            stood = 0
            while stood < len(draft) and draft.tree.tokens[stood] == whole[len(context.tokens) + stood]:
                stood += 1
            if len(draft):
                self.controller.learn(draft, Verdict(tuple(range(stood)), 0), ledger)
            ledger.count(len(draft), stood)
            context.tokens += whole[len(context.tokens) :][: stood + 1]
            if self.rng.random() < 0.05:
                self.slow = self.rng.choice([1.0, 1.5, 3.0]) if self.busy else 1.0
            seconds = self.slow * self.rng.uniform(0.95, 1.05) * (1.0 + 0.12 * len(draft))
            asked = 0.02 * self.slow if rule is not None else 0.0
            if not resting:
                self.controller.measure(num_requests=1, nodes=len(draft), draft=asked, total=seconds + asked)
        self.controller.ended(len(text))
        self.drafter.release(context.request_id)
        return steps


@pytest.mark.parametrize("busy", [False, True], ids=["quiet", "neighbour"])
@pytest.mark.parametrize("seed", range(6))
def test_copies_are_drafted_at_once_after_ordinary_answers(seed, busy):
    """Each copy takes about as few steps as on a fresh engine, and the answers hardly more than plain decoding's."""
    words = random.Random(100 + seed)

    def prose(length: int) -> list[int]:
        """Text in which single words recur, as "the" does, with another word after them each time."""
        return [words.randrange(20) if words.random() < 0.4 else words.randrange(20, 4000) for _ in range(length)]

    server, fresh = Server(seed, busy=busy), Server(seed, busy=busy)
    for length in (150, 250, 200):
        assert server.answer(prose(30), prose(length)) == pytest.approx(length, rel=0.06)
    passage = prose(84)
    assert fresh.answer(prose(8) + passage, passage) < 40
    for _ in range(3):
        assert server.answer(prose(8) + passage, passage) < 40


def foretold(confidence: float, controller: Controller, request: Endless, accepted: int) -> bool:
    """Run a step of a foretelling drafter that proposes two nodes at most; whether it was called."""
    request.says = confidence
    assert not controller.rests(1)
    (rule,) = controller.choose([request], 1)
    assert controller.drafts == (rule is not None)
    nodes = 0
    while rule is not None and nodes < 2 and rule.worthwhile(confidence**nodes, confidence, nodes):
        nodes += 1
    accepted = min(accepted, nodes)
    if nodes:
        draft = Draft(TokenTree(list(range(nodes))), confidence=(confidence,) * nodes)
        controller.count(request, draft, accepted)
        controller.compare(request, draft, Verdict(tuple(range(accepted)), 0))
    controller.measure(num_requests=1, nodes=nodes, draft=0.01 * bool(nodes), total=1.0 + 0.3 * nodes)
    request.tokens += [0] * (1 + accepted)
    return rule is not None


@pytest.mark.parametrize(("says", "num_requests", "looks"), [(0.0, 1, 100), (0.0, 8, 20), (0.95, 8, 100)])
def test_a_text_without_repeats_is_looked_up_less_often_where_many_requests_run(
    says: float, num_requests: int, looks: int
) -> None:
    """A look-up takes a few hundredths of a token's time there; where copies are foretold, none is left out."""
    found: list[Endless] = []
    controller = Controller(foretell=lambda each: found.append(each) or says)
    requests = [Endless() for _ in range(num_requests)]
    for step in range(110):
        if step == 10:
            found.clear()
        controller.choose(requests, num_requests)
        controller.measure(num_requests=num_requests, nodes=8 * (step < 10 and step % 2), draft=0.0, total=1.0)
    assert len(found) == pytest.approx(looks * num_requests, rel=0.05)


def test_an_unlikely_copy_is_not_looked_for_and_a_likely_one_is_whatever_came_before():
    """The rejected copies of a chat do not switch off those of the next request."""
    request = Endless()
    controller = Controller(foretell=lambda each: each.says)
    for _ in range(5):
        foretold(0.0, controller, request, 0)
    for _ in range(20):
        foretold(0.95, controller, request, 2)
    assert not foretold(0.0, controller, request, 0)
    rejected = [foretold(0.55, controller, request, 0) for _ in range(300)]
    assert any(rejected[:20])
    assert sum(rejected[100:]) < 20, "a copy that is always rejected pays for no row"
    request.ledger = DraftLedger()  # the next request
    assert foretold(0.95, controller, request, 2)
