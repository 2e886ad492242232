"""A model before it is loaded: its files, its path through the engine, its tokenizer, and what could draft for it.

Only headers, configs and tokenizers are read.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from torch import nn
from transformers import GenerationConfig

from foretoken import catalog, zoo
from foretoken.core.errors import ForetokenError, MismatchError
from foretoken.core.files import home_expanded
from foretoken.doctor.finding import Finding, found
from foretoken.drafting.learned_part import lies_beside
from foretoken.drafting.published.folder import method_for
from foretoken.drafting.published.layouts import DRAFT_MODEL
from foretoken.engine import before_weights
from foretoken.forward import attention
from foretoken.forward.ssm import layout
from foretoken.models.adoption.families import FAMILIES
from foretoken.models.adoption.fit import odd_anatomy
from foretoken.models.checkpoint_files import CheckpointFiles, auto_class, quiet
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.linear_layers import use_linear_layers
from foretoken.models.load import check_purpose, source_of
from foretoken.models.memory import bytes_of_token, free_memory, seats
from foretoken.models.quantised import folder as quantised_folder
from foretoken.models.quantised.assemble import skeleton

_QUESTION = {"role": "user", "content": "Hello"}
_TEXTS = ("Plain words, 1 234.5.", "def f(x):\n\treturn x ** 2\n", "naïve 日本語 🙂 é")
_LARGE_DRAFT = 0.4  # of the target's bytes


def check(model: str, draft: str | None) -> Iterator[Finding]:
    """Look at a model, and at its draft model.

    Args:
        draft: None: the bundled one where there is one for this target.
    """
    try:
        source = source_of(model)
        if not Path(source).exists() and not _is_here(source):
            yield found("model", f"{model} is not on this machine", fail="check the name, or load it once to fetch it")
            return
        files = CheckpointFiles.of(model, source, trusted=False)
        check_purpose(files.config, model)
        tokenizer = files.tokenizer()
    except ForetokenError as error:
        yield found("model", str(error), fail="correct this first: nothing can be loaded")
        return
    yield _model(files)
    yield _path(files)
    yield _whole(files)
    yield _tokenizer(tokenizer)
    yield _template(tokenizer)
    yield _ends(files, tokenizer)
    yield from _drafts(model, draft, files)
    if _positions(files.config):
        yield _memory(files)


def _is_here(source: str) -> bool:
    try:
        return isinstance(try_to_load_from_cache(source, "config.json"), str)
    except (HFValidationError, ValueError):
        return False


def _model(files: CheckpointFiles) -> Finding:
    text = files.config.get_text_config(decoder=True)
    dtype = getattr(files.config, "dtype", None) or getattr(text, "dtype", None) or torch.float32
    settings = quantised_folder.settings_of(files.config)
    kind = "GGUF" if files.gguf is not None else f"{settings.get('quant_method')} weights" if settings else "weights"
    stored = f"{kind} of {files.num_bytes(dtype) / 1e9:.2f} GB"
    facts = f"{files.config.model_type}, {stored}, computed in {str(dtype).removeprefix('torch.')}"
    if dtype == torch.float16:
        return found("model", facts, warn="processors are slow in float16: bfloat16 replaces it, or --dtype float32")
    return found("model", facts)


def _path(files: CheckpointFiles) -> Finding:
    """Whether the native decoder computes the model: modules of the same shapes, without weights, are looked at."""
    config = files.config.get_text_config(decoder=True)  # of a model that reads images, too, the part that is loaded
    kind = config.model_type
    if kind not in FAMILIES:
        return found(
            "path", f"general: no native code knows the family '{kind}'", warn="expect less speed, the same text"
        )
    dtype = getattr(files.config, "dtype", None)
    dtype = dtype if dtype in (torch.float32, torch.bfloat16) else torch.bfloat16
    try:
        with quiet():
            model = skeleton(auto_class(config), config, dtype, attn_implementation=attention.NAME)
            use_linear_layers(model)
            for module in model.modules():
                for name, value in module._parameters.items():
                    if value is not None:  # one number in memory, of the whole shape
                        full = torch.zeros((), dtype=value.dtype).expand(value.shape)
                        module._parameters[name] = nn.Parameter(full, requires_grad=False)
            reason = odd_anatomy(model, layout.mixers(model))
    except Exception as error:  # a config that makes no model fails anywhere in the library
        return found("path", " ".join(str(error).split())[:200], fail="the config is damaged: fetch the model again")
    if reason is not None:
        return found("path", f"general: {reason}", warn="expect less speed, the same text")
    return found("path", f"native ({kind})")


def _whole(files: CheckpointFiles) -> Finding:
    """Whether the weight files have the size that their headers say; GGUF files were checked when they were opened."""
    if files.gguf is not None or not Path(files.source).is_dir():
        return found("files", "whole" if files.gguf is not None else "in the hub's cache")
    folder = Path(files.source)
    names = {path.name for path in folder.glob("*.safetensors")}
    index = folder / "model.safetensors.index.json"
    name = index.name
    try:
        if index.is_file():
            names |= set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        for name in sorted(names):
            with (folder / name).open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                entries = json.loads(file.read(min(length, 1 << 28)))
            ends = [each["data_offsets"][1] for key, each in entries.items() if key != "__metadata__"]
            missing = 8 + length + max(ends, default=0) - (folder / name).stat().st_size
            if missing > 0:
                return found("files", f"{name} lacks its last {missing:,} bytes", fail="fetch it again")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return found("files", f"{name}: {error}", fail="fetch the file again")
    if not names and not any(folder.glob("*.bin")):
        return found("files", "no weights (*.safetensors)", fail="fetch or save the checkpoint again")
    return found("files", f"{len(names)} weight file{'s' * (len(names) != 1)}, whole")


def _tokenizer(tokenizer: Any) -> Finding:
    changed = [text for text in _TEXTS if _round_trip(tokenizer, text) != text]
    facts = f"{type(tokenizer).__name__}, {len(tokenizer):,} tokens"
    if changed:
        lost = f"{facts}; it does not give back {changed[0]!r}"
        return found("tokenizer", lost, warn="it normalises text: copies and offsets of such text are not exact")
    if not getattr(tokenizer, "is_fast", True):
        return found("tokenizer", f"{facts}, written in Python", warn="save it with its tokenizer.json, to be fast")
    return found("tokenizer", facts)


def _round_trip(tokenizer: Any, text: str) -> str:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)).removeprefix(" ")


def _template(tokenizer: Any) -> Finding:
    if not tokenizer.chat_template:
        return found("template", "none: prompts are continued as they are")
    try:
        plain = _rendered(tokenizer, [_QUESTION], generate=True)
        tools = "tools" in str(tokenizer.chat_template)
    except Exception as error:  # of the template's own code
        return found("template", f"fails: {error}", fail="correct chat_template, or use --raw")
    if plain == _rendered(tokenizer, [_QUESTION], generate=False):
        return found(
            "template", "does not begin the answer", warn="add_generation_prompt changes nothing: see its code"
        )
    return found("template", f"renders; {'with' if tools else 'without'} tools")


def _rendered(tokenizer: Any, messages: list[dict[str, str]], *, generate: bool) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate))


def _ends(files: CheckpointFiles, tokenizer: Any) -> Finding:
    """Whether the sources agree at which token an answer ends."""
    named = {
        "generation_config.json": _ids(_generation_config(files)),
        "config.json": _ids(files.config) or _ids(files.config.get_text_config(decoder=True)),
        "the tokenizer": {each for each in (tokenizer.eos_token_id, *getattr(tokenizer, "turn_end_ids", ())) if each},
    }
    stops = (named["generation_config.json"] or named["config.json"]) | named["the tokenizer"]
    names = tokenizer.convert_ids_to_tokens
    if not stops:
        return found("end tokens", "none is named", fail="set eos_token_id in generation_config.json: no answer ends")
    written = _written_end(tokenizer)
    if written is not None and written not in stops:
        facts = f"the template ends an answer with {names(written)!r} ({written}), which nothing names as an end"
        return found("end tokens", facts, fail=f"add {written} to eos_token_id in generation_config.json")
    alone = {
        each: [source for source, ids in named.items() if each in ids]
        for each in sorted(stops)
        if written in (None, each) and sum(map(bool, named.values())) > 1
    }
    odd = [f"{names(each)!r} ({each}) only by {by[0]}" for each, by in alone.items() if len(by) == 1]
    facts = ", ".join(f"{names(each)!r} ({each})" for each in sorted(stops))
    if odd:
        remedy = "answers end there; other engines read one of these files only: name it in generation_config.json"
        return found("end tokens", f"{facts}; named {'; '.join(odd)}", warn=remedy)
    return found("end tokens", facts)


def _generation_config(files: CheckpointFiles) -> Any:
    if files.gguf is not None:
        return None
    try:
        with quiet():
            return GenerationConfig.from_pretrained(files.source)
    except OSError:
        return None


def _ids(config: Any) -> set[int]:
    eos = getattr(config, "eos_token_id", None)
    return set(eos) if isinstance(eos, (list, tuple)) else {eos} if isinstance(eos, int) else set()


def _written_end(tokenizer: Any) -> int | None:
    """The first special token that the chat template writes after an answer; None: there is none."""
    if not tokenizer.chat_template:
        return None
    answer = "Indeed."
    try:
        text = _rendered(tokenizer, [_QUESTION, {"role": "assistant", "content": answer}], generate=False)
    except Exception:  # of the template's own code; the line above reports it
        return None
    after = tokenizer(text.rpartition(answer)[2], add_special_tokens=False)["input_ids"]
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    return next((each for each in after if each in special), None)


def _drafts(model: str, draft: str | None, files: CheckpointFiles) -> Iterator[Finding]:
    """The draft model, and heads next to the weights."""
    draft = draft or (zoo.DRAFT if zoo.drafts_for(zoo.DRAFT, model) else None)
    if draft is None:
        yield found("draft model", "none is named (--draft-model); copying drafts without one")
    else:
        yield _pair(model, draft, files)
    for entry in catalog.entries("drafter"):
        declared = entry.load().declared
        if declared.learned_part is None or declared.draft_model or declared.brought:
            continue
        if lies_beside(catalog.imported(declared.learned_part), files.source):
            try:
                before_weights.check(model, {"method": entry.name})
            except ForetokenError as error:
                yield found(f"head {entry.name}", str(error), fail="train it for these weights, or remove its folder")
            else:
                yield found(f"head {entry.name}", f"lies next to the weights: --method {entry.name}")


def _pair(model: str, draft: str, files: CheckpointFiles) -> Finding:
    method = DRAFT_MODEL
    try:
        method = method_for(draft)
        part = catalog.find(method, "drafter").load().declared.learned_part
        if part is not None:
            before_weights.check(model, {"method": method, "model": draft})
            return _head(draft, method, catalog.imported(part).load(home_expanded(draft)).config, files)
        before_weights.check_vocabulary(model, draft)
        theirs = CheckpointFiles.of(draft, source_of(draft), trusted=False)
    except ForetokenError as error:
        if isinstance(error, MismatchError) and method == DRAFT_MODEL:
            remedy = "draft_model translates between the vocabularies, which costs time; other methods refuse it"
            return found("draft model", str(error), warn=remedy)
        return found("draft model", str(error), fail="name another one, or leave it out")
    share = theirs.num_bytes(torch.bfloat16) / max(1, files.num_bytes(torch.bfloat16))
    reach, wanted = _positions(theirs.config), _positions(files.config)
    facts = f"{draft}: the same tokens, {share:.0%} of the target's bytes"
    if reach < wanted:
        remedy = f"beyond {reach:,} tokens nothing is drafted: take another draft for long contexts"
        return found("draft model", f"{facts}, {reach:,} of its {wanted:,} positions", warn=remedy)
    if share > _LARGE_DRAFT:
        return found("draft model", facts, warn="so large a draft seldom pays: --set dtype=int4 rounds it")
    return found("draft model", facts)


def _head(folder: str, method: str, head: Any, files: CheckpointFiles) -> Finding:
    """A head that is named as the draft model."""
    target = files.config.get_text_config(decoder=True)
    for name, ours, theirs in (
        ("width", getattr(head, "target_width", None), target.hidden_size),
        ("vocabulary", getattr(head, "vocab_size", None), target.vocab_size),
    ):
        if ours not in (None, theirs):
            facts = f"{folder}: a head of method '{method}' for a {name} of {ours:,}; the model's is {theirs:,}"
            return found("draft model", facts, fail="name a head of this model, or leave it out")
    facts = f"{folder}: a head of method '{method}', trained for "
    if head.target_fingerprint == fingerprint_of(files.source):
        return found("draft model", f"{facts}these weights")
    remedy = "it is compared with the model at load, and refused if its drafts do not agree"
    return found("draft model", f"{facts}other weights, those of '{head.target}'", warn=remedy)


def _positions(config: Any) -> int:
    return int(getattr(config.get_text_config(decoder=True), "max_position_embeddings", 0) or 0)


def _memory(files: CheckpointFiles) -> Finding:
    """Keys and values of as many requests as the server runs by default, each as long as the context."""
    each, positions = bytes_of_token(files.config), _positions(files.config)
    count = seats(each, positions)
    needed = each * positions * count
    facts = f"{count} requests of {positions:,} tokens take {needed / 1e9:.1f} GB of keys and values"
    free = free_memory()
    left = None if free is None else free - files.num_bytes(torch.bfloat16)
    if left is not None and needed > left:
        remedy = "--max-model-len or --max-num-seqs bounds them; --kv-cache-dtype int8 halves them"
        return found("server", f"{facts}, and {max(0, left) / 1e9:.1f} GB are left", warn=remedy)
    return found("server", facts)
