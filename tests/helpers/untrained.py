"""Learned parts with random weights that fit a target, for tests that need one of the right shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Gemma4AssistantConfig, Gemma4TextConfig

from foretoken.drafting.feature_heads.block import BlockConfig
from foretoken.drafting.feature_heads.state_network import StateNetwork
from foretoken.drafting.learned_part import CONFIG, WEIGHTS, LearnedPart
from foretoken.drafting.logistic import Logistic
from foretoken.forward import anatomy, target_kv
from foretoken.methods.gemma4_assistant.assistant import AssistantConfig, Gemma4Assistant
from foretoken.methods.judge.network import JudgeConfig, JudgeHead
from foretoken.methods.kangaroo.network import Adapter, AdapterConfig
from foretoken.methods.longspec.network import LongSpec, config_for
from foretoken.methods.mtp.train import LayerConfig, LearningLayer, laid_out
from foretoken.methods.sprinter.network import HeadConfig, SprinterHead
from foretoken.models.fingerprint import fingerprint, fingerprint_of
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import folder_of, load_as_is, load_config, source_of


def untrained(kind: type[LearnedPart], target: LanguageModel, folder: Path, **options: Any) -> str:
    """Write a part with random weights; the folder as it is given.

    Args:
        options: of :func:`random_part`.
    """
    part = random_part(kind, target, **options)
    if isinstance(part, Gemma4Assistant):  # never trained here, so it has no way of its own to be saved
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(json.dumps(dict(part.config.settings)))
        save_file(part.tensors(), folder / WEIGHTS)
    else:
        part.save(folder)
    return str(folder)


def random_part(kind: Any, target: LanguageModel, **options: Any) -> Any:
    """A part of a kind; the functions below name their options."""
    if issubclass(kind, StateNetwork):
        return _network(kind, target, **options)
    kinds = {
        Adapter: _adapter,
        LongSpec: _long,
        JudgeHead: _judge,
        SprinterHead: _sprinter,
        Gemma4Assistant: _assistant,
    }
    return kinds[kind](target, **options)


def random_unit(width: int, *, bias: float, spread: float, seed: int) -> Logistic:
    """A logistic unit with weights around 0, of a standard deviation."""
    return Logistic(spread * torch.randn(width, generator=torch.Generator().manual_seed(seed)), bias)


def spread_ids(config: BlockConfig) -> Tensor | None:
    """The tokens of an untrained network: as many as its config says, spread evenly; None: all."""
    size, whole = config.draft_vocab_size, config.vocab_size
    return torch.arange(size) * (whole // size) if size < whole else None


def untrained_layer(name: str, folder: Path) -> str:
    """Write a target's checkpoint with an untrained prediction layer that hands the state on; return its folder."""
    source = laid_out(name, folder_of(source_of(name)), folder)
    loaded = load_as_is(str(source), device="cpu")
    torch.manual_seed(0)
    layer = LearningLayer(LayerConfig.of(loaded.model.config), loaded.model, source, loaded.model.dtype)
    layer.save(folder / "whole")
    return str(folder / "whole")


def _network(
    kind: Any, target: LanguageModel, *, draft_vocab_size: int | None = None, seed: int = 0, **fields: Any
) -> StateNetwork:
    """A network that hands the target's feature on where it can.

    Args:
        draft_vocab_size: how many tokens it scores, every so many-th one; at most, and without it, all.
        fields: others of the config.
    """
    size = None if draft_vocab_size is None else min(draft_vocab_size, target.vocab_size)
    made_for = target.config, target.name, fingerprint_of(target.source)
    config = kind.config_for(*made_for, draft_vocab_size=size, **fields)
    network: StateNetwork = kind(config, ids_K=spread_ids(config))
    network.draw(torch.Generator().manual_seed(seed), spread=0.2)
    network.begin_near(target.model)
    return network.eval()


