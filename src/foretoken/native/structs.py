"""The structures that are handed to the native decoder: types.h, field by field."""

from __future__ import annotations

import ctypes

_I, P = ctypes.c_int64, ctypes.c_void_p


class Mixer(ctypes.Structure):
    """A state-space mixer."""

    _fields_ = [
        *((name, _I) for name in ("place", "heads", "groups", "state", "width", "taps", "channels", "inner", "stride")),
        ("norm_group", _I),
        *((name, ctypes.c_double) for name in ("low", "high", "eps")),
        *((name, P) for name in ("conv", "conv_bias", "rate", "step_bias", "skip", "gain")),
        ("norm_first", _I),
    ]


class Matrix(ctypes.Structure):
    """A packed weight."""

    _fields_ = [
        ("tiles", P),
        *((name, _I) for name in ("stride", "bits", "group", "half", "minimum", "offset")),
        ("order", P),
    ]


class Experts(ctypes.Structure):
    """Experts in the place of an MLP."""

    _fields_ = [
        *((name, Matrix) for name in ("router", "gate_up", "down")),
        *((name, _I) for name in ("count", "chosen", "width", "normed", "opens")),
    ]


class Layer(ctypes.Structure):
    """One layer's packed weights; addresses may be None where the layer has no such part."""

    _fields_ = [
        *((name, Matrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, P) for name in ("qkv_bias", "out_bias", "gate_up_bias", "down_bias")),
        *((name, P) for name in ("qkv_scale", "out_scale", "gate_up_scale")),
        *((name, P) for name in ("attention_norm", "mlp_norm", "attention_shift", "mlp_shift")),
        *((name, P) for name in ("attention_end_norm", "mlp_end_norm")),
        *((name, P) for name in ("q_norm", "k_norm", "q_all_norm", "k_all_norm")),
        *((name, _I) for name in ("window", "rot_dim", "angles", "index")),
        *((name, _I) for name in ("elsewhere", "mlp_width", "gated", "parallel")),
        ("beside", P),
        ("mixer", ctypes.POINTER(Mixer)),
        ("experts", ctypes.POINTER(Experts)),
    ]


ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "relu_squared": 2, "gelu": 3, "relu": 4}


class Model(ctypes.Structure):
    """Sizes and weights; the native side only reads them."""

    _fields_ = [
        *((name, _I) for name in ("bf16", "num_layers", "width", "heads", "kv_heads", "head_dim", "vocab")),
        *((name, _I) for name in ("qkv_stride", "mlp_width", "logits_stride")),
        *((name, _I) for name in ("activation", "centred", "interleaved")),
        *((name, ctypes.c_double) for name in ("eps", "scaling", "score_cap", "logit_cap", "logit_scale")),
        *((name, ctypes.c_double) for name in ("embedding_scale", "residual_scale")),
        ("layers", ctypes.POINTER(Layer)),
        *((name, P) for name in ("embedding", "places")),
        ("head", Matrix),
        *((name, P) for name in ("head_bias", "final_norm", "final_shift")),
    ]


class Segment(ctypes.Structure):
    """The rows of one request."""

    _fields_ = [
        *((name, _I) for name in ("slot", "prefix", "tail", "start", "rows", "committed", "keep", "far_slot", "far")),
        ("seen", P),
    ]


SCORES = {"exact": 0, "bounds": 1, "mean": 2}
SETS = {"per_head": 0, "global": 1, "per_layer": 2}


class Blocks(ctypes.Structure):
    """Attention over selected blocks of the prefix."""

    _fields_ = [
        *((name, _I) for name in ("size", "sinks", "locals", "sets", "score", "capacity", "most")),
        ("selects", P),
        ("summaries", ctypes.POINTER(P)),
        *((name, P) for name in ("scores", "chosen")),
    ]


class StateSegment(ctypes.Structure):
    """What a request's rows read and leave behind in layers with mixers."""

    _fields_ = [
        *((name, _I) for name in ("pend", "pending", "stored", "count", "levels")),
        *((name, P) for name in ("steps", "taps", "ahead_base", "ahead_conv")),
    ]


