"""Training of SPRINTER's head: the labels by hand, the fit, ROC AUC, and what stops a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from foretoken.core.errors import ConfigError, InputError, MismatchError
from foretoken.methods.sprinter import train as training
from foretoken.methods.sprinter.labels import Collecting, Examples, collect, prompts_of
from foretoken.methods.sprinter.network import FEATURES, SprinterHead, facts_of
from foretoken.methods.sprinter.train import PENALTIES, by_source, fit, fit_beside_facts, quality
from foretoken.models.load import load
from foretoken.train.roc import auc
from foretoken.train.sources import parse
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model

PROMPTS = [[1, 7, 30, 12], [1, 50], [1, 9, 9, 40, 41, 42, 60]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair and a text. The draft is the target after its weights were shaken: right often, not always."""
    place = tmp_path_factory.mktemp("sprinter")
    save_model("llama", place / "target")
    model = AutoModelForCausalLM.from_pretrained(place / "target", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.15 * weight.std() * torch.randn(weight.shape, generator=generator))
    save_model("llama", place / "draft")
    model.save_pretrained(place / "draft")
    model = AutoModelForCausalLM.from_pretrained(place / "target", dtype=torch.float32)
    with torch.no_grad():  # the target, but for half of the vocabulary, of which it names another token
        model.lm_head.weight[50:] = model.lm_head.weight[50:].roll(7, 0)
    save_model("llama", place / "half")
    model.save_pretrained(place / "half")
    lines = [{"prompt": f"What is {n} + {n * 7 % 31}?", "response": f"It is {n + n * 7 % 31}."} for n in range(300)]
    (place / "my.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


def examples_of(folder: Path, **options: Any) -> Examples:
    pair = [load(folder / name, device="cpu") for name in ("target", "draft")]
    return collect(pair[0], pair[1], iter(PROMPTS), Collecting(**{"count": 36, "steps": 12, **options}))


@pytest.mark.parametrize("ratio", [1.0, 1.5])
def test_labels_and_states_by_hand(folder: Path, ratio: float) -> None:
    """Every prefix from scratch with the library's own models, greedy tokens, as the specification has it."""
    found = examples_of(folder, ratio=ratio)
    big, small = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32) for name in ("target", "draft")
    )
    ends = load(folder / "target", device="cpu").end_ids
    rows = []
    for number, prompt in enumerate(PROMPTS):
        tokens = list(prompt)
        for step in range(12):
            with torch.inference_mode():
                drafted = small(input_ids=torch.tensor([tokens]), output_hidden_states=True)
                q_V = drafted.logits[0, -1].softmax(-1)
                p_V = big(input_ids=torch.tensor([tokens])).logits[0, -1].softmax(-1)
                y = int(q_V.argmax())
                read = small(input_ids=torch.tensor([[*tokens, y]]), output_hidden_states=True)
            states = drafted.hidden_states[-1][0, -1], read.hidden_states[-1][0, -1]
            top, second = q_V.sort(descending=True).values[:2]
            facts = torch.stack([q_V[y].log(), -(q_V * q_V.log()).sum(), top - second])
            rows.append((step, number, *states, p_V[y], q_V[y], facts))
            tokens.append(y if q_V[y] <= p_V[y] * ratio else int(p_V.argmax()))
            if tokens[-1] in ends:
                break
    rows.sort(key=lambda row: row[:2])  # step by step, all prompts of a group
    assert len(found) == len(rows)
    assert found.document_N.tolist() == [row[1] for row in rows]
    every = ((found.pre_ND, 2), (found.post_ND, 3), (found.p_N, 4), (found.q_N, 5), (found.facts_N3, 6))
    for ours, place in every:
        torch.testing.assert_close(ours, torch.stack([row[place] for row in rows]), rtol=1e-3, atol=1e-3)
    labels = found.labels(ratio, soft=False)
    assert labels.tolist() == [float(row[5] <= row[4] * ratio) for row in rows]
    assert torch.equal(found.features("drawn"), torch.cat([found.pre_ND, found.facts_N3], dim=-1))
    assert 0 < labels.mean() < 1
    soft = found.labels(ratio, soft=True)
    torch.testing.assert_close(soft, (found.p_N / found.q_N).clamp(max=1.0))


