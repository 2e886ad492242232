"""Training of EAGLE's head (network.py): from the target's own states it learns to draft as deep as it will serve.

Papers: EAGLE-3, arXiv:2503.01840, section 3.2: no feature is regressed; the head is unrolled S steps over its own
outputs, and the loss is the cross-entropy with the target's laws, step s weighing 0.8^s. EAGLE-2's network is trained
in the same way, which the paper of EAGLE-2 (arXiv:2406.16858) does not: there a feature is regressed.

    loss = sum over s of 0.8^s mean over columns of -sum over kept tokens v of p(v) log q_s(v)   /  sum of 0.8^s

Differs: p is neither renormalised over the kept tokens nor are columns left out whose favourite is not kept, so that a
position weighs by the mass that can be accepted; four steps are unrolled instead of seven; half of the text is by
default the target's own (``own_words``); the rate is ours, the schedule linear, and the gradient is clipped by its norm
(1.0). A head of its own (``own_head``) begins as the target's rows, which are otherwise shared and stay as they are.

Letters: B sequences, T positions, N rows, W width, K draft vocabulary, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.core.errors import ConfigError, ModelError
from foretoken.core.files import write_whole
from foretoken.core.provenance import provenance
from foretoken.methods.eagle.config import EAGLE2, EAGLE3
from foretoken.methods.eagle.lessons import FromFeatures, FromTokens, Lessons, depths_read, frequent
from foretoken.methods.eagle.network import Eagle, config_for, unrolled
from foretoken.methods.eagle.walk import Text, Walk
from foretoken.models.hidden_states import FINAL
from foretoken.models.load import load_as_is, load_config
from foretoken.train import acceptance, trainer
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.mixture import Mixture, Source
from foretoken.train.optimiser import Rates
from foretoken.train.recipe import (
    RECORD,
    Recipe,
    claim_of,
    disk_trouble,
    refuse_another,
    scaled,
    write_claim,
    written,
)
from foretoken.train.recipes.base import mixture
from foretoken.train.rendering import encoder
from foretoken.train.replies import Replies
from foretoken.train.stored_blocks import StoredBlocks
from foretoken.train.trainer import Blocks, Bounds, Schedule

OWN_WORDS = 0.5
STEPS = 4
DECAY = 0.8  # of a step's weight
DRAFT_VOCABULARY = 2048  # tokens that EAGLE-3 scores
BLOCK = 256  # tokens; what drafting needs is near, and attention is unrolled S times
LOGITS = 1 << 25  # of one micro-batch's target, about: 128 MB of float32


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is trained, beside the target.

    Attributes:
        algorithm: "eagle3" or "eagle".
        draft_vocab_size: K; None: 2048, or the whole vocabulary where that is smaller.
        mlp_width: None: a quarter of the target's.
        own_head: train a head of its own instead of sharing rows of the target's.
        steps: S.
    """

    algorithm: str = EAGLE3
    draft_vocab_size: int | None = None
    mlp_width: int | None = None
    own_head: bool = False
    steps: int = STEPS

    def __post_init__(self) -> None:
        if self.algorithm not in (EAGLE2, EAGLE3):
            raise ConfigError(f"--algorithm {self.algorithm}: '{EAGLE3}' or '{EAGLE2}'")
        if self.mlp_width is not None and self.mlp_width % 32:
            raise ConfigError(f"--mlp-width {self.mlp_width}: a multiple of 32")
        if self.algorithm == EAGLE2 and (self.draft_vocab_size is not None or self.own_head):
            raise ConfigError("--algorithm eagle has the target's head: leave out --draft-vocab-size and --own-head")


def recipe(target: str, shape: Shape, own_words: float = OWN_WORDS) -> Recipe:
    """What decides a run on text, beside the shape.

    Raises:
        ConfigError: the share is out of range.
    """
    if not 0 <= own_words <= 1:
        raise ConfigError(f"--own-words {own_words}: a share must be from 0 to 1")
    return Recipe(
        name="eagle",
        description=f"{shape.algorithm} head of {target}",
        config=lambda tokenizer: load_config(target),
        sources=mixture,
        block=BLOCK,
        schedule=Schedule(batch=4, micro_batch=4, rates=Rates(muon=None, adamw=2e-3, warmup=0.03, decay=0.9)),
        bounds=Bounds(minutes=30),
        tokenizer=target,
        teacher=target,
        own_words=own_words,
    )


