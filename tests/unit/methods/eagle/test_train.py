"""Training of an EAGLE head: the loss by hand, stops, stores, and a walk that foretells what serving measures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foretoken.core.errors import ConfigError, ForetokenError, InputError, MismatchError, ModelError
from foretoken.forward.quantised_weight import QuantisedLinear, rounded
from foretoken.methods.eagle.checkpoint import Eagle
from foretoken.methods.eagle.command import Config
from foretoken.methods.eagle.train import training
from foretoken.models.load import load_as_is
from foretoken.train import acceptance
from foretoken.train.begin_as import begin_as
from foretoken.train.feature_heads.batches import BY_COVERAGE, AllPositions, FromFeatures, FromTokens, frequent
from foretoken.train.feature_heads.batches import STEP as STEP_OF_K
from foretoken.train.feature_heads.expected_length import ExpectedLength, expected_steps, texts
from foretoken.train.feature_heads.objective import Thinned, Unrolled
from foretoken.train.feature_heads.remembered import Remembered
from foretoken.train.feature_heads.run import run
from foretoken.train.feature_heads.training import BLOCK as LONGEST
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.sources import parse
from foretoken.train.trainer import Bounds
from foretoken_lab.features.stored_blocks import StoredBlocks
from helpers.head_training import BATCH, shortened
from helpers.stored_features import Wanted, extract
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model

BLOCK, STEPS = 24, 3
STEP = BATCH * BLOCK
DEPTHS = (1, 3)
PROMPTS = ["What is 3 + 1?", "Who was there?", "It is late.", "one two three", "abc abc abc", "Tell me more."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target and a text."""
    place = tmp_path_factory.mktemp("eagle")
    save_model("llama", place / "target", hidden_size=64, head_dim=32, intermediate_size=128)
    lines = [{"prompt": f"What is {n} + 1?", "response": f"It is {n + 1}."} for n in range(300)]
    (place / "my.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


def small(**options):
    return shortened(training(Config(**options)), BLOCK, micro_batch=2)


class Replies:
    """Three of four positions."""

    def used(self, tokens_BT):
        return (torch.arange(tokens_BT.shape[1]) % 4 != 2).expand_as(tokens_BT)


def parts_of(folder, ids=None, **shape):
    loaded = load_as_is(str(folder / "target"), device="cpu")
    target = FrozenTarget(loaded.model, DEPTHS)
    torch.manual_seed(0)
    made = small(target=str(folder / "target"), out=folder / "none", **{"steps": STEPS, **shape})
    config = made.config(loaded.model.config, "it", loaded.fingerprint)
    if ids is not None:
        config = replace(config, draft_vocab_size=len(ids))
    return loaded, target, made.build(config, target, None if ids is None else torch.tensor(ids))


def train(folder, out, steps, shape=None, **options):
    settings = {"bounds": Bounds(tokens=steps * STEP), **options}
    shape = {"own_words": settings.pop("own_words", 0.0), "steps": STEPS, "draft_vocab_size": 60, **(shape or {})}
    sources = [] if "features" in settings else [parse(str(folder / "my.jsonl"))]
    made = small(target=str(folder / "target"), out=folder / out, **shape)
    return run(made, sources, folder / out, **settings)


@pytest.mark.parametrize("own_head", [False, True])
def test_the_loss_by_hand(own_head, folder):
    """Column by column, token by token, by the plain forward."""
    ids = list(range(3, 101, 2))
    loaded, target, head = parts_of(folder, ids, own_head=own_head)
    tokens_BT = torch.randint(4, 101, (2, 11), generator=torch.Generator().manual_seed(1))
    depths = head.config.taps.of(3)
    batches = FromTokens(target, Replies(), depths)
    table = head.embedding_of(target.model)
    loss = Unrolled(batches, table, lambda: head.lm_head_of(target.model), STEPS)(head, tokens_BT, torch.Generator())
    with torch.no_grad():
        p_BTK = loaded.model(input_ids=tokens_BT).logits.softmax(-1)[..., ids]
        found = target.states(tokens_BT)
    assert depths == (1, 1, 3)
    states = torch.cat([found[depth] for depth in depths], dim=-1)
    total = weights = 0.0
    for step in range(STEPS):
        losses = []
        for b in range(2):
            for i in range(11 - 1 - step):
                row = i + 1 + step
                if row % 4 == 2 or (i + 1) % 4 == 2:
                    continue  # no distribution to learn, or none that a draft would begin with
                read_W = head(states[b, : i + 1], tokens_BT[b, 1 : i + 2 + step], table)[-1]
                log_q = (read_W @ head.lm_head_of(target.model).T).log_softmax(-1)
                losses.append(-(p_BTK[b, row] * log_q).sum())
        total = total + 0.8**step * torch.stack(losses).mean()
        weights += 0.8**step
    torch.testing.assert_close(loss, total / weights, rtol=1e-4, atol=1e-5)
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in head.parameters())
    assert all(parameter.grad is None for parameter in loaded.model.parameters())


