"""What rounding does to a model: the distance of its distributions from those of the same weights in float32.

    python lab/benchmarks/rounding_error.py MODEL --text wiki.txt --dtype int8,int4
    python lab/benchmarks/rounding_error.py model-Q4_1.gguf --text wiki.txt --dtype auto

The reference are the weights as they are stored: a file's own, dequantised, in the library's float32
forward; so the files' rounding of weights is left out where ``--dtype auto`` reads a file, and rounding of activations
is what remains. One JSON line for each dtype: mean, median and 99th percentile of KL(float32 || rounded) in nats a
token, the share of positions with the same best token, by how much perplexity grows, and where the figures come from.

Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretoken.core.provenance import checksum, provenance
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.forward.quantised_weight import QuantisedLinear
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load, load_as_is
from foretoken_lab.peers.versions import command


class Distance(NamedTuple):
    """Of one sequence of distributions from another; KL in nats, perplexity relative."""

    mean_kl: float
    median_kl: float
    p99_kl: float
    same_best: float
    perplexity: float


def distance(found_TV: Tensor, expected_TV: Tensor, ids_T: Tensor) -> Distance:
    """How far logits are from the expected ones, which is 0 for a shift that all logits of a row have in common."""
    found_TV, expected_TV = (each.float().log_softmax(-1) for each in (found_TV, expected_TV))
    kl_T = (expected_TV.exp() * (expected_TV - found_TV)).sum(-1).clamp_min(0)
    nats = [-each[:-1].gather(1, ids_T[1:, None]).mean().item() for each in (found_TV, expected_TV)]
    return Distance(
        mean_kl=kl_T.mean().item(),
        median_kl=kl_T.median().item(),
        p99_kl=kl_T.quantile(0.99).item(),
        same_best=(found_TV.argmax(-1) == expected_TV.argmax(-1)).float().mean().item(),
        perplexity=math.exp(nats[0] - nats[1]) - 1,
    )


@torch.inference_mode()
def logits_of(model: LanguageModel, ids: list[int]) -> Tensor:
    """[T, V] float32, read as a prompt is."""
    cache = model.new_cache(1)
    slot = cache.acquire()
    cache.reserve(slot, len(ids))
    batch = PackedBatch()
    batch.add_chunk(slot, 0, ids, wanted=len(ids))
    return model.forward(batch, DensePlan(cache, batch)).logits_MV.float().clone()


def in_float32(name: str) -> Any:
    """The library's model with every weight dequantised."""
    found = load_as_is(name, device="cpu").model.float()
    for path, module in list(found.named_modules()):
        if isinstance(module, QuantisedLinear):
            dense = torch.nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            dense.weight = torch.nn.Parameter(module.weight, requires_grad=False)
            if module.bias is not None:
                dense.bias = torch.nn.Parameter(module.bias.float(), requires_grad=False)
            found.set_submodule(path, dense)
    return found


def checksums(model: Path) -> dict[str, str]:
    """16 hexadecimal digits of SHA-256 for a file, or for each file of weights in a folder; nothing for other names."""
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else [model] if model.is_file() else []
    return {f"{model.name}/{path.name}" if model.is_dir() else path.name: checksum(path) for path in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True, help="a file; its first tokens are read")
    parser.add_argument("--tokens", type=int, default=700)
    parser.add_argument("--dtype", default="int8,int4", help="what to load the model in, separated by commas")
    parser.add_argument("--kv-cache-dtype", default="auto")
    given = parser.parse_args()
    facts = provenance([], model=Path(given.model).name, threads=torch.get_num_threads())
    facts["command"] = command("rounding_error.py")
    facts["models"] |= checksums(Path(given.model))
    text = given.text.read_text(encoding="utf-8")[: 20 * given.tokens]
    expected_TV, ids = None, []
    for dtype in given.dtype.split(","):
        model = load(given.model, dtype=dtype, device="cpu", kv_cache_dtype=given.kv_cache_dtype)
        if expected_TV is None:
            ids = model.tokenizer(text).input_ids[: given.tokens]
            with torch.inference_mode():
                expected_TV = in_float32(given.model)(torch.tensor([ids])).logits[0]
        found = distance(logits_of(model, ids), expected_TV, torch.tensor(ids))
        record = {"model": Path(given.model).name, "dtype": dtype, "kv_cache_dtype": given.kv_cache_dtype}
        record |= {"tokens": len(ids), "native": model.native_decoder is not None}
        record |= {name: round(value, 5) for name, value in found._asdict().items()}
        print(json.dumps(record | {"provenance": facts}), flush=True)


if __name__ == "__main__":
    main()
