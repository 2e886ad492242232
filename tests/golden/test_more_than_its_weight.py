"""A projection may be more than its weight: quantised, adapted, hooked. Then only its module can compute it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from foretoken.forward.plain import why_not_plain
from foretoken.models import prepack
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from helpers import golden
from helpers.golden import LayerPlan, Session
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import FAMILIES, VOCAB_SIZE, load_eager, randomise, save_model

TOLERANCE = 6e-5


class Quantised(nn.Module):
    """Weights in a byte each, as packed BitNet and bitsandbytes hold them: their memory is smaller than it looks."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().max() / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


class Adapted(nn.Module):
    """A linear layer with a correction of low rank, under the names of its base layer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.base_layer = linear
        self.a = nn.Parameter(torch.randn(2, linear.in_features) / linear.in_features**0.5)
        self.b = nn.Parameter(torch.randn(linear.out_features, 2))

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    @property
    def out_features(self) -> int:
        return self.base_layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + F.linear(F.linear(x, self.a), self.b).to(self.base_layer.weight.dtype)


class Doubled(nn.Parameter):
    """A parameter that is not what its memory says, as torchao's are."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        return 2 * found if func is F.linear else found


class Ternary(nn.Linear):
    """A linear layer that rounds its weight on its way, as BitNet's does."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.abs().mean()
        return F.linear(x, (self.weight / scale).round().clamp(-1, 1) * scale, self.bias)


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def quantised(linear: nn.Linear) -> nn.Module:
    return Quantised(linear)


def adapted(linear: nn.Linear) -> nn.Module:
    return Adapted(linear)


def ternary(linear: nn.Linear) -> nn.Module:
    found = Ternary(linear.in_features, linear.out_features, bias=linear.bias is not None)
    found.load_state_dict(linear.state_dict())
    return found


def own_forward(linear: nn.Linear) -> nn.Module:
    """As compressed-tensors does: the module is a plain one, its forward is not."""

    def forward(x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 7
        return F.linear((x / scale).round() * scale, linear.weight, linear.bias)

    linear.forward = forward
    return linear


def hooked(linear: nn.Linear) -> nn.Module:
    linear.register_forward_hook(lambda module, args, output: 2 * output)
    return linear


def hooked_before(linear: nn.Linear) -> nn.Module:
    linear.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    return linear


def parametrised(linear: nn.Linear) -> nn.Module:
    nn.utils.parametrize.register_parametrization(linear, "weight", Twice())
    return linear


def subclassed_weight(linear: nn.Linear) -> nn.Module:
    linear.weight = Doubled(linear.weight.detach(), requires_grad=False)
    return linear


def scaled(linear: nn.Linear) -> nn.Module:
    """A parameter next to the weight: whoever put it there uses it."""
    linear.register_parameter("scale", nn.Parameter(torch.ones(1)))
    return linear


KINDS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    each.__name__: each
    for each in (quantised, adapted, ternary, own_forward, hooked, hooked_before, parametrised, subclassed_weight)
}
PLACES = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head")


def altered(family: str, kind: str, place: str) -> tuple[Any, Any]:
    """A model of ours with every projection of that name altered, and its twin with the library's own attention."""
    config = AutoConfig.for_model(FAMILIES[family].model_type, **FAMILIES[family].options)
    pair = []
    for attention in ("foretoken", "eager"):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.float32, attn_implementation=attention
        )
        randomise(model)
        torch.manual_seed(1)
        for name, linear in list(model.named_modules()):
            parent, _, own = name.rpartition(".")
            if own == place:
                setattr(model.get_submodule(parent), own, KINDS[kind](linear))
        pair.append(model.eval())
    return pair[0], pair[1]


@pytest.mark.covering(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "exaone4"], ids=["fused", "layers"])
def test_an_altered_projection_is_left_to_its_module(family: str, kind: str, place: str) -> None:
    ours, reference = altered(family, kind, place)
    model = LanguageModel(ours, None, name=kind)
    assert golden.worst(Session(model), reference, "tree", VOCAB_SIZE) < TOLERANCE
    assert golden.worst(Session(model, plan=LayerPlan), reference, "tree", VOCAB_SIZE) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "exaone4"], ids=["fused", "layers"])
def test_the_reason_for_going_layer_by_layer_is_reported(
    family: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours, _ = altered(family, kind, "down_proj")
    LanguageModel(ours, None, name="a folder")
    (record,) = [each for each in caplog.records if each.name != "foretoken.phases"]
    assert record.levelname == "WARNING"
    assert "slower" in record.message
    assert "down_proj" in record.message
    assert "\n" not in record.message


def test_a_model_of_plain_layers_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for family in ("llama", "exaone4", "gpt_neox", "mixtral"):
        config = AutoConfig.for_model(FAMILIES[family].model_type, **FAMILIES[family].options)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="foretoken")
        LanguageModel(model.eval(), None, name=family)
    assert not [
        each for each in caplog.records if each.name.startswith("foretoken") and each.name != "foretoken.phases"
    ]


def mistaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed layer that drops its bias."""
    inner = prepack.PackedLinear.__init__

    def without_bias(self: Any, linear: nn.Linear) -> None:
        inner(self, linear)
        self.bias = None

    monkeypatch.setattr(prepack.PackedLinear, "__init__", without_bias)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_were_packed_wrongly_are_not_used(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The native decoder's own trial is in test_native_adoption.py."""
    if not prepack.can_prepack(getattr(torch, dtype), torch.device("cpu")):
        pytest.skip(f"oneDNN packs no {dtype} weights on this processor")
    save_model("gpt_bigcode", tmp_path)
    mistaken(monkeypatch)
    model = load(tmp_path, dtype=dtype, device="cpu")
    (message,) = [record.message for record in caplog.records if record.name == "foretoken.models.load"]
    assert "runs unpacked" in message
    assert "do not agree" in message
    assert not any(isinstance(each, prepack.PackedLinear) for each in model.model.modules())
    if dtype == "float32":
        assert golden.worst(Session(model), load_eager(tmp_path), "chain", VOCAB_SIZE) < TOLERANCE


@pytest.mark.parametrize(
    ("linear", "reason"),
    [
        (nn.Linear(4, 4), None),
        (nn.Linear(4, 4, bias=False), None),
        (nn.Linear(4, 4, dtype=torch.bfloat16), None),
        (nn.Linear(4, 4, dtype=torch.float16), "torch.float16"),
        (nn.Linear(4, 4, device="meta"), "on meta"),
        (Ternary(4, 4, bias=False), "Ternary"),
        (hooked(nn.Linear(4, 4)), "hook"),
        (hooked_before(nn.Linear(4, 4)), "hook"),
        (own_forward(nn.Linear(4, 4)), "forward of its own"),
        (parametrised(nn.Linear(4, 4)), "ParametrizedLinear"),
        (subclassed_weight(nn.Linear(4, 4)), "Doubled"),
        (scaled(nn.Linear(4, 4)), "'scale'"),
        (quantised(nn.Linear(4, 4)), "Quantised"),
    ],
    ids=str,
)
def test_plain_layers_are_recognised(linear: nn.Module, reason: str | None) -> None:
    found = why_not_plain(linear)
    assert (found is None) if reason is None else (found is not None and reason in found)