def test_no_reply_in_a_micro_batch_moves_nothing(folder):
    _, target, head = parts_of(folder)

    class Nothing:
        def used(self, tokens_BT):
            return torch.zeros_like(tokens_BT, dtype=torch.bool)

    batches = FromTokens(target, Nothing(), head.config.taps.of(3))
    table, rows = head.embedding_of(target.model), head.lm_head_of(target.model)
    loss = Unrolled(batches, table, lambda: rows, STEPS)(head, torch.full((2, 9), 5), torch.Generator())
    loss.backward()
    assert float(loss.detach()) == 0
    assert not any(parameter.grad.any() for parameter in head.parameters() if parameter.grad is not None)


@pytest.mark.full_product
def test_a_run_learns_stops_and_goes_on(folder):
    whole = train(folder, "whole", 30)
    losses = [loss for _, _, loss in whole["curve"]]
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])

    def stop(progress):
        if progress.step == 13:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(folder, "parts", 30, report=stop, checkpoint_every=1e-9)
    assert Eagle.load(folder / "parts").config.draft_vocab_size == 60  # it can be used as it stands
    parts = train(folder, "parts", 30)
    assert [point[::2] for point in parts["curve"]] == [point[::2] for point in whole["curve"]]
    ours, theirs = Eagle.load(folder / "parts"), Eagle.load(folder / "whole")
    assert all(torch.equal(a, b) for a, b in zip(ours.tensors().values(), theirs.tensors().values(), strict=True))
    assert ours.ids_K is not None
    assert len(ours.ids_K) == whole["draft_vocab_size"] == 60
    with pytest.raises(ForetokenError, match="holds a run with another shape"):
        train(folder, "parts", 30, {"draft_vocab_size": 50})


@pytest.mark.parametrize(("layers", "top_logits"), [((*DEPTHS, "final"), 0), (DEPTHS, "all")])
def test_stored_features_teach_the_same(folder, layers, top_logits):
    loaded, target, head = parts_of(folder)
    generator = torch.Generator().manual_seed(2)
    blocks = [torch.randint(4, 101, (BLOCK - number % 3,), generator=generator) for number in range(40)]
    store = folder / f"store-{top_logits}"
    extract(loaded.model, blocks, store, Wanted(layers, top_logits, "float32"), target=loaded.fingerprint)
    stored, depths = StoredBlocks(store, DEPTHS, seed=0), head.config.taps.of(3)
    table, rows = head.embedding_of(target.model), head.lm_head_of(target.model)
    numbers = torch.tensor([[0], [3]])
    sequences = [each.tokens_N for each in stored.sequences([0, 3])]
    assert len(sequences[0]) == len(sequences[1])
    expected = Unrolled(FromTokens(target, Replies(), depths), table, lambda: rows, STEPS)
    found = Unrolled(FromFeatures(target, Replies(), stored, depths), table, lambda: rows, STEPS)
    wanted = expected(head, torch.stack(sequences).long(), torch.Generator())
    torch.testing.assert_close(found(head, numbers, torch.Generator()), wanted, rtol=1e-5, atol=1e-5)
    if top_logits == 0:
        record = train(folder, "from-store", 4, features=store)
        assert (record["own_words"], record["mixture"][0]["name"]) == (0, "features")
        with pytest.raises(InputError, match="needed are 1, 2, 3 and final"):
            StoredBlocks(store, (1, 2, 3), seed=0)


