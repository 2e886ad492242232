"""What agreement with the target settles, reports and refuses, on heads that were trained on the probe's own text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from foretoken.core.errors import MismatchError
from foretoken.drafting.published import probe
from foretoken.drafting.published.probe import _TEXT, _TOKENS, compared
from foretoken.methods.dflash.checkpoint import DFlash
from foretoken.methods.eagle.checkpoint import Eagle
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load, load_as_is
from helpers.tiny_models import save_model
from helpers.untrained import random_part

LAYERS = 7


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128, "num_hidden_layers": LAYERS}
    return load(str(save_model("llama", tmp_path_factory.mktemp("tiny"), **sizes)), device="cpu")


def train(network: Any, target: LanguageModel, **other: Any) -> Any:
    """Learn the target's greedy tokens of the probe's text by heart, and other tokens from the taps next to its own.

    States of neighbouring layers are so much alike that a head which had never seen the others would agree with them.

    Args:
        other: fields with which it learns other tokens, too.
    """
    wrong = network.with_config(replace(network.config, **other))
    tokens = torch.tensor(target.tokenizer.encode(_TEXT)[: min(_TOKENS, target.max_length - 1)])
    model = load_as_is(target.source, device="cpu").model
    with torch.no_grad():
        found = model(tokens[None], output_hidden_states=True)
    best_T, num_layers = found.logits[0].argmax(-1), len(found.hidden_states) - 1
    lessons = []  # the library norms the last of its states
    for by in (0, 1, -1):
        depths = [min(each + by, num_layers) for each in network.config.depths]
        states_TF = torch.cat([found.hidden_states[each][0] for each in depths], -1)
        lessons.append((network, states_TF, (best_T + by) % 101))
        if other and not by:
            lessons.append((wrong, states_TF, (best_T + 2) % 101))
    modules = model.get_input_embeddings(), model.get_output_embeddings()
    tables = [each.weight.detach().clone() for each in modules]
    optimiser = torch.optim.AdamW(network.parameters(), lr=4e-3)
    for _ in range(60):
        optimiser.zero_grad()
        for pupil, states_TF, wanted_T in lessons:
            rows_R, logits_RK = pupil.first_drafts(states_TF, tokens, *tables)
            F.cross_entropy(logits_RK, wanted_T[rows_R]).backward()
        optimiser.step()
    return network.eval()


@pytest.fixture(scope="module")
def eagle(target: LanguageModel) -> Eagle:
    """A head over the layers (3, 4, 5) with a normed residual; without ids it would be over (2, 3, 4)."""
    return train(random_part(Eagle, target, depths=(3, 4, 5), norm_before_residual=True), target)


@pytest.fixture(scope="module")
def dflash(target: LanguageModel) -> DFlash:
    """A head over layer 3 and the normed state after the last layer, with embeddings times 8."""
    block = {"layers": 1, "rows": 4, "windows": (), "causal": (False,), "anchor_predicts": True}
    head = random_part(DFlash, target, depths=(3, LAYERS), final_norm=True, embedding_scale=8.0, **block)
    return train(head, target, embedding_scale=1.0)


def loaded(head: Any, folder: Path, tensors: dict[str, Tensor] | None = None, **keys: Any) -> Any:
    """The head from a folder without a fingerprint, with other keys in its config; None: the key is left out.

    Args:
        tensors: in place of its own.
    """
    head.save(folder)
    config = json.loads((folder / "config.json").read_text()) | keys
    config["speculators_config"]["verifier"].pop("fingerprint")
    (folder / "config.json").write_text(json.dumps({name: each for name, each in config.items() if each is not None}))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")
    return type(head).load(folder)


IDS = "eagle_aux_hidden_state_layer_ids"


def test_a_head_that_is_read_right_is_kept(eagle: Eagle, target: LanguageModel, tmp_path: Path) -> None:
    head = loaded(eagle, tmp_path)
    found, said = compared(head, target, True)
    assert found.config == head.config
    assert int(said.split(" at ")[1].split(" %")[0]) > 60
    assert "better" not in said


@pytest.mark.parametrize(
    "keys", [{IDS: None}, {"norm_before_residual": None}, {IDS: None, "norm_before_residual": None}]
)
def test_what_the_config_leaves_open_is_settled(
    keys: dict[str, Any], eagle: Eagle, target: LanguageModel, tmp_path: Path
) -> None:
    head = loaded(eagle, tmp_path, **keys)
    found, said = compared(head, target, True)
    assert found.config.taps.of(LAYERS) == found.description.taps.of(LAYERS) == (3, 4, 5)
    assert found.config.norm_before_residual
    assert "which the config leaves open (as the config is read: " in said


@pytest.mark.parametrize(
    ("keys", "better"),
    [({IDS: [2, 3, 4]}, "depths=(3, 4, 5)"), ({"norm_before_residual": False}, "norm_before_residual=True")],
)
def test_a_stated_value_is_kept_and_a_better_one_reported(
    keys: dict[str, Any], better: str, eagle: Eagle, target: LanguageModel, tmp_path: Path
) -> None:
    head = loaded(eagle, tmp_path, **keys)
    found, said = compared(head, target, True)
    assert found.config == head.config
    assert f"the config is kept, but {better}: " in said


def test_a_pair_without_agreement_is_refused_with_its_readings(
    eagle: Eagle, target: LanguageModel, tmp_path: Path
) -> None:
    """Its rows of the LM head are those of the tokens next to them."""
    rows = load_as_is(target.source, device="cpu").model.get_output_embeddings().weight.detach()
    head = loaded(eagle, tmp_path, {**eagle.tensors(), "lm_head.weight": rows.roll(2, 0).clone()})
    with pytest.raises(MismatchError, match=r"as the config is read: \d %; .*depths=\(4, 5, 6\): \d %.*probe=False"):
        compared(head, target, True)
    assert compared(head, target, False)[0] is head


def test_a_head_of_other_weights_drafts_where_it_agrees(eagle: Eagle, target: LanguageModel) -> None:
    """The same model in another dtype has another fingerprint. A head of the very target is not compared."""
    assert compared(eagle, target, True) == (eagle, "")
    head = eagle.with_config(replace(eagle.config, target_fingerprint="0" * 64))
    head.check_target(target)
    found, said = compared(head, target, True)
    assert found.config == head.config
    assert re.search(r"trained for other weights, those of '.*': its first drafts agree .* at 100 % of", said)
    other = random_part(Eagle, target, depths=(3, 4, 5)).with_config(head.config)
    with pytest.raises(MismatchError, match=r"trained for other weights.*agree with .* on less than 5 % of a text"):
        compared(other, target, True)


def test_a_large_head_reads_less_and_in_fewer_ways(
    eagle: Eagle, target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readings that the config leaves open are all tried; those that it decides are not."""
    calls, agreements = [], probe._agreements

    def counted(head: Any, configs: Any, target: Any, tokens: list[int]) -> Any:
        calls.append((len(configs), len(tokens)))
        return agreements(head, configs, target, tokens)

    monkeypatch.setattr(probe, "_agreements", counted)
    small, open_ = loaded(eagle, tmp_path / "small"), loaded(eagle, tmp_path / "open", norm_before_residual=None)
    compared(small, target, True)
    monkeypatch.setattr(probe, "_PRODUCTS", 1.0)
    compared(small, target, True)
    compared(open_, target, True)
    assert calls == [(4, 127), (1, 32), (2, 32)]


def test_norms_that_count_from_one_are_noticed(eagle: Eagle, target: LanguageModel, tmp_path: Path) -> None:
    shares = []
    for offset in (0.0, 1.0):
        tensors = {name: each - offset if "norm" in name else each for name, each in eagle.tensors().items()}
        said = _said(loaded(eagle, tmp_path / str(offset), tensors), target)
        shares.append(max(int(each) for each in re.findall(r"(\d+) %", said)))
    assert shares[1] < shares[0] - 40


def _said(head: Any, target: LanguageModel) -> str:
    try:
        return compared(head, target, True)[1].split("better")[0]
    except MismatchError as error:
        return str(error)


def test_a_block_network_s_final_state_and_scale_are_settled(
    dflash: DFlash, target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target.model.get_input_embeddings(), "embed_scale", 8.0, raising=False)
    head = loaded(dflash, tmp_path)
    assert not head.config.final_norm
    assert head.config.embedding_scale == 1
    found, said = compared(head, target, True)
    assert found.config.final_norm
    assert found.config.embedding_scale == 8
    assert found.config.taps.final
    assert "final_norm=True, embedding_scale=8.0" in said
