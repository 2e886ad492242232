"""The training loop: stopped at any moment and gone on, it ends where an uninterrupted run does, bit for bit."""

from __future__ import annotations

import itertools
import math
import os
import signal
import threading
import time

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from foretoken.core.errors import ConfigError, ForetokenError
from foretoken.train import checkpoint, trainer
from foretoken.train.mixture import Mixture, Source
from foretoken.train.objectives import NextToken, weighted_loss
from foretoken.train.stopping import Interrupted, stoppable
from foretoken.train.trainer import Bounds, Progress, Schedule, fit, held_out_loss
from helpers.threads import one_thread  # noqa: F401  (a fixture)

BLOCK, BATCH, STEPS = 12, 4, 8
BOUNDS = Bounds(tokens=STEPS * BATCH * BLOCK)
SCHEDULE = Schedule(batch=BATCH, micro_batch=2)


def build(**options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = AutoConfig.for_model("llama", num_attention_heads=2, num_key_value_heads=1, **{**sizes, **options})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


class Drawn:
    """An objective that draws what counts."""

    name = "drawn"

    def __call__(self, model, tokens_BT, generator):
        return weighted_loss(model, tokens_BT, torch.rand(tokens_BT.shape, generator=generator))


def make_mixture(folder, documents=None):
    def read(start):
        return (f"document {number} " for number in itertools.count(start))

    def encode(texts):
        return [list(text.encode()) for text in texts]

    sources = [Source("a", 2.0, lambda: read(0)), Source("b", 1.0, lambda: read(10_000))]
    if documents is not None:
        sources = [Source("few", 1.0, lambda: iter(documents))]
    return Mixture(sources, encode, folder / "tokens", BLOCK, 128, 0)


def run(folder, *, objective=None, model=None, **options):
    """One run in a folder, as a new process would start it."""
    model = model or build()
    settings = {"schedule": SCHEDULE, "bounds": BOUNDS, **options}
    progress = fit(model, objective or NextToken(), make_mixture(folder), settings.pop("schedule"),
                   settings.pop("bounds"), folder / "checkpoints", **settings)  # fmt: skip
    return model, progress


def last(folder):
    return checkpoint.load(checkpoint.latest(folder / "checkpoints"))


def assert_same(folder, other):
    """Weights, optimiser, place in the mixture and curve are equal, bit for bit."""
    for found, expected in zip(last(folder)[:2], last(other)[:2], strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
    for key in ("step", "tokens", "mixture"):
        assert last(folder)[2][key] == last(other)[2][key]
    curves = [[(tokens, loss) for tokens, _, loss in last(each)[2]["curve"]] for each in (folder, other)]
    assert curves[0] == curves[1]


class At(NextToken):
    """Does something in the second half of a step."""

    def __init__(self, step, action):
        self.calls, self.when, self.action = 0, 2 * step + 1, action

    def __call__(self, model, tokens, generator):
        loss = super().__call__(model, tokens, generator)
        self.calls += 1
        return self.action(loss) if self.calls - 1 == self.when else loss


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    before = {name: value.clone() for name, value in build().named_parameters()}
    model, progress = run(folder)
    assert (progress.step, progress.tokens, progress.done) == (STEPS, STEPS * BATCH * BLOCK, 1.0)
    assert progress.curve[-1][2] < progress.curve[0][2] - 0.1  # it learns
    assert not any(torch.equal(value, before[name]) for name, value in model.named_parameters())
    return folder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cuts_the_step_and_the_same_command_goes_on(tmp_path, whole, number):
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]

    def stop(loss):
        os.kill(os.getpid(), number)
        return loss

    with pytest.raises(Interrupted, match=r"stopped at step 3; give the same command to go on from .*step-00000003"):
        run(tmp_path, objective=At(3, stop))
    assert Interrupted.exit_code == 130
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert last(tmp_path)[2]["step"] == 3
    seen = []
    _, progress = run(tmp_path, report=lambda progress: seen.append(progress.step))
    assert seen == [4, 5, 6, 7, 8]
    assert progress.tokens == STEPS * BATCH * BLOCK
    assert_same(tmp_path, whole)


def test_a_second_signal_stops_at_once_and_leaves_no_half_step(tmp_path):
    def stop(progress):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, report=stop)
    assert checkpoint.latest(tmp_path / "checkpoints") is None