def test_the_most_frequent_tokens_are_kept_and_the_stream_stays_where_it_was():
    class Stream:
        block, place = 1 << 14, 0

        def next(self, count):
            self.place += 1
            return torch.tensor([[9, 9, 9, 4, 4, 7]])

        def state(self):
            return {"place": self.place}

        def resume(self, state):
            self.place = state["place"]

    stream = Stream()
    assert frequent(stream, torch.Tensor.flatten, 2, 12) == [4, 9]
    assert frequent(stream, torch.Tensor.flatten, 5, 12) == [0, 1, 4, 7, 9]
    assert stream.place == 0
    assert len(frequent(stream, torch.Tensor.flatten, BY_COVERAGE, 1000)) == STEP_OF_K
    assert len(frequent(stream, torch.Tensor.flatten, BY_COVERAGE, 12)) == 12


def test_no_more_text_is_counted_than_the_run_may_read():
    class Stream:
        block, place = 1 << 10, 0

        def next(self, count):
            self.place += 1
            return torch.full((1, 4), self.place)

        def state(self):
            return {}

        def resume(self, state):
            pass

    stream = Stream()
    frequent(stream, torch.Tensor.flatten, 2, 12, most=3 << 10)
    assert stream.place == 3


def test_a_block_that_was_read_costs_no_forward(folder, tmp_path):
    _, target, head = parts_of(folder, list(range(3, 101, 2)))
    depths = head.config.taps.of(3)
    calls = []

    def batches(tokens_BT):
        calls.append(len(tokens_BT))
        return FromTokens(target, Replies(), depths)(tokens_BT)

    def remembered():
        return Remembered(batches, tmp_path / "states", 101)

    tokens_BT = torch.randint(4, 101, (3, 11), generator=torch.Generator().manual_seed(1))
    exact, kept = batches(tokens_BT), remembered()
    kept(tokens_BT[:2])
    again = remembered()(tokens_BT)
    assert calls == [3, 1, 1, 1]
    assert torch.equal(again.used_BT, exact.used_BT)
    torch.testing.assert_close(again.states_BTF, exact.states_BTF, rtol=1e-2, atol=1e-2)
    likely = exact.p_NK(head.ids_K) > again.p_NK(head.ids_K).amin()
    torch.testing.assert_close(again.p_NK(head.ids_K)[likely], exact.p_NK(head.ids_K)[likely], rtol=5e-3, atol=5e-3)
    table, rows = head.embedding_of(target.model), head.lm_head_of(target.model)
    losses = [Unrolled(each, table, lambda: rows, STEPS)(head, tokens_BT, None) for each in (batches, kept)]
    torch.testing.assert_close(*losses, rtol=0.3, atol=0)
    kept.forget()
    assert not (tmp_path / "states").exists()


def test_a_quantised_target_is_read_by_dense_products(folder):
    model, same = (load_as_is(str(folder / "target"), device="cpu").model for _ in range(2))
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, torch.nn.Linear):
                setattr(parent, name, QuantisedLinear(rounded(child.weight.detach(), 8, 16)))
    for name, child in same.named_modules():
        if isinstance(child, torch.nn.Linear):
            child.weight.data = model.get_submodule(name).weight
    tokens_BT = torch.randint(4, 101, (2, 9), generator=torch.Generator().manual_seed(1))
    found, expected = (FrozenTarget(each, DEPTHS).states(tokens_BT) for each in (model, same))
    assert not any(isinstance(each, QuantisedLinear) for each in model.modules())
    for depth, state in expected.items():
        assert (found[depth] - state).norm() < 2e-2 * state.norm()