def test_drawn_tokens_depend_on_the_seed_and_the_temperature(folder: Path) -> None:
    first, again, other = (examples_of(folder, temperature=0.8, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.q_N, again.q_N)
    assert not torch.equal(first.q_N, other.q_N)
    hot = examples_of(folder, temperature=5.0)
    assert hot.q_N.max() < first.q_N.max()


def test_collecting_ends_with_the_count_the_time_or_the_text(folder: Path) -> None:
    assert len(examples_of(folder, count=10)) <= 12
    assert 10 <= len(examples_of(folder, count=10, steps=5)) <= 15
    assert len(examples_of(folder, count=10**6)) <= 36
    assert len(examples_of(folder, seconds=0.0)) == 0


def test_prompts_are_first_parts_of_documents(folder: Path) -> None:
    tokenizer = load(folder / "target", device="cpu").tokenizer
    source = parse(str(folder / "my.jsonl"))
    whole = list(prompts_of([source], tokenizer, 1000, Collecting(share=1.0)))
    parts = list(prompts_of([source], tokenizer, 1000, Collecting()))
    assert len(whole) == len(parts) == 300
    for part, ids in zip(parts, whole, strict=True):
        assert part == ids[: int(0.3 * len(ids))]
    assert max(map(len, prompts_of([source], tokenizer, 5, Collecting(share=1.0)))) == 5
    replies = list(prompts_of([source], tokenizer, 1000, Collecting(replies=True)))
    assert len(replies) == 300
    assert replies[0] != parts[0]


# ---------------------------------------------------------------------- the fit


def separable(count: int = 600) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randn(count, 8, generator=generator)
    noise_N = torch.randn(count, generator=generator)
    return x_ND, (x_ND[:, 0] - x_ND[:, 3] + 0.5 * noise_N > 0).float(), torch.arange(count) // 10


def test_a_fit_finds_what_there_is_and_is_of_its_seed() -> None:
    found, again = (fit(*separable(), rate=0.02) for _ in range(2))
    assert torch.equal(found.weight_D, again.weight_D)
    assert found.held_out["auc"] > 0.9  # type: ignore[operator]
    assert found.held_out["examples"] == 180  # 30 % of the documents
    assert float(found.weight_D[0]) > 0 > float(found.weight_D[3])
    assert found.curve[int(found.chosen) - 1][1] == min(held for _, held in found.curve)


def test_where_the_facts_say_all_a_noisy_state_does_no_harm() -> None:
    """A few hundred examples, a hundred numbers of noise: the penalty keeps what the distribution says."""
    generator = torch.Generator().manual_seed(0)
    facts_N3, noise_ND = torch.randn(400, 3, generator=generator), torch.randn(400, 100, generator=generator)
    y_N = (facts_N3[:, 0] + 0.7 * torch.randn(400, generator=generator) > 0).float()
    document_N = torch.arange(400) // 10
    found = fit_beside_facts(torch.cat([noise_ND, facts_N3], dim=-1), y_N, document_N)
    alone = auc(facts_N3[found.held_N, 0], y_N[found.held_N] > 0.5)
    assert alone is not None
    assert found.held_out["auc"] > alone - 0.02  # type: ignore[operator]
    assert found.chosen == max(PENALTIES)
    useful = torch.cat([noise_ND, facts_N3], dim=-1)
    useful[:, 7] = y_N + 0.3 * torch.randn(400, generator=generator)  # and a state that knows more is heard
    told = fit_beside_facts(useful, y_N, document_N)
    assert told.held_out["auc"] > alone + 0.02  # type: ignore[operator]
    assert told.chosen < max(PENALTIES)


def test_nothing_to_find_is_chance() -> None:
    x_ND, y_N, document_N = separable(3000)
    shuffled = y_N[torch.randperm(len(y_N), generator=torch.Generator().manual_seed(1))]
    area = fit(x_ND, shuffled, document_N, epochs=3).held_out["auc"]
    assert area == pytest.approx(0.5, abs=0.07)


def test_quality_by_hand() -> None:
    found = quality(torch.tensor([2.0, -1.0, 0.5, -3.0]), torch.tensor([1.0, 0.9, 0.2, 0.0]), 0.4)
    assert found == {"loss": 0.4, "auc": 0.75, "accuracy": 0.5, "acceptable": 0.5, "examples": 4}


def test_a_score_that_only_separates_sources_is_chance_within_each() -> None:
    good, source = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]), ["a"] * 4 + ["b"] * 4
    apart, true = torch.tensor([1.0] * 4 + [0.0] * 4), good + 0.1
    found = by_source({"apart": apart, "true": true}, good, source)
    assert found["a"] == {"examples": 4, "acceptable": 0.75, "auc": {"apart": 0.5, "true": 1.0}}
    assert found["b"] == {"examples": 4, "acceptable": 0.25, "auc": {"apart": 0.5, "true": 1.0}}
    assert by_source({"true": true}, good, ["all"] * 8)["all"]["auc"]["true"] == 1.0
    assert by_source({"true": true[:3]}, good[:3], ["a"] * 3)["a"]["auc"]["true"] is None


