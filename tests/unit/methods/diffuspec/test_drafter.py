"""Drafts from lattices that a test writes: the distribution of a drawn path, where drafts stop, trees, and bad
options.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.certify.recipe_law import TextLaw, text_law
from foretoken.core.draft import NO_DRAFT, Draft, PointMass, Sampled
from foretoken.core.errors import ConfigError, ModelError
from foretoken.core.protocols import Budget, Context, Outcome
from foretoken.core.randomness import Streams
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict
from foretoken.engine.llm import LLM
from foretoken.methods.diffuspec import drafter as drafter_module
from foretoken.methods.diffuspec.drafter import DiffuSpecDrafter
from foretoken.methods.diffuspec.lattice import Lattice, LatticeNetwork
from foretoken.methods.diffuspec.network import BlockNetwork
from foretoken.methods.diffuspec.trigram import Trigram
from foretoken.methods.diffuspec.verifier import SlotLaws
from foretoken.models.language_model import LanguageModel, Output
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from helpers.requests import make_request
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import VOCAB_SIZE, save_model
from helpers.untrained import untrained
from helpers.zoo_llms import PROMPTS as ZOO_PROMPTS
from helpers.zoo_llms import greedy, with_config

SLOTS = 4
END = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128, "num_hidden_layers": 4}
    return load(str(save_model("llama", tmp_path_factory.mktemp("tiny"), **sizes)), device="cpu")


@pytest.fixture(scope="module")
def head(model: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A block network with a trigram model next to it."""
    folder = tmp_path_factory.mktemp("head")
    untrained(BlockNetwork, model, folder, slots=SLOTS, norm_heads=True)
    texts = [[(7 * i * i + seed) % VOCAB_SIZE for i in range(200)] for seed in range(20)]
    texts += [[5, 40, token, token, 57, 20] * 20 for token in (20, 57)]
    Trigram.fit(texts, VOCAB_SIZE).save(folder)
    return folder


class Written(LatticeNetwork):
    """The same logits for every request."""

    name = "written"

    def __init__(self, logits_kV: Tensor, top: int = 15) -> None:
        self.slots, self._output = len(logits_kV), Output.of(logits_kV, top=top)
        self.asked = 0

    def lattices(self, contexts: Sequence[Context], asked: Sequence[int] | None = None) -> list[Lattice | None]:
        self.asked += len(contexts)
        return [Lattice(self._output, 0, self.slots) for _ in contexts]


def drafter_of(model: LanguageModel, head: Path, logits_kV: Tensor, **options: Any) -> DiffuSpecDrafter:
    drafter = DiffuSpecDrafter(DiffuSpecDrafter.Config(head=str(head), **{"tree": False, **options}), model)
    drafter._network = Written(logits_kV)
    return drafter


