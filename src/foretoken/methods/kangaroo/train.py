"""Training of Kangaroo's adapter (network.py) on the target's distribution, from an early layer.

    tokens ── embedding ── layers[0] ─ … ─ layers[E-1] ── … ── layers[L-1] ── final norm ── head ── p
                                              └── adapter ─────────────────────────────── head ── q

Paper: arXiv:2404.18911, section 3.1. The target is frozen; the loss is the cross-entropy between full distributions,
-sum_v p(v) log q(v), through the same frozen head with the target's own scaling and capping, averaged over the
positions that predict a reply (train/replies.py). Both are at temperature 1. There is no regression of features.

Differs: by default the target generates half of the text (``own_words``), while the reference reads stored chats; the
target runs during training unless features were stored; the gradient is clipped by its norm (1.0), not element by
element (0.5); the mean is taken micro-batch by micro-batch; the adapter's last norm is initialised from the target's
final norm. AdamW (0.9, 0.95) and a linear schedule with warm-up are the reference's; the rate and the weight decay
(0.1) are ours.

Letters: B sequences, T positions, N rows, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.errors import ConfigError, UnsupportedArchitecture
from foretoken.forward import anatomy
from foretoken.methods.kangaroo.network import Adapter, AdapterConfig
from foretoken.models.load import load_as_is
from foretoken.train.begin_as import begin_as
from foretoken.train.feature_heads.batches import Batches, batches_of
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.mixture import Source
from foretoken.train.optimiser import Rates
from foretoken.train.recipe import Recipe, part_recipe
from foretoken.train.rendering import encoder
from foretoken.train.replies import Replies
from foretoken.train.run import LoopOptions, TrainingRun, within_memory
from foretoken.train.sources import mixture, stored_features
from foretoken.train.trainer import Blocks, Schedule

if TYPE_CHECKING:
    from typing_extensions import Unpack

OWN_WORDS = 0.5
RATE = 3e-3
HELD_OUT_BLOCKS = 32
AGREE = 3  # agreement is measured for the adapter's 1, 2 and 3 most probable tokens


def recipe(target: str, exit_layer: int, own_words: float = OWN_WORDS) -> Recipe:
    """Return the recipe of a training run, apart from the adapter's depth.

    Args:
        target: zoo name, folder or hub id.
        exit_layer: layers of the target below the adapter.
        own_words: share of the text that the target generates.
    Raises:
        ConfigError: the share is out of range.
    """
    return part_recipe(
        "kangaroo",
        f"adapter of {target} after {exit_layer} layers",
        target,
        own_words,
        sources=mixture("base"),
        schedule=Schedule(batch=4, micro_batch=4, rates=Rates(muon=None, adamw=RATE, warmup=0.05, decay=0.95)),
    )


class ExitTarget(FrozenTarget):
    """A frozen target with states after E layers and after its final norm.

    Args:
        model: see :class:`FrozenTarget`.
        exit_layer: E.
    Raises:
        ConfigError: the target has no more than E layers.
    """

    def __init__(self, model: Any, exit_layer: int) -> None:
        depth = len(anatomy.find(model).layers)
        if not 1 <= exit_layer < depth:
            raise ConfigError(
                f"--exit-layer {exit_layer}: must be from 1 to {depth - 1}, as the target has {depth} layers"
            )
        super().__init__(model, (exit_layer,))
        self.exit_layer = exit_layer


class FullLaw:
    """-sum_v p(v) log q(v), the mean over the used positions; 0 where a micro-batch has none.

    Args:
        target: its head computes q.
        batches: states after E layers, which the adapter reads, and p.
    """

    name = "cross_entropy"

    def __init__(self, target: FrozenTarget, batches: Batches) -> None:
        self._target, self._batches = target, batches

    def __call__(self, model: nn.Module, tokens_BT: Tensor, generator: torch.Generator) -> Tensor:
        batch = self._batches(tokens_BT)
        out_ND = model(batch.states_BTF)[batch.used_BT]
        if not len(out_ND):
            return out_ND.sum()  # 0, with the gradient 0
        return F.cross_entropy(self._target.logits(out_ND), batch.target_NV.softmax(-1))


@torch.no_grad()
def judge(
    adapters: Mapping[str, Adapter],
    target: FrozenTarget,
    batches: Batches,
    blocks: Blocks,
    count: int,
    micro_batch: int,
) -> dict[str, dict[str, float] | None]:
    """Measure the agreement of adapters with the target on held-out blocks.

    Returns:
        for each adapter: ``cross_entropy`` in nats; ``acceptance``, the expected share sum_v min(p(v), q(v)) of
        accepted drafts at temperature 1; ``top_k``, how often the target's most probable token is among the adapter's
        k; and the number of ``positions`` of these means. None if no block is held out.
    """
    sums = {name: torch.zeros(2 + AGREE, dtype=torch.float64) for name in adapters}
    positions = 0
    for chunk in blocks.held_out(count).split(micro_batch):
        batch = batches(chunk.to(target.device))
        if not len(batch.target_NV):
            continue
        p_NV, favourite_N = batch.target_NV.softmax(-1), batch.target_NV.argmax(-1)
        positions += len(p_NV)
        for name, adapter in adapters.items():
            log_q_NV = target.logits(adapter(batch.states_BTF)[batch.used_BT]).log_softmax(-1)
            agrees_NK = log_q_NV.topk(AGREE, dim=-1).indices == favourite_N[:, None]
            found = [-(p_NV * log_q_NV).sum(), torch.minimum(p_NV, log_q_NV.exp()).sum()]
            found += list(agrees_NK.cumsum(-1).sum(0))
            sums[name] += torch.stack([each.double().cpu() for each in found])
    if not positions:
        return dict.fromkeys(adapters)
    names = ("cross_entropy", "acceptance", *(f"top_{k + 1}" for k in range(AGREE)))
    means = {name: [round(value, 4) for value in (total / positions).tolist()] for name, total in sums.items()}
    return {name: {**dict(zip(names, found, strict=True)), "positions": positions} for name, found in means.items()}


def adopt_norm(adapter: Adapter, final_norm: nn.Module) -> None:
    """Initialise norm_out from the target's final norm, as in an early exit without weights of its own.

    A final norm that is no RMSNorm of either kind (weight or 1 + weight) is ignored.
    """
    gain_D = anatomy.gain_of(final_norm)
    if gain_D is not None and gain_D.shape == adapter.norm_out.weight.shape:
        with torch.no_grad():
            adapter.norm_out.weight.copy_(gain_D)


def build(config: Any, target: ExitTarget, name: str, fingerprint: str) -> Adapter:
    """Return the untrained adapter, float32, with weights from torch's generator.

    Args:
        config: the target's.
        name: of the target.
    Raises:
        UnsupportedArchitecture: the target's configuration lacks the sizes of an attention.
    """
    try:
        adapter = Adapter(AdapterConfig.for_target(config, target.exit_layer, name, fingerprint))
    except AttributeError as error:
        raise UnsupportedArchitecture(f"{name}: no adapter fits it ({error})") from None
    adopt_norm(adapter, target.parts.final_norm)
    return adapter


def run(
    name: str,
    exit_layer: int,
    sources: Sequence[Source],
    out: Path,
    *,
    own_words: float = OWN_WORDS,
    features: Path | None = None,
    start: Path | None = None,
    **loop: Unpack[LoopOptions],
) -> dict[str, Any]:
    """Train an adapter, or resume an interrupted run.

    Args:
        name: the target: zoo name, folder or hub id.
        exit_layer: E.
        sources: the text; not read if features are given.
        out: the folder to write: ``config.json``, ``model.safetensors``, ``training.json``, and ``run/``.
        own_words: share of the text that the target generates; ignored if features are given.
        features: folder of a feature store to train from instead.
        start: folder of an adapter of the same shape to start from.
        loop: see :class:`foretoken.train.run.TrainingRun`.
    Returns:
        the record that is saved as ``training.json``.
    Raises:
        ForetokenError: target, data, disk or loss stop the run; its checkpoints are kept.
    """
    Adapter.check_place(out)
    chosen = recipe(name, exit_layer, 0.0 if features else own_words)
    training = TrainingRun(chosen, sources, out, start=start, **loop)
    loaded = load_as_is(name, device=training.device)
    target = ExitTarget(loaded.model, exit_layer)
    target.check_tokenizer(loaded.tokenizer, name)
    replies = Replies(loaded.tokenizer)
    torch.manual_seed(training.seed)
    adapter = build(loaded.model.config, target, name, loaded.fingerprint).to(target.device)
    if start is not None:
        begin_as(adapter, Adapter.load(start), start)
    stored = None if features is None else stored_features(features, (exit_layer,), training.seed, loaded.folder)
    with training.claimed(loaded.fingerprint, {"exit layer": exit_layer}, stored):
        blocks: Blocks
        if stored is not None:
            blocks = stored
        else:
            block = min(chosen.block, target.longest or chosen.block)
            blocks = training.mixture(training.text(adapter), encoder(loaded.tokenizer), target.vocabulary, block)
        batches = batches_of(target, replies, stored, (exit_layer,))
        schedule = within_memory(chosen.schedule, blocks.block, target.vocabulary)
        untrained = deepcopy(adapter)
        training.fit(adapter, FullLaw(target, batches), blocks, schedule)
        # both at the end, on the same blocks: the text that the target generates does not exist before
        pair = {"before": untrained.eval(), "after": adapter.eval()}
        fields = {
            **training.part_fields(loaded.fingerprint),
            "exit_layer": exit_layer,
            "own_words": chosen.own_words,
            "replies_only": replies.known,
            "held_out": judge(pair, target, batches, blocks, HELD_OUT_BLOCKS, schedule.micro_batch),
        }
        record = training.record(adapter, FullLaw.name, fields)
        adapter.save(out)
        training.save_record(record)
    return record
