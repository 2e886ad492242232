"""Training of a next-token-prediction layer on the target's own states, unrolled as deep as in serving.

Papers: DeepSeek-V3, arXiv:2412.19437, section 2.2 (the layer); EAGLE-3, arXiv:2503.01840, section 3.2 (unrolling).
Differs: the target is frozen, while the paper trains both together; the layer is unrolled over its own outputs after
its norm, as in serving (drafting/feature_heads/unroll.py), while the paper trains a layer for each depth; the loss uses
the target's whole distribution instead of tokens (train/feature_heads/objective.py). Experts are not balanced.

A target of a family without such a layer is converted to GLM-4-MoE first (glm.py). Training starts from the
target's layer if it has one, else from a layer that passes the target's state through.

Letters: V vocabulary.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from foretoken.core.errors import UnsupportedArchitecture
from foretoken.drafting.feature_heads.description import Taps
from foretoken.drafting.feature_heads.state_network import TrainableNetwork
from foretoken.forward import anatomy
from foretoken.methods.mtp import checkpoint
from foretoken.methods.mtp.command import Config
from foretoken.methods.mtp.glm import write_relaid
from foretoken.methods.mtp.layouts import LAYOUTS
from foretoken.methods.mtp.network import PredictionLayer
from foretoken.methods.mtp.shards import Shards, read_layer
from foretoken.models.fingerprint import fingerprint, folder_of
from foretoken.models.load import load_config, source_of
from foretoken.train.feature_heads.training import HeadTraining, Stage, recipe_for
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.run_folder import RECORD


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """The sizes of the layer, for the record; see ``NetworkConfig`` of drafting/feature_heads/state_network.py.

    Attributes:
        draft_vocab_size: V.
        mlp_width: number of MLP channels per token.
    """

    draft_vocab_size: int
    mlp_width: int
    taps: ClassVar[Taps] = Taps(final=True)

    @classmethod
    def of(cls, target: Any) -> "LayerConfig":
        """Return the sizes for a configuration of transformers."""
        text = target.get_text_config(decoder=True)
        experts = text.num_experts_per_tok + (getattr(text, "n_shared_experts", None) or 0)
        return cls(draft_vocab_size=text.vocab_size, mlp_width=experts * text.moe_intermediate_size)


class LearningLayer(PredictionLayer, TrainableNetwork):
    """A layer in training.

    Args:
        model: the target, of transformers.
        source: its folder, which provides the rest of the checkpoint.
        dtype: of the checkpoint.
    """

    def __init__(self, config: LayerConfig, model: Any, source: Path, dtype: torch.dtype) -> None:
        text = model.config.get_text_config(decoder=True)
        prefix = LAYOUTS[text.model_type].prefix_in(text.num_hidden_layers)
        brought = Shards(str(source)).has(prefix)
        tensors = read_layer(model.config, str(source), str(source)) if brought else None
        super().__init__(model, str(source), tensors)
        self.config, self._source, self._dtype = config, source, dtype
        if not brought:
            self.draw(anatomy.find(model).final_norm)

    @classmethod
    def check_place(cls, folder: Path) -> None:
        """Do nothing: :func:`training` checks the folder together with the target's."""

    def save(self, folder: Path) -> None:
        checkpoint.write(self, self._source, folder, self._dtype)

    @torch.no_grad()
    def draw(self, final_norm: Any) -> None:
        """Initialise the weights so that the target's state reaches its LM head nearly unchanged."""
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                gain = 0.3 if "o_proj" in name or "down_proj" in name else 1.0
                weight.copy_(torch.randn_like(weight) * gain / weight.shape[-1] ** 0.5)
        for name, buffer in self.named_buffers():
            if name.startswith("layer.mlp"):
                buffer.zero_()  # expert choice biases
        width = len(self.eh_proj.weight)
        self.eh_proj.weight.mul_(0.3)
        self.eh_proj.weight[:, width:] += torch.eye(width, device=self.eh_proj.weight.device)
        # the layer norms its input once more: the final gain restores the length of the final norm's output
        unit = final_norm(torch.ones(1, width, device=self.eh_proj.weight.device, dtype=self.eh_proj.weight.dtype))
        self.norm.weight.mul_(unit.pow(2).mean().sqrt())


def training(options: Config) -> HeadTraining:
    """Return the layer and its training; convert a target of a family without such layers in the output folder first.

    Raises:
        ConfigError: the share of own words is out of range, or the folder contains another model.
        ForetokenError: the target cannot be converted.
    """
    name, out = options.target, options.out
    dtype = load_config(name).dtype or torch.float32
    source = folder_of(source_of(name))
    checkpoint.check_place(out, source, Path(RECORD))
    recipe = recipe_for("mtp", f"next-token-prediction layer of {name}", name, options.share)
    learned_from = laid_out(name, source, out)

    def config(text: Any, name: str, fingerprint: str) -> LayerConfig:
        return LayerConfig.of(text)

    def build(config: LayerConfig, target: FrozenTarget, ids_K: Tensor | None) -> LearningLayer:
        return LearningLayer(config, target.model, learned_from, dtype)

    return HeadTraining(
        target=str(learned_from),
        part=LearningLayer,
        recipe=recipe,
        stages=(Stage(own_words=options.share),),
        shape=options.shape,
        steps=options.steps,
        config=config,
        build=build,
        original=source,
    )


def laid_out(name: str, source: Path, out: Path) -> Path:
    """Return the folder of a target in a layout with prediction layers: its own, or a new one in ``out``.

    Raises:
        ForetokenError: see glm.py.
    """
    kind = load_config(name).get_text_config(decoder=True).model_type
    if kind in LAYOUTS:
        if not LAYOUTS[kind].written:
            written = ", ".join(each for each, layout in LAYOUTS.items() if layout.written)
            raise UnsupportedArchitecture(f"a layer of a '{kind}' can be read, but not trained: only of {written}")
        return source
    place = out / f"target-{fingerprint(source)[:16]}"
    if not (place / checkpoint.CONFIG).is_file():
        unfinished = out / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        write_relaid(name, unfinished)
        unfinished.rename(place)
    return place
