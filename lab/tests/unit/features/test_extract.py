"""Features against the library's own forward; shards that survive kills, full disks, bounds and damage."""

from __future__ import annotations

import dataclasses
import errno
import gc
import json
import resource
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from foretoken.core.errors import (
    ConfigError,
    ForetokenError,
    InputError,
    MismatchError,
    ModelError,
    UnsupportedArchitecture,
)
from foretoken.forward import anatomy
from foretoken.models import fingerprint as fingerprints
from foretoken.models.fingerprint import fingerprint
from foretoken.train.stopping import Interrupted
from foretoken_lab.features import extract as writing
from foretoken_lab.features import store as feature_store
from foretoken_lab.features.extract import Progress, extract
from foretoken_lab.features.store import FeatureStore
from foretoken_lab.features.taps import Taps, Wanted
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import FAMILIES, VOCAB_SIZE, Family, randomise, save_model

_SSM = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
RECURRENT = {
    "mamba2": Family(
        "mamba2",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 16,
            "n_groups": 1,
            "chunk_size": 8,
        },
    ),
    "bamba": Family("bamba", {**FAMILIES["llama"].options, "attn_layer_indices": [1], **_SSM}),
}
KINDS = ("llama", "qwen3", "qwen3_moe", "mixtral", "gpt2", "gpt_neox", "gemma2", "opt", "gemma4_text", *RECURRENT)


def build(name: str) -> Any:
    family = {**FAMILIES, **RECURRENT}[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family.model_type, **family.options), dtype=torch.float32
    )
    randomise(model)
    return model.eval()


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


def text(count: int, length: int = 8, seed: int = 0) -> Tensor:
    return torch.randint(4, VOCAB_SIZE, (count, length), generator=torch.Generator().manual_seed(seed))


