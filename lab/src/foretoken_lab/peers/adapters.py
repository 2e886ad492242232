"""One small class per engine, all with the same face, so that one loop can measure them alike.

    name                       how tables and files call it
    group                      "ours", "transformers", "llama.cpp" or "openvino"
    generate(ids, max_tokens)  tokens after the prompt, up to and including the end token

Every engine gets the prompt as the same token ids, starts without any memory of earlier prompts, stops at the same end
tokens, and has ``threads`` threads. Above temperature 0 it samples from all tokens, without other filters. Limits of an
engine are documented next to the code that works around them.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from foretoken import LLM, SamplingParams
from foretoken.models.fingerprint import fingerprint
from foretoken.models.load import source_of
from foretoken_lab.models.made_once import folder_made_once

LLAMA_CPP_INSTALL = "pip install cmake ninja && pip install 'llama-cpp-python>=0.3.16' 'gguf>=0.17'"

BAR = "!" * 78


class Adapter(Protocol):
    name: str
    group: str

    def generate(self, ids: Sequence[int], max_tokens: int) -> list[int]: ...


def folder_of(model: str) -> str:
    """What transformers is given for ``zoo:NAME`` or ``grown:NAME:SIZE``; a folder is one."""
    return source_of(model)


def gguf_file_of(model: str) -> Path | None:
    """The GGUF file that a model's name stands for; None: it is a folder."""
    source = Path(source_of(model))
    return source if source.is_file() else None


# ---------------------------------------------------------------------------------------------------------- ours


class Foretoken:
    """Our engine with one recipe. All recipes share the target's weights, as in ``foretoken bench``."""

    group = "ours"

    def __init__(self, name: str, llm: LLM, temperature: float = 0.0) -> None:
        self.name = name
        self.llm = llm
        self.temperature = temperature
        self.metrics: Any = None  # of the last call: steps and draft lengths, which other engines do not report

    def generate(self, ids: Sequence[int], max_tokens: int) -> list[int]:
        params = SamplingParams(max_tokens=max_tokens, temperature=self.temperature)
        (output,) = self.llm.generate([{"prompt_token_ids": list(ids)}], params)
        if output.error is not None:
            raise RuntimeError(output.error)
        self.metrics = output.metrics
        return output.token_ids


def our_recipes(draft: str | None) -> dict[str, dict[str, Any]]:
    """Our side of the comparison: plain, every drafter with its defaults (adaptive length), and one fixed length."""
    recipes: dict[str, dict[str, Any]] = {
        "none": {"method": "none"},
        "auto": {"method": "auto", **({"model": draft} if draft is not None else {})},
        "ngram": {"method": "ngram"},
        "suffix": {"method": "suffix"},
    }
    if draft is not None:
        recipes["draft_model"] = {"method": "draft_model", "model": draft}
        recipes["suffix_first"] = {"method": "suffix_first", "model": draft}
        recipes["draft_model topk"] = {"method": "draft_model", "model": draft, "tree": "topk"}
        recipes["draft_model 4"] = {"method": "draft_model", "model": draft, "num_speculative_tokens": 4}
    return recipes


# -------------------------------------------------------------------------------------------------- transformers


