"""LoRA folders that stay next to a base model, so that each request has its own; models/lora.py merges them instead.

What cannot be computed as a low-rank product next to a linear layer is refused by name.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_tensors
from torch import Tensor

from foretoken.core.errors import ModelError
from foretoken.core.files import home_expanded
from foretoken.forward.adapter import Adapter, LowRank
from foretoken.models.adoption.description import order_of
from foretoken.models.adoption.parts import Layer, parts_of
from foretoken.models.language_model import LanguageModel
from foretoken.models.lora import CONFIG
from foretoken.native.low_rank import DOWN, GATE_UP, OUT, QKV, PackedAdapter, Part

_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_MOST_RANK = 256
_REFUSED = (  # settings that make more of an adapter than low-rank products
    *("use_dora", "lora_bias", "modules_to_save", "layer_replication", "trainable_token_indices", "target_parameters"),
    *("alora_invocation_tokens", "use_qalora", "use_bdlora", "velora_config", "monteclora_config", "arrow_config"),
    "kasa_config",
)
_OWN_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # ways of beginning that change the base's weights
_Places = dict[str, list[tuple[int, int, Sequence[int], int]]]


def load_adapter(target: LanguageModel, name: str, folder: str | Path) -> Adapter:
    """Read an adapter for a loaded base model.

    Args:
        name: for messages and clients.
        folder: with ``adapter_config.json`` and ``adapter_model.safetensors``, as peft writes them.
    Raises:
        ModelError: it cannot be read, does not fit the model, or is of a kind that only a merge computes.
    """
    config, weights, digest = _read(name, home_expanded(folder))
    products, sides = {}, _sides(name, weights)
    places = None if target.native_decoder is None else _places(target)
    for module, (down_RK, up_OR) in sides.items():
        _check(name, target, module, down_RK, up_OR)
        if places is not None and module not in places:
            raise _odd(name, f"'{module}' is not one of the layers that an adapter of this model can correct")
        scale = _scale(config, module, len(down_RK))
        products[module] = LowRank(
            down_RK.float().contiguous().to(target.device), (up_OR.float() * scale).contiguous().to(target.device)
        )
    packed = None if places is None else _packed(target, products, places)
    return Adapter(name, products, digest, packed)


def _read(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], str]:
    for file in (CONFIG, _WEIGHTS):
        if not (folder / file).is_file():
            raise ModelError(f"adapter '{name}': there is no {folder / file}: give a folder that peft has saved")
    try:
        content = [(folder / file).read_bytes() for file in (CONFIG, _WEIGHTS)]
        config, weights = json.loads(content[0]), read_tensors(content[1])
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"adapter '{name}': {folder} cannot be read ({type(error).__name__}: {error})") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else config
        raise _odd(name, f"its {CONFIG} says peft_type={kind!r:.40}, not LORA")
    for option in _REFUSED:
        if config.get(option):
            raise _odd(name, f"it has {option}={config[option]!r:.60}")
    if config.get("bias", "none") != "none":
        raise _odd(name, f"it has bias={config['bias']!r:.20}")
    began = config.get("init_lora_weights")
    if isinstance(began, str) and began.lower().startswith(_OWN_BASE):
        raise _odd(name, f"it has init_lora_weights={began!r:.40}, which changes the base model's weights")
    return config, weights, hashlib.sha256(b"".join(content)).hexdigest()


def _sides(name: str, weights: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """The two matrices of each module."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in weights.items():
        matched = _KEY.fullmatch(key.removeprefix(_PREFIX))
        if matched is None or tensor.dim() != 2:
            raise _odd(name, f"it has '{key}' {list(tensor.shape)}, which is no lora_A.weight or lora_B.weight")
        found.setdefault(matched["module"], {})[matched["side"]] = tensor
    if not found:
        raise ModelError(f"adapter '{name}': its {_WEIGHTS} is empty: save the adapter again")
    for module, sides in found.items():
        if len(sides) < 2:
            raise ModelError(f"adapter '{name}': '{module}' has only lora_{next(iter(sides))}: save the adapter again")
    return {module: (sides["A"], sides["B"]) for module, sides in found.items()}


