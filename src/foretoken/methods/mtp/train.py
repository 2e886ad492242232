"""Training of a next-token-prediction layer: from the target's own states it learns to draft as deep as it will serve.

Papers: DeepSeek-V3, arXiv:2412.19437, section 2.2 (the layer); EAGLE-3, arXiv:2503.01840, section 3.2 (unrolling).
Differs: the target is frozen, where the paper trains both together; the layer is unrolled over its own outputs, taken
behind its norm, as it is served (drafting/feature_heads/unroll.py), where the paper trains a layer for each depth; the
loss is over the target's whole law, and not over tokens (train/feature_heads/objective.py). Experts are not balanced.

A target of a family without such a layer is laid out as a GLM-4-MoE first (glm.py). A layer that the target brings is
where training begins, else what hands the target's feature on.

Letters: V vocabulary.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from foretoken.drafting.feature_heads.description import Taps
from foretoken.drafting.feature_heads.state_network import TrainableNetwork
from foretoken.forward import anatomy
from foretoken.methods.mtp import checkpoint
from foretoken.methods.mtp.glm import write_relaid
from foretoken.methods.mtp.layouts import LAYOUTS
from foretoken.methods.mtp.network import PredictionLayer
from foretoken.methods.mtp.shards import Shards, read_layer
from foretoken.models.fingerprint import fingerprint, folder_of
from foretoken.models.load import load_as_is, load_config, source_of
from foretoken.train.feature_heads import run as training
from foretoken.train.feature_heads.course import Course, Stage, recipe_for
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.mixture import Source
from foretoken.train.recipe import RECORD, Recipe, add_to_record

STEPS = 3  # as deep as it drafts by default


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is trained, beside the target.

    Attributes:
        steps: S.
    """

    steps: int = STEPS


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """What a run records of the layer; see :class:`foretoken.drafting.feature_heads.state_network.NetworkConfig`.

    Attributes:
        draft_vocab_size: V.
        mlp_width: channels that a token goes through.
    """

    draft_vocab_size: int
    mlp_width: int
    taps: ClassVar[Taps] = Taps(final=True)

    @classmethod
    def of(cls, target: Any) -> LayerConfig:
        """For a configuration of transformers."""
        text = target.get_text_config(decoder=True)
        experts = text.num_experts_per_tok + (getattr(text, "n_shared_experts", None) or 0)
        return cls(draft_vocab_size=text.vocab_size, mlp_width=experts * text.moe_intermediate_size)


class LearningLayer(PredictionLayer, TrainableNetwork):
    """A layer in training.

    Args:
        model: the target, of transformers.
        source: its folder, from which the checkpoint is completed.
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
        """Checked with the target's folder, see :func:`run`."""

    def save(self, folder: Path) -> None:
        checkpoint.write(self, self._source, folder, self._dtype)

    @torch.no_grad()
    def draw(self, final_norm: Any) -> None:
        """Draw the weights such that the target's feature is handed on to its head, nearly as it is."""
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                gain = 0.3 if "o_proj" in name or "down_proj" in name else 1.0
                weight.copy_(torch.randn_like(weight) * gain / weight.shape[-1] ** 0.5)
        for name, buffer in self.named_buffers():
            if name.startswith("layer.mlp"):
                buffer.zero_()  # what experts are chosen by beside their scores
        width = len(self.eh_proj.weight)
        self.eh_proj.weight.mul_(0.3)
        self.eh_proj.weight[:, width:] += torch.eye(width, device=self.eh_proj.weight.device)
        # what it reads is normed once more: the length of what the final norm gives comes back at the end
        unit = final_norm(torch.ones(1, width, device=self.eh_proj.weight.device, dtype=self.eh_proj.weight.dtype))
        self.norm.weight.mul_(unit.pow(2).mean().sqrt())


def recipe(target: str, own_words: float) -> Recipe:
    """What decides a run on text, beside the shape.

    Raises:
        ConfigError: the share is out of range.
    """
    return recipe_for("mtp", f"next-token-prediction layer of {target}", target, own_words)


def run(
    name: str,
    shape: Shape,
    sources: Sequence[Source],
    out: Path,
    *,
    own_words: float,
    **loop: Any,
) -> dict[str, Any]:
    """Train a layer, and write the target's checkpoint with it; goes on where an interrupted run stopped.

    Args:
        own_words: share of the text that the target writes.
        loop: see ``train/feature_heads/run.py``, as the other arguments.
    Returns:
        the record that is saved as ``training.json``.
    Raises:
        ForetokenError: target, data, disk or loss stop the run; what was reached is kept.
    """
    chosen = recipe(name, own_words)
    dtype = load_config(name).dtype or torch.float32
    source = folder_of(source_of(name))
    checkpoint.check_place(out, source, Path(RECORD))
    learned_from = laid_out(name, source, out)

    def config(target: Any, name: str, fingerprint: str, size: int | None) -> LayerConfig:
        return LayerConfig.of(target)

    def build(config: LayerConfig, target: FrozenTarget, ids_K: Tensor | None) -> LearningLayer:
        return LearningLayer(config, target.model, learned_from, dtype)

    course = Course(
        part=LearningLayer,
        recipe=chosen,
        stages=(Stage(own_words=own_words),),
        shape=asdict(shape),
        steps=shape.steps,
        config=config,
        build=build,
    )
    training.run(str(learned_from), course, sources, out, laid_out_from=source, **loop)
    return add_to_record(out, {"target": name})


def untrained(name: str, folder: Path) -> str:
    """A checkpoint of a target with a layer that nobody trained, which hands its feature on; where it lies.

    Raises:
        ForetokenError: see :func:`laid_out`.
    """
    source = laid_out(name, folder_of(source_of(name)), folder)
    loaded = load_as_is(str(source), device="cpu")
    torch.manual_seed(0)
    layer = LearningLayer(LayerConfig.of(loaded.model.config), loaded.model, source, loaded.model.dtype)
    layer.save(folder / "whole")
    return str(folder / "whole")


def laid_out(name: str, source: Path, out: Path) -> Path:
    """The folder of a target whose layout has prediction layers: its own, or one beside ``out`` that is made.

    Raises:
        ForetokenError: see glm.py.
    """
    if load_config(name).get_text_config(decoder=True).model_type in LAYOUTS:
        return source
    place = out / f"target-{fingerprint(source)[:16]}"
    if not (place / checkpoint.CONFIG).is_file():
        unfinished = out / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        write_relaid(name, unfinished)
        unfinished.rename(place)
    return place