@pytest.mark.parametrize("options", [{}, {"attention_dropout": 0.2}], ids=["plain", "dropout"])
def test_a_run_that_dies_goes_on_from_its_last_checkpoint(tmp_path, options):
    def die(loss):
        raise RuntimeError("killed")

    run(tmp_path / "whole", model=build(**options))
    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path / "cut", model=build(**options), objective=At(5, die), checkpoint_every=0)
    assert last(tmp_path / "cut")[2]["step"] == 5
    run(tmp_path / "cut", model=build(**options))
    assert_same(tmp_path / "cut", tmp_path / "whole")


def test_dropout_is_in_force_and_another_seed_gives_another_run(tmp_path, whole):
    """The negative control of the equalities above."""
    run(tmp_path / "dropout", model=build(attention_dropout=0.2))
    run(tmp_path / "seed", objective=Drawn(), schedule=SCHEDULE)
    run(tmp_path / "other seed", objective=Drawn(), schedule=Schedule(BATCH, 2, seed=1))
    for first, second in (("dropout", whole), ("seed", tmp_path / "other seed")):
        with pytest.raises(AssertionError):
            assert_same(tmp_path / first, second)


def test_checkpoints_are_written_now_and_then(tmp_path, monkeypatch):
    clock = itertools.count(0.0, 10.0)  # every look at it is ten seconds later
    monkeypatch.setattr(trainer.time, "monotonic", lambda: next(clock))
    steps = []
    real = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda folder, step, *rest: steps.append(step) or real(folder, step, *rest))
    run(tmp_path, checkpoint_every=60.0)
    assert steps[-1] == STEPS
    assert 2 <= len(steps) < STEPS


@pytest.mark.parametrize("part", ["loss", "gradient"])
def test_a_loss_that_is_no_number_stops_the_run_and_the_last_good_checkpoint_stays(tmp_path, part):
    def spoil(loss):
        return loss * math.nan if part == "loss" else loss + (loss - loss).clamp_min(0).sqrt()  # 0 * inf

    with pytest.raises(ForetokenError, match=r"not a number at step 6 .* checkpoint, .*step-00000005, is kept"):
        run(tmp_path, objective=At(5, spoil), checkpoint_every=0)
    weights, _, state = last(tmp_path)
    assert state["step"] == 5
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())
    with pytest.raises(ForetokenError, match="there was no checkpoint yet"):
        run(tmp_path / "new", objective=At(0, spoil))


def test_a_finished_run_has_nothing_left_to_do(tmp_path, whole):
    steps = []
    _, progress = run(whole, report=lambda progress: steps.append(progress.step))
    assert not steps
    assert progress.step == STEPS


def test_more_tokens_go_on_from_the_end(tmp_path):
    run(tmp_path, bounds=Bounds(tokens=2 * BATCH * BLOCK))
    _, progress = run(tmp_path, bounds=Bounds(tokens=3 * BATCH * BLOCK))
    assert progress.step == 3


@pytest.mark.parametrize("options", [{"hidden_size": 32}, {"num_hidden_layers": 2}, {"attention_bias": True}])
def test_a_checkpoint_of_another_model_is_refused(whole, options):
    with pytest.raises(ForetokenError, match=r"step-00000008: belongs to another model or recipe; name another --out"):
        run(whole, model=build(**options))


def test_a_micro_batch_changes_the_memory_and_not_the_result(tmp_path):
    """Three does not divide four: a smaller last piece weighs less."""
    results = []
    for micro in (4, 3, 1):
        model, progress = run(
            tmp_path / str(micro), schedule=Schedule(BATCH, micro), bounds=Bounds(tokens=BATCH * BLOCK)
        )
        results.append((progress.loss, torch.cat([value.flatten() for value in model.parameters()])))
    for loss, weights in results[1:]:
        assert loss == pytest.approx(results[0][0], abs=2e-3)  # products are in bf16
        torch.testing.assert_close(weights, results[0][1], rtol=0.0, atol=3e-4)


