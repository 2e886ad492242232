"""The block network: serving and training compute its plain forward pass; its cache; files that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.core.draft import NO_DRAFT, Draft, PointMass
from foretoken.core.errors import MismatchError, ModelError
from foretoken.core.protocols import Features, Outcome
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict
from foretoken.drafting.feature_heads.unroll import every_column
from foretoken.methods.diffuspec.block import BlockLattices
from foretoken.methods.diffuspec.network import BlockNetwork
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load, load_as_is
from foretoken.train.feature_heads.batches import TrainingBatch
from foretoken.train.feature_heads.blocks import BlockLoss, slot_by_slot
from foretoken.train.frozen_target import FrozenTarget
from helpers.golden import tokens_of
from helpers.requests import make_request
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import VOCAB_SIZE, save_model
from helpers.untrained import random_part

SLOTS = 4
DEPTHS = (1, 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128}
    return load(str(save_model("llama", tmp_path_factory.mktemp("tiny"), **sizes)), device="cpu")


def network_of(model: LanguageModel, **fields: Any) -> BlockNetwork:
    return random_part(BlockNetwork, model, **{"slots": SLOTS, "norm_heads": True, "depths": DEPTHS, **fields})


def states_of(tokens: Sequence[int]) -> dict[int, Tensor]:
    """Stand-ins for the target's states: of each position, from its token and place alone."""
    found = {}
    for depth in DEPTHS:
        rows = [
            torch.randn(64, generator=torch.Generator().manual_seed(1000 * depth + 101 * place + token))
            for place, token in enumerate(tokens)
        ]
        found[depth] = torch.stack(rows)
    return found


def show(lattices: BlockLattices, context: Any, begin: int, count: int, draft: Draft = NO_DRAFT) -> None:
    tokens = [*context.tokens, *draft.tree.tokens]
    hidden = {depth: rows[begin : begin + count] for depth, rows in states_of(tokens).items()}
    lattices.on_forward([Features(context, begin, draft, hidden, ())])


def logits_of(lattices: BlockLattices, contexts: Sequence[Any]) -> list[Tensor]:
    found = lattices.lattices(contexts)
    assert all(each is not None for each in found)
    return [each.logits_kC.float() for each in found if each is not None]


def ready(lattices: BlockLattices, length: int, seed: int) -> Any:
    context = make_request(tokens_of(seed, length, VOCAB_SIZE), vocab_size=VOCAB_SIZE)
    show(lattices, context, 0, length - 1)
    return context


TEXT = tokens_of(5, 12, VOCAB_SIZE)


def paper(network: BlockNetwork, model: LanguageModel, root: int) -> Tensor:
    """Logits of the plain forward pass for the block after a root of ``TEXT``, [k, K]."""
    states_TF = torch.cat(list(states_of(TEXT).values()), dim=-1)
    with torch.no_grad():
        e_W = network.embedding_of(model.model).float()[TEXT[root]]
        return network(states_TF[:root], e_W) @ network.lm_head_of(model.model).float().T


def served_difference(network: BlockNetwork, served: BlockNetwork, model: LanguageModel, implementation: str) -> float:
    """Largest difference between lattices after several roots and the plain forward pass, in standard deviations."""
    lattices, worst = BlockLattices(served, model, top=3), 0.0
    if implementation == "torch":
        lattices._decoder = None
    elif not lattices.native:
        pytest.skip("this machine has no native decoder")
    for root in (1, 4, 7):
        expected = paper(network, model, root)
        context = make_request(TEXT[: root + 1], vocab_size=VOCAB_SIZE)
        show(lattices, context, 0, root)
        (found,) = logits_of(lattices, [context])
        worst = max(worst, float((found - expected).abs().max() / expected.std()))
    return worst


def trained_difference(network: BlockNetwork, trained: BlockNetwork, model: LanguageModel) -> float:
    """The same of training's rows, for the blocks of all roots at once."""
    states_1TF, text_1T = torch.cat(list(states_of(TEXT).values()), dim=-1)[None], torch.tensor([TEXT])
    with torch.no_grad():
        embedding_VW, head_KW = (each(model.model).float() for each in (network.embedding_of, network.lm_head_of))
        steps = slot_by_slot(trained, states_1TF, text_1T, embedding_VW, SLOTS, every_column(text_1T))
        found_TkK = torch.stack([rows_TW @ head_KW.T for rows_TW in steps], dim=1)
    expected_TkK = torch.stack([paper(network, model, root) for root in range(1, len(TEXT))])
    return float((found_TkK - expected_TkK).abs().max() / expected_TkK.std())


every_implementation = pytest.mark.parametrize("implementation", ["native", "torch"])
SHAPES: tuple[dict[str, Any], ...] = ({}, {"draft_vocab_size": 40, "norm_heads": False}, {"layers": 3})


@every_implementation
@pytest.mark.parametrize("fields", SHAPES)
def test_lattices_are_the_plain_forward(model: LanguageModel, fields: dict[str, Any], implementation: str) -> None:
    """Every slot, after texts of several lengths."""
    network = network_of(model, **fields)
    assert served_difference(network, network, model, implementation) < 1e-5


