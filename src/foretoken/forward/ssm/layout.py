"""A state-space mixer of transformers, read into one record and tried.

    rows ── in projection ─┬─ z ─────────────────────────────────────────── gate ─┐
                           ├─ x, B, C ── causal convolution ── SiLU ── recurrence ─ norm ── out projection
                           └─ dt ──────────────────────────────────┘

The families share this form (Mamba2, Bamba, Granite hybrid, Falcon-H1, Zamba2, Nemotron-H), and with q, k, v in the
place of C, B, x the gated delta net of Qwen3-Next, Qwen3.5 and OLMo hybrid. They differ in how the projections are
laid out, in factors, limits of dt, groups and the order of norm and gate. The module still
computes projections, norm and gate; this library computes every step in which a row depends on other rows. Names
change and can mislead, so each reading is tried: some random rows as a prompt and one more after them must give the
module's results.

The library's forward of a single row does not limit dt in some versions, that of several rows does. The trial finds out
which rows are limited, and ``Mixer.gates`` follows: rows of a prompt, later rows, or the row of a prompt of one token.

Letters: T rows, D width, C channels of the convolution, W its taps, H heads, G groups, N state size, P head width.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from foretoken.core.errors import UnsupportedArchitecture
from foretoken.forward import anatomy
from foretoken.forward.ssm import scan
from foretoken.forward.stored_embedding import dtype_of

Kind = Literal["prompt", "later", "only"]  # a row of a longer prompt, after it, or a prompt of one token
KINDS: tuple[Kind, ...] = ("prompt", "later", "only")

_PROMPT = 6  # rows of the trial's prompt: the convolution's border lies inside
_ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}  # of the largest output, both sides round
_L2_EPS = 1e-6

REMEDY = (
    "layers that are known have attention, a Mamba mixer, a gated delta net or a short convolution: take a "
    "checkpoint of such layers, or generate with transformers itself"
)


class Projected(NamedTuple):
    """Outputs of the in projection for T rows.

    Attributes:
        z: input of the gate.
        raw_TC: input of the convolution, in the model's dtype.
        steps_TH: dt before bias and softplus (of a delta net: a, and b after it, [T, 2 H]).
    """

    z: Tensor
    raw_TC: Tensor
    steps_TH: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Mixer:
    """One state-space mixer.

    Attributes:
        layer: index of its layer.
        module: its forward maps [1, T, D] to [1, T, D].
        delta: whether it is a gated delta net.
        heads, groups, state_size, head_width: H, G, N, P.
        conv_CW: taps, the row itself last; float32.
        conv_bias_C: or None.
        rate_H: A of Mamba-2, minus exp(A_log) of a delta net; negative.
        step_bias_H: added to dt.
        skip_H: D, or None.
        limits: of dt.
        project: rows [T, D] to the inputs of the recurrence.
        finish: y [T, H, P] float32 and z to [T, D].
        limited: kinds of rows with a dt that the library limits.
        most_factor: of a delta net, the largest b: 1, or 2 where a state may change its sign.
        short: whether it is a convolution alone: its state stays zero, and the skip connection is its output.
        late: of Mamba-1, which has a head of width 1 for each channel: outputs of the convolution [T, C] to dt [T, H],
            k [T, N] and q [T, N]; the state decays by ``rate_H`` [H, N]. None: all three are projected before it.
    """

    layer: int
    module: nn.Module
    delta: bool
    heads: int
    groups: int
    state_size: int
    head_width: int
    conv_CW: Tensor
    conv_bias_C: Tensor | None
    rate_H: Tensor
    step_bias_H: Tensor
    skip_H: Tensor | None
    limits: tuple[float, float]
    project: Callable[[Tensor], Projected]
    finish: Callable[[Tensor, Tensor], Tensor]
    limited: frozenset[Kind] = frozenset(KINDS)
    most_factor: float = 1.0
    short: bool = False
    late: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] | None = None

    @property
    def channels(self) -> int:
        """C."""
        return self.conv_CW.shape[0]

    @property
    def taps(self) -> int:
        """W."""
        return self.conv_CW.shape[1]

    def gates(self, steps_TH: Tensor, kinds_T: Sequence[Kind]) -> Tensor:
        """Decay and factor of each row, [T, 2, H], float32 or wider.

        Args:
            steps_TH: as projected.
            kinds_T: the kind of each row.
        """
        wide = torch.promote_types(steps_TH.dtype, torch.float32)
        steps_TH = steps_TH.to(wide)
        if self.late is not None:
            return steps_TH.new_zeros(len(steps_TH), 2, self.heads)
        dt_TH = F.softplus(steps_TH[:, : self.heads] + self.step_bias_H.to(wide))
        if self.delta:
            factor_TH = self.most_factor * steps_TH[:, self.heads :].sigmoid()
            return torch.stack([dt_TH * self.rate_H.to(wide), factor_TH], dim=1)
        if self.limits != (0.0, float("inf")):
            limited_TH = dt_TH.clamp(*self.limits)
            where_T = torch.tensor([kind in self.limited for kind in kinds_T], device=dt_TH.device)
            dt_TH = torch.where(where_T[:, None], limited_TH, dt_TH)
        return torch.stack([dt_TH * self.rate_H.to(wide), dt_TH], dim=1)

    def rows(self, taps_TWC: Tensor, gates_T2H: Tensor) -> scan.Rows:
        """Inputs of the recurrence, from the window of the convolution at each row: the row and those before it."""
        wide = gates_T2H.dtype
        mixed_TC = (taps_TWC.to(wide) * self.conv_CW.to(wide).T).sum(1)
        if self.conv_bias_C is not None:
            mixed_TC = mixed_TC + self.conv_bias_C.to(wide)
        T, width = len(mixed_TC), self.groups * self.state_size
        if self.short:
            none_T1N = mixed_TC.new_zeros(T, 1, self.state_size)
            v_THP = mixed_TC.view(T, self.heads, self.head_width)
            return scan.Rows(none_T1N, none_T1N, v_THP, gates_T2H[:, 0], gates_T2H[:, 1], self.delta)
        mixed_TC = F.silu(mixed_TC)
        if self.late is not None:
            dt_TH, k_TN, q_TN = (each.to(wide) for each in self.late(mixed_TC))
            decay_THN = dt_TH[..., None] * self.rate_H.to(wide)
            return scan.Rows(k_TN[:, None], q_TN[:, None], mixed_TC[..., None], decay_THN, dt_TH, self.delta)
        shape = (T, self.groups, self.state_size)
        if self.delta:
            q_TGN, k_TGN, v = mixed_TC[:, :width], mixed_TC[:, width : 2 * width], mixed_TC[:, 2 * width :]
            q_TGN, k_TGN = _unit(q_TGN.view(shape)) * self.state_size**-0.5, _unit(k_TGN.view(shape))
        else:
            inner = self.heads * self.head_width
            v, k, q = mixed_TC.split([inner, width, width], dim=1)
            k_TGN, q_TGN = k.view(shape), q.view(shape)
        v_THP = v.view(T, self.heads, self.head_width)
        return scan.Rows(k_TGN, q_TGN, v_THP, gates_T2H[:, 0], gates_T2H[:, 1], self.delta)

    def skipped(self, y_THP: Tensor, rows: scan.Rows) -> Tensor:
        """The recurrence's output plus the skip connection."""
        if self.skip_H is None:
            return y_THP
        return y_THP + self.skip_H.to(y_THP.dtype)[:, None] * rows.v_THP


