"""The training loop: one model, one objective, one mixture, until the tokens or the minutes are used up.

Guarantees: a run that is interrupted at any moment goes on from its last checkpoint when the same command is
given again, with the same blocks in the same order; a loss that is not a number stops it and leaves the last good
checkpoint; progress (tokens or time, whichever is further) decides the learning rate, so a bounded run always ends
with the rate at zero.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from foretoken.core.errors import ConfigError, ForetokenError
from foretoken.train import checkpoint
from foretoken.train.memory import keep_freed_memory
from foretoken.train.objectives import Objective
from foretoken.train.optimiser import Optimiser, Rates
from foretoken.train.processor import products, tiny_numbers_ignored
from foretoken.train.stopping import Cut, Interrupted, current, stoppable

CHECKPOINT_SECONDS = 120.0
MEASURE_SECONDS = 60.0
MEASURE_LATEST = 300.0  # seconds between two measurements, however long they take
MEASURE_PARTS = 20  # else a measurement takes one in so many parts of the time, at most
CURVE_POINTS = 400


@dataclass(frozen=True)
class Bounds:
    """When a run is over: after so many tokens, or so many minutes of preparation and training, whichever comes first.

    Raises:
        ConfigError: neither is given, or one is not positive.
    """

    tokens: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        given = [bound for bound in (self.tokens, self.minutes) if bound is not None]
        if not given or not all(bound > 0 for bound in given):
            raise ConfigError(f"a run needs an end: tokens={self.tokens}, minutes={self.minutes} must be more than 0")

    def part(self, share: float) -> "Bounds":
        """The bounds of a stage that takes this share of the run."""
        if share == 1:
            return self
        return Bounds(
            tokens=None if self.tokens is None else max(1, round(self.tokens * share)),
            minutes=None if self.minutes is None else self.minutes * share,
        )

    def progress(self, tokens: int, seconds: float) -> float:
        """The share that is done, from 0 to 1."""
        parts = [0.0]
        if self.tokens is not None:
            parts.append(tokens / self.tokens)
        if self.minutes is not None:
            parts.append(seconds / 60 / self.minutes)
        return min(1.0, max(parts))


@dataclass(frozen=True)
class Schedule:
    """How a run is cut into steps.

    Attributes:
        batch: blocks of one optimiser step.
        micro_batch: blocks of one forward; bounds the memory, which is otherwise the model, its gradient and its two
            optimiser states in float32.
        rates: of the optimiser.
        seed: of masks and other draws; the mixture has its own.
    """

    batch: int = 16
    micro_batch: int = 8
    rates: Rates = field(default_factory=Rates)
    seed: int = 0


@dataclass
class Progress:
    """How far a run is; what the progress bar shows and the checkpoint stores.

    Attributes:
        curve: [tokens, seconds, mean training loss since the point before] a point.
        measured: the last result of the run's own measure; empty: there is none yet.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = math.nan
    done: float = 0.0
    curve: list[list[float]] = field(default_factory=list)
    measured: str = ""


class Blocks(Protocol):
    """What a run reads: blocks, the same in the same order for a resumed run. ``Mixture`` is one."""

    block: int  # tokens of one, on average if they differ

    def next(self, count: int) -> Tensor:
        """The next blocks, int64 [count, ...]: tokens, or what else the objective understands."""
        ...

    def held_out(self, count: int) -> Tensor:
        """Blocks that training never reads, the same at every call, int64 [<= count, ...]."""
        ...

    def state(self) -> dict[str, Any]:
        """Where it stands, as JSON."""
        ...

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        ...

    def report(self) -> list[dict[str, Any]]:
        """Describe the data read from each source, for the record."""
        ...