def test_facts_of_a_distribution_by_hand() -> None:
    q_MV = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]])
    found = facts_of(q_MV, torch.tensor([1, 2]))
    torch.testing.assert_close(found[0], torch.tensor([math.log(0.25), 1.5 * math.log(2.0), 0.25]))
    assert found[1].tolist() == [-20.0, 0.0, 1.0]


# ---------------------------------------------------------------------- a run


def train(folder: Path, out: str, draft: str = "draft", text: str = "my.jsonl", **options: Any) -> dict[str, Any]:
    how = Collecting(**{"count": 1500, "steps": 12, **options.pop("how", {})})
    return training.run(
        str(folder / "target"), str(folder / draft), [parse(str(folder / text))], folder / out, how, **options
    )


def test_training_on_a_tiny_pair_beats_chance(folder: Path) -> None:
    """The draft is right where it names a token of the first half; its hidden state determines which half that is."""
    generator = torch.Generator().manual_seed(5)
    prompts = [[1, *torch.randint(4, 101, (6,), generator=generator).tolist()] for _ in range(200)]
    target, draft = (load(folder / name, device="cpu") for name in ("target", "half"))
    how = Collecting(count=2000, steps=10, ratio=1.05)
    found = collect(target, draft, iter(prompts), how)
    y_N = found.labels(how.ratio, soft=False)
    assert 0.3 < float(y_N.mean()) < 0.7
    for feature in FEATURES:
        fitting = fit_beside_facts if feature == "drawn" else fit
        area = fitting(found.features(feature), y_N, found.document_N).held_out["auc"]
        assert area is not None
        assert area > 0.55


def test_a_run_leaves_a_whole_folder(folder: Path) -> None:
    seen: list[int] = []
    record = train(folder, "head", report=seen.append, how={"temperature": 1.0})
    assert seen == sorted(seen)
    assert seen[-1] == record["examples"]
    assert record == json.loads((folder / "head" / "training.json").read_text())
    head = SprinterHead.load(folder / "head")
    assert (head.config.feature, head.config.width, record["parameters"]) == ("drawn", 64, 68)
    (source,) = record["held_out_by_source"].values()
    assert set(source["auc"]) == {"pre", "drawn", "post", "q", "entropy", "margin"}
    assert source["auc"]["drawn"] == record["held_out"]["drawn"]["auc"]  # one source is the whole
    assert source["examples"] == record["held_out"]["drawn"]["examples"]
    assert head.config.draft_fingerprint == record["draft_fingerprint"] != record["target_fingerprint"]
    assert sorted(path.name for path in (folder / "head").iterdir()) == [
        "config.json",
        "model.safetensors",
        "training.json",
    ]


def test_soft_labels_and_the_other_feature(folder: Path) -> None:
    record = train(folder, "soft", feature="post", soft=True, how={"temperature": 1.0, "replies": True})
    assert (record["feature"], record["soft"], record["collecting"]["temperature"]) == ("post", True, 1.0)
    assert SprinterHead.load(folder / "soft").config.feature == "post"


def test_what_stops_a_run_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    (folder / "short.jsonl").write_text('{"text": "a short text of a few words"}\n')
    with pytest.raises(InputError, match=r"only \d+ examples could be collected, 100 are needed"):
        train(folder, "none", text="short.jsonl")
    with pytest.raises(InputError, match=r"all of the .* draft tokens are acceptable to the target"):
        train(folder, "none", draft="target")
    with pytest.raises(ConfigError, match="--feature mid: must be pre, drawn or post"):
        train(folder, "none", feature="mid")
    with pytest.raises(ConfigError, match="this is a file"):
        train(folder, "my.jsonl")
    with pytest.raises(MismatchError, match="has another vocabulary"):
        training.run(str(folder / "target"), "zoo:draft", [], folder / "none", Collecting())
    assert not (folder / "none").exists()
