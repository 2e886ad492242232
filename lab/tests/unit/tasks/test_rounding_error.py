"""The distance of a rounded model from its reference: figures by hand, families in float32, and a planted fault."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from foretoken.core.errors import ConfigError
from foretoken.forward import attention
from foretoken.forward.quantised_weight import QuantisedLinear
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load, load_config
from foretoken.models.quantised.rounding import round_weights
from foretoken_lab.tasks import reference as reference_module
from foretoken_lab.tasks.reference import Reference, bytes_of_reference, check_disk, check_memory, dequantised
from foretoken_lab.tasks.rounding_error import Comparison, RoundingError, StoredLogits, compare, store, windows
from helpers import quantised_folders
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import VOCAB_SIZE, save_model

CHANNEL, FACTOR = 5, 40.0  # of the residual stream, and by how much it is larger than the others


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def distance(model: LanguageModel, reference: Reference, text: list[list[int]]) -> RoundingError:
    with StoredLogits(sum(map(len, text)), model.vocab_size) as stored:
        store(model, [text], stored, lambda rows: None)
        (found,) = compare(stored, reference, [text], lambda rows: None)
    return found


def logits(rows: int, seed: int) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def test_the_figures_are_those_of_their_definitions() -> None:
    found_TV, expected_TV, tokens = logits(70, 1), logits(70, 2), ids(70)
    comparison = Comparison()
    comparison.add(found_TV[:40], expected_TV[:40], tokens[:40])
    comparison.add(found_TV[40:], expected_TV[40:], tokens[40:])
    found = comparison.result()
    q, p = (torch.distributions.Categorical(logits=each.double()) for each in (found_TV, expected_TV))
    kl_T = torch.distributions.kl_divergence(p, q)
    assert found.num_tokens == 70
    assert found.mean_kl == pytest.approx(kl_T.mean().item(), rel=1e-9)
    assert found.median_kl == pytest.approx(kl_T.median().item(), rel=1e-9)
    assert found.p99_kl == pytest.approx(kl_T.quantile(0.99).item(), rel=1e-9)
    assert found.same_best == (found_TV.argmax(-1) == expected_TV.argmax(-1)).sum().item() / 70
    predicted = [row for row in range(70) if row not in (39, 69)]  # the last of a window predicts nothing
    following = torch.tensor(tokens)[[row + 1 for row in predicted]]
    ours, theirs = (-each.logits[predicted].gather(1, following[:, None]).mean().item() for each in (q, p))
    assert found.perplexity == pytest.approx(math.exp(ours), rel=1e-9)
    assert found.reference_perplexity == pytest.approx(math.exp(theirs), rel=1e-9)
    assert found.perplexity_change == pytest.approx(math.exp(ours - theirs) - 1, rel=1e-6)


def test_a_common_shift_changes_nothing_and_padding_of_the_vocabulary_is_left_out() -> None:
    expected_TV, tokens = logits(9, 1).double(), ids(9)
    padded_TV = torch.cat([expected_TV + 1000.0, torch.full((9, 3), 5000.0).double()], dim=1)
    comparison = Comparison()
    comparison.add(padded_TV, expected_TV, tokens)
    found = comparison.result()
    assert found.p99_kl < 1e-9
    assert found.same_best == 1.0
    assert found.perplexity_change == pytest.approx(0.0, abs=1e-9)


def test_tokens_that_neither_allows_count_nothing_and_one_that_only_the_model_forbids_is_infinite() -> None:
    expected_TV = logits(4, 1)
    expected_TV[:, 7] = -math.inf
    comparison = Comparison()
    comparison.add(expected_TV.clone(), expected_TV, [1, 2, 3, 4])
    assert comparison.result().mean_kl == 0.0
    found_TV = expected_TV.clone()
    found_TV[0, 8] = -math.inf
    comparison.add(found_TV, expected_TV, [1, 2, 3, 4])
    assert comparison.result().mean_kl == math.inf


def test_a_single_token_has_no_perplexity() -> None:
    comparison = Comparison()
    comparison.add(logits(1, 1), logits(1, 2), [3])
    found = comparison.result()
    assert found.mean_kl > 0
    assert (found.perplexity, found.reference_perplexity, found.perplexity_change) == (None, None, None)


def test_every_window_begins_as_the_tokenizer_begins_a_text() -> None:
    assert windows([1, 2, 3, 4, 5], [], 2) == [[1, 2], [3, 4], [5]]
    assert windows([1, 2, 3, 4, 5], [9], 3) == [[9, 1, 2], [9, 3, 4], [9, 5]]


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "bamba"])
def test_float32_is_its_own_reference(family, tmp_path) -> None:
    """Windows longer than one forward, and a second one that must not see the first."""
    folder = str(save_model(family, tmp_path / family))
    model = load(folder, dtype="float32", device="cpu")
    longest = min(200, model.max_length)
    found = distance(model, Reference.load(folder, "float32"), [ids(longest), ids(30, seed=1)])
    assert found.num_tokens == longest + 30
    assert found.mean_kl < 1e-7
    assert found.same_best > 0.99


@pytest.mark.parametrize(
    ("settings", "make"),
    [
        quantised_folders.gptq(4, 32),
        quantised_folders.awq(32),
        quantised_folders.compressed("pack-quantized", 4, "group", 32),
    ],
    ids=["gptq", "awq", "compressed-tensors"],
)
def test_the_reference_of_a_quantised_folder_has_the_weights_that_its_codes_stand_for(settings, make, tmp_path) -> None:
    source, target = save_model("llama", tmp_path / "plain"), tmp_path / "rounded"
    dense = quantised_folders.write(source, target, settings, make)
    twin = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    for name, weight in dense.items():
        twin.get_submodule(name).weight = nn.Parameter(weight)
    tokens = ids(20)
    with torch.no_grad():
        expected_TV = twin(torch.tensor([tokens])).logits[0]
    found_TV = Reference.load(str(target), "float32").logits(tokens)
    assert torch.allclose(found_TV, expected_TV, atol=1e-4)


def test_rounded_experts_are_dequantised_too(tmp_path) -> None:
    folder = save_model("qwen3_moe", tmp_path / "mixture")
    rounded, twin = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2))
    round_weights(rounded, "int4", "mixture")
    for path, module in rounded.named_modules():
        if path.endswith(".experts"):
            own = twin.get_submodule(path)
            own.gate_up_proj = nn.Parameter(module.gate_up_proj)
            own.down_proj = nn.Parameter(module.down_proj)
        elif isinstance(module, QuantisedLinear):
            twin.get_submodule(path).weight = nn.Parameter(module.weight)
    tokens = torch.tensor([ids(20)])
    with torch.no_grad():
        assert torch.allclose(dequantised(rounded)(tokens).logits, twin(tokens).logits, atol=1e-4)


def with_outliers(folder) -> None:
    """Make one channel of the residual stream large; what reads it is made small there, as training does."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[:, CHANNEL] *= FACTOR
        for weight in model.parameters():
            if weight.ndim > 1 and weight.shape[-1] == model.config.hidden_size and weight is not embedding:
                weight[..., CHANNEL] /= FACTOR
    model.save_pretrained(folder)