class StoredFeatures(Blocks, Protocol):
    """Sequences of which a target's states are stored; its blocks are their numbers, int64 [count, 1]."""

    hashes: list[str]  # of its files

    @classmethod
    def of(cls, folder: Path, depths: Sequence[int], seed: int, target: Path) -> "StoredFeatures":
        """Open a store.

        Args:
            depths: of the hidden states that are needed, increasing, next to the final ones or all logits.
            seed: of the order.
            target: the folder of the model.
        Raises:
            InputError: something that is needed was not stored.
            MismatchError: the features are another target's.
        """
        ...

    def sequences(self, numbers: Sequence[int]) -> list[Any]:
        """The features of these sequences: ``tokens_N``, ``hidden`` by depth, ``logits_NV`` or None."""
        ...

    def tokens(self, numbers: Tensor) -> Tensor:
        """The tokens of these sequences end to end, int64 [N]."""
        ...


Report = Callable[[Progress], None]


def fit(
    model: nn.Module,
    objective: Objective,
    mixture: Blocks,
    schedule: Schedule,
    bounds: Bounds,
    folder: Path,
    *,
    report: Report = lambda progress: None,
    device: torch.device | str = "cpu",
    checkpoint_every: float = CHECKPOINT_SECONDS,
    measure: Callable[[], str] | None = None,
    usable: Callable[[], None] = lambda: None,
) -> Progress:
    """Train until the bounds are reached, from the last checkpoint in ``folder`` if there is one.

    Args:
        model: float32 parameters; trained in place.
        folder: for the checkpoints.
        report: called after every step.
        checkpoint_every: seconds between two checkpoints; one is written at the end in any case.
        measure: describes how good the model is now, in a few words for the progress bar; called about once a minute,
            and less often where it takes more than a twentieth of the time.
        usable: writes the result as it stands, next to each checkpoint: what a stopped run leaves can be used.
    Raises:
        ForetokenError: the loss became NaN or infinite, or a checkpoint could not be written.
        Interrupted: Ctrl-C or SIGTERM; a checkpoint of the last whole step was written.
    """
    device = torch.device(device)
    if device.type == "cpu":
        keep_freed_memory()
    model.to(device).train()
    optimiser = Optimiser(model, schedule.rates)
    progress = _resume(folder, model, optimiser, mixture)
    before = progress.seconds
    saved = time.monotonic()
    due = saved + MEASURE_SECONDS
    pending: list[float] = []
    standing = mixture.state()  # where the step under way began: a step that is cut is read again

    def keep() -> str:
        if not progress.step:
            return "stopped before the first step was done; nothing of the training is kept"
        place = _save(folder, model, optimiser, standing, progress)
        usable()
        return f"stopped at step {progress.step}; give the same command to go on from {place}"

    with stoppable() as stop, stop.saving(keep), tiny_numbers_ignored():
        started = stop.since

        def now() -> float:
            return before + time.monotonic() - started

        def over() -> bool:
            return bounds.progress(progress.tokens, now()) >= 1.0

        progress.seconds = now() if progress.step == 0 else before
        while (done := bounds.progress(progress.tokens, progress.seconds)) < 1.0:
            try:
                loss = _step(model, objective, optimiser, mixture, schedule, done, progress.step, device, folder, over)
            except Cut:
                if stop.requested:
                    with stop.whole():
                        raise Interrupted(keep()) from None
                progress.seconds, progress.done = now(), 1.0
                break
            standing = mixture.state()
            progress.step += 1
            progress.tokens += schedule.batch * mixture.block
            progress.seconds = now()
            progress.loss, progress.done = loss, bounds.progress(progress.tokens, progress.seconds)
            pending.append(loss)
            _extend_curve(progress, pending)
            if measure is not None and (asked := time.monotonic()) > due:
                progress.measured = measure()
                took = time.monotonic() - asked
                due = time.monotonic() + min(max(MEASURE_SECONDS, MEASURE_PARTS * took), MEASURE_LATEST)
            report(progress)
            if stop.requested:
                with stop.whole():
                    raise Interrupted(keep())
            if time.monotonic() - saved > checkpoint_every:
                with stop.whole():
                    _save(folder, model, optimiser, standing, progress)
                    usable()
                saved = time.monotonic()
        if not progress.step:
            raise ForetokenError(
                f"--minutes {bounds.minutes}: over after {now() / 60:.1f} minutes, before the first step of training "
                "was done (preparation counts): give more"
            )
        with stop.whole():
            _save(folder, model, optimiser, standing, progress)
    return progress