class Unrolled:
    """The loss of all steps; 0 where a micro-batch has no position that counts.

    Args:
        lessons: gives states and laws.
        embedding_VW: where tokens are looked up.
        head_of: gives the rows that score, [K, W]; asked at every call, as they may be in training.
        steps: S.
    """

    name = "unrolled_cross_entropy"

    def __init__(self, lessons: Lessons, embedding_VW: Tensor, head_of: Callable[[], Tensor], steps: int) -> None:
        self._lessons, self._embedding_VW, self._head_of, self._steps = lessons, embedding_VW, head_of, steps

    def __call__(self, model: nn.Module, tokens_BT: Tensor, generator: torch.Generator) -> Tensor:
        assert isinstance(model, Eagle)
        lesson = self._lessons(tokens_BT)
        head_KW = self._head_of()
        p_NK = lesson.target_NV.softmax(-1)
        if model.ids_K is not None:
            p_NK = p_NK[:, model.ids_K.to(p_NK.device)]
        row_BT = torch.full(lesson.used_BT.shape, -1, dtype=torch.int64, device=p_NK.device)
        row_BT[lesson.used_BT] = torch.arange(len(p_NK), device=p_NK.device)
        total, weights = p_NK.new_zeros(()), 0.0
        steps = unrolled(model, lesson.states_BTF, lesson.tokens_BT, self._embedding_VW, self._steps)
        for step, rows in enumerate(steps):
            of_BT = row_BT[:, 1 + step :]  # row i + 1 + s is the law of x_{i+2+s}
            taken_BT = of_BT >= 0
            log_q_NK = (rows[taken_BT] @ head_KW.T).log_softmax(-1)
            count = max(1, len(log_q_NK))
            total = total - DECAY**step * (p_NK[of_BT[taken_BT]] * log_q_NK).sum() / count
            weights += DECAY**step
        return total / max(weights, 1.0)


def build(config: Any, shape: Shape, target: FrozenTarget, name: str, fingerprint: str, ids: list[int] | None) -> Eagle:
    """The untrained head, float32, drawn from torch's generator.

    Args:
        config: the target's.
        ids: the tokens that it scores; None: all.
    Raises:
        UnsupportedArchitecture: no head fits the target.
    """
    settings = config_for(
        config,
        name,
        fingerprint,
        algorithm=shape.algorithm,
        draft_vocab_size=None if ids is None else len(ids),
        mlp_width=shape.mlp_width,
    )
    head = Eagle(settings, ids_K=None if ids is None else torch.tensor(ids), own_head=shape.own_head)
    with torch.no_grad():
        for part, weight in head.named_parameters():
            if weight.dim() == 2:
                gain = 0.3 if "o_proj" in part or "down_proj" in part else 1.0
                weight.normal_(std=gain / weight.shape[1] ** 0.5)
        if head.lm_head is not None:
            shared = Eagle(settings, ids_K=head.ids_K)
            head.lm_head.weight.copy_(shared.head_of(target.model))
    head.begin_near(target.model)
    return head