def logits(seed: int = 0, slots: int = SLOTS) -> Tensor:
    return torch.randn(slots, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2


def request(temperature: float = 0.0, **params: Any) -> Any:
    return make_request([5, 40], vocab_size=VOCAB_SIZE, end_ids=[END], temperature=temperature, max_tokens=50, **params)


def only(drafter: DiffuSpecDrafter, context: Any, nodes: int = 16, depth: int = 16, rule: Any = None) -> Draft:
    (draft,) = drafter.propose([context], [Budget(nodes, depth, rule)])
    return draft


class Below:
    """Stops before a node of less than some chance, or after some number of nodes."""

    def __init__(self, least: float = 0.0, most: int = 99) -> None:
        self.least, self.most = least, most
        self.asked: list[float] = []

    def worthwhile(self, reach: float, confidence: float, num_nodes: int) -> bool:
        self.asked.append(confidence)
        return confidence >= self.least and num_nodes < self.most


def test_a_greedy_path_is_a_point_mass_of_best_tokens_without_search(model: LanguageModel, head: Path) -> None:
    draft = only(drafter_of(model, head, logits(), mass=0.0, candidates=1, balance=1.0), request())
    assert list(draft.tree.tokens) == logits().argmax(-1).tolist()
    assert isinstance(draft.law, PointMass)
    assert draft.confidence == pytest.approx(logits().softmax(-1).amax(-1).tolist())


def test_the_trigram_chooses_among_candidates(model: LanguageModel, head: Path) -> None:
    flat = torch.full((SLOTS, VOCAB_SIZE), -9.0)
    flat[:, [20, 57, 90]] = torch.tensor([0.0, 0.1, 0.2])
    alone = only(drafter_of(model, head, flat, balance=1.0), request())
    told = only(drafter_of(model, head, flat, balance=0.5), request())
    silent = only(drafter_of(model, head, flat, balance=0.5, trigram="none"), request())
    assert list(alone.tree.tokens) == list(silent.tree.tokens) == [90] * SLOTS
    assert set(told.tree.tokens) <= {20, 57}


def test_a_path_ends_at_an_end_token(model: LanguageModel, head: Path) -> None:
    raw = logits()
    raw[1, END] = 30.0
    draft = only(drafter_of(model, head, raw), request())
    assert draft.tree.tokens[-1] == END
    assert len(draft) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_budgets_and_the_stop_rule_are_kept_to(model: LanguageModel, head: Path, temperature: float) -> None:
    drafter = drafter_of(model, head, logits(), balance=1.0)
    assert len(only(drafter, request(temperature))) == SLOTS
    assert len(only(drafter, request(temperature), nodes=2)) == 2
    assert len(only(drafter, request(temperature), depth=3)) == 3
    assert len(only(drafter, request(temperature), rule=Below(most=1))) == 1
    asked = drafter._network.asked
    assert only(drafter, request(temperature), nodes=0) is NO_DRAFT
    assert only(drafter, request(temperature), rule=Below(most=0)) is NO_DRAFT
    assert drafter._network.asked == asked  # nothing is computed where nothing is drafted
    assert len(only(drafter_of(model, head, logits(), slots=2), request(temperature))) == 2


def test_a_tree_is_best_first_and_as_deep_as_it_may_be(model: LanguageModel, head: Path) -> None:
    drafter = drafter_of(model, head, logits(), tree=True, mass=1.0, balance=1.0)
    for temperature in (0.0, 1.0):
        draft = only(drafter, request(temperature), nodes=9, depth=3)
        assert isinstance(draft.law, PointMass)
        assert len(draft) == 9
        assert max(draft.tree.depths) <= 3
        assert not draft.tree.is_chain
        reach = []
        for node, parent in enumerate(draft.tree.parents):
            reach.append(draft.confidence[node] * (1.0 if parent < 0 else reach[parent]))
        assert reach == sorted(reach, reverse=True)


def test_left_open_it_is_a_tree_where_the_rule_takes_one_and_the_temperature_is_0(
    model: LanguageModel, head: Path
) -> None:
    drafter = drafter_of(model, head, logits(), tree=None, mass=1.0, balance=1.0)
    assert not only(drafter, request()).tree.is_chain
    drawn = only(drafter, request(1.0))
    assert drawn.tree.is_chain
    assert isinstance(drawn.law, Sampled)
    for rule, branches in (("ratio", False), ("block", False), ("recursive", True), (None, True)):
        settings = {"method": "diffuspec", "head": str(head), "verifier": rule}
        assert with_config(settings, target=model).recipe.drafter.branches == branches


def test_penalties_and_filters_change_the_distribution(model: LanguageModel, head: Path) -> None:
    drafter = drafter_of(model, head, logits(), balance=1.0, mass=0.0, candidates=1)
    favourite = int(logits()[0].argmax())
    banned = only(drafter, request(logit_bias={favourite: -100.0}))
    assert favourite not in banned.tree.tokens[:1]
    drawn = only(drafter, request(1.0, top_k=3, seed=1))
    assert isinstance(drawn.law, Sampled)
    assert ((drawn.law.q_KV > 0).sum(-1) == 3).all()


def test_where_no_scored_token_may_be_emitted_there_is_no_draft(model: LanguageModel, head: Path) -> None:
    raw = torch.full((SLOTS, VOCAB_SIZE), -torch.inf)
    for temperature in (0.0, 1.0):
        for options in ({"balance": 1.0}, {"balance": 0.5}, {"tree": True}):
            assert len(only(drafter_of(model, head, raw, **options), request(temperature))) == 0


@pytest.mark.parametrize("balance", [1.0, 0.5, 0.0])
def test_draws_follow_the_distribution_that_they_carry(model: LanguageModel, head: Path, balance: float) -> None:
    """The second token's distribution depends on the first one, through the trigram; each row sums to one."""
    raw = logits()
    raw[0, 60] = -torch.inf
    drafter = drafter_of(model, head, raw, balance=balance)
    counts: dict[int, Counter[int]] = {}
    rows: dict[int, Tensor] = {}
    for seed in range(300):
        context = request(1.0)
        context.streams = Streams(seed)
        draft = only(drafter, context, depth=2)
        assert isinstance(draft.law, Sampled)
        first, second = draft.tree.tokens
        assert draft.law.q_KV.sum(-1).tolist() == pytest.approx([1.0, 1.0], abs=1e-5)
        assert float(draft.law.q_KV[0, 60]) == 0.0
        assert rows.setdefault(first, draft.law.q_KV[1]).equal(draft.law.q_KV[1])
        counts.setdefault(-1, Counter())[first] += 1
        counts.setdefault(first, Counter())[second] += 1
        rows.setdefault(-1, draft.law.q_KV[0])
    best = int(rows[-1].argmax())
    assert counts[-1][best] / 300 == pytest.approx(float(rows[-1][best]), abs=0.1)
    met = [rows[first] for first in counts if first >= 0]
    apart = max(float((each - met[0]).abs().max()) for each in met)
    assert (apart > 1e-3) == (balance < 1)


def test_whether_to_draw_is_decided_from_the_distribution_alone(model: LanguageModel, head: Path) -> None:
    drafter = drafter_of(model, head, logits(), balance=1.0)
    asked = set()
    for seed in range(8):
        rule = Below()
        context = request(1.0)
        context.streams = Streams(seed)
        only(drafter, context, rule=rule)
        asked.add(tuple(rule.asked))
    assert len(asked) == 1


def test_adl_follows_the_accepted_lengths(model: LanguageModel, head: Path) -> None:
    raw = logits()
    raw[3, END] = 30.0  # the best tokens end at the fourth slot
    drafter = drafter_of(model, head, raw, length="adl", least=1, step=1, balance=1.0)
    assert drafter.offers.length == SLOTS
    context = request()
    lengths = []
    for accepted in (3, 2, 0, 0):
        draft = only(drafter, context)
        lengths.append(len(draft))
        verdict = Verdict(tuple(range(min(accepted, len(draft)))), 9)
        drafter.observe([Outcome(context.request_id, draft, verdict, (9,))])
    assert lengths == [4, 2, 2, 1]  # gen 1.5, 1.75, 1.875; acc 1.5, 1.75, 0.875
    drafter.release(context.request_id)
    assert not drafter._lengths


def test_the_bundled_network_drafts_for_zoo_base_without_an_option() -> None:
    llm = with_config({"method": "diffuspec", "num_speculative_tokens": 6})
    (output,) = llm.generate(ZOO_PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True))
    assert output.token_ids == greedy(ZOO_PROMPTS[0], 40)
    assert output.metrics.num_accepted_tokens >= 8


