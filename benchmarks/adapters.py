"""One small class per engine, all with the same face, so that one loop can measure them alike.

    name                       how tables and files call it
    group                      "ours", "transformers" or "llama.cpp"
    generate(ids, max_tokens)  greedy tokens after the prompt, up to and including the end token

Every engine gets the prompt as the same token ids, starts without any memory of earlier prompts, stops at the same end
tokens, and has ``threads`` threads. What an engine cannot do is said here, beside the code that works around it.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from foretoken import LLM, SamplingParams
from foretoken.core.files import folder_made_once
from foretoken.models.fingerprint import fingerprint
from foretoken.models.load import source_of

LLAMA_CPP_INSTALL = "pip install cmake ninja && pip install 'llama-cpp-python>=0.3.16' 'gguf>=0.17'"

_NOTHING = np.array([], dtype=np.intc)


class Adapter(Protocol):
    name: str
    group: str

    def generate(self, ids: Sequence[int], max_tokens: int) -> list[int]: ...


def folder_of(model: str) -> str:
    """What transformers is given for ``zoo:NAME`` or ``grown:NAME:SIZE``; a folder is one."""
    return source_of(model)


# ---------------------------------------------------------------------------------------------------------- ours


class Foretoken:
    """Our engine with one recipe. All recipes share the target's weights, as in ``foretoken bench``."""

    group = "ours"

    def __init__(self, name: str, llm: LLM) -> None:
        self.name = name
        self.llm = llm
        self.metrics: Any = None  # of the last call: steps and draft lengths, which other engines do not tell

    def generate(self, ids: Sequence[int], max_tokens: int) -> list[int]:
        (output,) = self.llm.generate([{"prompt_token_ids": list(ids)}], SamplingParams(max_tokens=max_tokens))
        if output.error is not None:
            raise RuntimeError(output.error)
        self.metrics = output.metrics
        return output.token_ids


def our_recipes(draft: str | None) -> dict[str, dict[str, Any]]:
    """Our side of the comparison: plain, every drafter with its defaults (adaptive length), and one fixed length."""
    recipes: dict[str, dict[str, Any]] = {
        "none": {"method": "none"},
        "ngram": {"method": "ngram"},
        "suffix": {"method": "suffix"},
    }
    if draft is not None:
        recipes["draft_model"] = {"method": "draft_model", "model": draft}
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
        assistant: Any = None,
        assistant_options: dict[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.options = options or {}
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
                ids_1T,
                attention_mask=torch.ones_like(ids_1T),
                max_new_tokens=max_tokens,
                do_sample=False,
                use_cache=True,
                **options,
            )
        return out_1T[0, len(ids) :].tolist()


def load_transformers(model: str, dtype: str) -> Any:
    """The library's own model, untouched by us."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="transformers")
    loaded = AutoModelForCausalLM.from_pretrained(folder_of(model), dtype=getattr(torch, dtype)).eval()
    # sampling fields that a checkpoint may bring mean nothing to greedy decoding, and would only be warned about
    loaded.generation_config.update(temperature=None, top_p=None, top_k=None, do_sample=False)
    return loaded


def transformers_family(target: Any, assistant: Any | None) -> list[Transformers]:
    """Plain, prompt lookup, and assisted generation in several settings; the best of each kind is what counts."""
    family = [Transformers("transformers", target)]
    family += [
        Transformers(f"transformers lookup {count}", target, {"prompt_lookup_num_tokens": count})
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
            family.append(Transformers(name, target, assistant=assistant, assistant_options=options))
    return family


def _constant(count: int) -> dict[str, Any]:
    return {
        "num_assistant_tokens": count,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


# ------------------------------------------------------------------------------------------------------ llama.cpp


def import_llama_cpp() -> Any | None:
    """The binding, or None after saying loudly what is missing and how to get it."""
    try:
        import gguf  # noqa: F401
        import llama_cpp
    except ImportError as error:
        bar = "!" * 78
        print(f"{bar}\nllama.cpp is NOT measured: {error}\nTo include it: {LLAMA_CPP_INSTALL}\n{bar}", file=sys.stderr)
        return None
    return llama_cpp


QUANTISED = {"int8": "Q8_0", "int4": "Q4_0"}  # of llama.cpp: its files of about as many bits


def dense(dtype: str) -> str:
    """What engines compute in that have no weights of this kind."""
    return "bfloat16" if dtype in QUANTISED else dtype


def export_gguf(model: str, dtype: str, path: Path) -> Path:
    """The checkpoint as GGUF in that dtype; int8 and int4 as llama.cpp rounds the bfloat16 file by its own rules."""
    from foretoken.bench.gguf import export

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
    """The same, made once and kept in the user's cache folder until model, exporter or llama.cpp change."""
    import llama_cpp

    from foretoken.bench import gguf

    source = Path(folder_of(model))
    key = hashlib.sha256(Path(gguf.__file__).read_bytes())
    key.update(f"{fingerprint(source)} {llama_cpp.__version__}".encode())
    name = f"gguf/{source.name}-{dtype}-{key.hexdigest()[:16]}"
    (found,) = folder_made_once(name, lambda place: export_gguf(model, dtype, place / "model.gguf")).glob("*.gguf")
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


