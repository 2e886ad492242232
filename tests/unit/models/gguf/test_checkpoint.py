"""GGUF files as checkpoints: the library's model with the file's own numbers, and every way a file can be refused."""

from __future__ import annotations

import contextlib
import errno
import math
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

gguf = pytest.importorskip("gguf", reason="needs the package gguf (extra 'dev')")

from foretoken.core.errors import ModelError, NoMemory, UnsupportedArchitecture  # noqa: E402
from foretoken.forward.quantised_weight import QuantisedLinear, QuantisedWeight  # noqa: E402
from foretoken.models import language_model  # noqa: E402
from foretoken.models.fingerprint import fingerprint, fingerprint_of  # noqa: E402
from foretoken.models.gguf import checkpoint, container  # noqa: E402
from foretoken.models.gguf.container import GGUFFile  # noqa: E402
from foretoken.models.load import load, load_as_is, load_config, load_tokenizer  # noqa: E402
from foretoken.native import build  # noqa: E402
from helpers import gguf_files  # noqa: E402
from helpers.tiny_models import FAMILIES, randomise  # noqa: E402

SIZES = {"vocab_size": 288, "num_hidden_layers": 2, "tie_word_embeddings": False}


def model_of(family: str, **options: Any) -> Any:
    config = AutoConfig.for_model(FAMILIES[family].model_type, **{**FAMILIES[family].options, **SIZES, **options})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model)
    return model


@pytest.fixture(scope="module")
def original() -> Any:
    return model_of("llama")


