"""Lattices from a masked diffusion checkpoint, as in the paper: the text, then k masks, in one pass.

                 Dream                          LLaDA                             masked language models
    class        Qwen2                          Llama, weights renamed            transformers' own class
    recognised   model_type "Dream"             model_type "llada"                transformers' table (ModernBERT, ...)
    rows         P-1 .. P+k-2: row j predicts   P .. P+k-1: row j predicts        P .. P+k-1
                 position j + 1                 position j

The first two pack all requests; rows of a segment attend to each other in both directions. No state is kept
between passes, because every row depends on every other one. The code of a checkpoint is never run.

Letters: P tokens of text that are read, k slots, V vocabulary of the target.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

from foretoken.core.errors import MismatchError, ModelError, UnsupportedArchitecture
from foretoken.core.protocols import Context
from foretoken.drafting.published.folder import tensors_of
from foretoken.forward import attention
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.methods.diffuspec.lattice import Lattice, LatticeNetwork
from foretoken.models.checkpoint_files import check_there
from foretoken.models.fingerprint import folder_of
from foretoken.models.language_model import LanguageModel, Output
from foretoken.models.load import load_config, load_network, load_tokenizer, source_of

_SLOTS = 1024  # maximum number of requests in one pass
# fields of LLaDA's config: the known value, and those that must be absent; its weights' names -> Llama's
_LLADA: Mapping[str, Any] = json.loads(Path(__file__).with_name("llada.json").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A masked diffusion model, ready to run.

    Attributes:
        model: a decoder over packed rows, or a masked language model of transformers.
        tokenizer: the checkpoint's tokenizer.
        mask: id of the mask token.
        shift: row that predicts a masked position, minus that position: -1 or 0.
        longest: number of positions.
    """

    model: Any
    tokenizer: Any
    mask: int
    shift: int
    longest: int


class MaskedLattices(LatticeNetwork):
    """Makes lattices with one checkpoint for one target.

    Args:
        name: zoo:NAME, a local folder, or a hub id; token ids must equal the target's.
        target: sets dtype and device.
        slots: k.
        top: number of tokens to rank at each slot.
        context: maximum number of tokens read, masks included; None: the training length if the checkpoint
            records it, else its number of positions.
    Raises:
        ModelError: the model does not exist or is damaged.
        UnsupportedArchitecture: the model is no masked diffusion model of a known layout.
        MismatchError: its tokenizer assigns a different token to one of the target's ids.
    """

    def __init__(self, name: str, target: LanguageModel, *, slots: int, top: int, context: int | None = None) -> None:
        self.name, self.slots = f"'{name}'", slots
        self._target, self._top = target, top
        self._checkpoint = found = _load(name, target)
        self._context = min(found.longest, context or _trained_length(name) or found.longest)
        if self._context <= slots + 1:
            raise ModelError(
                f"masked model '{name}' reads {self._context} tokens, which leaves no text before slots={slots} masks: "
                "give fewer slots, or a larger context if it was given"
            )
        ours, theirs = target.tokenizer.get_vocab(), found.tokenizer.get_vocab()
        other = (text for text, index in ours.items() if theirs.get(text) != index)
        odd = min(other, key=ours.__getitem__, default=None)
        if odd is not None:
            raise MismatchError(
                f"masked model '{name}' has another vocabulary than '{target.name}' ('{odd}' is {ours[odd]} and "
                f"{theirs.get(odd, 'absent')}): use one with the target's tokenizer"
            )
        known = torch.tensor(sorted(ours.values()), device=target.device)
        self._never = torch.ones(target.vocab_size, dtype=torch.bool, device=target.device)
        self._never[known] = False  # excludes padding of the table and tokens unknown to the target
        self._never[found.mask : found.mask + 1] = True
        self._cache = found.model.new_cache(_SLOTS) if isinstance(found.model, LanguageModel) else None

    @torch.inference_mode()
    def lattices(self, contexts: Sequence[Context], counts: Sequence[int] | None = None) -> list[Lattice | None]:
        """Run one forward for all requests if the model is a decoder, else one for each."""
        read = [list(context.tokens[-(self._context - self.slots) :]) for context in contexts]
        if not read:
            return []
        logits_MV = self._packed(read) if self._cache is not None else self._one_by_one(read)
        width = self._target.vocab_size
        if logits_MV.shape[1] < width:
            missing = width - logits_MV.shape[1]
            logits_MV = torch.nn.functional.pad(logits_MV, (0, missing), value=-torch.inf)
        logits_MV = logits_MV[:, :width].float().masked_fill(self._never, -torch.inf)
        output = Output.of(logits_MV, top=min(self._top, width))
        return [Lattice(output, number * self.slots, self.slots) for number in range(len(read))]

    def _one_by_one(self, read: Sequence[list[int]]) -> Tensor:
        rows = []
        for tokens in read:
            ids = torch.tensor([[*tokens, *[self._checkpoint.mask] * self.slots]], device=self._target.device)
            begin = len(tokens) + self._checkpoint.shift
            rows.append(self._checkpoint.model(input_ids=ids).logits[0, begin : begin + self.slots])
        return torch.cat(rows)

    def _packed(self, read: Sequence[list[int]]) -> Tensor:
        batch, cache = PackedBatch(), self._cache
        assert cache is not None
        slots = [cache.acquire() for _ in read]
        try:
            wanted: list[int] = []
            for slot, tokens in zip(slots, read, strict=True):
                begin = len(batch) + len(tokens) + self._checkpoint.shift
                cache.reserve(slot, len(tokens) + self.slots)
                batch.add_block(slot, 0, [*tokens, *[self._checkpoint.mask] * self.slots], first=0)
                wanted += range(begin, begin + self.slots)
            batch.wanted = wanted
            return self._checkpoint.model.forward(batch, DensePlan(cache, batch)).logits_MV
        finally:
            for slot in slots:
                cache.release(slot)


