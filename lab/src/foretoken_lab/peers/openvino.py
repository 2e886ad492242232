"""OpenVINO GenAI on a GGUF file: plain decoding and its prompt look-up.

It opens GGUF files of Llama and Qwen in float16, Q8_0, Q4_0, Q4_1, Q4_K_M and Q6_K by itself; other files and dtypes
are reported as not measured. Its cache of prompts is off: every other engine reads each prompt anew.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken_lab.peers.adapters import BAR

INSTALL = "pip install openvino-genai"


class OpenVino:
    """One pipeline with its settings; token ids go in and come back.

    Args:
        options: of ``LLMPipeline``, next to the number of threads.
        generation: fields of ``GenerationConfig`` for every call.
    """

    group = "openvino"

    def __init__(
        self,
        name: str,
        package: Any,
        file: Path,
        *,
        threads: int,
        end_ids: frozenset[int],
        temperature: float,
        options: dict[str, Any],
        generation: dict[str, Any],
    ) -> None:
        self.name = name
        self.pipeline = package.LLMPipeline(str(file), "CPU", INFERENCE_NUM_THREADS=threads, **options)
        self.config = package.GenerationConfig()
        self.config.apply_chat_template = False
        self.config.stop_token_ids = set(end_ids)
        self.config.do_sample = temperature > 0
        if temperature > 0:
            self.config.temperature = temperature
        for field, value in generation.items():
            setattr(self.config, field, value)

    def generate(self, ids: Sequence[int], max_tokens: int) -> list[int]:
        from openvino import Tensor

        self.config.max_new_tokens = max_tokens
        result = self.pipeline.generate(Tensor(np.array([ids], dtype=np.int64)), self.config)
        return list(result.tokens[0])


def openvino_family(
    file: Path, *, threads: int, end_ids: frozenset[int], temperature: float, requested: Callable[[str], bool]
) -> list[OpenVino]:
    """Plain with both of its kinds of attention, and prompt look-up in two settings: its best counts."""
    try:
        import openvino_genai
    except ImportError as error:
        print(f"{BAR}\nOpenVINO is NOT measured: {error}\nTo include it: {INSTALL}\n{BAR}", file=sys.stderr)
        return []
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    paged = {"scheduler_config": scheduler}
    settings: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "openvino": (paged, {}),
        "openvino SDPA": ({"ATTENTION_BACKEND": "SDPA"}, {}),
        **{
            f"openvino lookup {matching}-{proposed}": (
                {**paged, "prompt_lookup": True},
                {"max_ngram_size": matching, "num_assistant_tokens": proposed},
            )
            for matching, proposed in ((2, 4), (3, 8))
        },
    }
    found = []
    for name, (options, generation) in settings.items():
        if not requested(name):
            continue
        try:
            found.append(
                OpenVino(
                    name,
                    openvino_genai,
                    file,
                    threads=threads,
                    end_ids=end_ids,
                    temperature=temperature,
                    options=options,
                    generation=generation,
                )
            )
        except RuntimeError as error:
            print(f"{BAR}\n{name} is NOT measured: it does not open {file.name}: {error}\n{BAR}", file=sys.stderr)
    return found


def logits_of_openvino(file: Path, folder: Path, threads: int) -> Callable[[Sequence[int]], Tensor]:
    """A function from token ids to logits [T, V] of the model that its pipeline makes of a GGUF file.

    Args:
        folder: an empty one, for the model in OpenVINO's own form; needed while the function is used.
    """
    import openvino
    import openvino_genai

    here = folder / file.name
    here.symlink_to(file.resolve())
    openvino_genai.LLMPipeline(str(here), "CPU", enable_save_ov_model=True)
    model = openvino.Core().compile_model(folder / "openvino_model.xml", "CPU", {"INFERENCE_NUM_THREADS": threads})

    def logits(ids: Sequence[int]) -> Tensor:
        request, places_1T = model.create_infer_request(), np.arange(len(ids))[None]
        found = request.infer(
            {
                "input_ids": np.array([ids], dtype=np.int64),
                "attention_mask": np.ones_like(places_1T),
                "position_ids": places_1T,
                "beam_idx": np.zeros(1, dtype=np.int32),
            }
        )
        return torch.from_numpy(found["logits"][0].copy())

    return logits
