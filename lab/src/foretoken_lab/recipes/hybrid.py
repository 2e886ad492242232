"""``hybrid``: ``base`` with a Mamba-2 mixer for every second attention, distilled from ``base``.

A mixer begins as the attention that it replaces: values become x, keys B, queries C and the output projection stays,
as linear attention would compute it, and the state's decay is drawn as always (Wang et al., "The Mamba in the Llama",
arXiv:2408.15237, section 2.2 and algorithm 1). Everything else is ``base``'s own. Differences from the paper:
all weights are trained from the first step, not block by block, and B and C have a group for every head, so that each
query keeps its own.

The published weights began as ``base-tasks-2``, the stage of ``base`` before the last.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BambaConfig, PreTrainedTokenizerBase

from foretoken.forward import anatomy
from foretoken.train.mixture import Source
from foretoken.train.objectives import Distil
from foretoken.train.optimiser import Rates
from foretoken.train.recipe import Recipe
from foretoken.train.trainer import Bounds, Schedule
from foretoken_lab.recipes import base
from foretoken_lab.recipes import sources as s
from foretoken_lab.recipes.ssd import CHUNK, faster_scan, initialise


def mixture(root: Path) -> list[Source]:
    """The mixture of ``base-tasks``, with more of the two tasks with answers that copy from the question."""
    return [
        s.task("arithmetic", 0.2),
        s.task("profiles", 0.16),
        s.task("json", 0.12),
        s.task("code", 0.1),
        s.task("keys", 0.02),
        s.corpus("gsm8k", 0.06, root),
        s.corpus("sgd_dialogues", 0.1, root),
        s.corpus("topical_chat", 0.06, root),
        s.corpus("stdlib_functions", 0.04, root),
        s.corpus("books", 0.14, root),
    ]


def _config(tokenizer: PreTrainedTokenizerBase) -> BambaConfig:
    shape = base.shape(tokenizer)
    heads, layers = shape["num_attention_heads"], shape["num_hidden_layers"]
    # the layout's own default turns only half of each head
    shape["rope_parameters"]["partial_rotary_factor"] = 1.0
    return BambaConfig(
        **shape,
        attn_layer_indices=[*range(1, layers, 2)],
        mamba_n_heads=heads,
        mamba_d_head=shape["hidden_size"] // heads,
        mamba_n_groups=heads,
        mamba_d_state=shape["hidden_size"] // heads,
        mamba_d_conv=4,
        mamba_expand=1,
        mamba_chunk_size=CHUNK,
    )


@torch.no_grad()
def adopt(model: nn.Module, start: nn.Module) -> None:
    """Take a transformer's weights, those of its attentions into mixers where the new model has mixers."""
    ours, theirs = anatomy.find(model), anatomy.find(start)
    ours.embedding.load_state_dict(theirs.embedding.state_dict())
    ours.final_norm.load_state_dict(theirs.final_norm.state_dict())
    layer: Any
    source: Any
    for layer, source in zip(ours.layers, theirs.layers, strict=True):
        layer.input_layernorm.load_state_dict(source.input_layernorm.state_dict())
        layer.pre_ff_layernorm.load_state_dict(source.post_attention_layernorm.state_dict())
        layer.feed_forward.load_state_dict(source.mlp.state_dict())
        if layer.block_type == "full_attention":
            layer.self_attn.load_state_dict(source.self_attn.state_dict())
        else:
            _into_mixer(layer.mamba, source.self_attn)


def _into_mixer(mixer: Any, attention: Any) -> None:
    """Attention's projections as a mixer's: the rows of ``in_proj`` are the gate, x, B, C and the step sizes."""
    width, states = mixer.intermediate_size, mixer.n_groups * mixer.ssm_state_size
    _, x, B, C, step = mixer.in_proj.weight.split([width, width, states, states, mixer.num_heads])
    x.copy_(_for_every_head(attention.v_proj.weight, mixer))
    B.copy_(_for_every_head(attention.k_proj.weight, mixer))
    C.copy_(attention.q_proj.weight * attention.scaling)
    step.zero_()
    mixer.conv1d.weight.zero_()
    mixer.conv1d.weight[..., -1].fill_(1.0)  # at first a token sees itself only
    mixer.out_proj.load_state_dict(attention.o_proj.state_dict())


def _for_every_head(weight: Tensor, mixer: Any) -> Tensor:
    """Rows of shared key and value heads, once for every query head."""
    shared = weight.view(-1, mixer.head_dim, weight.shape[1])
    return shared.repeat_interleave(mixer.num_heads // len(shared), dim=0).flatten(0, 1)


RECIPE = Recipe(
    name="hybrid",
    description="hybrid: base in the Bamba layout, every second attention a Mamba-2 mixer, 8 layers, width 384",
    config=_config,
    sources=mixture,
    schedule=Schedule(batch=16, micro_batch=4, rates=Rates(muon=2e-3, adamw=1e-3, decay=0.6)),
    bounds=Bounds(minutes=90),
    start="zoo:base",
    adopt=adopt,
    teacher="zoo:base",
    objective=lambda tokenizer, teacher: Distil(teacher, "kl", next_token=0.2),
    initialise=initialise,
    prepare=faster_scan,
)