@torch.no_grad()
def held_out_loss(
    model: nn.Module, objective: Objective, mixture: Blocks, blocks: int, micro_batch: int, seed: int = 0
) -> float:
    """The objective on blocks that training never reads; NaN if the mixture is too small to have any."""
    tokens = mixture.held_out(blocks)
    if not len(tokens):
        return math.nan
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for chunk in tokens.split(micro_batch):
        with products(device):
            losses += [float(objective(model, chunk.to(device), generator))] * len(chunk)
    model.train(was_training)
    return sum(losses) / len(losses)


def _step(
    model: nn.Module,
    objective: Objective,
    optimiser: Optimiser,
    mixture: Blocks,
    schedule: Schedule,
    done: float,
    step: int,
    device: torch.device,
    folder: Path,
    over: Callable[[], bool],
) -> float:
    """One step; its loss.

    Args:
        over: whether the time is.
    Raises:
        Cut: a stop was requested, or the time was over, before weights were changed.
    """
    stop = current()
    seed = schedule.seed * 1_000_003 + step
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)  # of dropout, where a model has it
    total = 0.0
    with stop.cuttable():
        for chunk in mixture.next(schedule.batch).split(schedule.micro_batch):
            with products(device):
                loss = objective(model, chunk.to(device), generator)
            weight = len(chunk) / schedule.batch
            (loss * weight).backward()
            total += float(loss.detach()) * weight
            if over():
                raise Cut
    with stop.whole():
        norm = optimiser.step(done)
    if not (math.isfinite(total) and math.isfinite(norm)):
        last = checkpoint.latest(folder)
        kept = f"the last good checkpoint, {last}, is kept" if last else "there was no checkpoint yet"
        raise ForetokenError(
            f"the loss is not a number at step {step + 1} (loss {total}, gradient norm {norm}): training stopped; "
            f"{kept}; give the command again with a lower --rate"
        )
    return total


def _extend_curve(progress: Progress, pending: list[float]) -> None:
    """Add a point for the losses since the last one; when there are too many points, keep every second."""
    every = max(1, progress.step // CURVE_POINTS)
    if progress.step % every == 0:
        progress.curve.append([progress.tokens, round(progress.seconds, 1), round(sum(pending) / len(pending), 4)])
        pending.clear()
    if len(progress.curve) > 2 * CURVE_POINTS:
        progress.curve = progress.curve[1::2]


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _save(folder: Path, model: nn.Module, optimiser: Optimiser, standing: dict[str, Any], progress: Progress) -> Path:
    state = {
        "step": progress.step,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "curve": progress.curve,
        "mixture": standing,
    }
    return checkpoint.save(folder, progress.step, _weights(model), optimiser.tensors(), state)


def _resume(folder: Path, model: nn.Module, optimiser: Optimiser, mixture: Blocks) -> Progress:
    place = checkpoint.latest(folder)
    if place is None:
        return Progress()
    weights, tensors, state = checkpoint.load(place)
    parameters = dict(model.named_parameters())
    if parameters.keys() != weights.keys() or any(parameters[n].shape != weights[n].shape for n in weights):
        raise ForetokenError(f"{place}: belongs to another model or recipe; name another --out, or remove it")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    optimiser.load(tensors)
    mixture.resume(state["mixture"])
    return Progress(
        step=state["step"], tokens=state["tokens"], seconds=state["seconds"], curve=[list(p) for p in state["curve"]]
    )