def _trained_length(name: str) -> int | None:
    """Return the text length in the training record of a checkpoint; None: no record."""
    try:
        found = json.loads((Path(source_of(name)) / "training.json").read_text(encoding="utf-8"))
        return int(found["block"]) if found.get("objective") == "masked_diffusion" else None
    except (OSError, ValueError, KeyError):
        return None


# ---------------------------------------------------------------------- layouts


def _load(name: str, target: LanguageModel) -> Checkpoint:
    """See :class:`MaskedLattices`."""
    source = source_of(name)
    check_there(source)
    folder = folder_of(source)
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind = settings["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"masked model '{name}': its config cannot be read ({error})") from None
    if kind in ("Dream", "llada"):
        try:
            return (_dream if kind == "Dream" else _llada)(name, folder, settings, target)
        except Exception as error:  # mismatched configs and files can fail anywhere; the remedy is the same
            reason = " ".join(str(error).split())[:300]
            raise ModelError(f"masked model '{name}': its files do not fit the {kind} layout ({reason})") from None
    config = load_config(name)
    if type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
        raise UnsupportedArchitecture(
            f"model '{name}' ({kind}) is no masked diffusion model: Dream, LLaDA and the masked language models of "
            "transformers are supported; for a causal model use method='draft_model'"
        )
    tokenizer = load_tokenizer(name)
    mask = tokenizer.mask_token_id if tokenizer.mask_token_id is not None else getattr(config, "mask_token_id", None)
    if mask is None:
        raise ModelError(f"masked model '{name}': neither its tokenizer nor its config has a mask token")
    dtype = {torch.bfloat16: "bfloat16", torch.float16: "float16"}.get(target.dtype, "float32")
    model = load_network(name, dtype=dtype).to(target.device)
    return Checkpoint(model, tokenizer, int(mask), 0, int(getattr(config, "max_position_embeddings", 512)))


def _dream(name: str, folder: Path, settings: Mapping[str, Any], target: LanguageModel) -> Checkpoint:
    """Load Qwen2 under Dream's tensor names; a row predicts the next position."""
    config = Qwen2Config(**{key: value for key, value in settings.items() if key not in ("model_type", "auto_map")})
    model = _decoder(Qwen2ForCausalLM, config, tensors_of(folder), name, target)
    if (folder / "tokenizer.json").is_file():
        tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    else:
        tokenizer = Qwen2Tokenizer.from_pretrained(str(folder))
    mask = int(settings["mask_token_id"])
    return Checkpoint(LanguageModel(model, tokenizer, name=name), tokenizer, mask, -1, config.max_position_embeddings)


def _llada(name: str, folder: Path, settings: Mapping[str, Any], target: LanguageModel) -> Checkpoint:
    """Load Llama under LLaDA's tensor names; a row predicts its own position."""
    for field, value in _LLADA["fixed"].items():
        if settings.get(field, value) != value:
            raise ValueError(f"{field}={settings[field]!r}, only {value!r} is known")
    for field in _LLADA["absent"]:
        if settings.get(field):
            raise ValueError(f"{field}={settings[field]!r} is not known")
    heads = settings["n_heads"]
    config = LlamaConfig(
        vocab_size=settings.get("embedding_size") or settings["vocab_size"],
        hidden_size=settings["d_model"],
        intermediate_size=settings.get("mlp_hidden_size") or settings["mlp_ratio"] * settings["d_model"],
        num_hidden_layers=settings["n_layers"],
        num_attention_heads=heads,
        num_key_value_heads=settings.get("n_kv_heads") or heads,
        max_position_embeddings=settings["max_sequence_length"],
        rope_parameters={"rope_type": "default", "rope_theta": float(settings.get("rope_theta", 10000.0))},
        rms_norm_eps=settings.get("rms_norm_eps", 1e-5),
        tie_word_embeddings=bool(settings.get("weight_tying")),
        eos_token_id=settings.get("eos_token_id"),
    )
    weights = {_renamed(key): value for key, value in tensors_of(folder).items()}
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    model = _decoder(LlamaForCausalLM, config, weights, name, target)
    mask = int(settings["mask_token_id"])
    return Checkpoint(LanguageModel(model, tokenizer, name=name), tokenizer, mask, 0, config.max_position_embeddings)


def _renamed(key: str) -> str:
    """Return Llama's name of a LLaDA weight."""
    bare = key.removeprefix("model.transformer.")
    whole: Mapping[str, str] = _LLADA["whole"]
    if bare in whole:
        return whole[bare]
    parts = bare.split(".")
    if len(parts) != 4 or parts[0] != "blocks" or parts[2] not in _LLADA["of_layer"]:
        raise ValueError(f"the tensor {key} does not belong to a LLaDA model")
    return f"model.layers.{parts[1]}.{_LLADA['of_layer'][parts[2]]}.{parts[3]}"


def _decoder(kind: Any, config: Any, weights: dict[str, Tensor], name: str, target: LanguageModel) -> Any:
    """Build a model of transformers with exactly these weights: none missing, none left over."""
    config._attn_implementation = attention.NAME
    model = kind(config).to(target.dtype)
    expected = {key: list(value.shape) for key, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
        weights = {key: value for key, value in weights.items() if key != "lm_head.weight"}
    for key in sorted(expected.keys() | weights.keys()):
        if key not in weights:
            raise ValueError(f"the tensor {key} is missing")
        if expected.get(key) != list(weights[key].shape):
            raise ValueError(f"{key} is {list(weights[key].shape)}, but {expected.get(key, 'nothing')} is described")
    model.load_state_dict(weights, strict=False)
    model.name_or_path = name
    return model.to(target.device).eval()