@pytest.fixture(scope="module")
def saved(original: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_files.save(original, tmp_path_factory.mktemp("gguf") / "llama.gguf")


# ------------------------------------------------------------------ what works


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama_multi_query", {"tie_word_embeddings": True}),
        ("llama_odd_heads", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
    ],
)
def test_every_weight_is_the_originals(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = model_of(family, **options)
    loaded = load_as_is(gguf_files.save(model, tmp_path / "x.gguf"), device="cpu")
    expected, found = model.state_dict(), loaded.model.state_dict()
    assert set(found) == set(expected)
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    ids = torch.arange(4, 40)[None]
    with torch.inference_mode():  # the config is right, too
        assert torch.equal(loaded.model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("tied", [False, True])
def test_quantised_rows_go_back_to_their_places(kind: str, tied: bool, tmp_path: Path) -> None:
    model = model_of("llama", tie_word_embeddings=tied)
    path = gguf_files.save(model, tmp_path / "x.gguf", kind=kind)
    found = load_as_is(path, device="cpu").model
    number = gguf.GGMLQuantizationType[kind]

    def through(weight: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(gguf.dequantize(gguf.quantize(weight.detach().numpy(), number), number))

    layers = {name: each for name, each in found.named_modules() if isinstance(each, QuantisedLinear)}
    assert len(layers) == 2 * 7 + 1
    for name, module in layers.items():
        assert torch.equal(module.quantised.dense(), through(model.get_submodule(name).weight)), name
    assert torch.equal(found.model.embed_tokens.weight, through(model.model.embed_tokens.weight))
    assert found.dtype == torch.float32


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_large_file_is_packed_from_where_it_lies(
    kind: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are the same; none of them has been made before it was packed."""
    model = model_of("llama", tie_word_embeddings=tied)
    path = gguf_files.save(model, tmp_path / "m.gguf", kind=kind)
    small = load(path, device="cpu")
    monkeypatch.setattr(language_model, "_SMALL", 0)
    monkeypatch.setattr(language_model, "hold", lambda model: pytest.fail("all weights are made"))
    large = load(path, device="cpu")
    assert (small.native_decoder is None) == (large.native_decoder is None) == (build.library() is None)
    assert (large.weight_bytes, large.precision) == (small.weight_bytes, small.precision)
    before, after = (dict(each.model.named_modules()) for each in (small, large))
    for name, module in before.items():
        if hasattr(module, "weight"):
            assert torch.equal(module.weight, after[name].weight), name


def test_a_files_scales_are_looked_at_on_one_thread(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, before = set(), torch.get_num_threads()
    read = checkpoint.fill
    monkeypatch.setattr(checkpoint, "fill", lambda *given: seen.add(torch.get_num_threads()) or read(*given))
    torch.set_num_threads(2)
    try:
        load(saved)
        assert (seen, torch.get_num_threads()) == ({1}, 2)
    finally:
        torch.set_num_threads(before)


def test_without_a_compiler_a_large_file_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = gguf_files.save(model_of("llama"), tmp_path / "m.gguf", kind="Q8_0")
    monkeypatch.setattr(language_model, "_SMALL", 0)
    monkeypatch.setattr(build, "library", lambda: None)
    layers = [each for each in load(path, device="cpu").model.modules() if isinstance(each, QuantisedLinear)]
    assert layers
    assert {type(each.quantised) for each in layers} == {QuantisedWeight}


def test_a_large_file_with_a_scale_that_is_no_number_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gguf_files.save(model_of("llama", num_hidden_layers=4), tmp_path / "m.gguf", kind="Q8_0")
    places = {each.name: each.start for each in GGUFFile(path).entries.values()}
    for layer in (0, 3):
        data = bytearray(path.read_bytes())
        start = places[f"blk.{layer}.ffn_up.weight"]
        data[start : start + 2] = b"\x00\x7e"  # NaN
        damaged = tmp_path / f"{layer}.gguf"
        damaged.write_bytes(data)
        monkeypatch.setattr(language_model, "_SMALL", 0)
        with pytest.raises(ModelError, match=rf"^model '.*{layer}\.gguf': .*blk\.{layer}\.ffn_up\.weight.* not finite"):
            load(damaged, device="cpu")


def test_a_loaded_file(saved: Path) -> None:
    model = load(saved, device="cpu")
    assert (model.vocab_size, model.num_layers, model.max_length, model.end_ids) == (288, 2, 128, {2})
    assert (model.name, model.source) == (str(saved), str(saved))
    assert load(saved, device="cpu", dtype="bfloat16").dtype == torch.bfloat16
    assert load_config(saved).rms_norm_eps == 1e-6  # as written in a config, not as float32 holds it
    assert load_tokenizer(saved)("he").input_ids == [260]


def test_half_precision_is_the_files_own(saved: Path, tmp_path: Path) -> None:
    for kind, dtype in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        path = gguf_files.rewrite(saved, tmp_path / f"{kind}.gguf", kind=kind)
        assert load_as_is(path, device="cpu").model.dtype == dtype


def test_a_processor_computes_float16_in_bfloat16(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rounding is reported; a requested dtype is used, with a warning where it is slow."""
    path = gguf_files.rewrite(saved, tmp_path / "x.gguf", kind="F16")
    model = load(path, device="cpu")
    assert model.dtype == torch.bfloat16
    assert (model.native_decoder is None) == (build.library() is None)
    assert f"model '{path}' is stored in float16 and computed in bfloat16, which rounds its weights" in caplog.text
    caplog.clear()
    assert load(path, device="cpu", dtype="float16").dtype == torch.float16
    assert "the native CPU decoder is not used for this model, the slower general path is: its dtype" in caplog.text


def test_ends_of_turns_count(saved: Path, tmp_path: Path) -> None:
    fields = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 9}
    assert load(gguf_files.rewrite(saved, tmp_path / "x.gguf", fields=fields), device="cpu").end_ids == {2, 7, 9}


@pytest.mark.parametrize(("kind", "ends"), [(3, {2, 20}), (1, {2})], ids=["control", "text"])
def test_an_end_of_turn_that_only_the_tokenizer_names_counts(
    kind: int, ends: set[int], saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fields = gguf.GGUFReader(str(saved)).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    tokens[20], kinds[20] = "<|im_end|>", kind
    named = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    path = gguf_files.rewrite(saved, tmp_path / "x.gguf", fields=named)
    assert load(path, device="cpu").end_ids == ends
    assert ("texts end at '<|im_end|>' (20) too" in caplog.text) == (20 in ends)


@pytest.mark.parametrize("kind", ["linear", "yarn", "none"])
def test_scaled_rotary_embeddings(kind: str, saved: Path, tmp_path: Path) -> None:
    fields = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "yarn":
        fields["llama.rope.scaling.original_context_length"] = 32
        rope["original_max_position_embeddings"] = 32
    if kind == "none":
        rope = {"rope_type": "default", "rope_theta": 10000.0}
    path = gguf_files.rewrite(saved, tmp_path / "x.gguf", fields=fields)
    config = load_config(path)
    assert {key: config.rope_parameters.get(key) for key in rope} == rope


@pytest.mark.parametrize("name", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_without_a_type_is_linear(name: str, saved: Path, tmp_path: Path) -> None:
    """As llama.cpp reads it, by the factor's old name, too: undivided positions are another model's."""
    path = gguf_files.rewrite(saved, tmp_path / "x.gguf", fields={f"llama.{name}": 4.0})
    rope = load_config(path).rope_parameters
    assert (rope["rope_type"], rope["factor"]) == ("linear", 4.0)
    factors = {"rope_freqs.weight": llama3_factors(8.0).numpy()}
    both = gguf_files.rewrite(path, tmp_path / "both.gguf", tensors=factors)
    with pytest.raises(UnsupportedArchitecture, match=r"scaled twice, by 'rope_freqs\.weight' and by 'linear'"):
        load_config(both)


def llama3_factors(factor: float) -> torch.Tensor:
    """As llama.cpp's converter writes them, for heads of 16."""
    found = []
    for dimension in range(0, 16, 2):
        wavelength = 2 * math.pi * 10000.0 ** (dimension / 16)
        if wavelength < 8192 / 4:
            found.append(1.0)
        elif wavelength > 8192 / 1:
            found.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            found.append(1 / ((1 - smooth) / factor + smooth))
    assert len(set(found)) > 2
    return torch.tensor(found, dtype=torch.float32)


@pytest.mark.parametrize(("factor", "wrong"), [(8.0, False), (32.0, False), (8.0, True)])
def test_llama_3s_rotary_embedding(factor: float, wrong: bool, saved: Path, tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    factors = llama3_factors(factor)
    rotary = model_of("llama", rope_parameters=rope).model.rotary_emb
    plain = 10000.0 ** -(torch.arange(0, 16, 2).double() / 16)
    torch.testing.assert_close(plain / factors, rotary.inv_freq.double(), rtol=1e-6, atol=0)
    if wrong:
        factors[3] *= 1.01
    path = gguf_files.rewrite(saved, tmp_path / "x.gguf", tensors={"rope_freqs.weight": factors.numpy()})
    if wrong:
        with pytest.raises(UnsupportedArchitecture, match=r"'rope_freqs\.weight' differs from Llama 3's scaling"):
            load_config(path)
    else:
        assert load_config(path).rope_parameters == rope


def test_fingerprints_distinguish_files(saved: Path, tmp_path: Path) -> None:
    other = gguf_files.rewrite(saved, tmp_path / "x.gguf", kind="Q8_0")
    assert fingerprint(saved) == fingerprint_of(str(saved)) == load_as_is(saved, device="cpu").fingerprint
    assert fingerprint(other) != fingerprint(saved)


# ------------------------------------------------------------------ refused


def refusal(path: Path, kind: type[ModelError] = ModelError) -> str:
    with pytest.raises(kind) as caught:
        load(path, device="cpu")
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_a_file_that_is_cut_short_at_any_place(saved: Path, tmp_path: Path) -> None:
    data, path = saved.read_bytes(), tmp_path / "x.gguf"
    for size in (0, 3, 4, 20, 100, 1000, 4000, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        message = refusal(path)
        assert (
            "is no whole GGUF file" in message or "is cut short: its tensor" in message or "cannot be read" in message
        )
    assert "ends at byte" in message


def test_a_header_that_is_damaged(saved: Path, tmp_path: Path) -> None:
    data, path = saved.read_bytes(), tmp_path / "x.gguf"
    for begin, number, message in (
        (0, b"GGML", "does not begin with 'GGUF'"),
        (4, struct.pack("<I", 1), "of version 1; versions 2 and 3"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 2**60), "has 0 dimensions"),
        (8, struct.pack("<Q", 0), "there is something after its header"),
        (16, struct.pack("<Q", 2**60), "in the middle of its header"),
        (24, struct.pack("<Q", 2**60), "in the middle of its header"),
    ):
        path.write_bytes(data[:begin] + number + data[begin + len(number) :])
        assert message in refusal(path)
    generator = torch.Generator().manual_seed(0)
    header = data.index(b"output_norm.weight")
    for place in torch.randint(4, header, (40,), generator=generator).tolist():  # an unused bit, or one error
        path.write_bytes(data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :])
        with contextlib.suppress(ModelError):
            load_as_is(path, device="cpu")


FIELDS: dict[str, tuple[dict[str, Any], type[ModelError], str]] = {
    "another architecture": ({"llama.block_count": 0}, ModelError, "its field 'llama.block_count' is 0"),
    "no layers": ({"llama.block_count": None}, ModelError, "its field 'llama.block_count' is missing"),
    "text for a number": ({"llama.context_length": "long"}, ModelError, "'llama.context_length' is 'long'"),
    "an epsilon that is no number": (
        {"llama.attention.layer_norm_rms_epsilon": float("nan")},
        ModelError,
        "'llama.attention.layer_norm_rms_epsilon' is nan",
    ),
    "an epsilon that is no small number": (
        {"llama.attention.layer_norm_rms_epsilon": 3.0},
        ModelError,
        "'llama.attention.layer_norm_rms_epsilon' is 3.0",
    ),
    "a base below 1": ({"llama.rope.freq_base": 0.5}, ModelError, "its field 'llama.rope.freq_base' is 0.5"),
    "experts": ({"llama.expert_count": 8}, UnsupportedArchitecture, "'llama.expert_count' is 8, which is not computed"),
    "partial rotary": ({"llama.rope.dimension_count": 8}, UnsupportedArchitecture, "a part of a head only"),
    "another scaling": ({"llama.rope.scaling.type": "longrope"}, UnsupportedArchitecture, "scaled by 'longrope'"),
    "heads by layer": (
        {"llama.attention.head_count_kv": [2, 1]},
        UnsupportedArchitecture,
        "different numbers of heads",
    ),
    "one of several": ({"split.count": 3}, ModelError, "one of 3 pieces, which its name does not say"),
    "no tokenizer": (
        {"tokenizer.ggml.model": None},
        ModelError,
        "it holds no tokenizer ('tokenizer.ggml.model', 'tokenizer.ggml.tokens'): convert it again",
    ),
    "more layers": ({"llama.block_count": 3}, ModelError, "missing from the checkpoint ('model.layers.2."),
    "fewer layers": ({"llama.block_count": 1}, ModelError, "'model.layers.1.self_attn.q_proj.weight' has no place"),
    "far too many layers": ({"llama.block_count": 2**31 - 1}, ModelError, "of a larger model than its tensors"),
    "far too wide": ({"llama.feed_forward_length": 2**30}, ModelError, "of a larger model than its tensors"),
    "text for a token": (
        {"tokenizer.ggml.eos_token_id": "end"},
        ModelError,
        "its field 'tokenizer.ggml.eos_token_id' is 'end'",
    ),
    "a width of a head that is text": (
        {"llama.attention.key_length": "16"},
        ModelError,
        "'llama.attention.key_length' is '16'",
    ),
    "pieces in words": ({"split.count": "two"}, ModelError, "its field 'split.count' is 'two'"),
    "no keys": ({"llama.attention.head_count_kv": 0}, ModelError, "'llama.attention.head_count_kv' is 0"),
    "keys for a part of the heads": (
        {"llama.attention.head_count_kv": 3},
        ModelError,
        "'llama.attention.head_count_kv' is 3, which does not divide its 4 heads",
    ),
    "far too many keys": ({"llama.attention.head_count_kv": 2**31}, ModelError, "head_count_kv' is 2147483648"),
    "a token beyond the last": (
        {"tokenizer.ggml.eot_token_id": 288},
        ModelError,
        "'tokenizer.ggml.eot_token_id' is 288, of 288 tokens",
    ),
    "another vocabulary": (
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [f"t{index}" for index in range(300)],
            "tokenizer.ggml.token_type": [1] * 300,
            "tokenizer.ggml.scores": [0.5] * 300,
        },
        ModelError,
        "'tokenizer.ggml.tokens' has 300 tokens, and its embedding 288 rows",
    ),
    "merges of numbers": ({"tokenizer.ggml.merges": [1, 2]}, ModelError, "'tokenizer.ggml.merges' is no list of texts"),
    "a kind of tokenizer that is a list": (
        {"tokenizer.ggml.model": ["gpt2"]},
        ModelError,
        "its tokenizer is of kind ['gpt2'], which is not read",
    ),
    "another width": (
        {"llama.feed_forward_length": 128},
        ModelError,
        "weights do not fit its config ('model.layers.0.mlp.gate_proj.weight': [96, 64] in the checkpoint, [128, 64]",
    ),
}


@pytest.mark.parametrize("case", FIELDS)
def test_fields_that_do_not_fit(case: str, saved: Path, tmp_path: Path) -> None:
    fields, kind, message = FIELDS[case]
    assert message in refusal(gguf_files.rewrite(saved, tmp_path / "x.gguf", fields=fields), kind)


@dataclass
class Places:
    """Where the numbers of a file's list of tensors lie.

    Attributes:
        shape, kind, offset: of each tensor by name, the first byte.
    """

    shape: dict[str, int]
    kind: dict[str, int]
    offset: dict[str, int]

    @classmethod
    def of(cls, data: bytes, names: Iterable[str]) -> Places:
        found = cls({}, {}, {})
        for name in names:
            at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
            found.shape[name] = at + 4
            found.kind[name] = at + 4 + 8 * struct.unpack_from("<I", data, at)[0]
            found.offset[name] = found.kind[name] + 4
        return found


NORM, UP = "blk.1.ffn_norm.weight", "blk.1.ffn_up.weight"


def test_tensors_that_lie_elsewhere(saved: Path, tmp_path: Path) -> None:
    """A place, a kind or a shape that is not the tensor's would give other numbers, and no error."""
    whole, path = gguf_files.rewrite(saved, tmp_path / "q.gguf", kind="Q8_0"), tmp_path / "x.gguf"
    data = whole.read_bytes()
    names = [tensor.name for tensor in gguf.GGUFReader(str(whole)).tensors]
    places = Places.of(data, names)
    last = names[-1]
    cases = [
        (places.offset[UP], struct.pack("<Q", 0), rf"its tensor '{UP}' begins at byte \d+, and those before it end at"),
        (places.offset[UP], struct.pack("<Q", 2**60), f"its tensor '{UP}' begins at byte 1152"),
        (places.kind[UP], struct.pack("<I", 2), r"begins at byte \d+, and those before it end at"),
        (places.kind[NORM], struct.pack("<I", 1), r"begins at byte \d+, and those before it end at"),
        (places.kind[last], struct.pack("<I", 2), f"there is something after its last tensor '{last}'"),
        (places.shape[UP], struct.pack("<Q", 32), r"begins at byte \d+, and those before it end at"),
        (places.shape[UP], struct.pack("<Q", 0), rf"its tensor '{UP}' has the shape \[96, 0\]"),
        (places.shape[UP], struct.pack("<Q", 2**60), f"is cut short: its tensor '{UP}' ends at byte"),
    ]
    for begin, number, message in cases:
        assert data[begin : begin + len(number)] != number
        path.write_bytes(data[:begin] + number + data[begin + len(number) :])
        assert re.search(message, refusal(path)), message
    path.write_bytes(data + bytes(100))  # padding
    load_as_is(path, device="cpu")


def test_names_that_are_there_twice(saved: Path, tmp_path: Path) -> None:
    data, path = saved.read_bytes(), tmp_path / "x.gguf"
    for name, other, message in (
        (NORM, b"blk.0.ffn_norm.weight", "two tensors of one name, 'blk.0.ffn_norm.weight'"),
        (
            "tokenizer.ggml.bos_token_id",
            b"tokenizer.ggml.eos_token_id",
            "two fields of one name, 'tokenizer.ggml.eos_to",
        ),
    ):
        begin = data.index(name.encode())
        path.write_bytes(data[:begin] + other + data[begin + len(name) :])
        assert message in refusal(path)


def test_a_list_that_is_longer_than_any(saved: Path, tmp_path: Path) -> None:
    """Its numbers would take eight times the file's size as objects."""
    data, path = saved.read_bytes(), tmp_path / "x.gguf"
    name = b"tokenizer.ggml.token_type"
    at = data.index(name) + len(name) + 8
    for count in (2**60, 2**25, len(data) // 4):
        path.write_bytes(data[:at] + struct.pack("<Q", count) + data[at + 8 :])
        assert f"'tokenizer.ggml.token_type' has {count} entries, more than fit into the file" in refusal(path)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite(value: float, saved: Path, tmp_path: Path) -> None:
    """In a scale of a block, and in a tensor that is not quantised."""
    norm = np.ones(64, dtype=np.float32)
    norm[3] = value
    path = gguf_files.rewrite(saved, tmp_path / "x.gguf", tensors={NORM: norm})
    assert f"its tensor '{NORM}' holds values that are not finite" in refusal(path)
    path = gguf_files.rewrite(saved, tmp_path / "q.gguf", kind="Q8_0")
    tensor = next(each for each in gguf.GGUFReader(str(path)).tensors if each.name == UP)
    data, begin = path.read_bytes(), int(tensor.data_offset)
    path.write_bytes(data[:begin] + struct.pack("<e", value) + data[begin + 2 :])
    assert f"'{UP}' has scales that are not finite" in refusal(path)


def test_a_matrix_with_other_rows_than_its_heads(saved: Path, tmp_path: Path) -> None:
    path = gguf_files.rewrite(saved, tmp_path / "x.gguf", tensors={"blk.0.attn_q.weight": np.ones((2, 64), np.float32)})
    assert "('model.layers.0.self_attn.q_proj.weight': [2, 64] in the checkpoint, [64, 64] in the model)" in refusal(
        path
    )


def test_an_embedding_that_is_no_matrix(saved: Path, tmp_path: Path) -> None:
    path = gguf_files.rewrite(saved, tmp_path / "x.gguf", tensors={"token_embd.weight": np.ones(64, np.float32)})
    assert "its tensor 'token_embd.weight' has the shape [64]" in refusal(path)


def test_a_name_of_many_lines(saved: Path, tmp_path: Path) -> None:
    path = gguf_files.rewrite(saved, tmp_path / "x.gguf", tensors={"one\n" * 15: np.ones(4, np.float32)})
    assert r"its tensor 'one\none\n" in refusal(path)


def test_another_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "falcon")
    gguf_files.finish(writer, tmp_path / "x.gguf")
    message = refusal(tmp_path / "x.gguf", UnsupportedArchitecture)
    assert "architecture 'falcon', which is not read: llama, qwen2, qwen3, " in message


def test_a_tensor_without_a_place(saved: Path, tmp_path: Path) -> None:
    odd = torch.zeros(2, 2).numpy()
    path = gguf_files.rewrite(saved, tmp_path / "x.gguf", tensors={"blk.0.ffn_gate_inp.weight": odd})
    assert "'blk.0.ffn_gate_inp.weight' has no place in a model of type 'llama'" in refusal(path)


def test_a_tensor_that_is_missing(saved: Path, tmp_path: Path) -> None:
    path = gguf_files.rewrite(saved, tmp_path / "x.gguf", tensors={"blk.1.attn_k.weight": None})
    assert "('model.layers.1.self_attn.k_proj.weight', 1 in all)" in refusal(path)


def test_a_name_without_a_file() -> None:
    with pytest.raises(ModelError, match=r"'nowhere\.gguf' does not exist"):
        load("nowhere.gguf")


def test_a_file_that_is_larger_than_the_memory(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **options: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(container.mmap, "mmap", full)
    with pytest.raises(NoMemory, match=r"has 0\.0 GB, more than this machine's memory"):
        load(saved)


def test_another_file(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"other")
    with pytest.raises(ModelError, match=r"is a file: point to the folder .* or to a GGUF file"):
        load(tmp_path / "weights.bin")
