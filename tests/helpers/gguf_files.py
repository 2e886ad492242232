"""GGUF files to read: written with the package ``gguf``, quantised by it or by llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

F32, BF16 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.BF16


def rewrite(
    source: Path,
    target: Path,
    *,
    kind: str | Callable[[str], str | None] | None = None,
    fields: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
) -> Path:
    """A copy of a file, with other contents.

    Args:
        kind: what matrices are quantised to, or a function of their names; None: they stay.
        fields: text, numbers or lists that replace the file's, or are added; None as a value takes one away.
        tensors: arrays of float32 that replace the file's, or are added; None as a value takes one away.
    """
    reader = gguf.GGUFReader(str(source))
    writer = gguf.GGUFWriter(str(target), reader.fields["general.architecture"].contents())
    fields, tensors = dict(fields or {}), dict(tensors or {})
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or name in fields:
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for name, value in fields.items():
        if value is not None:
            _add(writer, name, value)
    for tensor in reader.tensors:
        if tensor.name in tensors:
            continue
        to = kind(tensor.name) if callable(kind) else kind
        if to is None or len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        number = gguf.GGMLQuantizationType[to]
        dense = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, gguf.quantize(dense, number), raw_dtype=number)
    for name, value in tensors.items():
        if value is not None:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _add(writer: Any, name: str, value: Any) -> None:
    kind = gguf.GGUFValueType.get_type(value)
    inner = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
    writer.add_key_value(name, value, kind, sub_type=inner)
