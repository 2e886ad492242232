"""What a batch consists of: gaps, positions, what counts; and that training teaches, and goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from foretoken.core.errors import ForetokenError
from foretoken.data.documents import exchange
from foretoken.methods.longspec import train as training
from foretoken.methods.longspec.network import LongSpec, config_for
from foretoken.methods.longspec.noisy import noisy_forward
from foretoken.methods.longspec.train import ANCHORS, DECAY, KeyedTarget, Noisy, judge, read
from foretoken.models.load import load_as_is
from foretoken.train import sources, trainer
from foretoken.train.replies import Replies
from foretoken.train.stopping import Interrupted
from foretoken.train.trainer import Bounds
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model

LEVELS, BLOCK = 3, 48


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama_rope_yarn", tmp_path_factory.mktemp("model"), intermediate_size=128)


@pytest.fixture(scope="module")
def target(place: Path) -> KeyedTarget:
    loaded = load_as_is(str(place))
    return KeyedTarget(loaded.model, "it", Replies(loaded.tokenizer))


@pytest.fixture
def head(target: KeyedTarget) -> LongSpec:
    torch.manual_seed(0)
    found = LongSpec(config_for(target.model.config, "it", "0", target.kv, levels=LEVELS, window=5))
    found.draw()
    found.begin_near(target.model)
    return found


def tokens(count: int, length: int = BLOCK) -> torch.Tensor:
    return torch.randint(4, 100, (count, length), generator=torch.Generator().manual_seed(7))


def test_the_loss_is_the_cross_entropy_of_counted_tokens_weighted_by_gap(
    target: KeyedTarget, head: LongSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recomputed block by block, at the positions and gaps that were drawn."""
    seen: list[tuple[Any, Any]] = []

    def watched(net: LongSpec, e_BTW: Any, angles: Any, keys: Any, values: Any, gaps: Any) -> Any:
        seen.append((angles, list(gaps)))
        return noisy_forward(net, e_BTW, angles, keys, values, gaps)

    monkeypatch.setattr(training, "noisy_forward", watched)
    tokens_BT = tokens(4)
    found = Noisy(target, LEVELS, 120)(head, tokens_BT, torch.Generator().manual_seed(5))
    angles, gaps = seen[0]
    assert len(set(gaps)) > 1
    positions = []
    for cos_Th, _ in angles:  # which positions they are of
        table, _ = target.kv.angles(torch.arange(120))
        positions.append([int((table - row).abs().sum(-1).argmin()) for row in cos_Th])
    total = weights = 0.0
    for row, gap in enumerate(gaps):
        positions_1T = torch.tensor([positions[row]])
        batch = target.batch(tokens_BT[row : row + 1], positions_1T)
        out_TW = read(head, target, batch, positions_1T, [gap])[0]
        p_TV = target.logits(batch.target_BTW[0]).softmax(-1)
        losses_T = -(p_TV * target.logits(out_TW).log_softmax(-1)).sum(-1)
        total += DECAY ** (gap - 1) * float(losses_T[gap:-1].mean().detach())  # the last one has no next token
        weights += DECAY ** (gap - 1)
    assert float(found.detach()) == pytest.approx(total / weights, rel=1e-4)


def test_gaps_and_positions_are_drawn_for_every_block(target: KeyedTarget) -> None:
    """Gaps from 1 to the number of levels; anchors stay, the others move together, and the last position is used."""
    noisy, generator = Noisy(target, LEVELS, 120), torch.Generator().manual_seed(0)
    offsets = set()
    for _ in range(2000):
        positions_T = noisy._positions(BLOCK, generator)
        assert positions_T[:ANCHORS].tolist() == list(range(ANCHORS))
        assert set((positions_T[ANCHORS + 1 :] - positions_T[ANCHORS:-1]).tolist()) == {1}
        offsets.add(int(positions_T[-1]) - BLOCK + 1)
    assert (min(offsets), max(offsets)) == (0, 120 - BLOCK)
    assert Noisy(target, LEVELS, None)._positions(BLOCK, generator).tolist() == list(range(BLOCK))
    drawn = {int(1 + torch.randint(LEVELS, (1,), generator=generator)) for _ in range(100)}
    assert drawn == set(range(1, LEVELS + 1))


@pytest.mark.parametrize("gap", [1, 3])
def test_a_column_sees_the_target_s_keys_up_to_its_gap(gap: int, target: KeyedTarget, head: LongSpec) -> None:
    """By which values a column's output depends on."""
    positions_1T = torch.arange(BLOCK)[None]
    batch = target.batch(tokens(1), positions_1T)
    values = batch.values_BGTd.clone().requires_grad_()
    out_BTW = read(head, target, replace(batch, values_BGTd=values), positions_1T, [gap])
    column = 20
    (gradient,) = torch.autograd.grad(out_BTW[0, column].sum(), values)
    seen = (gradient[0].abs().sum((0, 2)) > 0).nonzero().flatten().tolist()
    assert seen == list(range(column - gap + 1))
    e_BTW = batch.e_BTW.clone().requires_grad_()
    out_BTW = read(head, target, replace(batch, e_BTW=e_BTW), positions_1T, [gap])
    (gradient,) = torch.autograd.grad(out_BTW[0, column].sum(), e_BTW)
    near = (gradient[0].abs().sum(-1) > 0).nonzero().flatten().tolist()
    assert near == list(range(column - 5, column + 1))