def run(model: Any, folder: Path, blocks: Any, wanted: Wanted | None = None, **options: Any) -> Any:
    options = {"target": "t", "shard_tokens": 16, **options}
    return extract(model, blocks, folder, wanted or Wanted((1, "final"), 4, "float32"), **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stop_after(tokens: int, error: BaseException) -> Any:
    def report(progress: Progress) -> None:
        if progress.new >= tokens:
            raise error

    return report


# the values


@pytest.mark.parametrize("name", KINDS)
def test_every_depth_equals_the_librarys_hidden_states(name: str) -> None:
    model, tokens_BT = build(name), text(2, 10)
    depth = model.config.num_hidden_layers
    rows = Taps(model, Wanted((*range(depth + 1), "final"), "all", "float32"))(tokens_BT)
    with torch.inference_mode():
        output = model(input_ids=tokens_BT, output_hidden_states=True, use_cache=False)
        theirs = [states.flatten(0, 1) for states in output.hidden_states]
        normed = anatomy.find(model).final_norm(rows[f"hidden.{depth}_ND"])
    assert len(theirs) == depth + 1
    # the library's list ends after the final norm; Mamba's begins after the first layer, the others' before it
    first = 1 if name == "mamba2" else 0
    for index in range(depth):
        assert torch.equal(rows[f"hidden.{first + index}_ND"], theirs[index])
        # negative control: a depth too many or too few would be seen
        assert not torch.allclose(rows[f"hidden.{first + index}_ND"], theirs[index + 1], rtol=1e-2, atol=1e-2)
    assert torch.equal(rows["hidden.final_ND"], theirs[depth])
    torch.testing.assert_close(rows["hidden.final_ND"], normed)
    assert torch.equal(rows["logits_NV"], output.logits.flatten(0, 1))


def test_the_body_alone_gives_the_same_states(llama: Any) -> None:
    """Without logits the head is not computed."""
    tokens_BT, wanted = text(2), Wanted((0, 2, "final"), 0, "float32")
    with_head, without = Taps(llama, dataclasses.replace(wanted, top_logits=2)), Taps(llama, wanted)
    calls: list[Any] = []
    handle = llama.lm_head.register_forward_hook(lambda *args: calls.append(args))
    alone = without(tokens_BT)
    assert not calls
    both = with_head(tokens_BT)
    assert calls
    handle.remove()
    assert all(torch.equal(both[name], values) for name, values in alone.items())


def test_bfloat16_is_the_rounding_of_float32(llama: Any) -> None:
    tokens_BT = text(2)
    exact, rounded = (Taps(llama, Wanted((-1, "final"), 3, kind))(tokens_BT) for kind in ("float32", "bfloat16"))
    for name in ("hidden.3_ND", "hidden.final_ND"):
        assert torch.equal(exact[name].bfloat16(), rounded[name])
        assert not torch.equal(exact[name], rounded[name].float())
    assert torch.equal(exact["top_logits_NK"], rounded["top_logits_NK"])  # probabilities stay exact


def test_top_logits_give_the_true_probabilities(llama: Any, tmp_path: Path) -> None:
    blocks = text(3)
    run(llama, tmp_path, blocks, Wanted((), 5, "bfloat16"))
    with torch.inference_mode():
        p_NV = llama(input_ids=blocks).logits.flatten(0, 1).softmax(-1)
    [*batches] = FeatureStore(tmp_path).batches(1000)
    ids_NK = torch.cat([batch.top_ids_NK for batch in batches])
    log_p_NK = torch.cat([batch.top_log_p_NK for batch in batches])
    kept_NK, best_NK = p_NV.topk(5)
    assert torch.equal(ids_NK, best_NK)
    torch.testing.assert_close(log_p_NK.exp(), kept_NK)
    # negative control: the softmax of the kept logits is another distribution
    assert not torch.allclose(log_p_NK.softmax(-1), kept_NK, atol=1e-2)


def test_sequences_of_any_length_come_back_as_they_were(llama: Any, tmp_path: Path) -> None:
    lengths = (5, 5, 1, 30, 7, 7, 7)
    blocks = [text(1, length, seed)[0] for seed, length in enumerate(lengths)]
    summary = run(llama, tmp_path, [blocks[0].tolist(), *blocks[1:]])
    assert (summary.tokens, summary.sequences, summary.full) == (sum(lengths), len(lengths), False)
    store = FeatureStore(tmp_path)
    assert (len(store), store.width) == (sum(lengths), 64)
    taps = Taps(llama, Wanted((1, "final"), 4, "float32"))
    found = list(store.sequences())
    for sequence, tokens_T in zip(found, blocks, strict=True):
        assert torch.equal(sequence.tokens_N, tokens_T)
        assert sequence.positions_N.tolist() == list(range(len(tokens_T)))
        assert sequence.starts_S.tolist() == [0]
        # the sequences of one length were computed together, so rounding may differ
        torch.testing.assert_close(sequence.hidden["final"], taps(tokens_T[None])["hidden.final_ND"])
        torch.testing.assert_close(sequence.hidden[1], taps(tokens_T[None])["hidden.1_ND"])


def test_states_are_kept_as_they_were_when_they_passed(llama: Any) -> None:
    """A model may add to the residual stream in place."""
    tokens_BT, wanted = text(2), Wanted((1,), 0, "float32")
    before = Taps(llama, wanted)(tokens_BT)

    def add_one(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        args[0].add_(1)

    handle = llama.model.layers[1].register_forward_pre_hook(add_one)
    after = Taps(llama, wanted)(tokens_BT)
    handle.remove()
    assert torch.equal(before["hidden.1_ND"], after["hidden.1_ND"])


def test_nothing_is_left_on_the_model(llama: Any, tmp_path: Path) -> None:
    llama.train()
    run(llama, tmp_path, text(2))
    assert llama.training
    llama.eval()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in llama.modules())


# runs that end early


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(9)])
@pytest.mark.parametrize("tokens", [8, 40])
def test_a_killed_run_goes_on_to_the_same_bytes(llama: Any, tmp_path: Path, error: BaseException, tokens: int) -> None:
    blocks = [text(1, length, seed)[0] for seed, length in enumerate((8, 8, 12, 5, 8, 8, 3, 16))]
    run(llama, tmp_path / "whole", blocks)
    with pytest.raises((Interrupted, SystemExit)) as stopped:
        run(llama, tmp_path / "killed", blocks, report=stop_after(tokens, error))
    assert stopped.type is SystemExit or "same command" in str(stopped.value)
    before = len(FeatureStore(tmp_path / "killed"))
    assert before < 68
    # killed between a shard and its index, and while the next one was written
    for stray in ("shard-00003.safetensors", "shard-00098.safetensors", "shard-00004.part", "shard-00099.part"):
        (tmp_path / "killed" / stray).write_bytes(b"not in the index")
    summary = run(llama, tmp_path / "killed", blocks)
    assert (summary.tokens, summary.new) == (68, 68 - before)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert run(llama, tmp_path / "killed", blocks).new == 0


def test_more_text_goes_on_from_there(llama: Any, tmp_path: Path) -> None:
    run(llama, tmp_path, text(5)[:3])
    assert run(llama, tmp_path, text(5)).new == 16
    assert torch.equal(torch.stack([each.tokens_N for each in FeatureStore(tmp_path).sequences()]), text(5))