def test_a_thinned_loss_is_the_whole_loss_of_fewer_columns(folder):
    """Its first step is whole; over both halves of the columns its mean is that of all."""
    _, target, head = parts_of(folder, list(range(3, 101, 2)))
    tokens_BT = torch.randint(4, 101, (2, 41), generator=torch.Generator().manual_seed(1))
    batches = FromTokens(target, AllPositions(), head.config.taps.of(3))
    table, rows = head.embedding_of(target.model), head.lm_head_of(target.model)
    head.requires_grad_(False)
    first, whole = (float(Unrolled(batches, table, lambda: rows, each)(head, tokens_BT, None)) for each in (1, 2))
    seeds = [torch.Generator().manual_seed(seed) for seed in range(40)]
    thinned = [float(Thinned(batches, table, lambda: rows, 2)(head, tokens_BT, each)) for each in seeds]
    assert float(Thinned(batches, table, lambda: rows, 1)(head, tokens_BT, seeds[0])) == pytest.approx(first)
    assert len(set(thinned)) > 1
    assert sum(thinned) / len(thinned) == pytest.approx(whole, rel=0.02)


# ------------------------------------------------------------------ the walk


def plain_steps(stands, column=0):
    """The same expectation by going through every walk."""
    count = stands.shape[1]
    if column >= count:
        return 0.0
    longest, reach, total = min(len(stands), count - column - 1), 1.0, 1.0
    for step in range(longest):
        total += reach * (1 - float(stands[step, column])) * plain_steps(stands, column + step + 1)
        reach *= float(stands[step, column])
    return total + reach * plain_steps(stands, column + longest + 1)


def test_expected_steps():
    assert expected_steps(torch.zeros(3, 5)) == 5  # nothing stands: plain decoding
    assert expected_steps(torch.ones(3, 8)) == 2  # three drafted and one more a step
    assert expected_steps(torch.ones(3, 5)) == 2
    assert expected_steps(torch.ones(3, 1)) == 1
    chances = torch.rand(3, 7, generator=torch.Generator().manual_seed(0))
    assert expected_steps(chances) == pytest.approx(plain_steps(chances))


@pytest.fixture(scope="module")
def learned(folder):
    """A head that learnt the target's greedy text by heart, so some of its drafts are accepted; not those at T=1."""
    made = pytest.MonkeyPatch()
    made.setattr(acceptance, "MAX_TOKENS", 40)
    encode = load_as_is(str(folder / "target"), device="cpu").tokenizer
    name = str(folder / "target")
    said = [*texts(name, PROMPTS, 0.0), *texts(name, [f"{prompt} And" for prompt in PROMPTS], 1.0)]
    lines = [{"text": encode.decode(each.tokens)} for each in said]
    (folder / "said.jsonl").write_text("".join(json.dumps(line) + "\n" for line in 20 * lines))
    sources = [parse(str(folder / "said.jsonl"))]
    bounds = Bounds(tokens=150 * STEP)
    options = {"target": name, "out": folder / "learned", "steps": STEPS, "draft_vocab_size": 80, "own_words": 0.0}
    yield run(small(**options), sources, folder / "learned", bounds=bounds, prompts=PROMPTS, rate=4.0)
    made.undo()


def test_training_says_what_serving_then_measures(folder, learned, monkeypatch):
    """At temperature 0 there is no chance in it: step for step the same."""
    monkeypatch.setattr(acceptance, "MAX_TOKENS", 40)
    name = str(folder / "target")
    config = {"method": "eagle", "head": str(folder / "learned"), "num_speculative_tokens": STEPS}
    served = acceptance.measure(name, config, PROMPTS, (0.0,))
    assert served["greedy"]["tokens_per_step"] > 1.08
    assert learned["walked"]["greedy"]["after"] == pytest.approx(served["greedy"]["tokens_per_step"], rel=0.01)
    assert learned["walked"]["greedy"]["after"] > learned["walked"]["greedy"]["before"]