def test_long_blocks_have_the_same_window(target: KeyedTarget, head: LongSpec, monkeypatch: Any) -> None:
    positions_1T = torch.arange(BLOCK)[None]
    batch = target.batch(tokens(1), positions_1T)
    whole = read(head, target, batch, positions_1T, [2])
    monkeypatch.setattr("foretoken.methods.longspec.noisy._QUERIES", 7)
    torch.testing.assert_close(read(head, target, batch, positions_1T, [2]), whole)


def test_keys_are_those_of_the_given_positions(target: KeyedTarget) -> None:
    """The target reads the same moved positions, and its keys are rotated by them."""
    own, moved = torch.arange(BLOCK)[None], torch.arange(BLOCK)[None].clone()
    moved[:, ANCHORS:] += 60
    found = [target.batch(tokens(1), positions_1T) for positions_1T in (own, moved)]
    assert torch.allclose(found[0].keys_BGTd[..., :ANCHORS, :], found[1].keys_BGTd[..., :ANCHORS, :], atol=1e-5)
    assert not torch.allclose(found[0].keys_BGTd[..., ANCHORS:, :], found[1].keys_BGTd[..., ANCHORS:, :], atol=1e-2)


# ------------------------------------------------------------------ the run


@pytest.fixture
def run(place: Path, tmp_path: Path, monkeypatch: Any) -> Callable[..., dict[str, Any]]:
    small = [replace(stage, block=size, batch=2) for stage, size in zip(training.STAGES, (32, 64), strict=True)]
    monkeypatch.setattr(training, "STAGES", tuple(small))
    monkeypatch.setattr(training, "HELD_OUT_TOKENS", 1024)
    text = tmp_path / "mine.jsonl"
    lines = [{"text": exchange(f"Tom has {n} marbles.", f"He has {2 * n + 3}.")} for n in range(400)]
    text.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def train(out: str = "head", count: int = 6, **options: Any) -> dict[str, Any]:
        return training.run(
            str(place),
            [sources.parse(str(text))],
            tmp_path / out,
            **{"levels": LEVELS, "mlp_width": 64, "own_words": 0.0, "bounds": Bounds(tokens=count * 128), **options},
        )

    return train


def test_training_improves_the_head_and_reports_it(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    record = run(count=60, rate=5.0)
    assert [(stage["name"], stage["block"], stage["offset"]) for stage in record["stages"]] == [
        ("short", 32, True),
        ("long", 64, False),
    ]
    before, after = record["held_out"]["before"], record["held_out"]["after"]
    assert len(after) == LEVELS
    assert all(late["cross_entropy"] < early["cross_entropy"] - 0.3 for early, late in zip(before, after, strict=True))
    head = LongSpec.load(tmp_path / "head")
    assert (head.config.levels, head.config.mlp_width, head.config.layer) == (LEVELS, 64, 2)
    assert json.loads((tmp_path / "head" / "training.json").read_text()) == record


def test_a_run_that_was_stopped_goes_on_to_the_same_weights(
    run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: Any
) -> None:
    run("whole", count=10)
    step = trainer._step
    calls = 0

    def stopped(*arguments: Any) -> float:
        nonlocal calls
        calls += 1
        if calls == 9:  # in the second stage
            raise Interrupted("stopped")
        return step(*arguments)

    monkeypatch.setattr(trainer, "_step", stopped)
    with pytest.raises(ForetokenError, match="stopped"):
        run("cut", count=10, checkpoint_every=0.0)
    monkeypatch.setattr(trainer, "_step", step)
    run("cut", count=10)
    whole, cut = (LongSpec.load(tmp_path / name).state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_a_head_that_returns_the_target_s_states_agrees_everywhere(
    target: KeyedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:

    class Blocks:
        block = BLOCK

        def held_out(self, count: int) -> torch.Tensor:
            return tokens(2)

    states: list[Any] = []
    batch_of = target.batch

    def kept(*arguments: Any) -> Any:
        found = batch_of(*arguments)
        states.append(found.target_BTW)
        return found

    monkeypatch.setattr(training, "noisy_forward", lambda *arguments: states[-1])
    head = LongSpec(config_for(target.model.config, "it", "0", target.kv, levels=2))
    target.batch = kept  # type: ignore[method-assign]
    found = judge({"same": head}, target, Blocks())["same"]  # type: ignore[arg-type]
    target.batch = batch_of  # type: ignore[method-assign]
    assert found is not None
    assert [each["top_1"] for each in found] == [1.0, 1.0]
    assert all(each["acceptance"] == pytest.approx(1.0, abs=1e-4) for each in found)
    p_NV = F.softmax(target.logits(states[0][0, 1:-1]), -1)
    assert found[0]["cross_entropy"] > 0
    assert len(p_NV) * 2 == found[0]["positions"]


def test_it_goes_on_from_a_head(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """From its weights and in its shape; a run that begins elsewhere is another one; another shape is refused."""
    first = run("first", count=30, rate=5.0)
    second = run("second", count=6, start=tmp_path / "first")
    ends, begins = first["held_out"]["after"][0], second["held_out"]["before"][0]
    assert begins["cross_entropy"] == pytest.approx(ends["cross_entropy"], abs=0.02)  # saved in bfloat16
    assert second["start"] == str(tmp_path / "first")
    with pytest.raises(ForetokenError, match="another start"):
        run("second", count=6)
    with pytest.raises(ForetokenError, match="first: its mlp_width is 64, but that of the head to train is 96"):
        run("third", mlp_width=96, start=tmp_path / "first")