class Transformers:
    """``model.generate`` of the library, with its default attention and its own cache.

    Args:
        options: more arguments of ``generate``, e.g. ``prompt_lookup_num_tokens``.
        assistant: a draft model for assisted generation.
        assistant_options: fields of the assistant's generation config. They are set again before every call: the
            library changes some of them while it runs.
    """

    group = "transformers"

    def __init__(
        self,
        name: str,
        model: Any,
        options: dict[str, Any] | None = None,
        *,
        temperature: float = 0.0,
        assistant: Any = None,
        assistant_options: dict[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.options = {**(options or {}), "do_sample": temperature > 0}
        if temperature > 0:
            self.options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        self.assistant = assistant
        if assistant is not None:
            self.assistant_config = copy.deepcopy(assistant.generation_config)
            self.assistant_config.update(**(assistant_options or {}))

    def generate(self, ids: Sequence[int], max_tokens: int) -> list[int]:
        ids_1T = torch.tensor([ids])
        options = dict(self.options)
        if self.assistant is not None:
            self.assistant.generation_config = copy.deepcopy(self.assistant_config)
            options["assistant_model"] = self.assistant
        with torch.inference_mode():
            out_1T = self.model.generate(
                ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=max_tokens, use_cache=True, **options
            )
        return out_1T[0, len(ids) :].tolist()


def load_transformers(model: str, dtype: str) -> Any:
    """The library's own model, untouched by us; of a GGUF file, which it makes dense."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="transformers")
    file = gguf_file_of(model)
    where = {"pretrained_model_name_or_path": folder_of(model)}
    if file is not None:
        where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype)).eval()
    # sampling fields that a checkpoint may bring mean nothing to greedy decoding, and would only be warned about
    loaded.generation_config.update(temperature=None, top_p=None, top_k=None, do_sample=False)
    return loaded


def transformers_family(target: Any, assistant: Any | None, temperature: float = 0.0) -> list[Transformers]:
    """Plain, prompt lookup, and assisted generation in several settings; the best of each kind is what counts."""
    family = [Transformers("transformers", target, temperature=temperature)]
    family += [
        Transformers(
            f"transformers lookup {count}", target, {"prompt_lookup_num_tokens": count}, temperature=temperature
        )
        for count in (3, 10, 20)
    ]
    if assistant is not None:
        settings: dict[str, dict[str, Any]] = {
            "default": {},  # up to 20 tokens, stops at confidence 0.4
            "3": _constant(3),
            "6": _constant(6),
            "5 heuristic": {**_constant(5), "num_assistant_tokens_schedule": "heuristic_transient"},
        }
        for label, options in settings.items():
            name = f"transformers assisted {label}"
            family.append(
                Transformers(name, target, temperature=temperature, assistant=assistant, assistant_options=options)
            )
    return family


def _constant(count: int) -> dict[str, Any]:
    return {
        "num_assistant_tokens": count,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


# ------------------------------------------------------------------------------------------------------ llama.cpp


def import_llama_cpp() -> Any | None:
    """The binding; or None, after a message on the missing package and how to get it."""
    try:
        import gguf  # noqa: F401
        import llama_cpp
    except ImportError as error:
        print(f"{BAR}\nllama.cpp is NOT measured: {error}\nTo include it: {LLAMA_CPP_INSTALL}\n{BAR}", file=sys.stderr)
        return None
    return llama_cpp


QUANTISED = {"int8": "Q8_0", "int4": "Q4_0"}  # of llama.cpp: its files of about as many bits


FILE = "file"  # a GGUF file's own weights


def dense(dtype: str) -> str:
    """What engines compute in that have no weights of this kind."""
    return "bfloat16" if dtype in (*QUANTISED, FILE) else dtype


def export_gguf(model: str, dtype: str, path: Path) -> Path:
    """The checkpoint as GGUF in that dtype; int8 and int4 as llama.cpp rounds the bfloat16 file by its own rules."""
    from foretoken_lab.peers.gguf import export

    tokenizer = AutoTokenizer.from_pretrained(folder_of(model))
    found = export(load_transformers(model, dense(dtype)), tokenizer, path)
    if dtype not in QUANTISED:
        return found
    import llama_cpp

    kind = QUANTISED[dtype]
    rounded = path.with_name(f"{path.stem}-{kind}.gguf")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    with _quiet_stderr():
        code = llama_cpp.llama_model_quantize(str(found).encode(), str(rounded).encode(), params)
    if code != 0:
        raise RuntimeError(f"llama_model_quantize returned {code}")
    found.unlink()
    return rounded


def kept_gguf(model: str, dtype: str) -> Path:
    """The same, made once and kept in the user's cache folder until model, exporter or llama.cpp change.

    Of a model that is a GGUF file, that file.
    """
    file = gguf_file_of(model)
    if file is not None:
        return file
    import llama_cpp

    from foretoken_lab.peers import gguf

    source = Path(folder_of(model))
    key = hashlib.sha256(Path(gguf.__file__).read_bytes())
    key.update(f"{fingerprint(source)} {llama_cpp.__version__}".encode())
    name = f"gguf/{source.name}-{dtype}-{key.hexdigest()[:16]}"

    def make(place: Path) -> None:
        export_gguf(model, dtype, place / "model.gguf")

    (found,) = folder_made_once(name, make).glob("*.gguf")
    return found


def open_llama(llama_cpp: Any, path: Path, *, context: int, threads: int, flash: bool, **options: Any) -> Any:
    """A model of the binding, greedy use, all threads for prompts and for tokens."""
    with _quiet_stderr():
        return llama_cpp.Llama(
            str(path),
            n_ctx=context,
            n_batch=512,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=flash,
            verbose=False,
            **options,
        )


class LlamaCppDirect:
    """llama.cpp plain, straight through its C interface: decode, largest logit, next; the least that Python can do.

    Above temperature 0, its own sampler takes the place of the largest logit.
    """

    group = "llama.cpp"

    def __init__(
        self, name: str, llama_cpp: Any, llama: Any, end_ids: frozenset[int], temperature: float = 0.0
    ) -> None:
        self.name = name
        self.lib = llama_cpp
        self.llama = llama
        self.end_ids = end_ids
        self.num_vocab = llama.n_vocab()
        self.sampler = None
        if temperature > 0:
            self.sampler = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
            llama_cpp.llama_sampler_chain_add(self.sampler, llama_cpp.llama_sampler_init_temp(temperature))
            llama_cpp.llama_sampler_chain_add(self.sampler, llama_cpp.llama_sampler_init_dist(0))

    def generate(self, ids: Sequence[int], max_tokens: int) -> list[int]:
        lib, context = self.lib, self.llama.ctx
        lib.llama_memory_clear(lib.llama_get_memory(context), False)
        array = (lib.llama_token * len(ids))(*ids)
        step = self.llama.n_batch
        for begin in range(0, len(ids), step):
            part = (lib.llama_token * len(ids[begin : begin + step])).from_buffer(array, begin * 4)
            self._decode(lib.llama_batch_get_one(part, len(part)))
        one = (lib.llama_token * 1)()
        batch = lib.llama_batch_get_one(one, 1)
        tokens: list[int] = []
        while True:
            if self.sampler is None:
                logits_V = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), shape=(self.num_vocab,))
                token = int(logits_V.argmax())
            else:
                token = lib.llama_sampler_sample(self.sampler, context, -1)
            tokens.append(token)
            if token in self.end_ids or len(tokens) == max_tokens:
                return tokens
            one[0] = token
            self._decode(batch)

    def _decode(self, batch: Any) -> None:
        code = self.lib.llama_decode(self.llama.ctx, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")


class LlamaServer:
    """llama.cpp's own server, over a socket of this machine, with its own speculation in C++.

    Args:
        options: of ``llama-server``, next to the usual ones.
    """

    group = "llama.cpp"

    def __init__(
        self,
        name: str,
        target: Path,
        *,
        context: int,
        threads: int,
        flash: bool,
        temperature: float,
        options: Sequence[str],
    ) -> None:
        self.name = name
        self.temperature = temperature
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        both = str(threads)
        command = [
            "llama-server",
            "--model",
            str(target),
            "--port",
            str(self._port),
            "--threads",
            both,
            "--threads-batch",
            both,
        ]
        command += [
            "--parallel",
            "1",
            "--ctx-size",
            str(context),
            "--flash-attn",
            "on" if flash else "off",
            "--log-disable",
        ]
        self._process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        atexit.register(self._process.terminate)
        self._wait()

    def generate(self, ids: Sequence[int], max_tokens: int) -> list[int]:
        body = {
            "prompt": list(ids),
            "n_predict": max_tokens,
            "temperature": self.temperature,
            "samplers": ["temperature"],
            "cache_prompt": False,
            "return_tokens": True,
        }
        connection = HTTPConnection("127.0.0.1", self._port, timeout=600)
        try:
            connection.request("POST", "/completion", json.dumps(body), {"content-type": "application/json"})
            answer = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        if "tokens" not in answer:
            raise RuntimeError(f"llama-server answered {str(answer)[:300]}")
        return list(answer["tokens"])

    def _wait(self) -> None:
        """Until the model is loaded."""
        for _ in range(600):
            if self._process.poll() is not None:
                raise RuntimeError(f"llama-server ended with {self._process.returncode}")
            with contextlib.suppress(OSError):
                connection = HTTPConnection("127.0.0.1", self._port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            time.sleep(0.1)
        raise RuntimeError("llama-server does not answer")


def llama_cpp_family(
    llama_cpp: Any,
    target: Path,
    draft: Path | None,
    *,
    context: int,
    threads: int,
    end_ids: frozenset[int],
    flash: bool,
    temperature: float = 0.0,
    requested: Callable[[str], bool],
) -> list[Any]:
    """Plain twice (straight, and its server's), and its server's speculation in several settings.

    Args:
        requested: whether an engine of this name is wanted.
    """
    common: dict[str, Any] = {"context": context, "threads": threads, "flash": flash}
    family: list[Any] = []
    if requested("llama.cpp"):
        opened = open_llama(llama_cpp, target, **common)
        family.append(LlamaCppDirect("llama.cpp", llama_cpp, opened, end_ids, temperature))
    settings: dict[str, list[str]] = {"": []}
    for matching, proposed in ((2, 4), (3, 8)):
        sizes = {"n": matching, "m": proposed}
        settings[f" ngram {matching}-{proposed}"] = ["--spec-type", "ngram-simple"] + [
            part for name, size in sizes.items() for part in (f"--spec-ngram-simple-size-{name}", str(size))
        ]
    if draft is not None:
        for count in (3, 6):  # its default, and more
            settings[f" draft {count}"] = [
                *("--model-draft", str(draft), "--spec-type", "draft-simple", "--spec-draft-n-max", str(count))
            ]
    wanted = {name: options for name, options in settings.items() if requested(f"llama.cpp server{name}")}
    if wanted and shutil.which("llama-server") is None:
        print(f"{BAR}\nllama.cpp's speculation is NOT measured: there is no llama-server on the PATH; "
              f"llama_server.py says how to build it\n{BAR}", file=sys.stderr)  # fmt: skip
        wanted = {}
    return family + [
        LlamaServer(f"llama.cpp server{name}", target, options=options, temperature=temperature, **common)
        for name, options in wanted.items()
    ]


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """The C library writes to the process's stderr while it loads, whatever ``verbose`` says."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