@pytest.mark.parametrize("name", ["moe", "hybrid", "mamba", "long"])
def test_another_model_of_the_zoo_is_drafted_for_without_an_option(name: str) -> None:
    """By the masked model of the zoo, which needs no states of the target, with the trigram model of zoo:base."""
    over = load(f"zoo:{name}", dtype="float32", device="cpu")
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    (plain,) = with_config(None, target=over).generate(ZOO_PROMPTS[2], params)
    llm = with_config({"method": "diffuspec", "num_speculative_tokens": 4}, target=over)
    (output,) = llm.generate(ZOO_PROMPTS[2], params)
    assert output.token_ids == plain.token_ids
    assert output.metrics.num_accepted_tokens >= 3
    assert llm.recipe.drafter._trigram is not None


def test_targets_that_are_drafted_for_without_an_option(model: LanguageModel, head: Path, monkeypatch: Any) -> None:
    """Grown models as their originals; unknown tokens are not taken for those of the zoo."""
    monkeypatch.setattr(drafter_module, "MaskedLattices", lambda name, *_, **__: pytest.fail(f"asks {name}"))
    monkeypatch.setattr(model, "name", "grown:mamba:10m")
    with pytest.raises(pytest.fail.Exception, match="asks zoo:diffusion"):
        with_config({"method": "diffuspec"}, target=model)
    assert with_config({"method": "diffuspec", "head": str(head)}, target=model).recipe.drafter.name == "diffuspec"
    monkeypatch.setattr(model, "name", "my-mamba")
    with pytest.raises(ModelError, match="train diffuspec --target my-mamba"):
        with_config({"method": "diffuspec"}, target=model)


# ---------------------------------------------------------------------- the whole recipe, enumerated


class SearchedAsDrawn(DiffuSpecDrafter):
    """The paper's rule above temperature 0: the searched path is verified as if it had been drawn from the lattice."""

    def _draw(self, draft: Any, lattice: Lattice, slots: int) -> None:
        self._find(draft, lattice, slots, tree=False)
        draft.row_of = [draft.keep(lattice.logits_kC[slot].softmax(-1), None) for slot in range(len(draft.tokens))]


PROMPT, LENGTH, NODES = [5, 40], 4, 3