def _check(name: str, target: LanguageModel, module: str, down_RK: Tensor, up_OR: Tensor) -> None:
    try:
        linear = target.model.get_submodule(module)
    except AttributeError:
        raise ModelError(
            f"adapter '{name}': model '{target.name}' has no module '{module}': it is an adapter of another model"
        ) from None
    sizes = getattr(linear, "in_features", None), getattr(linear, "out_features", None)
    if None in sizes or linear is target.model.get_output_embeddings() or ".experts." in module:
        raise _odd(
            name,
            f"it corrects '{module}', a {type(linear).__name__}, and only linear layers of attention and "
            "MLPs can be corrected",
        )
    rank = len(down_RK)
    if (down_RK.shape[1], up_OR.shape[0]) != sizes or up_OR.shape[1] != rank:
        shapes = f"{list(down_RK.shape)} and {list(up_OR.shape)}"
        raise ModelError(
            f"adapter '{name}': '{module}' has matrices of {shapes}, and the model's layer maps {sizes[0]} inputs to "
            f"{sizes[1]} outputs: it is an adapter of another model"
        )
    if not 1 <= rank <= _MOST_RANK:
        raise _odd(name, f"'{module}' has rank {rank}, and at most {_MOST_RANK} can be computed")


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """alpha / rank, or alpha / sqrt(rank); a pattern may give a module its own alpha."""
    alpha = config.get("lora_alpha", 8)
    for pattern, own in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = own
            break
    return float(alpha / (rank**0.5 if config.get("use_rslora") else rank))


def _places(target: LanguageModel) -> _Places:
    """Where the native decoder has each linear layer: layer, packed weight, tiles, and tiles of the whole weight."""
    decoder = target.native_decoder
    assert decoder is not None
    found: dict[int, list[tuple[int, int, Sequence[int], int]]] = {}

    def put(index: int, which: int, modules: list[Any], places: Sequence[Sequence[int] | None], total: int) -> None:
        for module, tiles in zip(modules, places, strict=True):
            if tiles is not None:
                found.setdefault(id(module), []).append((index, which, tiles, total))

    for index, layer in enumerate(parts_of(target.model).layers):
        facts = decoder.facts(index)
        if facts["qkv_scale"] or facts["out_scale"] or facts["gate_up_scale"]:
            continue  # of a product and its correction together
        part, given, last = layer.attention, layer.heads, layer.out
        if part is None and layer.mixer is not None:
            part, (convolved, steps, last) = layer.mixer, layer.mixing
            given = (*convolved, *steps)
        if part is not None:
            linears, out = [getattr(part, each) for each in given], getattr(part, last)
            total = -(-sum(each.out_features for each in linears) // 16)
            put(index, QKV, linears, list(_one_after_the_other(layer, linears)), total)
            put(index, OUT, [out], [range(out.out_features // 16)], out.out_features // 16)
        if layer.mlp is not None:
            into = [getattr(layer.mlp, each) for each in layer.way.into]
            total = sum(each.out_features for each in into) // 16
            ranges = [range(0, total, 2), range(1, total, 2)] if layer.way.gated else [range(total)]
            put(index, GATE_UP, into * (len(ranges) // len(into)), ranges, total)
            down = getattr(layer.mlp, layer.way.out)
            put(index, DOWN, [down], [range(down.out_features // 16)], down.out_features // 16)
    names = {id(module): name for name, module in target.model.named_modules()}
    return {names[key]: value for key, value in found.items() if key in names}


def _one_after_the_other(layer: Layer, linears: list[Any]) -> Iterator[Sequence[int] | None]:
    """The tiles of each, in the order of its outputs; None where these are not whole tiles."""
    begin = 0
    for each in linears:
        order_O = order_of(layer, each)
        order_O = torch.arange(each.out_features) if order_O is None else order_O
        firsts_N = order_O[::16]
        tiles_O = (firsts_N[:, None] + torch.arange(16)).flatten()
        whole = not begin % 16 and not firsts_N.remainder(16).any() and torch.equal(order_O, tiles_O)
        yield (begin // 16 + firsts_N.argsort()).tolist() if whole else None
        begin += each.out_features


def _packed(target: LanguageModel, products: Mapping[str, LowRank], places: _Places) -> PackedAdapter:
    parts: dict[tuple[int, int], list[Part]] = {}
    for module, product in products.items():
        begin = 0  # a gate and its other factor may be one linear layer
        for layer, which, tiles, total in places[module]:
            end = begin + 16 * len(tiles)
            own = LowRank(product.down_RK, product.up_OR[begin:end])
            parts.setdefault((layer, which), []).append(Part(own, tiles, total))
            begin = end
    return PackedAdapter(target.num_layers, parts)


def _odd(name: str, why: str) -> ModelError:
    return ModelError(f"adapter '{name}': {why}: load it as a model of its own, which merges it")
