"""Training of a prediction layer: the columns are what serving computes, the checkpoint is one that others read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from foretoken.core.errors import UnsupportedArchitecture
from foretoken.drafting.feature_heads.unroll import every_column, unrolled
from foretoken.forward.hidden_states import FINAL
from foretoken.methods.mtp.command import Config
from foretoken.methods.mtp.drafter import MtpDrafter
from foretoken.methods.mtp.glm import relaid, write_relaid
from foretoken.methods.mtp.network import PredictionLayer
from foretoken.methods.mtp.shards import read_layer
from foretoken.methods.mtp.train import LayerConfig, LearningLayer, training
from foretoken.models.load import load, load_as_is
from foretoken.options.sampling import SamplingParams
from foretoken.train import acceptance
from foretoken.train.feature_heads.batches import FromFeatures, FromTokens
from foretoken.train.feature_heads.expected_length import texts
from foretoken.train.feature_heads.objective import Unrolled
from foretoken.train.feature_heads.run import run
from foretoken.train.feature_heads.training import HeadTraining
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.sources import parse
from foretoken.train.trainer import Bounds
from foretoken_lab.features.stored_blocks import StoredBlocks
from helpers.golden import tokens_of
from helpers.head_training import BATCH, shortened
from helpers.mtp_models import FAMILIES, INDEX, PREFIX, VOCABULARY, save_mtp, shard
from helpers.stored_features import Wanted, extract
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model
from helpers.zoo_llms import with_config

BLOCK, STEPS = 24, 3
STEP = BATCH * BLOCK
OPENINGS = ["What is 3 + 1?", "Who was there?", "It is late.", "one two three", "abc abc abc", "Tell me more."]
PROMPTS = [f"{opening} {word}" for opening in OPENINGS for word in ("Yes", "No", "It")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense target and a text."""
    place = tmp_path_factory.mktemp("mtp")
    save_model("llama", place / "target", hidden_size=64, head_dim=32, intermediate_size=128)
    lines = [{"prompt": f"What is {n} + 1?", "response": f"It is {n + 1}."} for n in range(300)]
    (place / "my.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


class EveryThird:
    """Positions of which the loss is taken (train/replies.py)."""

    def used(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return (torch.arange(tokens_BT.shape[1]) % 3 == 1).expand_as(tokens_BT)


def small(name: str, out: Path, **options: Any) -> HeadTraining:
    made = training(Config(**{"target": name, "out": out, "steps": STEPS, "own_words": 0.0, **options}))
    return shortened(made, BLOCK, micro_batch=2)


def train(folder: Path, out: str, steps: int, **options: Any) -> dict[str, Any]:
    settings = {"bounds": Bounds(tokens=steps * STEP), **options}
    sources = [] if "features" in settings else [parse(str(folder / "my.jsonl"))]
    sources = settings.pop("sources", sources)
    return run(small(str(folder / "target"), folder / out), sources, folder / out, **settings)


@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_follow_from_the_target_s_states(name: str, tmp_path: Path) -> None:
    """Every drafted token's probability is the plain forward's, from the target's final states."""
    source = str(save_mtp(name, tmp_path))
    frozen, model = FrozenTarget(load_as_is(source, device="cpu").model, ()), load(source, device="cpu")
    layer = PredictionLayer(frozen.model, name, read_layer(frozen.model.config, source, name))
    drafter, asked = MtpDrafter(MtpDrafter.Config(), model), list[tuple[list[int], Any]]()
    propose = drafter.propose

    def listening(contexts: Any, budgets: Any) -> Any:
        drafts = propose(contexts, budgets)
        asked.extend((list(each.tokens), draft) for each, draft in zip(contexts, drafts, strict=True))
        return drafts

    drafter.propose = listening  # type: ignore[method-assign]
    llm = with_config({"method": drafter, "num_speculative_tokens": 3}, target=model)
    prompt = {"prompt_token_ids": tokens_of(1, 9, VOCABULARY)}
    llm.generate([prompt], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    drafted = [(tokens, draft) for tokens, draft in asked if len(draft)]
    assert len(drafted) > 5
    for tokens, draft in drafted:
        text_1T = torch.tensor([[*tokens, *draft.tree.tokens]])
        with torch.inference_mode():
            states_SF = frozen.states(text_1T)[FINAL][0, : len(tokens) - 1]
            rows = layer(states_SF, text_1T[0, 1:-1], layer.embedding_VW)[-len(draft) :]
            laws = (rows @ layer.head_VW.T).softmax(-1)
        for token, chance, q_V in zip(draft.tree.tokens, draft.confidence, laws, strict=True):
            assert chance == pytest.approx(float(q_V[token]), rel=1e-3, abs=2e-6)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_dense_model_is_the_same_function_as_a_glm(kind: str, tmp_path: Path) -> None:
    """In float32, tied or not. Planted: half of each head rotated, as GLM-4-MoE does by default, and it is another."""
    name = str(save_model(kind, tmp_path / "dense"))
    write_relaid(name, tmp_path / "glm")
    ours, theirs = (load_as_is(each, device="cpu").model.float() for each in (str(tmp_path / "glm"), name))
    ids = torch.tensor([tokens_of(4, 40, 100), tokens_of(5, 40, 100)])
    with torch.no_grad():
        expected = theirs(ids).logits
        torch.testing.assert_close(ours(ids).logits, expected, rtol=1e-5, atol=1e-5)
        config, weights = relaid(theirs, name)
        config.rope_parameters["partial_rotary_factor"] = 0.5
        half = AutoModelForCausalLM.from_config(config)
        half.load_state_dict(weights)
        assert float((half.eval()(ids).logits - expected).abs().max()) > 0.01


def test_models_that_are_not_laid_out(tmp_path: Path) -> None:
    for number, (kind, options, message) in enumerate(
        (
            ("gpt2", {}, "a 'gpt2' cannot be laid out"),
            ("llama", {"attention_bias": True}, "a bias after attention"),
            ("llama", {"mlp_bias": True}, "an MLP with biases"),
            ("qwen3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding windows"),
        )
    ):
        name = str(save_model(kind, tmp_path / str(number), **options))
        with pytest.raises(UnsupportedArchitecture, match=message):
            relaid(load_as_is(name, device="cpu").model, name)


@pytest.mark.full_product
def test_it_learns_stops_and_goes_on(folder: Path) -> None:
    whole = train(folder, "whole", 24, rate=2.0)
    losses = [loss for _, _, loss in whole["curve"]]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    seen = []

    def stop(progress: Any) -> None:
        seen.append(progress.step)
        if len(seen) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(folder, "parts", 24, rate=2.0, report=stop, checkpoint_every=1e-9)
    train(folder, "parts", 24, rate=2.0)
    ours, theirs = (load_file(folder / each / "model-00002-of-00002.safetensors") for each in ("parts", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_stored_features_teach_the_same(folder: Path) -> None:
    """A store of the target's last state, which is the laid-out one's: the same losses as from the text of it."""
    write_relaid(str(folder / "target"), folder / "glm")
    loaded, dense = (load_as_is(str(folder / each), device="cpu") for each in ("glm", "target"))
    generator = torch.Generator().manual_seed(2)
    blocks = [torch.randint(4, 101, (BLOCK - number % 3,), generator=generator) for number in range(40)]
    extract(dense.model, blocks, folder / "store", Wanted(("final",), 0, "float32"), target=dense.fingerprint)
    stored = StoredBlocks(folder / "store", (), seed=0)
    frozen = FrozenTarget(loaded.model, ())
    torch.manual_seed(0)
    layer = LearningLayer(LayerConfig(draft_vocab_size=101, mlp_width=96), frozen.model, folder / "glm", torch.float32)
    table, rows = layer.embedding_of(frozen.model), layer.lm_head_of(frozen.model)
    sequences = [each.tokens_N for each in stored.sequences([0, 3])]
    from_text = Unrolled(FromTokens(frozen, cast(Any, EveryThird()), (FINAL,)), table, lambda: rows, STEPS)
    from_store = Unrolled(FromFeatures(frozen, cast(Any, EveryThird()), stored, (FINAL,)), table, lambda: rows, STEPS)
    expected = from_text(layer, torch.stack(sequences).long(), torch.Generator())
    found = from_store(layer, torch.tensor([[0], [3]]), torch.Generator())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    record = train(folder, "from-store", 4, features=folder / "store")
    assert (record["own_words"], record["mixture"][0]["name"]) == (0, "features")
    assert len(record["curve"]) > 0
    assert (folder / "from-store" / INDEX).is_file()


def test_training_begins_where_the_feature_is_handed_on(folder: Path, tmp_path: Path) -> None:
    """Almost the target's own distribution of the token that it has just read: what drafts are learnt from."""
    write_relaid(str(folder / "target"), tmp_path / "glm")
    frozen = FrozenTarget(load_as_is(str(tmp_path / "glm"), device="cpu").model, ())
    torch.manual_seed(0)
    config = LayerConfig(draft_vocab_size=101, mlp_width=96)
    layer = LearningLayer(config, frozen.model, tmp_path / "glm", torch.float32)
    tokens_1T = torch.tensor([tokens_of(6, 60, 100)])
    states = frozen.states(tokens_1T)[FINAL]
    with torch.no_grad():
        asked_1C = every_column(tokens_1T)
        said = next(unrolled(layer, states, tokens_1T, layer.embedding_VW, 1, asked_1C)) @ layer.head_VW.T
        law = frozen.logits(states[0, :-1])
    same = torch.nn.functional.cosine_similarity(said - said.mean(-1, True), law - law.mean(-1, True), dim=-1)
    assert float(same.mean()) > 0.6
    assert 0.5 < float(said.std() / law.std()) < 1.5


def test_others_find_the_layer(folder: Path) -> None:
    """The library's own reader of such layers loads it from the shards, and computes the same."""
    train(folder, "published", 2)
    out = folder / "published"
    index = json.loads((out / INDEX).read_text())["weight_map"]
    assert {name for name in index if name.startswith("model.layers.3.mlp.experts.")} == {
        f"model.layers.3.mlp.experts.{number}.{kind}_proj.weight"
        for number in range(4)
        for kind in ("gate", "up", "down")
    }
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 1
    main: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3.*"]  # it lists the depths of published ones only
    theirs: Any = MtpModel.from_pretrained(main)
    tokens = tokens_of(7, 12, 100)
    with torch.no_grad():
        states_1TW = main.model(torch.tensor([tokens])).last_hidden_state
        cache = MtpCache(config=main.config.get_mtp_config())
        positions = torch.arange(11)[None]
        drafted, logits, _ = theirs(
            torch.tensor([tokens[1:]]), states_1TW[:, :-1], None, positions, cache, full_input_ids=None
        )
        layer = PredictionLayer(main, "it", read_layer(main.config, str(out), "it"))
        text_1T = torch.tensor([tokens])
        last = next(unrolled(layer, states_1TW, text_1T, layer.embedding_VW, 1, every_column(text_1T)))[-1]
        ours = last @ layer.head_VW.T
    torch.testing.assert_close(logits.flatten(), ours, rtol=1e-4, atol=1e-4)
    assert int(drafted.flatten()[-1]) == int(ours.argmax())


def test_a_layer_in_shards_is_replaced(folder: Path, tmp_path: Path) -> None:
    """Of a checkpoint in many files; the target's own shards keep their bytes."""
    source = save_mtp("glm4_moe", tmp_path / "source")
    shard(source)
    before = {name: path.read_bytes() for path in source.iterdir() for name in [path.name]}
    sources = [parse(str(folder / "my.jsonl"))]
    run(small(str(source), tmp_path / "out", steps=2), sources, tmp_path / "out", bounds=Bounds(tokens=2 * STEP))
    assert before == {path.name: path.read_bytes() for path in source.iterdir()}
    name = "model-00001-of-00002.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == before[name]
    old, new = (load_file(each / "model-00002-of-00002.safetensors") for each in (source, tmp_path / "out"))
    moved = float((old[f"{PREFIX}eh_proj.weight"] - new[f"{PREFIX}eh_proj.weight"]).abs().max())
    assert 0 < moved < 0.1  # trained on from where it was
    others = [{each for each in found if ".mlp.experts." not in each} for found in (old, new)]
    assert others[0] == others[1]


@pytest.mark.full_product
def test_training_says_what_serving_then_measures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains: at temperature 0 step for step the same, above it within the error of the mean."""
    monkeypatch.setattr(acceptance, "MAX_TOKENS", 40)
    name = str(folder / "target")
    decode = load_as_is(name, device="cpu").tokenizer.decode
    said = [*texts(name, PROMPTS, 0.0), *texts(name, [f"{prompt} And" for prompt in PROMPTS], 1.0)]
    (folder / "said.jsonl").write_text("".join(json.dumps({"text": decode(each.tokens)}) + "\n" for each in 5 * said))
    record = train(folder, "learned", 100, sources=[parse(str(folder / "said.jsonl"))], prompts=PROMPTS, rate=2.0)
    config = {"method": "mtp", "max_depth": STEPS, "num_speculative_tokens": STEPS}
    served, walked = acceptance.measure(str(folder / "learned"), config, PROMPTS), record["walked"]
    assert served["greedy"]["tokens_per_step"] > 1.08
    assert walked["greedy"]["after"] == pytest.approx(served["greedy"]["tokens_per_step"], rel=0.02)
    assert walked["greedy"]["after"] > walked["greedy"]["before"]
    # two texts of 720 tokens, each in about 400 steps, with a deviation of their lengths of about 0.9
    assert walked["T=1"]["after"] == pytest.approx(served["T=1"]["tokens_per_step"], abs=3 * 0.9 * (2 / 400) ** 0.5)