def test_a_shifted_scale_is_seen_in_a_model_with_outlier_channels(tmp_path) -> None:
    folder = save_model("llama", tmp_path / "llama")
    with_outliers(folder)
    reference, text = Reference.load(str(folder), "float32"), [ids(100)]

    def rounded(factor: float) -> LanguageModel:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention.NAME)
        round_weights(model.eval(), "int8", "llama")
        scale_OG = model.get_submodule("model.layers.0.mlp.down_proj").quantised.scale_OG
        scale_OG *= factor
        return LanguageModel(model, AutoTokenizer.from_pretrained(folder), name="llama")

    sound, shifted = distance(rounded(1.0), reference, text), distance(rounded(1.3), reference, text)
    assert 0 < sound.median_kl <= sound.p99_kl
    assert shifted.mean_kl > 4 * sound.mean_kl
    assert shifted.median_kl > 4 * sound.median_kl


def test_what_does_not_fit_is_refused_with_both_sizes(tmp_path, monkeypatch) -> None:
    folder = save_model("llama", tmp_path / "llama")
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = load_config(str(folder))
    weights = 4 * sum(each.numel() for each in model.parameters())
    assert bytes_of_reference(config, "float32", 10) == weights + 3 * 4 * 10 * VOCAB_SIZE
    monkeypatch.setattr(reference_module, "_free_memory", lambda: 3 * 10**9)
    check_memory("float32", 3 * 10**9)
    with pytest.raises(ConfigError, match=r"--against float32: .* 4\.0 GB of memory and 3\.0 GB are free"):
        check_memory("float32", 4 * 10**9)
    monkeypatch.setattr(reference_module, "_free_memory", lambda: None)  # where the system does not say
    check_memory("float32", 10**15)
    check_disk(10, 1000)
    with pytest.raises(ConfigError, match=r"tokens take 4000000000\.0 GB in .*--text-tokens, or set TMPDIR"):
        check_disk(10**12, 10**6)
