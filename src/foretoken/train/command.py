"""What a ``foretoken train NAME`` command is, as data; the command line (cli/learn/train.py) makes it from this.

    Command ── Config    a frozen dataclass: a field is an option, with its type, its default, and its description; its
            │             docstring is the command's help
            ── run       (config, session) -> the record of the run
            ── say       (record, out) -> lines for a person

A method declares one ("module:NAME"). Help needs no torch: the module of a command imports it inside of ``run``.
Options that several commands share are declared once, in the classes below, which a Config inherits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from inspect import get_annotations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from foretoken.options.model import ModelOptions
from foretoken.options.option import Checked, Declared, Option, declared, named

if TYPE_CHECKING:
    from foretoken.train.mixture import Source
    from foretoken.train.trainer import Bounds, Report


WIDEST = 1 << 17  # the most channels of an MLP: a mistyped number beyond it would fill the memory

OUT = Option("Folder to make.", "-o", metavar="PATH")
OUT_AGAIN = Option("Folder to make; give it again to go on after a stop.", "-o", metavar="PATH")
DATA = Option("The folder of the corpora; short for FORETOKEN_DATA.", metavar="DIR")
DRAFT = Option("The draft checkpoint, of the target's vocabulary.", "-d", name="draft-model", metavar="MODEL")


@dataclass(frozen=True, kw_only=True)
class Common(Checked):
    """Options that every command has; see their descriptions."""

    out: Annotated[Path, OUT]
    seed: Annotated[int, Option("Of weights, order and sampling.", metavar="N", least=0, most=2**63 - 1)] = 0
    device: Annotated[str, Option("auto, cpu or cuda.")] = "cpu"
    threads: Annotated[int | None, named(ModelOptions, "threads").option] = None
    as_json: Annotated[bool, Option("The record of the run as one JSON object on stdout.", name="json")] = False
    verbose: Annotated[bool, Option("Show what the libraries print, and tracebacks of internal errors.")] = False

    @property
    def place(self) -> Path:
        """The folder that is made."""
        return self.out


@dataclass(frozen=True, kw_only=True)
class Text(Common):
    """Options of commands that read text."""

    data: Annotated[Path | None, DATA] = None
    corpus: Annotated[
        list[str] | None,
        Option(
            "FILE or FILE=SHARE: your own text, or stored outputs; 'generated': the lab's tasks, no file. Repeatable.",
            metavar="FILE",
        ),
    ] = None

    def sources(self, default: Callable[[Path], list[Source]]) -> list[Source]:
        """The user's files, or a mixture of the data folder.

        Args:
            default: the mixture, given the folder.
        Raises:
            ConfigError, InputError: a file or the folder is missing, or both are given.
        """
        from foretoken.train import sources

        return sources.chosen(self.data, self.corpus, default)


@dataclass(frozen=True, kw_only=True)
class Loop(Text):
    """Options of commands that run the training loop, which goes on where it was stopped."""

    out: Annotated[Path, OUT_AGAIN]
    minutes: Annotated[
        float | None,
        Option(
            "Stop training so many minutes after the start, preparation included; the measurements at the end take "
            "longer. Default: the recipe's 30 to 120, or none with --tokens.",
            above=0,
        ),
    ] = None
    tokens: Annotated[int | None, Option("Stop after so many tokens; default: no such bound.", above=0)] = None
    checkpoint_every: Annotated[
        float | None, Option("Seconds of training between two checkpoints; default: 120.", metavar="SECONDS", above=0)
    ] = None
    rate: Annotated[float, Option("Factor on the recipe's learning rates.", above=0)] = 1.0

    def bounds(self, default: Bounds) -> Bounds:
        """When a run ends: as the options say, or as the recipe does."""
        from foretoken.train.trainer import Bounds

        if self.minutes is None and self.tokens is None:
            return default
        return Bounds(tokens=self.tokens, minutes=self.minutes)

    def loop(self, default: Bounds, report: Report, session: Session) -> dict[str, Any]:
        """What a function that runs the training loop is given by name, next to what its method adds."""
        from foretoken.train.trainer import CHECKPOINT_SECONDS

        return {
            "bounds": self.bounds(default),
            "seed": self.seed,
            "device": self.device,
            "report": report,
            "arguments": session.arguments,
            "checkpoint_every": self.checkpoint_every or CHECKPOINT_SECONDS,
            "rate": self.rate,
        }


class When(str, Enum):
    """When to compile: ``auto`` is where there is a GPU, since that is where it pays."""

    auto = "auto"
    on = "on"
    off = "off"

    def holds(self, device: str) -> bool:
        """Whether to compile for a device."""
        return device != "cpu" if self is When.auto else self is When.on


@dataclass(frozen=True, kw_only=True)
class Compiling(Loop):
    """The option of commands that train whole models."""

    compiled: Annotated[
        When, Option("Compile the layers first, half a minute; auto: only where there is a GPU.", name="compile")
    ] = When.auto


@dataclass(frozen=True, kw_only=True)
class Judged(Common):
    """Options of commands that measure the result in the engine."""

    suite: Annotated[
        str | None,
        Option("Held-out prompts to judge by, as for foretoken bench; default: the bundled ones.", metavar="NAME|FILE"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Continued(Common):
    """Options of commands that can begin with trained weights."""

    start: Annotated[
        Path | None,
        Option(
            "Begin with the weights in this folder, of the same shape or a narrower MLP; its target may be another.",
            metavar="DIR",
        ),
    ] = None


@dataclass(frozen=True)
class Session:
    """The arguments of a run in addition to its options.

    Attributes:
        arguments: the command line, for the record.
        training: shows a training loop's progress while it is entered, given a title.
        counting: the same for something that is counted up to about a total, given title and total.
        prompts: the texts of a suite; None: of the bundled one.
    """

    arguments: list[str]
    training: Callable[[str], AbstractContextManager[Report]]
    counting: Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
    prompts: Callable[[str | None], list[str]]


@dataclass(frozen=True, kw_only=True)
class Command:
    """One ``foretoken train NAME``.

    Attributes:
        name: NAME.
        example: a whole command line.
        config: its options: a frozen dataclass that inherits :class:`Common`. Its docstring is the command's help: a
            line, an empty line, and paragraphs.
        run: does it; raises ForetokenError.
        say: the lines to print at the end.
    """

    name: str
    example: str
    config: type[Common]
    run: Callable[[Any, Session], dict[str, Any]]
    say: Callable[[dict[str, Any], Path], list[str]]


def shown_loss(record: dict[str, Any]) -> str:
    """The held-out loss of a run, for a person."""
    loss = record["held_out_loss"]
    return "unknown (no document was held out of a corpus this small)" if loss is None else f"{loss} a token"


def options(config: type[Common]) -> Iterator[Declared]:
    """The options of a Config: its own ones first, then the shared ones, :class:`Common` last."""
    by_name = {each.name: each for each in declared(config)}
    order = dict.fromkeys(name for each in config.__mro__ for name in get_annotations(each) if name in by_name)
    required = [name for name in order if by_name[name].required]
    for name in dict.fromkeys([*required, *order]):
        yield by_name[name]
