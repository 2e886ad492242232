"""A recipe's run: its files, the folders that it resumes, and the folders that it leaves unchanged."""

from __future__ import annotations

import errno
import json
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, LlamaConfig

from foretoken.core.errors import ConfigError, ForetokenError, ModelError
from foretoken.data import documents as doc
from foretoken.models.load import load_network, load_tokenizer
from foretoken.train import checkpoint, trainer
from foretoken.train.distil import distil, special_ids
from foretoken.train.mixture import Source
from foretoken.train.objectives import Distil
from foretoken.train.recipe import Recipe, build, copy_all, run
from foretoken.train.trainer import Bounds, Schedule
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model


def tiny_config(tokenizer, **options):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaConfig(**{"vocab_size": len(tokenizer), **sizes, **options}, **special_ids(tokenizer))


RECIPE = Recipe(
    name="tiny",
    description="of the tests",
    config=tiny_config,
    sources=lambda root: [],
    block=16,
    schedule=Schedule(batch=2, micro_batch=2),
    tokenizer="zoo:draft",
)
BOUNDS = Bounds(tokens=2 * 2 * 16)


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Say {n}.", "response": f"It is {n}."}) + "\n" for n in range(300)))
    return Source("mine", 1.0, lambda: doc.documents(path), (path,))


def strict_json(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_a_run_makes_a_folder_and_a_record(tmp_path, corpus):
    record = run(RECIPE, [corpus], tmp_path / "out", bounds=BOUNDS, seed=3, arguments=["train", "base"])
    assert strict_json(tmp_path / "out" / "training.json") == record
    assert record["seed"] == 3
    assert (record["steps"], record["tokens"], record["bounds"]) == (2, 64, {"tokens": 64, "minutes": None})
    assert [point[0] for point in record["curve"]] == [32, 64]
    assert record["provenance"]["command"] == "foretoken train base"
    assert record["provenance"]["versions"]["torch"]
    [source] = record["mixture"]
    assert source["files"][0]["name"] == "mine.jsonl"
    assert len(source["files"][0]["sha256"]) == 64
    assert record["held_out_loss"] == pytest.approx(9.01, abs=0.5)  # hardly trained: near the logarithm of 8192
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16
    weights, _, _ = checkpoint.load(checkpoint.latest(tmp_path / "out" / "run" / "checkpoints"))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name].bfloat16())
    first = {path: path.read_bytes() for path in (tmp_path / "out").glob("*") if path.is_file()}
    again = run(RECIPE, [corpus], tmp_path / "out", bounds=BOUNDS, seed=3, arguments=["train", "base"])
    assert again["curve"] == record["curve"]
    for path, content in first.items():
        assert path.name == "training.json" or path.read_bytes() == content


def test_a_corpus_too_small_to_hold_anything_out(tmp_path):
    few = Source("few", 1.0, lambda: iter([doc.text("Once upon a time")]))
    record = run(RECIPE, [few], tmp_path, bounds=BOUNDS)
    assert record["held_out_loss"] is None
    assert strict_json(tmp_path / "training.json") == record


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"seed": 1}, "seed"),
        ({"recipe": {"name": "other"}}, "recipe"),
        ({"recipe": {"block": 8}}, "block"),
        ({"recipe": {"start": "zoo:draft"}}, "start"),
        ({"recipe": {"teacher": "zoo:draft"}}, "teacher"),
        ({"recipe": {"tokenizer": "zoo:base"}}, "tokenizer"),
        ({"recipe": {"description": "distance tv"}}, "description"),
        ({"share": 2.0}, "sources"),
        ({"file": '{"text": "more"}\n'}, "sources"),
    ],
)
def test_the_folder_of_another_run_is_refused(tmp_path, corpus, changed, word):
    def again():
        if "file" in changed:
            with corpus.files[0].open("a") as file:
                file.write(changed["file"])
        source = replace(corpus, share=changed.get("share", 1.0))
        recipe = replace(RECIPE, **changed.get("recipe", {}))
        return run(recipe, [source], tmp_path / "out", bounds=BOUNDS, seed=changed.get("seed", 0))

    run(RECIPE, [corpus], tmp_path / "out", bounds=BOUNDS)
    place = checkpoint.latest(tmp_path / "out" / "run" / "checkpoints")
    with pytest.raises(ForetokenError, match=rf"holds a run with another {word}; name another --out, or remove"):
        again()
    assert checkpoint.latest(tmp_path / "out" / "run" / "checkpoints") == place


def test_a_run_that_saved_no_step_gives_way(tmp_path, corpus):
    """Its data was wrong, say: the corrected command is not refused, and reads nothing that the first one left."""
    broken = Source("mine", 1.0, lambda: iter([]))
    with pytest.raises(ForetokenError, match="'mine' is empty"):
        run(RECIPE, [broken], tmp_path / "out", bounds=BOUNDS)
    assert (tmp_path / "out" / "run" / "claim.json").exists()
    assert run(RECIPE, [corpus], tmp_path / "out", bounds=BOUNDS)["steps"] == 2


