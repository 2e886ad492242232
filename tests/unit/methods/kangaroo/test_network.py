"""Adapters and options that cannot be: one clear error each; and the choice among several adapters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from foretoken.cli.main import main
from foretoken.core.errors import ConfigError, ForetokenError, MismatchError, ModelError, UnsupportedArchitecture
from foretoken.drafting.learned_part import CONFIG, WEIGHTS
from foretoken.engine import compose
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.methods.kangaroo import exit_choice
from foretoken.methods.kangaroo.network import Adapter, AdapterConfig
from foretoken.methods.kangaroo.runner import AdapterRunner
from foretoken.models.load import load
from helpers.adapters import OracleHead
from helpers.golden import tokens_of
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import FAMILIES, save_model
from helpers.untrained import random_part, untrained
from helpers.zoo_llms import target


def build(**settings: Any) -> Any:
    return compose.build(settings, target()).drafter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good adapter of the target, leaving after layer 2."""
    return Path(untrained(Adapter, target(), tmp_path / "adapter", exit_layer=2))


def test_the_good_adapter_is_taken(folder: Path) -> None:
    drafter = build(method="kangaroo", adapter=str(folder))
    assert (drafter.exit_layer, drafter.explanation) == (2, "")


# ------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exit_layer": 0}, "exit_layer=0 must be"),
        ({"exit_layer": -1}, "exit_layer=-1"),
        ({"exit_layer": 8}, "exit_layer=8 is out of range"),
        ({"exit_layer": 99}, "1 to 7 can draft"),
        ({"exit_layer": 5}, "there is no adapter for it"),
        ({"exit_layer": True}, "exit_layer=True"),
        ({"exit_layer": "best"}, "exit_layer='best'"),
        ({"exit_layer": 2.0}, "exit_layer=2.0"),
        ({"threshold": -0.1}, "threshold=-0.1 must be"),
        ({"threshold": 1.01}, "threshold=1.01"),
        ({"threshold": float("nan")}, "threshold=nan"),
        ({"threshold": "high"}, "threshold='high'"),
        ({"max_depth": 0}, "max_depth=0"),
        ({"max_depth": 65}, "max_depth=65"),
        ({"width": 0}, "width=0"),
        ({"width": 2.5}, "width=2.5"),
        ({"wdth": 2}, "did you mean 'width'"),
        ({"adapter": 3}, "adapter=3"),
        ({"adapter": "~nobody-of-that-name/adapter"}, "nobody-of-that-name"),
        ({"verifier": "ratio", "tree": True}, "verifier='ratio' verifies chains"),
    ],
    ids=str,
)
def test_options_of_kangaroo(options: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ForetokenError) as caught:
        build(method="kangaroo", **{"adapter": str(folder), **options})
    assert message in str(caught.value)
    assert isinstance(caught.value, ConfigError | ModelError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exit_layer": 0}, "exit_layer=0"),
        ({"exit_layer": 8}, "exit_layer=8 is out of range"),
        ({"min_exit": 8}, "min_exit=8 is out of range"),
        ({"exit_layer": "2"}, "exit_layer='2'"),
        ({"draft_length": -1}, "draft_length=-1"),
        ({"draft_length": 65}, "draft_length=65"),
        ({"draft_length": "long"}, "draft_length='long'"),
        ({"decay": 0}, "decay=0"),
        ({"decay": 1.5}, "decay=1.5"),
        ({"decay": float("nan")}, "decay=nan"),
        ({"decay": "slow"}, "decay='slow'"),
        ({"reread_every": 0}, "reread_every=0"),
        ({"head_cost": -1}, "head_cost=-1"),
        ({"head_cost": float("inf")}, "head_cost=inf"),
        ({"head_cost": "dear"}, "head_cost='dear'"),
        ({"exit": 2}, "unknown option 'exit'"),
    ],
    ids=str,
)
def test_options_of_del(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(method="del", **options)
    assert message in str(caught.value)


# ------------------------------------------------------------------ files


def edit(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        settings = {**json.loads((folder / CONFIG).read_text()), **changes}
        (folder / CONFIG).write_text(json.dumps({key: value for key, value in settings.items() if value is not ...}))

    return change


def disown(fingerprint: str | None) -> Callable[[Path], None]:
    return edit(
        speculators_config={"algorithm": "kangaroo", "verifier": {"name_or_path": "zoo", "fingerprint": fingerprint}}
    )


DAMAGE: dict[str, tuple[Callable[[Path], None], type[ForetokenError], str]] = {
    "no config": (lambda folder: (folder / CONFIG).unlink(), ModelError, "no Kangaroo adapter for"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), ModelError, "has no Kangaroo adapter"),
    "empty weights": (lambda folder: (folder / WEIGHTS).write_bytes(b""), ModelError, "cannot be read"),
    "half the weights": (
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:5000]),
        ModelError,
        "cannot be read",
    ),
    "no JSON": (lambda folder: (folder / CONFIG).write_text("{"), ModelError, "cannot be read"),
    "a list": (lambda folder: (folder / CONFIG).write_text("[1]"), ModelError, "cannot be read"),
    "no UTF-8": (lambda folder: (folder / CONFIG).write_bytes(b"\xff{}"), ModelError, "cannot be read"),
    "no width": (edit(width=...), ModelError, "cannot be read"),
    "a wrong width": (edit(width=128), ModelError, "cannot be read"),
    "no heads": (edit(heads=0), ModelError, "cannot be read"),
    "a depth in words": (edit(exit_layer="two"), ModelError, "cannot be read"),
    "no depth": (edit(exit_layer=None), ModelError, "cannot be read"),
    "half a depth": (edit(exit_layer=2.5), ModelError, "cannot be read"),
    "a base in words": (edit(rope_theta="x"), ModelError, "cannot be read"),
    "no fingerprint": (disown(None), ModelError, "cannot be read"),
    "another target": (disown("0" * 64), MismatchError, "fingerprint 000000000000"),
    "too deep": (edit(exit_layer=8), MismatchError, "exits after layer 8"),
    "too shallow": (edit(exit_layer=0), MismatchError, "exits after layer 0"),
    "other heads, same weights": (
        edit(heads=12, kv_heads=4, head_dim=32),
        MismatchError,
        "the adapter's heads is 12, but that of",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_adapters(kind: str, folder: Path) -> None:
    damage, error, message = DAMAGE[kind]
    damage(folder)
    with pytest.raises(error) as caught:
        build(method="kangaroo", adapter=str(folder))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_adapter_of_another_model(tmp_path: Path) -> None:
    other = load(save_model("llama", tmp_path / "other"), device="cpu")
    place = untrained(Adapter, other, tmp_path / "adapter", exit_layer=1)
    with pytest.raises(MismatchError, match=r"was trained for .*other.*not for"):
        build(method="kangaroo", adapter=place)


def test_no_adapter_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="foretoken train kangaroo"):
        build(method="kangaroo", adapter=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("method", ["kangaroo", "del"])
def test_targets_that_cannot_be_cut(method: str, tmp_path: Path) -> None:
    one = load(save_model("llama", tmp_path / "one", num_hidden_layers=1), device="cpu")
    shared = load(save_model("gemma3n_text", tmp_path / "shared"), device="cpu")
    for model, reason in ((one, "has one layer"), (shared, "cannot draft for itself")):
        with pytest.raises(UnsupportedArchitecture, match=reason):
            compose.build({"method": method}, model)


PROGRESS = ("loading ", "checking ", "packing ")  # of a load that takes long


@pytest.mark.parametrize(
    ("sets", "code", "message"),
    [
        (["exit_layer=9"], 2, "exit_layer=9 is out of range"),
        (["threshold=2"], 2, "threshold=2"),
        (["threshold=x"], 2, "threshold='x'"),
        (["adapter=3"], 2, "adapter=3"),
        (["adapter=nowhere"], 1, "no Kangaroo adapter"),
        (["adapter=broken"], 1, "cannot be read"),
    ],
    ids=str,
)
def test_the_command_line_says_it_in_one_line(
    sets: list[str],
    code: int,
    message: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder.parent)
    Path("broken").mkdir()
    Path("broken", CONFIG).write_text("{")
    given = [] if any(each.startswith("adapter") for each in sets) else [f"adapter={folder}"]
    options = [part for each in (*sets, *given) for part in ("--set", each)]
    command = ["generate", "x", "--method", "kangaroo", "--dtype", "float32", "--device", "cpu", *options]
    assert main(command) == code
    _, err = capsys.readouterr()
    assert message in err
    assert "Traceback" not in err
    assert [line[:7] for line in err.splitlines() if not line.startswith(PROGRESS)] == ["error: "]


# ------------------------------------------------------------------ the network


def difference(
    model: Any, adapter: Adapter, implementation: str, served: Adapter | None = None, late: int = 0
) -> float:
    """Largest difference between the logits of packed rows, read in chunks, and of ``Adapter.forward``.

    Args:
        served: planted: serve this adapter instead.
        late: planted: positions of the packed rows are so many too large.
    """
    runner = AdapterRunner(model, served or adapter)
    if implementation == "torch":
        runner._native = None
    elif runner._native is None:
        pytest.skip("this machine has no native decoder")
    f_TD = torch.randn(19, adapter.config.width, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model.score(adapter(f_TD[None])[0], final_norm=False).logits_MV
        cache, found = KVCache(1, 1, 64), []
        cache.acquire()
        for begin, end in ((0, 7), (7, 8), (8, 19)):
            batch = PackedBatch()
            batch.add_chunk(0, begin, [0] * (end - begin), wanted=end - begin)
            batch.positions = [position + late * (position >= 7) for position in batch.positions]
            found.append(runner.forward(batch, cache, f_TD[begin:end], top=0).logits_MV.clone())
            cache.commit(0, range(end - begin))
    return float((torch.cat(found) - expected).abs().max() / expected.std())


every_implementation = pytest.mark.parametrize("implementation", ["native", "torch"])


@every_implementation
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_packed_rows_are_the_paper_s_forward(name: str, implementation: str, tmp_path: Path) -> None:
    """``Adapter.forward``, which training runs as it is."""
    model = load(save_model(name, tmp_path), device="cpu")
    assert difference(model, random_part(Adapter, model, exit_layer=1), implementation) < 1e-5


@every_implementation
def test_a_planted_fault_is_far_from_the_paper_s_forward(implementation: str, tmp_path: Path) -> None:
    model = load(save_model("llama", tmp_path), device="cpu")
    adapter = random_part(Adapter, model, exit_layer=1)
    assert difference(model, adapter, implementation, late=1) > 1e-3
    for name in ("norm_in.weight", "norm_out.weight", "o_proj.weight"):
        wrong = random_part(Adapter, model, exit_layer=1)
        wrong.state_dict()[name].mul_(1.01)
        assert difference(model, adapter, implementation, served=wrong) > 1e-3, name


def test_a_saved_adapter_is_the_same_in_bfloat16(folder: Path) -> None:
    original, loaded = random_part(Adapter, target(), exit_layer=2), Adapter.load(folder)
    assert loaded.config == original.config
    assert not loaded.training
    for (name, ours), (other, theirs) in zip(loaded.state_dict().items(), original.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(ours, theirs.bfloat16().float())


# ------------------------------------------------------------------ which of several


@pytest.mark.parametrize("good", [1, 3])
def test_the_adapter_that_agrees_is_chosen(good: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three knows what the target will say; times are made equal, so that no clock decides."""
    adapters = {depth: random_part(Adapter, target(), exit_layer=depth) for depth in (1, 2, 3)}

    def head_of(model: Any, adapter: Adapter) -> Any:
        if adapter.config.exit_layer != good:
            return AdapterRunner(model, adapter)
        oracle = OracleHead(model, good)
        forward = oracle.forward
        oracle.forward = lambda batch, cache, *args, **options: forward(  # type: ignore[method-assign]
            batch, KVCache(model.num_layers, 1, model.max_length), *args, **options
        )
        return oracle

    monkeypatch.setattr(exit_choice, "AdapterRunner", head_of)
    monkeypatch.setattr(exit_choice, "measured_step", lambda *args: 1.0)
    chosen, why = exit_choice.choose_exit(target(), adapters)
    assert chosen is adapters[good]
    assert f"exit_layer={good} measured best" in why
    assert f"{good}: agrees 100%" in why


def test_auto_measures_the_available_adapters(tmp_path: Path) -> None:
    for depth in (1, 2):
        untrained(Adapter, target(), tmp_path / f"exit-{depth}", exit_layer=depth)
    drafter = build(method="kangaroo", adapter=str(tmp_path), exit_layer="auto")
    assert f"exit_layer={drafter.exit_layer} measured best" in drafter.explanation
    assert build(method="kangaroo", adapter=str(tmp_path)).exit_layer == 1  # an eighth of eight layers
    assert build(method="kangaroo", adapter=str(tmp_path), exit_layer=2).exit_layer == 2


def test_tokens_of_a_text_do_not_matter_to_the_adapter() -> None:
    """Only hidden states, positions and segments do: drafters feed zeros."""
    head = AdapterRunner(target(), random_part(Adapter, target(), exit_layer=1))
    f_TD = torch.randn(5, target().config.hidden_size, generator=torch.Generator().manual_seed(1))
    found = []
    for tokens in ([0] * 5, tokens_of(1, 5, 100)):
        cache, batch = KVCache(1, 1, 64), PackedBatch()
        cache.acquire()
        batch.add_chunk(0, 0, tokens, wanted=5)
        found.append(head.forward(batch, cache, f_TD, top=0).logits_MV.clone())
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("model_type", "options", "exit_layer", "expected"),
    [
        ("cohere2_moe", {"layer_norm_eps": 1e-4, "num_key_value_heads": 2}, 1, {"norm_eps": 1e-4, "kv_heads": 2}),
        ("gemma4_text", FAMILIES["gemma4_text"].options, 1, {"head_dim": 16, "rope_theta": 1e4}),
        ("gemma4_text", FAMILIES["gemma4_text"].options, 2, {"head_dim": 32, "rope_theta": 1e6}),
        ("gemma3_text", FAMILIES["gemma3_text"].options, 2, {"head_dim": 16, "rope_theta": 1e6}),
    ],
    ids=str,
)
def test_layers_that_differ_give_the_adapter_of_the_layer_below(
    model_type: str, options: dict[str, Any], exit_layer: int, expected: dict[str, float]
) -> None:
    config = AutoConfig.for_model(model_type, **options)
    found = AdapterConfig.for_target(config, exit_layer, "a target", "0" * 64)
    assert {name: getattr(found, name) for name in expected} == expected
