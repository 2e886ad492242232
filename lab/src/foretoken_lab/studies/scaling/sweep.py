"""The sweep: heads of Scylla by tokens and by layers, each trained, tried and timed; it goes on where it was stopped.

    tokens      T1 .. Tn    at D1, the first number of layers                the data distribution
    layers      D1 .. Dm    at Tn, the most tokens                           the capacity distribution
    batches     b1 .. bl    with every head of Tn tokens                     throughput, and the speed model

Every head is trained anew from its first token: a schedule that falls to zero cannot be read off in its middle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foretoken.engine.llm import LLM
from foretoken.methods.scylla.command import Config
from foretoken.methods.scylla.drafter import ScyllaDrafter
from foretoken.methods.scylla.train import training
from foretoken.train.feature_heads.run import run as train
from foretoken.train.mixture import Source
from foretoken.train.trainer import Bounds, Report
from foretoken_lab.calibrations.scylla import measure
from foretoken_lab.studies.scaling import points
from foretoken_lab.studies.scaling.points import Point, Timed, name_of


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The swept and the fixed settings.

    Attributes:
        target, target_fingerprint: of the heads.
        tokens, layers, batches, nodes: increasing.
        max_depth, width: of the tree.
        draft_vocab_size, mlp_width: of the heads; None: the recipe's.
        prompts: how many, and their hash.
        answer: tokens of an answer.
        repeats: timed runs of each setting.
        text: names and sizes of the sources.
        seed, dtype, threads: of all of it.
    """

    target: str
    target_fingerprint: str
    tokens: tuple[int, ...]
    layers: tuple[int, ...]
    batches: tuple[int, ...]
    nodes: tuple[int, ...]
    max_depth: int
    width: int
    draft_vocab_size: int | None
    mlp_width: int | None
    prompts: str
    answer: int
    repeats: int
    text: tuple[str, ...]
    seed: int
    dtype: str
    threads: int

    def heads(self) -> list[tuple[int, int]]:
        """(D, T) of every head, the expensive ones last."""
        wanted = {(self.layers[0], tokens) for tokens in self.tokens}
        wanted |= {(layers, self.tokens[-1]) for layers in self.layers}
        return sorted(wanted, key=lambda each: (each[1], each[0]))

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        return {name: list(each) if isinstance(each, tuple) else each for name, each in asdict(self).items()}


def run(
    sweep: Sweep,
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    sources: Sequence[Source],
    out: Path,
    *,
    report: Report = lambda progress: None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Point]:
    """Measure every point that is not there yet.

    Args:
        llm: of any method, over the target.
        prompts: token ids.
        out: the folder; see points.py.
        report: of the training loops.
        say: called for every head.
    Returns:
        all points, the expensive ones last.
    Raises:
        ForetokenError: another sweep lies in the folder, or a training stopped; its checkpoints are kept.
    """
    points.claim(out, sweep.fields())
    found = []
    for layers, tokens in sweep.heads():
        name = name_of(layers, tokens)
        point = points.read(out, name)
        if point is None:
            say(f"{name}: training")
            folder = out / "heads" / name
            options = Config(
                target=sweep.target,
                out=folder,
                layers=layers,
                draft_vocab_size=sweep.draft_vocab_size,
                mlp_width=sweep.mlp_width,
                own_words=0.0,
            )
            record = train(
                training(options), sources, folder, bounds=Bounds(tokens=tokens), seed=sweep.seed, report=report
            )
            say(f"{name}: drafting")
            point = _measured(sweep, llm, prompts, folder, layers, tokens, record)
            points.write(out, point)
        found.append(point)
    return found


def _measured(
    sweep: Sweep,
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    layers: int,
    tokens: int,
    record: dict[str, Any],
) -> Point:
    timed = tokens == sweep.tokens[-1]
    config = ScyllaDrafter.Config(head=str(folder), max_depth=sweep.max_depth, width=sweep.width)
    seen = measure(
        llm,
        config,
        prompts,
        batches=sweep.batches if timed else sweep.batches[:1],
        nodes=sweep.nodes if timed else sweep.nodes[-1:],
        tokens=sweep.answer,
        repeats=sweep.repeats if timed else 1,
    )
    return Point(
        layers=layers,
        tokens=tokens,
        trained=record["tokens"],
        parameters=record["parameters"],
        accepted={int(nodes): gain for nodes, gain in seen["accepted"].items() if int(nodes)},
        recorded=seen["recorded_tokens"],
        timed=tuple(Timed(**each) for each in seen["measured"]),
    )