def _unit(x_TGN: Tensor) -> Tensor:
    return x_TGN * torch.rsqrt((x_TGN * x_TGN).sum(-1, keepdim=True) + _L2_EPS)


def windows(raw_TC: Tensor, taps: int, before_XC: Tensor | None = None) -> Tensor:
    """Windows of the convolution at a chain's rows, [T, W, C]: the rows before (zeros before a text) and itself."""
    if before_XC is None:
        before_XC = raw_TC.new_zeros(taps - 1, raw_TC.shape[1])
    return torch.cat([before_XC, raw_TC]).unfold(0, taps, 1).transpose(1, 2)


def alone(mixer: Mixer, raw_TC: Tensor, gates_T2H: Tensor) -> Tensor:
    """The recurrence's output for a text read from its start in one piece, [T, H, P]: without a cache, for trials."""
    rows = mixer.rows(windows(raw_TC, mixer.taps), gates_T2H)
    state_HNP = rows.v_THP.new_zeros(mixer.heads, mixer.state_size, mixer.head_width)
    return mixer.skipped(scan.walk(state_HNP, rows, scan.chain_of(len(rows)))[0], rows)


def mixers(model: Any) -> list[Mixer]:
    """Every state-space mixer of a causal model's layers, by layer; empty if it has none.

    Raises:
        UnsupportedArchitecture: one of them is of another form; the message has its layer and name.
    """
    try:
        layers = anatomy.find(model).layers
    except UnsupportedArchitecture:
        return []
    found: list[Mixer] = []
    for number, layer in enumerate(layers):
        for name, module in layer.named_modules():
            if is_short(module):
                found.append(_tried(_short_convolution(number, module), model))
            if not hasattr(module, "A_log"):
                continue
            around = layer.get_submodule(name.rpartition(".")[0])
            if not hasattr(module, "conv1d") and around is not layer:
                raise _odd(number, around, f"its states decay by the output of its {type(module).__name__}")
            if found and found[-1].layer == number:
                raise _odd(number, module, "its layer has more than one state-space mixer")
            found.append(_tried(_read(number, module), model))
    if found and len({(m.heads, m.groups, m.state_size, m.head_width, m.channels, m.taps) for m in found}) > 1:
        raise UnsupportedArchitecture("its state-space mixers are of different sizes")
    return found