def test_the_bound_holds_at_every_moment(llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    highest = 0
    real = feature_store.write_whole

    def watch(path: Path, content: str) -> None:
        nonlocal highest
        real(path, content)
        held = sum(file.stat().st_size for file in tmp_path.iterdir()) + len(content)  # the new index next to the old
        highest = max(highest, held)

    monkeypatch.setattr(feature_store, "write_whole", watch)
    bound, fits = 100_000, []
    # shards of one sequence: the index takes a good part of the bytes
    summary = run(llama, tmp_path, text(500), max_bytes=bound, shard_tokens=8, report=lambda each: fits.append(each))
    assert summary.full
    assert 0.8 * bound < summary.bytes < highest <= bound
    assert fits[0].fits >= summary.tokens > 0.5 * fits[0].fits
    assert run(llama, tmp_path, text(500), max_bytes=bound, shard_tokens=8).new == 0
    more = run(llama, tmp_path, text(500), max_bytes=2 * bound, shard_tokens=8)
    assert more.new > 0
    assert more.bytes > bound


def test_a_bound_below_one_sequence_is_refused(llama: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_bytes=3000 \(--max-gb\): not one sequence fits: 8 tokens take"):
        run(llama, tmp_path, text(1), max_bytes=3000)


def test_a_full_disk_keeps_the_shards_before(llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = writing.save_file

    def save(tensors: Any, path: Path) -> None:
        real(tensors, path)
        if "00002" in path.name:
            path.write_bytes(path.read_bytes()[:100])
            raise OSError(errno.ENOSPC, "No space left on device")

    run(llama, tmp_path / "whole", text(8))
    monkeypatch.setattr(writing, "save_file", save)
    with pytest.raises(ForetokenError, match=r"the disk is full\); the shards before it, 2, are kept"):
        run(llama, tmp_path / "full", text(8))
    assert sorted(contents(tmp_path / "full")) == ["index.json", "shard-00000.safetensors", "shard-00001.safetensors"]
    assert sum(len(batch) for batch in FeatureStore(tmp_path / "full").batches(9)) == 32
    monkeypatch.undo()
    run(llama, tmp_path / "full", text(8))
    assert contents(tmp_path / "full") == contents(tmp_path / "whole")


def test_a_limit_of_the_system_is_met_like_a_full_disk(llama: Any, tmp_path: Path) -> None:
    """The real writer against a real limit: the third sequence makes a shard that is larger than a file may be."""
    blocks = [text(1, length)[0] for length in (8, 8, 100)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        with pytest.raises(ForetokenError, match=r"cannot be written .*the shards before it, 1, are kept"):
            run(llama, tmp_path, blocks)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(contents(tmp_path)) == ["index.json", "shard-00000.safetensors"]
    assert len(list(FeatureStore(tmp_path).sequences())) == 2


# refusals


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"target": "u"}, r'target: "t" there, "u" now'),
        ({"wanted": Wanted((2,), 4, "float32")}, r'layers \(--depths\): \[1, "final"\] there, \[2\] now'),
        ({"wanted": Wanted((1, "final"), 3, "float32")}, r"top_logits \(--top-logits\): 4 there, 3 now"),
        ({"wanted": Wanted((1, "final"), 4)}, r'dtype \(--state-dtype\): "float32" there, "bfloat16" now'),
        ({"shard_tokens": 17}, "shard_tokens: 16 there, 17 now"),
        ({"data": {"seed": 1, "block": 8}}, r"\(data.seed \(--seed\): 0 there, 1 now\)"),
        ({"blocks": text(4, seed=1)}, "shard-00000.safetensors was extracted from another text"),
        ({"blocks": text(1)}, "another text"),
    ],
)
def test_going_on_with_something_else_is_refused(llama: Any, tmp_path: Path, change: Any, named: str) -> None:
    same = {"blocks": text(4), "data": {"block": 8, "seed": 0}}
    run(llama, tmp_path, **same)
    before = contents(tmp_path)
    with pytest.raises(ForetokenError, match=named):
        run(llama, tmp_path, **{**same, **change})
    assert contents(tmp_path) == before
    assert run(llama, tmp_path, **same).new == 0


def test_a_target_in_another_dtype_is_refused(tmp_path: Path) -> None:
    run(build("llama"), tmp_path, text(2))
    with pytest.raises(ForetokenError, match='computed_in: "float32" there, "bfloat16" now'):
        run(build("llama").bfloat16(), tmp_path, text(2))


