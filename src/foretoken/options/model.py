"""Options for loading a model and for its engine, each declared once; ``LLM`` and the commands use them."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from foretoken.core.errors import ConfigError, nearest
from foretoken.options.option import Checked, Option, documented

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "int4")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "int8")
DEVICES = ("auto", "cpu", "cuda", "cuda:N")

_ALSO_CALLED = {"half": "float16", "float": "float32"}  # vLLM's additional names of dtypes
_MOST_SEQS = 4096  # maximum concurrent requests: each has a slot in the cache from the start
_MOST_ROWS = 2**20  # of one forward
_PROCESSORS = os.cpu_count() or 1
_MOST_THREADS = max(8, 4 * _PROCESSORS)  # far above that, some libraries end the process


def dtype(name: str, value: Any) -> str:
    """Return a dtype's name; accepts torch's own dtypes and vLLM's names."""
    text = str(value).removeprefix("torch.")
    text = _ALSO_CALLED.get(text, text)
    if text not in DTYPES:
        raise ConfigError(f"{name}={value!r:.60} is unknown: {nearest(text, DTYPES)}")
    return text


def device(name: str, value: Any) -> str:
    """Return a device's name; accepts torch's own devices."""
    text = str(value)
    kind, colon, number = text.partition(":")
    if text not in DEVICES and not (kind in ("cpu", "cuda") and colon and number.isdecimal()):
        raise ConfigError(f"{name}={value!r:.60} is unknown: {nearest(text, DEVICES)}")
    return text


@documented
@dataclass(frozen=True, kw_only=True)
class ModelOptions(Checked):
    """Options for loading a checkpoint.

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
            "Format of keys and values: auto (as computed), float32, bfloat16 or int8 (CPU).",
            metavar="|".join(KV_CACHE_DTYPES),
            choices=KV_CACHE_DTYPES,
            more="auto next to quantised weights: bfloat16. int8: codes of 8 bits, a scale each (docs/quantised.md).",
        ),
    ] = "auto"
    revision: Annotated[
        str | None, Option("Revision of a hub id: a branch, a tag or a commit.", metavar="NAME", remedy="leave it out")
    ] = None
    trust_remote_code: Annotated[
        bool, Option("Run Python code from the checkpoint; without it such checkpoints are refused.")
    ] = False
    max_model_len: Annotated[
        int | None,
        Option(
            "Maximum length of a sequence, including the prompt; default: the model's own limit.",
            metavar="N",
            least=2,
            remedy="leave it out for the model's own limit",
        ),
    ] = None
    device: Annotated[str, Option("auto, cpu or cuda.", convert=device, more="cuda:N is the N-th GPU.")] = "auto"
    threads: Annotated[
        int | None,
        Option(
            "Number of CPU threads; default: torch's own choice.",
            metavar="N",
            least=1,
            most=_MOST_THREADS,
            remedy=f"there are {_PROCESSORS} processors",
            more="The setting applies to the whole process.",
        ),
    ] = None

    @property
    def origin(self) -> dict[str, Any]:
        """Return the arguments that a checkpoint's config or tokenizer is loaded with."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    @property
    def of_a_checkpoint(self) -> dict[str, Any]:
        """Return the arguments of ``models.load.load``."""
        given = asdict(self)
        del given["threads"]
        return given | {"max_length": given.pop("max_model_len")}


@documented
@dataclass(frozen=True, kw_only=True)
class EngineOptions(Checked):
    """Options of an engine, and defaults for requests without params.

    Raises:
        ConfigError: a value is out of range.
    """

    max_num_seqs: Annotated[
        int | None,
        Option(
            "Maximum concurrent prompts; None: 32, or fewer where their keys and values would not fit into memory.",
            least=1,
            most=_MOST_SEQS,
        ),
    ] = None
    max_rows_per_step: Annotated[
        int | None,
        Option(
            "Maximum rows (tokens) of one forward; None: 32 for each prompt, or 512 where max_num_seqs is given.",
            least=1,
            most=_MOST_ROWS,
            on_command_line=False,
            more="Prompts are read in chunks that fit into the remaining rows.",
        ),
    ] = None
    seed: Annotated[
        int | None,
        Option(
            "Base seed for requests without a seed.",
            least=0,
            most=2**63 - 1,
            on_command_line=False,
            more="None draws fresh seeds.",
        ),
    ] = None
    generation_config: Annotated[
        str,
        Option(
            "auto: requests without params use the checkpoint's generation_config.json; none: greedy.",
            choices=("auto", "none"),
            on_command_line=False,
        ),
    ] = "auto"
    enable_prefix_caching: Annotated[
        bool,
        Option(
            "Keep the KV cache of prompts, for later prompts with the same beginning.",
            on_command_line=False,
            more="The text does not change, but the time to the first token does, so measurements leave it off.",
        ),
    ] = False
    prefix_cache_bytes: Annotated[
        int, Option("Limit of the KV cache with prefixes.", least=1, most=2**63 - 1, on_command_line=False)
    ] = 2**30
    prefix_cache_dir: Annotated[
        str | None,
        Option(
            "Keep prefixes that leave memory in this folder, also after the end.",
            metavar="DIR",
            more="With it, enable_prefix_caching is on.",
        ),
    ] = None
    prefix_cache_gb: Annotated[
        float, Option("Limit of the files in prefix_cache_dir, in 10^9 bytes.", above=0, most=10**6, metavar="N")
    ] = 10.0
