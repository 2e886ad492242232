"""How a model is loaded and what its engine may use, each option declared once; ``LLM`` and the commands take them."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from foretoken.core.errors import ConfigError, nearest
from foretoken.options.option import Checked, Option, documented

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "int4")
KV_CACHE_DTYPES = ("auto", "int8")
DEVICES = ("auto", "cpu", "cuda", "cuda:N")

_ALSO_CALLED = {"half": "float16", "float": "float32"}  # vLLM's further names of dtypes
_MOST_SEQS = 4096  # requests at once: each has a place in the cache from the beginning
_MOST_ROWS = 2**20  # of one forward
_PROCESSORS = os.cpu_count() or 1
_MOST_THREADS = max(8, 4 * _PROCESSORS)  # with far too many, some libraries end the process


def dtype(name: str, value: Any) -> str:
    """A dtype's name; torch's own dtypes and vLLM's names are understood."""
    text = str(value).removeprefix("torch.")
    text = _ALSO_CALLED.get(text, text)
    if text not in DTYPES:
        raise ConfigError(f"{name}={value!r:.60} is unknown: {nearest(text, DTYPES)}")
    return text


def device(name: str, value: Any) -> str:
    """A device's name; torch's own devices are understood."""
    text = str(value)
    kind, colon, number = text.partition(":")
    if text not in DEVICES and not (kind in ("cpu", "cuda") and colon and number.isdecimal()):
        raise ConfigError(f"{name}={value!r:.60} is unknown: {nearest(text, DEVICES)}")
    return text


@documented
@dataclass(frozen=True, kw_only=True)
class ModelOptions(Checked):
    """How a checkpoint is loaded.

    Raises:
        ConfigError: a value is out of range.
    """

    dtype: Annotated[
        str,
        Option(
            "auto (as stored), float32, bfloat16, float16; int8, int4 (CPU).",
            convert=dtype,
            more="int8 and int4 round the weights when they are loaded. On a CPU, auto computes float16 in bfloat16.",
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        str,
        Option(
            "Of keys and values: auto (as computed), or int8, half the memory (CPU).",
            metavar="|".join(KV_CACHE_DTYPES),
            choices=KV_CACHE_DTYPES,
            more="int8: codes of 8 bits, a scale for each head and token, in the native decoder (docs/quantised.md).",
        ),
    ] = "auto"
    revision: Annotated[
        str | None, Option("Of a hub id: a branch, a tag or a commit.", metavar="NAME", remedy="leave it out")
    ] = None
    trust_remote_code: Annotated[
        bool, Option("Run Python code that comes with a checkpoint; it is refused otherwise.")
    ] = False
    max_model_len: Annotated[
        int | None,
        Option(
            "Longest sequence, prompt included; default: the model's own limit.",
            metavar="N",
            least=2,
            remedy="leave it out for the model's own limit",
        ),
    ] = None
    device: Annotated[str, Option("auto, cpu or cuda.", convert=device, more="cuda:N is the N-th GPU.")] = "auto"
    threads: Annotated[
        int | None,
        Option(
            "CPU threads; default: torch's own choice.",
            metavar="N",
            least=1,
            most=_MOST_THREADS,
            remedy=f"there are {_PROCESSORS} processors",
            more="It is a setting of the whole process.",
        ),
    ] = None

    @property
    def of_a_checkpoint(self) -> dict[str, Any]:
        """The arguments of ``models.load.load``."""
        given = asdict(self)
        del given["threads"]
        return given | {"max_length": given.pop("max_model_len")}


@documented
@dataclass(frozen=True, kw_only=True)
class EngineOptions(Checked):
    """What an engine may use, and what it does for requests that do not say.

    Raises:
        ConfigError: a value is out of range.
    """

    max_num_seqs: Annotated[int, Option("Prompts that run at the same time.", least=1, most=_MOST_SEQS)] = 16
    max_rows_per_step: Annotated[
        int,
        Option(
            "Rows (tokens) of one forward, at most.",
            least=1,
            most=_MOST_ROWS,
            on_command_line=False,
            more="Prompts are read in chunks within the rest.",
        ),
    ] = 512
    seed: Annotated[
        int | None,
        Option(
            "Fix the seeds of requests that bring none.",
            least=0,
            most=2**63 - 1,
            on_command_line=False,
            more="None draws fresh ones.",
        ),
    ] = None
    generation_config: Annotated[
        str,
        Option(
            "auto: requests without params take what the checkpoint's generation_config.json asks for; none: greedy.",
            choices=("auto", "none"),
            on_command_line=False,
        ),
    ] = "auto"
    enable_prefix_caching: Annotated[
        bool,
        Option(
            "Keep the rows of prompts, for prompts that begin alike.",
            on_command_line=False,
            more="The text is the same; the time to the first token is not, so measurements leave it off.",
        ),
    ] = False
    prefix_cache_bytes: Annotated[
        int,
        Option(
            "The cache of keys and values is not made larger than this for prefixes.",
            least=1,
            most=2**63 - 1,
            on_command_line=False,
        ),
    ] = 2**30