def test_a_folder_that_is_not_ours_is_left_alone(llama: Any, tmp_path: Path) -> None:
    (tmp_path / "shard-00000.safetensors").write_bytes(b"somebody's")
    with pytest.raises(ForetokenError, match=r"holds shard-00000.safetensors but no index.json"):
        run(llama, tmp_path, text(2))
    assert contents(tmp_path) == {"shard-00000.safetensors": b"somebody's"}


def test_a_lost_shard_is_named(llama: Any, tmp_path: Path) -> None:
    run(llama, tmp_path, text(4))
    (tmp_path / "shard-00001.safetensors").unlink()
    with pytest.raises(ForetokenError, match=r"shard-00001.safetensors: missing or cut short"):
        run(llama, tmp_path, text(4))
    with pytest.raises(InputError, match=r"shard-00001.safetensors: missing"):
        list(FeatureStore(tmp_path).sequences())


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([[5, VOCAB_SIZE]], f"sequence 0 has the token {VOCAB_SIZE}, but the target's are 0 to {VOCAB_SIZE - 1}"),
        ([[5], [5, -1]], "sequence 1 has the token -1"),
        ([[5], []], "sequence 1 is empty"),
        ([[5] * 129], "sequence 0 has 129 tokens, but the target takes at most 128"),
    ],
)
def test_sequences_that_the_target_cannot_read_are_refused(
    llama: Any, tmp_path: Path, blocks: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run(llama, tmp_path, blocks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": ()}, "nothing to extract"),
        ({"layers": ("last",)}, "'last' is no depth"),
        ({"layers": (4,)}, "depth 4 does not exist: the target has 3 layers"),
        ({"layers": (-5,)}, "depth -5 does not exist"),
        ({"top_logits": -1}, r"top_logits=-1 \(--top-logits\)"),
        ({"top_logits": VOCAB_SIZE + 1}, f"the target has {VOCAB_SIZE} tokens"),
        ({"dtype": "bf16"}, "did you mean 'bfloat16'"),
    ],
)
def test_what_does_not_exist_cannot_be_wanted(llama: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Taps(llama, Wanted(**options))


def test_depths_are_counted_from_both_ends() -> None:
    assert Wanted(("final", -1, 3, 0, -4)).resolve(3, 10).layers == (0, 3, "final")


def test_values_beyond_float16_are_refused() -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1e6)
    with pytest.raises(ForetokenError, match=r"hidden.0_ND: .* not finite in torch.float16: store them in bfloat16"):
        Taps(model, Wanted((0,), 0, "float16"))(text(1))
    Taps(model, Wanted((0,), 0, "bfloat16"))(text(1))


# architectures that look like supported ones


def test_a_head_that_reads_something_else_is_noticed() -> None:
    model = build("llama")
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] / 2,))
    with pytest.raises(UnsupportedArchitecture, match="the head does not read what the final norm gives; take depth 3"):
        Taps(model, Wanted(("final",)))
    Taps(model, Wanted((3,)))


def test_several_streams_are_noticed() -> None:
    with pytest.raises(UnsupportedArchitecture, match=r"depth 1 has the shape \[4, 1, 2, 64\], not one state a token"):
        Taps(build("gemma3n_text"), Wanted((1,)))


def test_missing_parts_are_named() -> None:
    model = build("llama")
    del model.model.norm
    with pytest.raises(UnsupportedArchitecture, match=r"no norm found .*next to them are: embed_tokens, layers"):
        anatomy.find(model)
    model.model.layers = nn.ModuleList(list(model.model.layers)[:2])
    with pytest.raises(UnsupportedArchitecture, match="no list of 3 layers"):
        anatomy.find(model)


def test_experts_are_not_taken_for_layers() -> None:
    """A list inside a layer may be as long as the list of layers."""
    model = build("llama")
    model.model.layers[0].mlp.experts = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
    assert anatomy.find(model).layers is model.model.layers


# the target's fingerprint


