"""What rounding does to a model here, in llama.cpp and in OpenVINO: the same files, tokens and references.

    python lab/benchmarks/rounding_error.py smollm2-f32 --text wiki.txt --dtype int8,int4 --file smollm2-Q8_0.gguf
    python lab/benchmarks/rounding_error.py --quantise Q4_1.gguf F32
    python lab/benchmarks/rounding_error.py --quantise Q4_1-F32.gguf Q8_0,Q4_K_M
    python lab/benchmarks/rounding_error.py --quantise smollm2-f32 GPTQ

It measures what ``foretoken eval --against`` does, with two references for each runtime: ``same weights`` is float32
with the very weights that the codes stand for, so only the rounding of activations is left; ``unrounded`` is MODEL in
float32. One JSON line for each runtime, reference and text. Of a folder of quantised layers (``--file FOLDER``), the
runtime next to ours is transformers with dequantised weights in bfloat16. OpenVINO is measured with ``--openvino``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from foretoken.core.provenance import checksum, provenance
from foretoken.models.load import load, load_network, load_tokenizer
from foretoken.models.quantised.rounding import round_weights
from foretoken_lab.peers import adapters
from foretoken_lab.peers.gptq import write_gptq
from foretoken_lab.peers.openvino import logits_of_openvino
from foretoken_lab.peers.versions import command
from foretoken_lab.tasks.reference import Reference, dequantised
from foretoken_lab.tasks.rounding_error import Comparison, logits_of, windows

Ids = list[int]
_PREFIX = "LLAMA_FTYPE_MOSTLY_"
_SMALLEST = 256  # tokens of llama.cpp's context, which it rounds up to a multiple


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a folder in float32")
    parser.add_argument("--text", type=Path, action="append", default=[], help="a file; its first tokens are read")
    parser.add_argument("--tokens", type=int, default=700)
    parser.add_argument("--dtype", default="", help="what to round the model to, separated by commas")
    parser.add_argument("--file", action="append", default=[], help="a GGUF file, or a folder of quantised layers")
    parser.add_argument("--theirs", action="append", default=[], help="a GGUF file that only llama.cpp reads")
    parser.add_argument("--openvino", action="store_true", help="read the GGUF files by OpenVINO, too")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quantise", nargs=2, metavar=("FILE", "KINDS"), help="write its quantised files, and end")
    given = parser.parse_args()
    if given.quantise:
        source, kinds = Path(given.quantise[0]), given.quantise[1]
        if source.is_dir():
            quantise_folder(source, kinds)
        else:
            quantise(source, kinds.split(","))
    else:
        measure(given)


def checksums(model: Path) -> dict[str, str]:
    """16 hexadecimal digits of SHA-256 for a file, or for each file of weights in a folder; nothing for other names."""
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else [model] if model.is_file() else []
    return {f"{model.name}/{path.name}" if model.is_dir() else path.name: checksum(path) for path in files}


def measure(given: argparse.Namespace) -> None:
    facts = provenance([], model=Path(given.model).name, threads=given.threads)
    facts["command"] = command("rounding_error.py")
    for name in (given.model, *given.file, *given.theirs):
        facts["models"] |= checksums(Path(name))
    tokenizer = load_tokenizer(given.model)
    begin = [each for each in tokenizer("").input_ids if each == tokenizer.bos_token_id]
    texts = {}
    for path in given.text:
        ids = tokenizer(path.read_text(encoding="utf-8")[: 20 * given.tokens], add_special_tokens=False).input_ids
        (texts[path.name],) = windows(list(islice(ids, given.tokens)), begin, given.tokens + len(begin))
    unrounded = read_all(Reference.load(given.model, "float32").logits, texts)

    def report(name: str, runtime: str, found: dict[str, Tensor], same: dict[str, Tensor] | None) -> None:
        for reference, expected in (("same weights", same), ("unrounded", unrounded)):
            if expected is None:
                continue
            for text, ids in texts.items():
                comparison = Comparison()
                comparison.add(found[text], expected[text], ids)
                record = {"model": Path(given.model).name, "weights": name, "runtime": runtime}
                figures = {key: round(value, 6) for key, value in asdict(comparison.result()).items()}
                record |= {"reference": reference, "text": text}
                print(json.dumps(record | figures | {"provenance": facts}), flush=True)

    for dtype in filter(None, given.dtype.split(",")):
        found = read_all(ours(given.model, dtype), texts)
        network = load_network(given.model, dtype="float32")
        round_weights(network, dtype, given.model)
        report(dtype, "foretoken", found, read_all(Reference(dequantised(network)).logits, texts))
    for file in given.file:
        same = read_all(Reference.load(file, "float32").logits, texts)
        report(Path(file).name, "foretoken", read_all(ours(file, "auto"), texts), same)
        if Path(file).is_dir():
            found = read_all(Reference.load(file, "bfloat16").logits, texts)
            report(Path(file).name, "transformers, bfloat16", found, same)
        else:
            report(Path(file).name, "llama.cpp", read_all(theirs(file, texts, given.threads), texts), same)
            if given.openvino:
                with tempfile.TemporaryDirectory() as folder:
                    found = read_all(logits_of_openvino(Path(file), Path(folder), given.threads), texts)
                report(Path(file).name, "openvino", found, same)
    for file in given.theirs:
        report(Path(file).name, "llama.cpp", read_all(theirs(file, texts, given.threads), texts), None)


def read_all(read: Callable[[Ids], Tensor], texts: dict[str, Ids]) -> dict[str, Tensor]:
    """Logits [T, V] of each text, in float32."""
    return {name: read(ids).float() for name, ids in texts.items()}


def ours(name: str, dtype: str) -> Callable[[Ids], Tensor]:
    model = load(name, dtype=dtype, device="cpu")

    def read(ids: Ids) -> Tensor:
        return torch.cat([each.clone() for each in logits_of(model, ids)])

    return read


def theirs(file: str, texts: dict[str, Ids], threads: int) -> Callable[[Ids], Tensor]:
    """llama.cpp as it is, one prompt after the other, keys and values in float16 as by default."""
    llama_cpp = adapters.import_llama_cpp()
    if llama_cpp is None:
        raise SystemExit(2)
    longest = max(map(len, texts.values()))
    context = longest + -longest % _SMALLEST
    model = adapters.open_llama(llama_cpp, Path(file), context=context, threads=threads, flash=False, logits_all=True)

    def read(ids: Ids) -> Tensor:
        model.reset()
        model.eval(ids)
        return torch.from_numpy(model.scores[: len(ids)].copy())

    return read


def quantise_folder(source: Path, kind: str) -> None:
    """Write NAME-GPTQ next to a folder."""
    if kind != "GPTQ":
        raise SystemExit(f"{kind}: a folder is written as GPTQ only; give a GGUF file for llama.cpp's kinds")
    target = source.with_name(f"{source.name}-GPTQ")
    write_gptq(source, target)
    print(target)


def quantise(source: Path, kinds: Sequence[str]) -> None:
    """Write NAME-KIND.gguf next to a GGUF file, as llama.cpp's quantiser does; its names of kinds, or F32."""
    llama_cpp = adapters.import_llama_cpp()
    if llama_cpp is None:
        raise SystemExit(2)
    for kind in kinds:
        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype = llama_cpp.LLAMA_FTYPE_ALL_F32 if kind == "F32" else getattr(llama_cpp, f"{_PREFIX}{kind}")
        settings.nthread, settings.allow_requantize = 1, kind == "F32"
        target = source.with_name(f"{source.stem.removesuffix('-F32')}-{kind}.gguf")
        if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(settings)):
            raise SystemExit(f"llama.cpp could not write {target}")
        print(target)


if __name__ == "__main__":
    main()