class LlamaCpp:
    """llama.cpp through its binding's ``generate``, plain or with the binding's own speculation (``draft_model``).

    The binding has prompt lookup and an interface for drafters, but no drafter that runs a model: see LlamaDrafter.
    With any drafter it computes and copies the logits of all rows, the prompt's included.
    """

    group = "llama.cpp"

    def __init__(self, name: str, llama: Any, end_ids: frozenset[int]) -> None:
        self.name = name
        self.llama = llama
        self.end_ids = end_ids

    def generate(self, ids: Sequence[int], max_tokens: int) -> list[int]:
        self.llama.reset()  # else it would keep the common prefix with the last prompt
        tokens: list[int] = []
        for token in itertools.islice(self.llama.generate(list(ids), temp=0.0), max_tokens):
            tokens.append(token)
            if token in self.end_ids:
                break
        return tokens


class LlamaCppDirect:
    """llama.cpp plain, straight through its C interface: decode, largest logit, next; nothing of the binding between.

    The binding's ``generate`` sets up a sampler chain and fills its batch in Python; this is the least that Python can
    do, and therefore the number to beat.
    """

    group = "llama.cpp"

    def __init__(self, name: str, llama_cpp: Any, llama: Any, end_ids: frozenset[int]) -> None:
        self.name = name
        self.lib = llama_cpp
        self.llama = llama
        self.end_ids = end_ids
        self.num_vocab = llama.n_vocab()

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
            logits_V = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), shape=(self.num_vocab,))
            token = int(logits_V.argmax())
            tokens.append(token)
            if token in self.end_ids or len(tokens) == max_tokens:
                return tokens
            one[0] = token
            self._decode(batch)

    def _decode(self, batch: Any) -> None:
        code = self.lib.llama_decode(self.llama.ctx, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")


def llama_drafter_class(llama_cpp: Any) -> type:
    """A drafter for the binding that runs a second model; a class made on demand, since its base is optional."""
    from llama_cpp.llama_speculative import LlamaDraftModel

    class LlamaDrafter(LlamaDraftModel):  # type: ignore[misc]
        """Greedy chain of ``count`` tokens from a second model, its cache kept up to the common prefix."""

        def __init__(self, llama: Any, count: int) -> None:
            self.llama = llama
            self.count = count
            self.num_vocab = llama.n_vocab()
            self.read = _NOTHING  # what the draft's cache holds
            self.one = (llama_cpp.llama_token * 1)()
            self.batch_of_one = llama_cpp.llama_batch_get_one(self.one, 1)

        def __call__(self, input_ids: Any, /, **kwargs: Any) -> Any:
            # what is already read stays, up to the first difference; the last token is read again for its logits
            shared = min(len(self.read), len(input_ids) - 1)
            differing = np.flatnonzero(self.read[:shared] != input_ids[:shared])
            keep = int(differing[0]) if len(differing) else shared
            memory = llama_cpp.llama_get_memory(self.llama.ctx)
            llama_cpp.llama_memory_seq_rm(memory, 0, keep, -1)
            rest = input_ids[keep:].tolist()
            for begin in range(0, len(rest), self.llama.n_batch):
                part = rest[begin : begin + self.llama.n_batch]
                array = (llama_cpp.llama_token * len(part))(*part)  # must outlive the call: the batch only points to it
                self._decode(llama_cpp.llama_batch_get_one(array, len(part)))
            drafted: list[int] = []
            while True:
                pointer = llama_cpp.llama_get_logits_ith(self.llama.ctx, -1)
                token = int(np.ctypeslib.as_array(pointer, shape=(self.num_vocab,)).argmax())
                drafted.append(token)
                if len(drafted) == self.count:
                    break
                self.one[0] = token
                self._decode(self.batch_of_one)
            tokens = np.array(drafted, dtype=np.intc)
            self.read = np.concatenate([input_ids, tokens[:-1]])
            return tokens

        def forget(self) -> None:
            self.read = _NOTHING

        def _decode(self, batch: Any) -> None:
            code = llama_cpp.llama_decode(self.llama.ctx, batch)
            if code != 0:
                raise RuntimeError(f"llama_decode of the draft returned {code}")

    return LlamaDrafter


def llama_cpp_family(
    llama_cpp: Any,
    target: Path,
    draft: Path | None,
    *,
    context: int,
    threads: int,
    end_ids: frozenset[int],
    flash: bool,
) -> list[Any]:
    """Plain twice (straight and through the binding), prompt lookup and model drafting with several lengths."""
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    common = {"context": context, "threads": threads, "flash": flash}
    plain = open_llama(llama_cpp, target, **common)
    family: list[Any] = [
        LlamaCppDirect("llama.cpp", llama_cpp, plain, end_ids),
        LlamaCpp("llama.cpp binding", plain, end_ids),
    ]
    # without logits_all the binding's score table has n_batch rows, and a drafter writes beyond them
    speculative = open_llama(llama_cpp, target, logits_all=True, **common)
    for count in (2, 6):
        drafter = LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=count)
        family.append(_WithDrafter(f"llama.cpp lookup {count}", speculative, end_ids, drafter))
    if draft is not None:
        drafting = open_llama(llama_cpp, draft, **common)
        make = llama_drafter_class(llama_cpp)
        for count in (2, 4):
            drafter = make(drafting, count)
            family.append(_WithDrafter(f"llama.cpp draft {count}", speculative, end_ids, drafter))
    return family


class _WithDrafter(LlamaCpp):
    """Several drafters share one loaded target: the drafter is put in before each call."""

    def __init__(self, name: str, llama: Any, end_ids: frozenset[int], drafter: Any) -> None:
        super().__init__(name, llama, end_ids)
        self.drafter = drafter

    def generate(self, ids: Sequence[int], max_tokens: int) -> list[int]:
        self.llama.draft_model = self.drafter
        if hasattr(self.drafter, "forget"):
            self.drafter.forget()
        return super().generate(ids, max_tokens)


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