def test_a_foreign_target_is_refused(llama: Any, tmp_path: Path) -> None:
    ours, same, weights, config = (save_model("llama", tmp_path / name) for name in ("ours", "same", "w", "c"))
    save_model("llama", weights, seed=1)
    edit(config, rms_norm_eps=1e-3)
    edit(same, transformers_version="9.9", _name_or_path="elsewhere")
    run(llama, tmp_path / "features", text(2), target=fingerprint(ours))
    store = FeatureStore(tmp_path / "features")
    store.check_target(ours)
    store.check_target(same)
    for other in (weights, config):
        with pytest.raises(MismatchError, match=r"taken from another target than .* differ\)"):
            store.check_target(other)
    with pytest.raises(ModelError, match="no fingerprint can be taken"):
        store.check_target(tmp_path / "nowhere")
    (same / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no weights \(model.safetensors or pytorch_model.bin\)"):
        store.check_target(same)


def edit(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_large_weights_are_sampled_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "PIECES", 4)
    monkeypatch.setattr(fingerprints, "PIECE", 10)
    (tmp_path / "config.json").write_text("{}")
    seen = set()
    places = [None, 0, 35, 65, 99]  # pieces begin at 0, 30, 60 and 90
    for place in places:
        weights = bytearray(100)
        if place is not None:
            weights[place] = 1
        (tmp_path / "model.safetensors").write_bytes(weights)
        seen.add(fingerprint(tmp_path))
    assert len(seen) == len(places)


def test_weights_in_several_files_all_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "b", "y": "a", "z": "b"}}))
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"2")
    before = fingerprint(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"never loaded")
    assert fingerprint(tmp_path) == before
    (tmp_path / "b").write_bytes(b"3")
    assert fingerprint(tmp_path) != before


# reading


@pytest.fixture(scope="module")
def stored(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    run(llama, folder, [text(1, 1 + seed % 7, seed)[0] for seed in range(40)])
    return folder


def bags(batches: Any) -> list[tuple[int, ...]]:
    return [
        tuple(batch.tokens_N[first:last].tolist()) for batch in batches for first, last in batch.spans()
    ]  # of each sequence


def test_batches_are_whole_sequences_in_order(stored: Path) -> None:
    store = FeatureStore(stored)
    batches = list(store.batches(10))
    assert bags(batches) == [tuple(text(1, 1 + seed % 7, seed)[0].tolist()) for seed in range(40)]
    assert max(len(batch) for batch in batches) <= 10
    assert len(batches) < 40
    assert len(list(store.batches(3))) > len(batches)  # a longer sequence is a batch of its own
    for batch in batches:
        assert all(batch.positions_N[start] == 0 for start in batch.starts_S)
        assert len(batch.hidden["final"]) == len(batch.logsumexp_N) == len(batch.top_ids_NK) == len(batch)


def test_a_shuffle_keeps_every_row_with_its_token(stored: Path) -> None:
    store = FeatureStore(stored)
    plain, first, again, second = (bags(store.batches(10, shuffle_seed=seed)) for seed in (None, 1, 1, 2))
    assert first == again
    assert len({tuple(plain), tuple(first), tuple(second)}) == 3
    assert sorted(plain) == sorted(first) == sorted(second)
    states = {bag: batch.hidden[1] for bag, batch in zip(plain, store.sequences(), strict=True)}
    for batch in store.batches(10, shuffle_seed=1):
        for begin, end in batch.spans():
            bag = tuple(batch.tokens_N[begin:end].tolist())
            assert torch.equal(batch.hidden[1][begin:end], states[bag])


def test_a_pass_holds_two_shards_at_most(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[weakref.ref[Tensor]] = []
    before: list[int] = []  # shards still held when one is loaded
    real = feature_store.load_file

    def load(path: Path) -> Any:
        tensors = real(path)
        before.append(sum(each() is not None for each in loaded))
        loaded.append(weakref.ref(tensors["hidden.final_ND"]))
        return tensors

    monkeypatch.setattr(feature_store, "load_file", load)
    store = FeatureStore(stored)
    gc.disable()
    try:
        for _batch in store.batches(10):
            pass
        for _batch in store.batches(10, shuffle_seed=0):
            pass
        for _sequence in store.sequences():
            pass
    finally:
        gc.enable()
    assert len(loaded) == 3 * len(store.index.shards) > 6
    assert max(before) <= 1


def test_a_damaged_shard_is_refused_by_name(llama: Any, tmp_path: Path) -> None:
    run(llama, tmp_path, text(4))
    path = tmp_path / "shard-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    batches = FeatureStore(tmp_path).batches(16)
    assert len(next(batches)) == 16  # the one before is sound
    with pytest.raises(InputError, match=r"shard-00001.safetensors: damaged"):
        next(batches)
    content[-1] ^= 1
    path.write_bytes(content)
    assert len(list(FeatureStore(tmp_path).batches(16))) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no features"),
        ("{", "damaged"),
        ("[]", "damaged"),
        ('{"format": 1}', "damaged"),
        ('{"format": 2}', "format 2, but this version reads 1"),
    ],
)
def test_an_index_that_cannot_be_used_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "index.json").write_text(content)
    with pytest.raises(InputError, match=message):
        FeatureStore(tmp_path)
