"""Training of DFlash's network: the loss by hand, and a folder in the layout of speculators that drafts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3Config

from foretoken import LLM, SamplingParams
from foretoken.drafting.feature_heads.description import spread_depths
from foretoken.drafting.feature_heads.unroll import every_column
from foretoken.drafting.published.layouts import recognise
from foretoken.methods.dflash.checkpoint import DFlash
from foretoken.methods.dflash.command import Config
from foretoken.methods.dflash.train import training
from foretoken.models.load import load_as_is
from foretoken.train.feature_heads.batches import FromTokens
from foretoken.train.feature_heads.blocks import BlockLoss, slot_by_slot
from foretoken.train.feature_heads.run import run
from foretoken.train.feature_heads.training import BLOCK
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.sources import parse
from foretoken.train.trainer import Bounds
from helpers.head_training import BATCH, shortened
from helpers.tiny_models import save_model

SLOTS, IDS = 3, list(range(3, 101, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a text."""
    place = tmp_path_factory.mktemp("dflash")
    save_model("llama", place / "target", hidden_size=64, head_dim=32, intermediate_size=128)
    lines = [{"prompt": f"What is {n} + 1?", "response": f"It is {n + 1}."} for n in range(60)]
    (place / "my.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


def made(folder: Path, **options: Any) -> Any:
    shape = {"target": str(folder / "target"), "out": folder / "none", "slots": SLOTS, "taps": 2, **options}
    return shortened(training(Config(**shape)), 24, micro_batch=2)


class Replies:
    """Three of four positions."""

    def used(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return (torch.arange(tokens_BT.shape[1]) % 4 != 2).expand_as(tokens_BT)


@pytest.mark.parametrize("options", [{}, {"markov_rank": 8, "own_head": True}], ids=["DFlash", "DSpark"])
def test_the_loss_by_hand(options: dict[str, Any], folder: Path) -> None:
    """Block by block, slot by slot, by the plain forward; each slot reads the true token before it."""
    job, loaded = made(folder, **options), load_as_is(str(folder / "target"), device="cpu")
    config = job.config(loaded.model.config, "it", loaded.fingerprint)
    target = FrozenTarget(loaded.model, config.depths)
    torch.manual_seed(0)
    head = job.build(replace(config, draft_vocab_size=len(IDS)), target, torch.tensor(IDS))
    tokens_BT = torch.randint(4, 101, (2, 9), generator=torch.Generator().manual_seed(1))
    table, batches = head.embedding_of(target.model), FromTokens(target, Replies(), config.depths)
    loss = BlockLoss(batches, table, lambda: head.lm_head_of(target.model), SLOTS)(head, tokens_BT, torch.Generator())
    with torch.no_grad():
        p_BTK = loaded.model(input_ids=tokens_BT).logits.softmax(-1)[..., IDS]
        found = target.states(tokens_BT)
    states = torch.cat([found[depth] for depth in config.depths], dim=-1)
    rows_KW = DFlash.lm_head_of(head, target.model)
    total = weights = 0.0
    for b in range(2):
        for anchor in range(1, 9):  # fewer than _ANCHORS: all of them
            block = torch.tensor([int(tokens_BT[b, anchor]), *[config.mask_token] * (config.rows - 1)])
            n_BW = head(states[b, :anchor], block, table)
            for slot in range(SLOTS):
                row, n_W = anchor + slot, n_BW[config.rows - SLOTS + slot]
                if row >= 9 or row % 4 == 2:
                    continue
                logits_K = rows_KW @ n_W
                if head.markov_head is not None:
                    f = head.markov_head(int(tokens_BT[b, row]), n_W, None)[0]
                    logits_K = logits_K + head.markov_head.markov_w2(f)
                weight = float(torch.exp(torch.tensor(-slot / (SLOTS / 2))))
                total = total - weight * (p_BTK[b, row] * F.log_softmax(logits_K, -1)).sum()
                weights += weight
    torch.testing.assert_close(loss, total / weights, rtol=1e-4, atol=1e-5)
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in head.parameters())
    steps = slot_by_slot(head, states, tokens_BT, table, SLOTS, every_column(tokens_BT))
    assert [len(each) for each in steps] == [16] * SLOTS


@pytest.mark.parametrize("options", [{"own_head": True}, {"markov_rank": 8}], ids=["DFlash", "DSpark"])
def test_a_folder_has_the_layout_of_speculators_and_drafts(
    options: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "head"
    job = made(folder, draft_vocab_size=60, own_words=0.0, **options)
    record = run(job, [parse(str(folder / "my.jsonl"))], out, bounds=Bounds(tokens=2 * BATCH * 24))
    assert record["draft_vocab_size"] == 60
    config, head = json.loads((out / "config.json").read_text()), DFlash.load(out)
    dspark, names = "markov_rank" in options, head.tensors().keys()
    kind = "dspark" if dspark else "dflash"
    assert recognise(config, head.tensors()).name == "DFlash and DSpark of speculators"
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == kind
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == SLOTS
    assert config["block_size"] == (SLOTS if dspark else SLOTS + 1)
    assert config["aux_hidden_state_layer_ids"] == list(head.config.depths) == [1, 2]
    block = Qwen3Config(**config["transformer_layer_config"])  # as speculators reads it
    assert (block.layer_types, block.sliding_window) == (["sliding_attention"] * 2, BLOCK + config["block_size"])
    assert not config["sliding_window_non_causal"]
    assert head.config.causal == (True, True)
    assert {"d2t", "t2d", "fc.weight", "hidden_norm.weight", "layers.1.self_attn.q_norm.weight"} <= names
    assert ("lm_head.weight" in names) == (not dspark)
    llm = LLM(str(folder / "target"), device="cpu", speculative_config={"model": str(out), "num_speculative_tokens": 3})
    (found,) = llm.generate(["What is 3 + 1?"], SamplingParams(max_tokens=8, temperature=0))
    assert (llm.recipe.method, llm.recipe.drafter.sources) == ("auto", ("suffix", "dflash"))
    assert found.metrics.num_draft_tokens >= 6


def test_depths_are_those_of_the_published_networks() -> None:
    assert spread_depths(5, 36) == (2, 10, 18, 26, 34)  # outputs [1, 9, 17, 25, 33]
    assert spread_depths(5, 4) == (2,)
    assert spread_depths(1, 12) == (2,)