def test_training_parts_are_swapped_out_whatever_happens(tmp_path, corpus, monkeypatch):
    state = []
    recipe = replace(RECIPE, prepare=lambda model: state.append("in") or (lambda: state.append("out")))
    run(recipe, [corpus], tmp_path / "good", bounds=BOUNDS)
    assert state == ["in", "out"]

    def fail(*arguments, **options):
        raise ForetokenError("the loss is not a number")

    monkeypatch.setattr(trainer, "fit", fail)
    with pytest.raises(ForetokenError, match="not a number"):
        run(recipe, [corpus], tmp_path / "bad", bounds=BOUNDS)
    assert state == ["in", "out"] * 2


def test_a_place_that_is_a_file(tmp_path, corpus):
    with pytest.raises(ConfigError, match=r"mine\.jsonl: this is a file; name a folder"):
        run(RECIPE, [corpus], corpus.files[0], bounds=BOUNDS)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"config": lambda t: tiny_config(t, vocab_size=9000), "teacher": "zoo:draft"},
         "vocabulary mismatch: the teacher zoo:draft has 8192 entries, the recipe's model 9000"),
        ({"start": "zoo:draft", "adopt": copy_all}, r"weights to start from do not fit the recipe's architecture \("),
        ({"teacher": "/nowhere"}, "^model '/nowhere' does not exist"),
        ({"tokenizer": "/nowhere"}, "^model '/nowhere' does not exist"),
    ],
)  # fmt: skip
def test_a_recipe_that_does_not_fit_makes_no_folder(tmp_path, corpus, changed, message):
    recipe = replace(RECIPE, objective=lambda tokenizer, teacher: Distil(teacher), **changed)
    with pytest.raises(ModelError, match=message) as caught:
        run(recipe, [corpus], tmp_path / "out", bounds=BOUNDS)
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error")])
def test_a_full_disk_at_the_export_keeps_the_checkpoint_and_the_old_model(tmp_path, corpus, monkeypatch, error):
    run(RECIPE, [corpus], tmp_path, bounds=BOUNDS)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*") if path.is_file()}

    def fail(self, folder):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr("transformers.LlamaForCausalLM.save_pretrained", fail)
    with pytest.raises(ForetokenError, match=r"cannot be written .*; the last checkpoint is kept; free space and run"):
        run(RECIPE, [corpus], tmp_path, bounds=Bounds(tokens=3 * 32))
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*") if path.is_file()} == before
    assert checkpoint.latest(tmp_path / "run" / "checkpoints").name == "step-00000003"


def test_a_draft_for_a_target_with_another_tokenizer_and_more_entries_than_it_names(tmp_path):
    """Vocabularies are padded in many models; the draft needs the target's, not the tokenizer's."""
    folder = str(save_model("llama", tmp_path / "target", vocab_size=112))
    recipe = distil(folder, None, "tv", 0.5, 0.0)
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer) == 101
    model = build(recipe, tokenizer)
    assert model.config.vocab_size == 112
    assert model.config.eos_token_id == [tokenizer.eos_token_id]  # no end of turn that it does not know
    assert recipe.objective(tokenizer, load_network(folder, dtype="float32")).name == "tv"
    assert folder in recipe.description


def test_a_draft_to_go_on_from_keeps_its_shape_and_weights(tmp_path):
    target = str(save_model("llama", tmp_path / "target"))
    start = str(save_model("llama", tmp_path / "start", num_hidden_layers=1, seed=5))
    model = build(distil(target, start, "kl", 0.5, 0.0), load_tokenizer(target))
    assert model.config.num_hidden_layers == 1
    for name, parameter in load_network(start, dtype="float32").named_parameters():
        assert torch.equal(dict(model.named_parameters())[name], parameter)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("kll", 0.5, 0.0), "--loss kll: did you mean 'kl'"),
        (("kl", 1.5, 0.0), "--own-words 1.5: a share must be from 0 to 1"),
        (("kl", 0.5, -0.1), "--on-policy -0.1: a share must be from 0 to 1"),
        (("kl", 0.6, 0.6), "--own-words 0.6 and --on-policy 0.6 add up to more than 1"),
    ],
)
def test_shares_and_losses_that_are_none(options, message):
    with pytest.raises(ConfigError, match=message):
        distil("zoo:base", None, *options)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_on_a_gpu_makes_the_same_folder(tmp_path, corpus, compiled):
    record = run(RECIPE, [corpus], tmp_path / "out", bounds=BOUNDS, device="cuda", compiled=compiled)
    assert record["steps"] == 2
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.hidden_size == 16


def test_the_rate_scales_what_the_recipe_says(tmp_path, corpus):
    record = run(RECIPE, [corpus], tmp_path / "out", bounds=BOUNDS, rate=0.5)
    assert record["rates"]["muon"] == RECIPE.schedule.rates.muon / 2
    assert record["rates"]["adamw"] == RECIPE.schedule.rates.adamw / 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
def test_compiled_layers_keep_their_names(tmp_path, corpus):
    """So that a run may be compiled before a stop and not after it."""
    run(RECIPE, [corpus], tmp_path / "out", bounds=BOUNDS, compiled=True)
    record = run(RECIPE, [corpus], tmp_path / "out", bounds=Bounds(tokens=2 * BOUNDS.tokens))
    assert record["steps"] == 4