def test_minutes_bound_a_run(tmp_path):
    _, progress = run(tmp_path, bounds=Bounds(minutes=1.5 / 60))
    assert progress.step >= 1
    assert progress.seconds < 20
    with pytest.raises(ForetokenError, match=r"--minutes 1e-09: over after .* before the first step .* give more"):
        run(tmp_path / "other", bounds=Bounds(minutes=1e-9))


def test_the_time_before_training_counts(tmp_path):
    with stoppable(tmp_path, minutes=1000) as stop:
        stop.since -= 60_000 - 2  # of preparation
        began = time.monotonic()
        _, progress = run(tmp_path, bounds=Bounds(minutes=1000))
        assert time.monotonic() - began < 30
        assert progress.seconds >= 60_000


def test_a_step_is_cut_where_the_time_is_over(tmp_path):
    """A step of a large model takes a minute; its blocks are read again."""

    def wait(loss):
        time.sleep(2.0)
        return loss

    _, progress = run(tmp_path, objective=At(3, wait), bounds=Bounds(minutes=1.9 / 60))
    assert progress.step == 3
    assert last(tmp_path)[2]["step"] == 3


def test_bounds():
    assert Bounds(minutes=2.0).progress(10**9, 60.0) == 0.5
    assert Bounds(tokens=100, minutes=2.0).progress(75, 60.0) == 0.75
    assert Bounds(tokens=100, minutes=2.0).progress(25, 60.0) == 0.5
    assert Bounds(tokens=100).progress(200, 0.0) == 1.0


@pytest.mark.parametrize("bounds", [{}, {"tokens": 0}, {"minutes": 0.0}, {"tokens": 5, "minutes": -1.0},
                                    {"minutes": math.nan}])  # fmt: skip
def test_a_run_without_end_is_refused(bounds):
    with pytest.raises(ConfigError, match="a run needs an end"):
        Bounds(**bounds)


def test_it_runs_in_a_thread(tmp_path, whole):
    """Only the main thread may set signal handlers."""
    thread = threading.Thread(target=run, args=(tmp_path,))
    thread.start()
    thread.join()
    assert_same(tmp_path, whole)


def test_the_curve_stays_short_and_loses_nothing():
    progress, pending = Progress(), []
    for step in range(1, 5001):
        progress.step = progress.tokens = step
        pending.append(float(step))
        trainer._extend_curve(progress, pending)
    assert trainer.CURVE_POINTS / 2 < len(progress.curve) <= 2 * trainer.CURVE_POINTS
    tokens = [point[0] for point in progress.curve]
    assert tokens == sorted(tokens)
    assert tokens[-1] > 4950
    every = 5000 // trainer.CURVE_POINTS
    assert progress.curve[-1][2] == pytest.approx(tokens[-1] - (every - 1) / 2)  # the mean since the point before


def test_the_held_out_loss_is_that_of_the_plain_model(tmp_path):
    model = build().train()
    mixture = make_mixture(tmp_path)
    found = held_out_loss(model, NextToken(), mixture, blocks=5, micro_batch=2)
    tokens = mixture.held_out(5)
    assert len(tokens) == 5
    with torch.no_grad():
        expected = NextToken()(model.eval(), tokens, torch.Generator()).item()
    assert found == pytest.approx(expected, abs=2e-3)
    assert found == held_out_loss(model, NextToken(), mixture, blocks=5, micro_batch=2)
    assert not model.training
    model.train()
    held_out_loss(model, NextToken(), mixture, blocks=5, micro_batch=2)
    assert model.training


def test_a_mixture_too_small_to_hold_anything_out_has_no_held_out_loss(tmp_path):
    assert math.isnan(held_out_loss(build(), NextToken(), make_mixture(tmp_path, ["one"]), 4, 2))
