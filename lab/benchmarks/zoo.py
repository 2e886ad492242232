"""What the zoo's models can do, measured with transformers alone: held-out loss, and accuracy on the tasks.

    python benchmarks/zoo.py --data DATA [--models base,draft,...] [--tasks arithmetic,profiles,...] [--limit 100]
                             [--json OUT]

Every model is loaded by ``AutoModelForCausalLM`` (or ``AutoModelForMaskedLM``) from its folder. The loss is in nats a
token, on blocks of 512 tokens of the base recipe's mixture that no training read, the same for all. For the masked
diffusion model it is the masked-diffusion bound of its own recipe, and it gets no questions.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer
from transformers.utils import logging

from foretoken import zoo
from foretoken.train.mixture import Mixture
from foretoken.train.objectives import NextToken
from foretoken.train.rendering import encoder
from foretoken.train.trainer import held_out_loss
from foretoken_lab.intervals import wilson_interval
from foretoken_lab.measurement import Measurement
from foretoken_lab.recipes import find
from foretoken_lab.tasks import catalog

BATCH = 25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", default=",".join(zoo.MODELS))
    parser.add_argument("--tasks", default="arithmetic,profiles,json,code,keys,factbook,squad")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measurement = Measurement("zoo.py", options.json, threads=options.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    found = {}
    for name in options.models.split(","):
        model = zoo.find(name)
        if model.folder is None:
            print(f"{name}: not made yet ({model.how})", flush=True)
            continue
        found[name] = _measure(name, model.folder, options)
        print(f"{name}: {found[name]}", flush=True)
    _show(found, options.tasks.split(","))
    measurement.write({"models": found}, limit=options.limit)


def _measure(name: str, folder: Path, options: argparse.Namespace) -> dict:
    recipe = find(name)
    masked = name == "diffusion"
    loader = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    model = loader.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    sources = find("base").sources(options.data)
    objective = recipe.objective(tokenizer, None) if masked else NextToken()
    with tempfile.TemporaryDirectory() as tokens:
        block = recipe.block if masked else 512
        mixture = Mixture(sources, encoder(tokenizer), Path(tokens), block, len(tokenizer), 0)
        loss = held_out_loss(model, objective, mixture, options.blocks, 4)
    result = {"parameters": sum(p.numel() for p in model.parameters()), "held_out_loss": round(loss, 3)}
    if masked:
        return result
    model.to(torch.bfloat16)
    for task in options.tasks.split(","):
        result[task] = _accuracy(model, tokenizer, catalog.find(task), options)
    return result


@torch.inference_mode()
def _accuracy(model, tokenizer, task: catalog.Task, options: argparse.Namespace) -> dict:
    setting = catalog.Setting(
        data=options.data,
        context=300 if task.context is not None else None,
        count=lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]),
    )
    examples = task.examples(options.limit, setting)
    started, right = time.perf_counter(), 0
    for start in range(0, len(examples), BATCH):
        some = examples[start : start + BATCH]
        chats = [[{"role": "user", "content": example.prompt}] for example in some]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_tensors="pt", padding=True, return_dict=True
        )
        inputs.pop("token_type_ids", None)
        output = model.generate(**inputs, max_new_tokens=task.max_tokens, do_sample=False)
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(task.score(text, example)["correct"] for text, example in zip(texts, some, strict=True))
    low, high = wilson_interval(int(right), len(examples))
    return {
        "accuracy": round(right / len(examples), 4),
        "interval": [round(low, 3), round(high, 3)],
        "examples": len(examples),
        "seconds": round(time.perf_counter() - started, 1),
    }


def _show(found: dict, tasks: list[str]) -> None:
    table = Table("model", "parameters", "loss", *tasks)
    for name, result in found.items():
        cells = [f"{result[task]['accuracy']:.0%}" if task in result else "-" for task in tasks]
        table.add_row(name, f"{result['parameters'] / 1e6:.1f} M", f"{result['held_out_loss']:.2f}", *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