@pytest.mark.parametrize("fields", SHAPES)
def test_training_computes_the_plain_forward_of_every_root(model: LanguageModel, fields: dict[str, Any]) -> None:
    network = network_of(model, **fields)
    assert trained_difference(network, network, model) < 1e-5


def shift_rotary(network: BlockNetwork) -> None:
    rotary_at = network.rotary_at
    network.rotary_at = lambda positions: rotary_at(positions + 3 * (positions > 4))  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[BlockNetwork], Any]] = {
    "masks of other slots": lambda network: network.masks.data.copy_(network.masks.data.roll(1, 0)),
    "context of other layers": lambda network: network.context.weight.data.copy_(
        network.context.weight.data.roll(64, 0)
    ),
    "depths exchanged": lambda network: network.enter.weight.data[:, 64:].copy_(
        network.enter.weight.data[:, 64:].roll(64, 1)
    ),
    "positions": shift_rotary,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_far_from_the_plain_forward(model: LanguageModel, fault: str) -> None:
    network, wrong = network_of(model), network_of(model)
    FAULTS[fault](wrong)
    for implementation in ("native", "torch"):
        if implementation == "torch" or model.native_decoder is not None:
            assert served_difference(network, wrong, model, implementation) > 1e-3
    assert trained_difference(network, wrong, model) > 1e-3


def test_slots_see_each_other_and_the_tokens_before_the_root(model: LanguageModel) -> None:
    network = network_of(model)
    lattices = BlockLattices(network, model, top=1)
    context = ready(lattices, 9, 1)
    (first,) = logits_of(lattices, [context])
    with torch.no_grad():
        network.masks[SLOTS - 1] += 1.0
    other = BlockLattices(network, model, top=1)
    again = make_request(context.tokens, vocab_size=VOCAB_SIZE)
    show(other, again, 0, 8)
    (second,) = logits_of(other, [again])
    assert ((first - second).abs().amax(-1) > 1e-3).all()  # the last mask is seen by all slots


def test_alone_or_packed_in_any_order_the_lattices_are_the_same_bit_for_bit(model: LanguageModel) -> None:
    def fresh(lengths: Sequence[int]) -> tuple[BlockLattices, list[Any]]:
        lattices = BlockLattices(network_of(model), model, top=3)
        return lattices, [ready(lattices, length, length) for length in lengths]

    lengths = (5, 23, 2, 14)
    lattices, contexts = fresh(lengths)
    together = dict(zip(lengths, logits_of(lattices, contexts), strict=True))
    lattices, contexts = fresh(lengths[::-1])
    for length, found in zip(lengths[::-1], logits_of(lattices, contexts), strict=True):
        assert found.equal(together[length])
    for length in lengths:
        lattices, contexts = fresh((length,))
        assert logits_of(lattices, contexts)[0].equal(together[length])


def test_only_requested_slots_are_scored(model: LanguageModel) -> None:
    """And the scored slots have the same bits as among all slots."""
    lattices = BlockLattices(network_of(model), model, top=3)
    contexts = [ready(lattices, length, length) for length in (9, 4, 6)]
    whole = logits_of(lattices, contexts)
    counts = [1, SLOTS + 3, 2]
    found = lattices.lattices(contexts, counts)
    for lattice, count, expected in zip(found, counts, whole, strict=True):
        assert lattice is not None
        assert lattice.slots == min(count, SLOTS)
        assert lattice.logits_kC.float().equal(expected[: lattice.slots])
        assert list(lattice.ranked(0)[0]) == expected[0].topk(3).indices.tolist()


def test_rejected_tokens_and_repeated_calls_change_nothing(model: LanguageModel) -> None:
    """A step with a draft of which one node stands leaves what plain steps over the same text leave."""
    network = network_of(model)
    drafted, plain = (BlockLattices(network, model, top=1) for _ in range(2))
    tokens = tokens_of(3, 12, VOCAB_SIZE)
    context = make_request(tokens[:6], vocab_size=VOCAB_SIZE)
    show(drafted, context, 0, 5)
    (once,), (twice,) = logits_of(drafted, [context]), logits_of(drafted, [context])
    assert once.equal(twice)
    draft = Draft(TokenTree([tokens[6], 77, 78], [-1, -1, 1]), PointMass())
    show(drafted, context, 5, 4, draft)
    verdict = Verdict((0,), tokens[7])
    drafted.observe([Outcome(context.request_id, draft, verdict, (tokens[6], tokens[7]))])
    context.tokens += tokens[6:8]
    other = make_request(tokens[:8], vocab_size=VOCAB_SIZE)
    show(plain, other, 0, 7)
    assert logits_of(drafted, [context])[0].equal(logits_of(plain, [other])[0])
    for mine, theirs in zip(
        (*drafted.cache.keys, *drafted.cache.values), (*plain.cache.keys, *plain.cache.values), strict=True
    ):
        assert mine is not None
        assert theirs is not None
        assert mine[0, :, :7].equal(theirs[0, :, :7])
    assert drafted.cache.lengths[0] == plain.cache.lengths[0] == 7


def test_without_the_states_of_all_rows_before_the_root_there_is_no_lattice(model: LanguageModel) -> None:
    lattices = BlockLattices(network_of(model), model, top=1)
    unseen = make_request(tokens_of(1, 6, VOCAB_SIZE), vocab_size=VOCAB_SIZE)
    assert lattices.lattices([unseen]) == [None]
    show(lattices, unseen, 2, 3)  # a beginning that was reused is never shown
    assert lattices.lattices([unseen]) == [None]
    behind = ready(lattices, 6, 2)
    behind.tokens.append(9)
    assert lattices.lattices([behind]) == [None]
    show(lattices, behind, 5, 1)
    assert lattices.lattices([behind])[0] is not None


def test_a_released_request_gives_its_slot_back(model: LanguageModel) -> None:
    lattices = BlockLattices(network_of(model), model, top=1)
    free = lattices.cache.free_slots
    contexts = [ready(lattices, 6, seed) for seed in range(3)]
    logits_of(lattices, contexts[:2])  # the third one was never used
    for context in contexts:
        lattices.release(context.request_id)
    lattices.release(12345)
    assert lattices.cache.free_slots == free


def test_the_whole_context_can_be_read(model: LanguageModel) -> None:
    lattices = BlockLattices(network_of(model), model, top=1)
    longest = ready(lattices, model.max_length, 4)
    assert logits_of(lattices, [longest])[0].isfinite().all()


def test_it_is_kept_to_the_bit_of_bfloat16(model: LanguageModel, tmp_path: Path) -> None:
    network = network_of(model, draft_vocab_size=40)
    network.save(tmp_path)
    again = BlockNetwork.load(tmp_path)
    assert again.config == network.config
    assert again.ids_K is not None
    assert again.ids_K.equal(network.ids_K)
    for name, weight in network.state_dict().items():
        assert again.state_dict()[name].equal(weight.to(torch.bfloat16).float())


@pytest.mark.parametrize(
    ("change", "error", "what"),
    [
        ({"slots": 0}, ModelError, "slots=0"),
        ({"slots": 65}, ModelError, "slots=65: 64 at most"),
        ({"depths": []}, ModelError, "at least one"),
        ({"depths": [2, 1]}, ModelError, "increasing"),
        ({"depths": [1, 9]}, MismatchError, "depths"),
        ({"layers": 3}, ModelError, r"context.weight is \[256, 128\]"),
        ({"target_width": 96}, ModelError, "described"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(
    model: LanguageModel, tmp_path: Path, change: dict[str, Any], error: type[Exception], what: str
) -> None:
    network_of(model).save(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(error, match=what):
        BlockNetwork.load(tmp_path).check_target(model)


def test_the_loss_is_the_target_s_distribution_at_every_slot_by_hand(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128}
    loaded = load_as_is(str(save_model("llama", tmp_path, **sizes)), device="cpu")
    target = FrozenTarget(loaded.model, DEPTHS)
    config = BlockNetwork.config_for(loaded.model.config, "it", "it", slots=3, depths=DEPTHS, draft_vocab_size=40)
    network = BlockNetwork(config, ids_K=torch.arange(0, 80, 2))
    network.draw(torch.Generator().manual_seed(1))
    tokens_BT = torch.tensor([tokens_of(seed, 7, VOCAB_SIZE) for seed in range(2)])
    used_BT = torch.tensor([[0, 0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 1, 1, 0]], dtype=torch.bool)
    states = target.states(tokens_BT)
    states_BTF = torch.cat([states[depth] for depth in DEPTHS], dim=-1)
    whole_BTV = target.logits(states["final"].flatten(0, 1)).view(2, 7, -1)
    embedding_VW, head_KW = network.embedding_of(loaded.model), network.lm_head_of(loaded.model)

    def batches(numbers: Tensor) -> TrainingBatch:
        return TrainingBatch(tokens_BT, states_BTF, used_BT, whole_BTV[used_BT])

    objective = BlockLoss(batches, embedding_VW, lambda: head_KW, 3)
    with torch.no_grad():
        found = objective(network, tokens_BT, torch.Generator().manual_seed(0))
        total = weights = 0.0
        for row in range(2):
            rows = network.many_blocks(
                states_BTF[row : row + 1], tokens_BT[row : row + 1], torch.arange(1, 7)[None], embedding_VW
            )
            for root in range(1, 7):  # there are fewer places than blocks: all of them are roots
                for slot in range(3):
                    place = root + slot
                    if place >= 7 or not used_BT[row, place]:
                        continue
                    log_q_K = (rows[0, root - 1, slot] @ head_KW.T).log_softmax(-1)
                    p_K = whole_BTV[row, place].softmax(-1)[network.ids_K]
                    weight = float(torch.exp(torch.tensor(-slot / 1.5)))
                    total -= weight * float((p_K * log_q_K).sum())
                    weights += weight
    assert float(found) == pytest.approx(total / weights, rel=1e-4)