def law_of(llm: LLM) -> TextLaw:
    return text_law(llm, PROMPT, [20, 57], length=LENGTH, num_nodes=NODES)


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_drawn_paths_keep_the_target_s_distribution_and_searched_ones_do_not(
    model: LanguageModel, head: Path, rule: str
) -> None:
    plain = text_law(with_config(None, target=model), PROMPT, [20, 57], length=LENGTH, num_nodes=0)
    errors = {}
    for kind in (DiffuSpecDrafter, SearchedAsDrawn):
        drafter = kind(kind.Config(head=str(head), mass=1.0, tree=False), model)
        settings = {"method": drafter, "verifier": rule, "num_speculative_tokens": "auto"}
        found = law_of(with_config(settings, target=model))
        assert found.num_drafted
        errors[kind.__name__] = found.distance(plain)
    assert errors["DiffuSpecDrafter"] <= 1e-12
    assert errors["SearchedAsDrawn"] > 1e-3


def test_searched_paths_are_exact_as_point_masses_and_biased_under_the_paper_s_rule(
    model: LanguageModel, head: Path
) -> None:
    plain = text_law(with_config(None, target=model), PROMPT, [20, 57], length=LENGTH, num_nodes=0)
    common = {"method": "diffuspec", "head": str(head), "mass": 1.0, "tree": False, "num_speculative_tokens": "auto"}
    errors = {}
    for name, more in {
        "exact": {"draw": False, "verifier": "ratio"},
        "paper": {"verifier": "diffuspec"},
        "budget": {"verifier": "diffuspec", "max_distortion": 0.0},
    }.items():
        found = law_of(with_config({**common, **more}, target=model))
        assert found.num_drafted
        errors[name] = found.distance(plain)
    assert max(errors["exact"], errors["budget"]) <= 1e-12
    assert errors["paper"] > 1e-3


def test_a_searched_path_carries_the_distributions_of_its_slots(model: LanguageModel, head: Path) -> None:
    """Those of the lattice alone, filtered as the request asks; only where the rule asks for them."""
    drafter = drafter_of(model, head, logits(), balance=0.5, draw=False)
    context = request(0.7, top_k=9)
    (draft,) = drafter.propose([context], [Budget(16, 16, None, SlotLaws)])
    assert isinstance(draft.law, PointMass)
    assert isinstance(draft.evidence, SlotLaws)
    for slot in range(len(draft)):
        best = (logits()[slot] / 0.7).topk(9)
        expected = torch.zeros(VOCAB_SIZE).index_copy(0, best.indices, best.values.softmax(0))
        torch.testing.assert_close(draft.evidence.law.q_at(slot), expected)
    assert only(drafter, context).evidence is None
    (greedy_draft,) = drafter.propose([request()], [Budget(16, 16, None, SlotLaws)])
    assert greedy_draft.evidence is None


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"slots": 0}, "slots=0"),
        ({"slots": True}, "slots=True"),
        ({"beam": 65}, "beam=65"),
        ({"mass": 1.5}, "mass=1.5"),
        ({"balance": "much"}, "balance='much'"),
        ({"length": "long"}, "length='long'"),
        ({"tree": 1}, "tree=1"),
        ({"draw": 0}, "draw=0"),
        ({"head": 3}, "head=3"),
        ({"model": ""}, "model=''"),
        ({"model": "zoo:diffusion", "head": "x"}, "leave one out"),
        ({"context": 64}, "give model"),
        ({"model": "zoo:diffusion", "context": 1}, "context=1"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        DiffuSpecDrafter.Config(**options)


def test_what_does_not_fit_the_target_is_refused(model: LanguageModel, head: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="foretoken train diffuspec --target"):
        with_config({"method": "diffuspec"}, target=model)
    with pytest.raises(ConfigError, match="slots=9: the block network has 4"):
        with_config({"method": "diffuspec", "head": str(head), "slots": 9}, target=model)
    with pytest.raises(ModelError, match="there is no trigram model"):
        with_config({"method": "diffuspec", "head": str(head), "trigram": str(tmp_path)}, target=model)
    with pytest.raises(ConfigError, match="verifies chains"):
        with_config({"method": "diffuspec", "head": str(head), "tree": True, "verifier": "ratio"}, target=model)


def test_an_empty_tree_is_what_a_request_without_a_lattice_gets(model: LanguageModel, head: Path) -> None:
    drafter = DiffuSpecDrafter(DiffuSpecDrafter.Config(head=str(head)), model)
    draft = only(drafter, request())  # its states were never shown
    assert draft is NO_DRAFT
    assert draft.tree == TokenTree([])