@pytest.mark.full_product
def test_training_says_what_serving_then_measures_of_drawn_texts(folder, learned, monkeypatch):
    """Within the error of the mean."""
    monkeypatch.setattr(acceptance, "MAX_TOKENS", 40)
    name = str(folder / "target")
    config = {"method": "eagle", "head": str(folder / "learned"), "num_speculative_tokens": STEPS}
    # texts of 1920 tokens each, in about 1100 steps: a mean accepted length has an error of about 1 / sqrt(1100)
    many = 8 * PROMPTS
    drawn = acceptance.measure(name, config, many, (1.0,))
    head, loaded = Eagle.load(folder / "learned"), load_as_is(name, device="cpu")
    target = FrozenTarget(loaded.model, DEPTHS)
    lengths = ExpectedLength(target, texts(name, many, 1.0), head.config.taps.of(3), STEPS)
    walked = lengths.tokens_per_step(head, head.embedding_of(target.model), head.lm_head_of(target.model))
    assert walked == pytest.approx(drawn["T=1"]["tokens_per_step"], abs=0.09)


def test_draws_for_different_prompts_are_independent(folder):
    """Or a mean over prompts would be no better known than that of one: the bounds above take draws for independent."""
    first, second = acceptance.written(str(folder / "target"), {"method": "none"}, PROMPTS[2:3] * 2, 1.0)
    assert first.token_ids != second.token_ids


def test_the_residual_begins_with_a_normed_feature_or_as_the_paper_has_it(folder, tmp_path):
    for plain in (False, True):
        train(folder, tmp_path / str(plain), 1, {"plain_residual": plain})
        assert Eagle.load(tmp_path / str(plain)).config.norm_before_residual is not plain


def test_a_walk_over_all_columns_would_be_another_number(folder, learned):
    """The teeth of the test above: without the jumps the number is off."""
    head = Eagle.load(folder / "learned")
    loaded = load_as_is(str(folder / "target"), device="cpu")
    target, depths = FrozenTarget(loaded.model, DEPTHS), head.config.taps.of(3)
    lengths_of = ExpectedLength(target, texts(str(folder / "target"), PROMPTS, 0.0), depths, STEPS)
    table, rows = head.embedding_of(target.model), head.lm_head_of(target.model)
    lengths = []
    for text, states, chances in lengths_of._read:
        stands = lengths_of._accepted(head, text, states, chances, table, rows)
        lengths += (1 + stands.cumprod(0).sum(0)).tolist()
    mean = sum(lengths) / len(lengths)
    found = lengths_of.tokens_per_step(head, table, rows)
    assert found == pytest.approx(learned["walked"]["greedy"]["after"], abs=0.02)  # stored in bf16
    assert abs(mean - found) > 0.02


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "eagle4"}, "algorithm='eagle4' must be"),
        ({"mlp_width": 50}, "--mlp-width 50: a multiple of 32"),
        ({"algorithm": "eagle", "own_head": True}, "uses the target's head"),
        ({"algorithm": "eagle", "draft_vocab_size": 60}, "uses the target's head"),
        ({"algorithm": "eagle", "plain_residual": True}, "leave out --plain-residual"),
    ],
    ids=str,
)
def test_shapes_that_cannot_be(options, message):
    with pytest.raises(ConfigError, match=message):
        Config(target="it", out=Path("none"), **options)


def test_runs_that_cannot_be(folder):
    with pytest.raises(ConfigError, match=r"--own-words 1\.5"):
        train(folder, "bad", 1, own_words=1.5)
    with pytest.raises(ConfigError, match="--draft-vocab-size 500"):
        train(folder, "bad", 1, {"draft_vocab_size": 500})
    with pytest.raises(ConfigError, match="another model lies there"):
        train(folder, "target", 1)
    assert not Path(folder, "bad").exists()