class States(ctypes.Structure):
    """States of every mixer and slot."""

    _fields_ = [
        *((name, _I) for name in ("slots", "capacity")),
        *((name, P) for name in ("base", "conv", "raw", "gates")),
        ("limited", ctypes.c_char_p),
        ("segments", ctypes.POINTER(StateSegment)),
    ]


class Elsewhere(ctypes.Structure):
    """One layer's keys and values of another cache."""

    _fields_ = [("groups", _I), ("capacity", _I), *((name, P) for name in ("keys", "values", "tiled", "known"))]


class Angles(ctypes.Structure):
    """By what positions are rotated."""

    _fields_ = [("cos", P), ("sin", P)]


class Call(ctypes.Structure):
    """One forward."""

    _fields_ = [
        *((name, _I) for name in ("num_rows", "num_segments", "num_wanted", "capacity", "threads", "coded")),
        *((name, P) for name in ("tokens", "positions", "wanted")),
        ("angles", ctypes.POINTER(Angles)),
        ("segments", ctypes.POINTER(Segment)),
        ("blocks", ctypes.POINTER(Blocks)),
        *((name, P) for name in ("keys", "values", "tiled", "known", "logits", "best", "peaks")),
        ("top", _I),
        *((name, P) for name in ("top_ids", "top_shares")),
        *((name, _I) for name in ("first", "last")),
        *((name, P) for name in ("entering", "beside")),
        *((name, _I) for name in ("skip_norm", "num_taps", "num_tap_rows")),
        *((name, P) for name in ("taps", "tap_rows", "tapped")),
        ("thresholds", P),
        ("attention_seconds", ctypes.POINTER(ctypes.c_double)),
        ("states", ctypes.POINTER(States)),
        ("elsewhere", ctypes.POINTER(Elsewhere)),
    ]


class Move(ctypes.Structure):
    """Rows of one slot to move together, in every layer."""

    _fields_ = [
        *((name, _I) for name in ("num_layers", "slot", "kv_heads", "capacity", "row_bytes", "to", "count")),
        *((name, P) for name in ("keys", "values", "from_rows")),
    ]


class Linear(ctypes.Structure):
    """One product."""

    _fields_ = [
        ("w", Matrix),
        *((name, _I) for name in ("bf16", "tiles", "units", "rows", "threads")),
        *((name, P) for name in ("x", "out", "bias")),
    ]


class Entry(ctypes.Structure):
    """How pairs of a feature and a token enter (chain.h)."""

    _fields_ = [
        *((name, P) for name in ("table", "embedding", "token_norm")),
        *((name, Matrix) for name in ("token", "feature")),
        *((name, P) for name in ("bias", "before", "behind")),
        *((name, _I) for name in ("num_tokens", "columns")),
    ]


class Chain(ctypes.Structure):
    """Passes over pairs (chain.h)."""

    _fields_ = [
        ("first", ctypes.POINTER(Call)),
        *((name, P) for name in ("features", "entering", "parts", "elements")),
        ("passes", _I),
        *((name, P) for name in ("most", "ids")),
        ("tenths", _I),
        *((name, P) for name in ("stands", "least", "free", "reach", "temperature", "uniforms", "weights")),
        ("segments", ctypes.POINTER(Segment)),
        *((name, P) for name in ("positions", "rows")),
        ("made", _I),
        *((name, P) for name in ("counts", "drafts", "tokens")),
    ]


class Growth(ctypes.Structure):
    """One tree (tree.h)."""

    _fields_ = [
        *((name, _I) for name in ("most", "deepest")),
        ("least", ctypes.c_double),
        *((name, _I) for name in ("count", "odd")),
        *((name, P) for name in ("tokens", "parents", "shares")),
    ]


class Trees(ctypes.Structure):
    """Trees over pairs (tree.h)."""

    _fields_ = [
        ("first", ctypes.POINTER(Call)),
        *((name, P) for name in ("features", "entering", "parts", "gathered", "elements", "ids")),
        ("width", _I),
        ("drafts", ctypes.POINTER(Growth)),
    ]