def _read(layer: int, module: Any) -> Mixer:
    conv = getattr(module, "conv1d", None)
    if not isinstance(conv, nn.Conv1d) or conv.groups != conv.in_channels or conv.in_channels != conv.out_channels:
        raise _odd(layer, module, "it has no causal convolution of its own channels ('conv1d')")
    if getattr(module, "activation", "silu") not in ("silu", "swish"):
        raise _odd(layer, module, f"its convolution goes through '{module.activation}', not SiLU")
    if module.A_log.dim() == 2 and all(hasattr(module, name) for name in ("x_proj", "dt_proj", "time_step_rank")):
        return _mamba1(layer, module)
    if module.A_log.shape != getattr(getattr(module, "dt_bias", None), "shape", None) or module.A_log.dim() != 1:
        raise _odd(layer, module, "its states decay by vectors, and it is not laid out as Mamba-1")
    return _delta_net(layer, module) if hasattr(module, "head_k_dim") else _mamba2(layer, module)


def is_short(module: Any) -> bool:
    """Whether it has the parts of LFM2's convolutions; :func:`_tried` compares its outputs."""
    return all(hasattr(module, name) for name in ("conv", "in_proj", "out_proj", "conv_kernel_size"))


def _short_convolution(layer: int, module: Any) -> Mixer:
    channels = module.conv.in_channels
    width = next((width for width in (64, 16) if channels % width == 0), channels)  # native code takes such parts
    one_H = torch.ones(channels // width, device=module.conv.weight.device)

    def project(x_TD: Tensor) -> Projected:
        before_TD, after_TD, x_TD = module.in_proj(x_TD[None])[0].chunk(3, dim=-1)
        return Projected(after_TD, before_TD * x_TD, x_TD.new_zeros(len(x_TD), len(one_H)))

    def finish(y_THP: Tensor, z_TD: Tensor) -> Tensor:
        return module.out_proj((z_TD * y_THP.flatten(1)).to(z_TD.dtype)[None])[0]

    sizes = {"heads": len(one_H), "groups": 1, "state_size": 16, "head_width": width}
    return _record(
        layer, module, module.conv, -one_H, project=project, finish=finish, skip_H=one_H, short=True, **sizes
    )


def _mamba1(layer: int, module: Any) -> Mixer:
    channels, states = module.A_log.shape
    names = ("dt_layernorm", "b_layernorm", "c_layernorm")  # Jamba's and Falcon Mamba's

    def project(x_TD: Tensor) -> Projected:
        raw_TC, z_TC = module.in_proj(x_TD[None])[0].chunk(2, dim=-1)
        return Projected(z_TC, raw_TC, raw_TC)

    def late(mixed_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        projected = module.x_proj(mixed_TC.to(module.D.dtype))
        parts = projected.split([projected.shape[-1] - 2 * states, states, states], dim=-1)
        if hasattr(module, names[0]):
            parts = tuple(getattr(module, name)(part) for name, part in zip(names, parts, strict=True))
        return F.softplus(module.dt_proj(parts[0]).float()), parts[1], parts[2]

    def finish(y_TC1: Tensor, z_TC: Tensor) -> Tensor:
        return module.out_proj((y_TC1[..., 0] * F.silu(z_TC)).to(z_TC.dtype)[None])[0]

    rate_H, skip_H = -module.A_log.detach().float().exp(), module.D.detach().float()
    sizes = {"heads": channels, "groups": 1, "state_size": states, "head_width": 1}
    return _record(
        layer, module, module.conv1d, rate_H, project=project, finish=finish, skip_H=skip_H, late=late, **sizes
    )


def _mamba2(layer: int, module: Any) -> Mixer:
    names = ("in_proj", "out_proj", "norm", "num_heads", "head_dim", "n_groups", "ssm_state_size", "intermediate_size")
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        raise _odd(layer, module, f"it is not laid out as Mamba-2 ({', '.join(missing)} not found)")
    inner, heads, channels = module.intermediate_size, module.num_heads, module.conv1d.in_channels
    before, scaled = getattr(module, "ssm_in_multiplier", None), hasattr(module, "mup_vector")
    gate_alone = isinstance(module.norm, nn.Identity)

    def project(x_TD: Tensor) -> Projected:
        if before is not None:
            x_TD = x_TD * before
        projected = module.in_proj(x_TD[None])
        if scaled:
            projected = projected * module.mup_vector
        return Projected(*projected[0].split([inner, channels, heads], dim=-1))

    def finish(y_THP: Tensor, z_TI: Tensor) -> Tensor:
        y_1TI = y_THP.flatten(1)[None]
        y_1TI = y_1TI * F.silu(z_TI[None]) if gate_alone else module.norm(y_1TI, z_TI[None])
        return module.out_proj(y_1TI.to(z_TI.dtype))[0]

    low, high = getattr(module, "time_step_limit", (0.0, float("inf")))
    return _record(
        layer,
        module,
        module.conv1d,
        -module.A_log.detach().float().exp(),
        heads=heads,
        groups=module.n_groups,
        state_size=module.ssm_state_size,
        head_width=module.head_dim,
        skip_H=module.D.detach().float(),
        limits=(float(low), float(high)),
        project=project,
        finish=finish,
    )


class _DeltaNames(NamedTuple):
    """Where a delta net's parts are."""

    project: tuple[str, ...]
    norm: str = "norm"
    out: str = "out_proj"


_QWEN3_NEXT = _DeltaNames(("in_proj_qkvz", "in_proj_ba"))  # by groups of heads
_QWEN3_5 = _DeltaNames(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))
_OLMO = _DeltaNames(("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"), "o_norm", "o_proj")


def _delta_net(layer: int, module: Any) -> Mixer:
    known = (_QWEN3_NEXT, _QWEN3_5, _OLMO)
    names = next((each for each in known if all(hasattr(module, part) for part in (*each.project, *each[1:]))), None)
    if names is None:
        raise _odd(layer, module, "its projections have names that are not those of a known gated delta net")
    heads, width = module.num_v_heads, module.head_v_dim

    def project(x_TD: Tensor) -> Projected:
        found = [getattr(module, part)(x_TD[None]) for part in names.project]
        if names is _QWEN3_NEXT:
            q, k, v, z, b, a = module.fix_query_key_value_ordering(*found)
            raw = torch.cat([each.flatten(2) for each in (q, k, v)], dim=-1)
        else:
            *raws, z, b, a = found
            raw = torch.cat(raws, dim=-1)
        return Projected(z[0].reshape(len(x_TD) * heads, width), raw[0], torch.cat([a, b], dim=-1)[0])

    def finish(y_THP: Tensor, z: Tensor) -> Tensor:
        y = getattr(module, names.norm)(y_THP.reshape(-1, width).to(z.dtype), z)
        return getattr(module, names.out)(y.view(1, len(y_THP), -1))[0]

    return _record(
        layer,
        module,
        module.conv1d,
        -module.A_log.detach().float().exp(),
        delta=True,
        heads=heads,
        groups=module.num_k_heads,
        state_size=module.head_k_dim,
        head_width=width,
        skip_H=None,
        most_factor=2.0 if getattr(module, "allow_neg_eigval", False) else 1.0,
        project=project,
        finish=finish,
    )


def _record(layer: int, module: Any, conv: Any, rate_H: Tensor, **parts: Any) -> Mixer:
    bias = getattr(module, "dt_bias", None)
    return Mixer(
        layer=layer,
        module=module,
        conv_CW=conv.weight.detach().squeeze(1).float(),
        conv_bias_C=None if conv.bias is None else conv.bias.detach().float(),
        rate_H=rate_H,
        step_bias_H=torch.zeros(1) if bias is None else bias.detach().float(),
        **{"delta": False, "limits": (0.0, float("inf")), **parts},
    )


def _tried(mixer: Mixer, model: Any) -> Mixer:
    """The mixer as the installed library computes it, after it has been compared."""
    device, dtype = next(model.parameters()).device, dtype_of(model.get_input_embeddings())
    width = model.config.get_text_config(decoder=True).hidden_size
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(_PROMPT + 1, width, generator=generator).to(device=device, dtype=dtype)
    with torch.inference_mode(), _quiet(), _short_chunks(mixer.module):
        try:
            given, cache = anatomy.cache_argument(mixer.module), DynamicCache(config=model.config)
            prompt = mixer.module(x_TD[None, :_PROMPT], **{given: cache})[0]
            later = mixer.module(x_TD[None, _PROMPT:], **{given: cache})[0]
            only = mixer.module(x_TD[None, _PROMPT:], **{given: DynamicCache(config=model.config)})[0]
            expected = torch.cat([prompt, later, only]).float()
            for some in range(len(KINDS) + 1):  # where nothing is limited, the first is as good as any
                for limited in combinations(KINDS, len(KINDS) - some):
                    found = replace(mixer, limited=frozenset(limited))
                    apart = (_computed(found, x_TD) - expected).abs().max()
                    if bool(apart <= _ALLOWED[x_TD.dtype] * expected.abs().max()):
                        return found
        except Exception as error:  # whatever a family raises for rows that it did not expect
            raise _odd(mixer.layer, mixer.module, str(error)) from error
    raise _odd(mixer.layer, mixer.module, "it computes something else than the recurrence that its parts stand for")


@contextmanager
def _short_chunks(module: Any) -> Iterator[None]:
    """Shorten the chunks to which the library pads rows: the cost of a chunk is quadratic, a second a layer here."""
    size = getattr(module, "chunk_size", None)
    if size is None:
        yield
        return
    module.chunk_size = _PROMPT
    try:
        yield
    finally:
        module.chunk_size = size


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the library's warnings about missing kernels, which decoding does not use."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _computed(mixer: Mixer, x_TD: Tensor) -> Tensor:
    text, only = mixer.project(x_TD), mixer.project(x_TD[_PROMPT:])
    kinds: list[Kind] = ["prompt"] * _PROMPT
    gates_T2H = mixer.gates(text.steps_TH, [*kinds, "later"])
    y_TD = mixer.finish(alone(mixer, text.raw_TC, gates_T2H), text.z)
    y_1D = mixer.finish(alone(mixer, only.raw_TC, mixer.gates(only.steps_TH, ["only"])), only.z)
    return torch.cat([y_TD, y_1D]).float()


def _odd(layer: int, module: nn.Module, why: str) -> UnsupportedArchitecture:
    return UnsupportedArchitecture(f"layer {layer}, {type(module).__name__}: {' '.join(why.split())[:300]}; {REMEDY}")