def _adapter(target: LanguageModel, *, exit_layer: int = 1, seed: int = 0) -> Adapter:
    """An adapter of one depth; weak attention keeps its tokens close to the early exit's."""
    config = AdapterConfig.for_target(target.config, exit_layer, target.name, fingerprint_of(target.source))
    adapter, generator = Adapter(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in adapter.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            gain = 0.3 if name.startswith("o_proj") else 1.0
            weight.copy_(1 + 0.2 * noise if weight.dim() < 2 else noise * gain / weight.shape[-1] ** 0.5)
        gain_D = anatomy.gain_of(anatomy.find(target.model).final_norm)
        if gain_D is not None:
            adapter.norm_out.weight.mul_(gain_D)
    return adapter.eval()


def _long(target: LanguageModel, *, seed: int = 0, **fields: Any) -> LongSpec:
    """A LongSpec head: its initial weights with noise added, biases included; ``fields`` of its config."""
    kv = target_kv.find(target.model, target.name)
    head = LongSpec(config_for(target.config, target.name, fingerprint_of(target.source), kv, **fields))
    generator = torch.Generator().manual_seed(seed)
    head.draw(generator)
    head.begin_near(target.model)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.2 * weight.std() * torch.randn(weight.shape, generator=generator))
    return head.eval()


def _assistant(
    target: LanguageModel, *, kinds: tuple[str, ...] = ("full_attention",), centroids: int = 0, seed: int = 0
) -> Gemma4Assistant:
    """A Gemma 4 assistant that mostly hands the target's feature on.

    Args:
        kinds: of its layers.
        centroids: clusters of tokens, half of which are scored, if they can be of one size; 0: all tokens are scored.
    """
    text = target.config.get_text_config(decoder=True)
    last, width = anatomy.last_own_layers(text), target.width
    attention_heads = getattr(text, "num_attention_heads", 4)  # a target of states has none
    centroids = centroids if centroids and text.vocab_size % centroids == 0 else 0
    sizes = {kind: text.per_layer_config[last.get(kind, 0)] for kind in kinds}
    heads = {kind: getattr(each, "head_dim", None) or width // attention_heads for kind, each in sizes.items()}
    own = Gemma4TextConfig(
        vocab_size=text.vocab_size,
        hidden_size=width,
        intermediate_size=96,
        num_hidden_layers=len(kinds),
        num_attention_heads=attention_heads,
        num_key_value_heads=getattr(sizes[kinds[0]], "num_key_value_heads", 1),
        layer_types=list(kinds),
        head_dim=heads.get("sliding_attention", 16),
        global_head_dim=heads.get("full_attention", 16),
        sliding_window=getattr(text, "sliding_window", None) or 16,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        num_kv_shared_layers=len(kinds),
    )
    config = Gemma4AssistantConfig(
        text_config=own,
        backbone_hidden_size=width,
        use_ordered_embeddings=centroids > 0,
        num_centroids=max(1, centroids),
        centroid_intermediate_top_k=max(1, centroids // 2),
    )
    settings = json.loads(config.to_json_string(use_diff=False))
    part = Gemma4Assistant(AssistantConfig(target=target.name, target_fingerprint="", settings=settings))
    generator, tensors = torch.Generator().manual_seed(seed), part.state_dict()
    for weight in tensors.values():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.is_floating_point():
            weight.copy_(1 + 0.2 * noise if weight.dim() < 2 else noise / weight.shape[-1] ** 0.5)
        else:
            weight.copy_(noise.argsort())
    handed_on = torch.cat([torch.zeros(width, width), torch.eye(width)], dim=1)
    tensors["pre_projection.weight"].mul_(0.05).add_(handed_on)
    tensors["post_projection.weight"].mul_(0.05).add_(torch.eye(width))
    tensors["model.embed_tokens.weight"].copy_(anatomy.find(target.model).head.weight.detach())
    return part.eval()


def _judge(
    target: LanguageModel, *, threshold: float = 0.5, bias: float = 0.0, spread: float = 0.3, seed: int = 5
) -> JudgeHead:
    config = JudgeConfig(
        width=target.config.get_text_config(decoder=True).hidden_size,
        threshold=threshold,
        target=target.name,
        target_fingerprint=fingerprint_of(target.source),
    )
    return JudgeHead(config, random_unit(config.width, bias=bias, spread=spread, seed=seed))


def _sprinter(
    target: LanguageModel,
    *,
    draft: str = "zoo:draft",
    feature: str = "pre",
    bias: float = 0.0,
    spread: float = 0.1,
    seed: int = 3,
) -> SprinterHead:
    config = HeadConfig(
        feature=feature,
        width=load_config(draft).get_text_config(decoder=True).hidden_size,
        target=target.name,
        target_fingerprint=fingerprint_of(target.source),
        draft=draft,
        draft_fingerprint=fingerprint(Path(source_of(draft))),
    )
    return SprinterHead(config, random_unit(config.num_inputs, bias=bias, spread=spread, seed=seed))
