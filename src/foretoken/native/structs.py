"""The structures that Python hands to the native decoder; types.h declares and describes their fields."""

import ctypes
from pathlib import Path
from typing import Any

from foretoken.native.declared import ADDRESS, NUMBERS, Header

P = ADDRESS
_HEADER = Header(Path(__file__).with_name("types.h"))

ACTIVATIONS = _HEADER.names("SILU")
SCORES = _HEADER.names("EXACT")
VOTERS = _HEADER.names("ROOT")
SETS = _HEADER.names("PER_HEAD")
SUPERBLOCKS = _HEADER.names("NO_SUPERBLOCK")
BLOCKS = _HEADER.names("DENSE")
TABLES_OF_CODES = _HEADER.names("NO_TABLE")


def same_named(kind: type[ctypes.Structure], source: Any, *others: str) -> dict[str, int | float]:
    """The numbers of a structure that a description has under the same names, except the others."""
    names = [name for name, each, *_ in kind._fields_ if each in NUMBERS and name not in others]
    return {name: getattr(source, name) for name in names if hasattr(source, name)}


class Mixer(ctypes.Structure):
    """A state-space mixer."""

    _fields_ = _HEADER.fields("Mixer")


class Matrix(ctypes.Structure):
    """A packed weight."""

    _fields_ = _HEADER.fields("Matrix")


class Experts(ctypes.Structure):
    """Experts in the place of an MLP."""

    _fields_ = _HEADER.fields("Experts", Matrix)


class Latent(ctypes.Structure):
    """Products from compressed queries, keys and values."""

    _fields_ = _HEADER.fields("Latent", Matrix)


class Layer(ctypes.Structure):
    """One layer's packed weights; addresses may be None where the layer has no such part."""

    _fields_ = _HEADER.fields("Layer", Matrix, Mixer, Experts, Latent)


class LowRank(ctypes.Structure):
    """The correction of a packed weight's outputs."""

    _fields_ = _HEADER.fields("LowRank")


class Model(ctypes.Structure):
    """Sizes and weights; the native side only reads them."""

    _fields_ = _HEADER.fields("Model", Matrix, Layer)


class Segment(ctypes.Structure):
    """The rows of one request."""

    _fields_ = _HEADER.fields("Segment")


class Blocks(ctypes.Structure):
    """Attention over selected blocks of the prefix."""

    _fields_ = _HEADER.fields("Blocks")


class StateSegment(ctypes.Structure):
    """State of a request in layers with mixers: its rows to read and to store."""

    _fields_ = _HEADER.fields("StateSegment")


class States(ctypes.Structure):
    """States of every mixer and slot."""

    _fields_ = _HEADER.fields("States", StateSegment)


class ExternalKV(ctypes.Structure):
    """One layer's keys and values of another cache."""

    _fields_ = _HEADER.fields("ExternalKV")


class Angles(ctypes.Structure):
    """The tables by which positions are rotated."""

    _fields_ = _HEADER.fields("Angles")


class Call(ctypes.Structure):
    """One forward."""

    _fields_ = _HEADER.fields("Call", Angles, Segment, Blocks, States, ExternalKV)


class Move(ctypes.Structure):
    """Rows of one slot to move together, in every layer."""

    _fields_ = _HEADER.fields("Move")


class Linear(ctypes.Structure):
    """One product."""

    _fields_ = _HEADER.fields("Linear", Matrix)