def run(
    name: str,
    shape: Shape,
    sources: Sequence[Source],
    out: Path,
    *,
    prompts: Sequence[str] = (),
    bounds: Bounds | None = None,
    own_words: float = OWN_WORDS,
    features: Path | None = None,
    seed: int = 0,
    device: str = "cpu",
    report: trainer.Report = lambda progress: None,
    arguments: Sequence[str] = (),
    checkpoint_every: float = trainer.CHECKPOINT_SECONDS,
    rate: float = 1.0,
) -> dict[str, Any]:
    """Train a head; goes on where an interrupted run stopped.

    Args:
        name: of the target: zoo name, folder or hub id.
        sources: the text; not read if features are given.
        out: the folder to make: ``config.json``, ``model.safetensors``, ``training.json``, and ``run/``.
        prompts: held-out prompts; what the target answers is walked (walk.py) while the head is trained.
        bounds: None: the recipe's.
        own_words: share of the text that the target writes; nothing is written if features are given.
        features: folder of a feature store to train from instead.
        arguments: the command line, for the record.
        checkpoint_every: seconds between two checkpoints.
        rate: factor on the learning rates.
    Returns:
        the record that is saved as ``training.json``.
    Raises:
        ForetokenError: target, data, disk or loss stop the run; what was reached is kept.
    """
    Eagle.check_place(out)
    chosen = recipe(name, shape, 0.0 if features else own_words)
    bounds = bounds or chosen.bounds
    loaded = load_as_is(name, device=device)
    settings = config_for(loaded.model.config, name, loaded.fingerprint, algorithm=shape.algorithm)
    depths = depths_read(settings, loaded.model.config.get_text_config(decoder=True).num_hidden_layers)
    numbers = tuple(sorted({each for each in depths if each != FINAL}))
    target = FrozenTarget(loaded.model, numbers)
    if len(loaded.tokenizer) > target.vocabulary:
        raise ModelError(
            f"vocabulary mismatch: the tokenizer of {name} has {len(loaded.tokenizer)} entries, its model "
            f"{target.vocabulary}"
        )
    size = min(shape.draft_vocab_size or DRAFT_VOCABULARY, target.vocabulary)
    if shape.draft_vocab_size is not None and size < shape.draft_vocab_size:
        raise ConfigError(f"--draft-vocab-size {shape.draft_vocab_size}: {name} has {target.vocabulary} tokens")
    replies = Replies(loaded.tokenizer)
    stored = None
    if features is not None:
        stored = StoredBlocks(features, numbers, seed)
        stored.store.check_target(loaded.folder)
    work = out / "run"
    with disk_trouble(out):
        claim = {**claim_of(chosen, sources, seed), "target": loaded.fingerprint, "shape": asdict(shape)}
        if stored is not None:
            claim["features"] = [shard.sha256 for shard in stored.store.index.shards]
        refuse_another(work, claim)
        write_claim(work, claim)
        lessons: Lessons
        blocks: Blocks | Any
        tokens_of: Callable[[Tensor], Tensor]
        if stored is not None:
            blocks, lessons, tokens_of = stored, FromFeatures(target, replies, stored, depths), stored.tokens
        else:
            text = [*scaled(sources, 1 - own_words), *written(chosen, loaded.model, sources, work, seed)]
            block = min(chosen.block, target.longest or chosen.block)
            blocks = Mixture(text, encoder(loaded.tokenizer), work / "tokens", block, target.vocabulary, seed)
            lessons, tokens_of = FromTokens(target, replies, depths), torch.Tensor.flatten
        few = shape.algorithm == EAGLE3 and size < target.vocabulary
        ids = _kept(work, blocks, tokens_of, size, target.vocabulary) if few else None
        torch.manual_seed(seed)
        head = build(loaded.model.config, shape, target, name, loaded.fingerprint, ids).to(target.device)
        embedding_VW = head.embedding_of(target.model)
        shared_KW = None if shape.own_head else head.head_of(target.model)

        def head_of() -> Tensor:
            return head.head_of(target.model) if shared_KW is None else shared_KW

        walks = {
            temperature: Walk(target, texts(name, prompts, temperature), depths, shape.steps)
            for temperature in ((0.0, 1.0) if prompts else ())
        }

        def walked(temperature: float) -> float:
            return walks[temperature].tokens_per_step(head, embedding_VW, head_of())

        micro_batch = max(1, min(chosen.schedule.micro_batch, LOGITS // (blocks.block * target.vocabulary)))
        rates = chosen.schedule.rates.scaled(rate)
        schedule = replace(chosen.schedule, micro_batch=micro_batch, rates=rates, seed=seed)
        objective = Unrolled(lessons, embedding_VW, head_of, shape.steps)
        before = {temperature: walked(temperature) for temperature in walks}
        progress = trainer.fit(
            head,
            objective,
            blocks,
            schedule,
            bounds,
            work / "checkpoints",
            report=report,
            device=target.device,
            checkpoint_every=checkpoint_every,
            measure=(lambda: f"{walked(0.0):.2f} tokens a step") if walks else None,
        )
        head.eval()
        record = {
            "method": "eagle",
            "algorithm": shape.algorithm,
            "target": name,
            "target_fingerprint": loaded.fingerprint,
            "depths": list(depths),
            "parameters": sum(parameter.numel() for parameter in head.parameters()),
            "draft_vocab_size": head.config.draft_vocab_size,
            "mlp_width": head.config.mlp_width,
            "own_head": shape.own_head,
            "unrolled_steps": shape.steps,
            "own_words": chosen.own_words,
            "replies_only": replies.known,
            "block": blocks.block,
            "batch": schedule.batch,
            "rates": asdict(rates),
            "bounds": asdict(bounds),
            "seed": seed,
            "objective": objective.name,
            "steps": progress.step,
            "tokens": progress.tokens,
            "minutes": round(progress.seconds / 60, 1),
            "threads": torch.get_num_threads(),
            "walked": {
                f"T={temperature:g}" if temperature else "greedy": {
                    "before": round(before[temperature], 3),
                    "after": round(walked(temperature), 3),
                }
                for temperature in walks
            },
            "mixture": blocks.report(),
            "curve": progress.curve,
            "provenance": provenance(arguments),
        }
        head.save(out)
        write_whole(out / RECORD, json.dumps(record, indent=1) + "\n")
    return record


def texts(name: str, prompts: Sequence[str], temperature: float) -> list[Text]:
    """What a target answers to prompts, as the engine writes it."""
    outputs = acceptance.written(name, {"method": "none"}, prompts, temperature)
    return [
        Text((*output.prompt_token_ids, *output.token_ids), len(output.prompt_token_ids), not temperature)
        for output in outputs
    ]


def _kept(work: Path, blocks: Blocks, tokens_of: Callable[[Tensor], Tensor], size: int, vocabulary: int) -> list[int]:
    """The draft vocabulary of a run: chosen once, so that a resumed run has the same."""
    path = work / "draft_vocabulary.json"
    if not path.exists():
        write_whole(path, json.dumps(frequent(blocks, tokens_of, size, vocabulary)))
    found: list[int] = json.loads(path.read_text(encoding="utf-8"))
    return found