def test_training_goes_on_from_a_trained_head(folder, tmp_path):
    """Of another target of the same shape: same tokens scored, same weights at the first step; others are refused.

    Rows of the target's head are not the head's: it may go on with more of them."""
    train(folder, "begun", 2)
    again = save_model("llama", tmp_path / "again", hidden_size=64, head_dim=32, intermediate_size=128, seed=1)
    sources = [parse(str(folder / "my.jsonl"))]

    def made(**shape):
        shape = {"own_words": 0.0, "steps": STEPS, "draft_vocab_size": 60, **shape}
        return small(target=str(again), out=tmp_path, **shape)

    options = {"bounds": Bounds(tokens=STEP), "start": folder / "begun", "rate": 1e-9}
    record = run(made(), sources, tmp_path / "on", **options)
    first, second = Eagle.load(folder / "begun"), Eagle.load(tmp_path / "on")
    assert torch.equal(first.ids_K, second.ids_K)
    assert second.config.target_fingerprint != first.config.target_fingerprint
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=1e-2, atol=1e-4)
    assert record["start"]["name"] == str(folder / "begun")
    assert second.config.windows == (LONGEST,)  # it never learned to look further
    run(made(draft_vocab_size=70), sources, tmp_path / "more", **options)
    third = Eagle.load(tmp_path / "more")
    assert third.ids_K is not None
    assert third.config.draft_vocab_size == len(third.ids_K) == 70
    torch.testing.assert_close(third.state_dict(), first.state_dict(), rtol=1e-2, atol=1e-4)
    for asked, message in (
        ({"draft_vocab_size": 50, "own_head": True}, "its draft_vocab_size is 60, but 50 is trained here"),
        ({"plain_residual": True}, r"ask for the same shape \(--plain-residual\)"),
        ({"own_head": True}, "it lacks lm_head.weight"),
    ):
        with pytest.raises(MismatchError, match=message):
            run(made(**asked), sources, tmp_path / "no", **options)
    with pytest.raises(ModelError, match="has no EAGLE head"):
        run(made(), sources, tmp_path / "no", **{**options, "start": tmp_path / "nowhere"})


def test_a_wider_mlp_begins_as_the_narrow_one(folder, tmp_path):
    """The same function, and channels that learn; a narrower one than the first is refused."""
    train(folder, "narrow", 2)
    name, sources = str(folder / "target"), [parse(str(folder / "my.jsonl"))]
    narrow = Eagle.load(folder / "narrow")
    shape = {"own_words": 0.0, "steps": STEPS, "draft_vocab_size": 60, "mlp_width": 96}
    made = small(target=name, out=tmp_path / "wide", **shape)
    config = made.config(load_as_is(name).model.config, name, narrow.config.target_fingerprint)
    config = replace(config, draft_vocab_size=60)
    wide = Eagle(config, ids_K=narrow.ids_K)
    wide.draw(torch.Generator().manual_seed(0))
    begin_as(wide, narrow, folder / "narrow")
    h_TW, attended = torch.randn(5, config.width), torch.randn(5, config.heads * config.head_dim)
    torch.testing.assert_close(wide.layer(0).close(h_TW, attended), narrow.layer(0).close(h_TW, attended))
    assert wide.layer(0).mlp.gate_proj.weight[32:].abs().min() > 0  # or the new channels would never learn
    options = {"bounds": Bounds(tokens=2 * STEP), "start": folder / "narrow"}
    run(made, sources, tmp_path / "wide", **options)
    trained = Eagle.load(tmp_path / "wide").layer(0).mlp
    assert trained.down_proj.weight[:, 32:].abs().max() > 0
    with pytest.raises(MismatchError, match=r"its mlp_width is 96, but 32 is trained here.*\(--mlp-width\)"):
        begin_as(narrow, wide, tmp_path)
