r"""llama.cpp behind the same API, for ``foretoken bench serve``: the same weights, prompts and HTTP as ours.

    python benchmarks/llama_server.py --model grown:base:100m --threads 2 --slots 32 --port 8090 &
    foretoken serve grown:base:100m --method suffix --threads 2 --max-num-seqs 32 --no-prefix-caching --port 8091 &
    foretoken bench serve --url ours=http://127.0.0.1:8091 --url llama.cpp=http://127.0.0.1:8090 \
        --served-model-name grown:base:100m --clients 1,8,32

The binding's own server needs packages of its own and runs one request at a time. Here llama.cpp's C interface decodes
a batch of all requests a step, as its C++ server does: a token for each that runs, and prompts in what is left of 512
rows. Greedy, chat completions as streams only; the largest logit is looked for in Python, over a view of llama.cpp's
memory.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import threading
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import adapters
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from transformers import AutoTokenizer

from foretoken.engine.text import TextStream
from foretoken.serve.stream import DONE, Chunks

ROWS = 512


@dataclass(eq=False)
class Asked:
    """One request: its tokens, and where what is new is told."""

    tokens: list[int]
    num_prompt: int
    most: int
    home: asyncio.AbstractEventLoop
    news: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)
    slot: int = -1
    read: int = 0

    def tell(self, token: int | None) -> None:
        self.home.call_soon_threadsafe(self.news.put_nowait, token)


class Batches(threading.Thread):
    """Runs llama.cpp: requests join and leave at every step."""

    def __init__(
        self, lib: Any, path: Path, *, slots: int, context: int, threads: int, ends: set[int], unified: bool
    ) -> None:
        super().__init__(daemon=True)
        self.lib, self.ends = lib, ends
        self.free = list(range(slots))
        self.waiting: deque[Asked] = deque()
        self.running: list[Asked] = []
        self.changed = threading.Condition()
        self.silence = lib.llama_log_callback(lambda level, text, data: None)  # must outlive all calls
        lib.llama_log_set(self.silence, None)
        self.model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = slots * context, slots
        params.n_batch = params.n_ubatch = ROWS
        params.kv_unified = unified
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.context = lib.llama_init_from_model(self.model, params)
        self.num_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(ROWS, 0, 1)

    def ask(self, asked: Asked) -> None:
        with self.changed:
            self.waiting.append(asked)
            self.changed.notify()

    def run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self.running)
                while self.waiting and self.free:
                    asked = self.waiting.popleft()
                    asked.slot = self.free.pop()
                    self.running.append(asked)
            self.step()

    def step(self) -> None:
        """One batch: a row for everybody, the rest for prompts; whoever's last row was read gets a token."""
        batch, scored = self.batch, list[tuple[int, Asked]]()
        batch.n_tokens = 0
        for asked in sorted(self.running, key=lambda each: each.read < each.num_prompt):
            count = min(len(asked.tokens) - asked.read, ROWS - batch.n_tokens)
            for place in range(asked.read, asked.read + count):
                row = batch.n_tokens
                batch.token[row], batch.pos[row] = asked.tokens[place], place
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, asked.slot
                batch.logits[row] = place == len(asked.tokens) - 1
                batch.n_tokens += 1
            asked.read += count
            if count and asked.read == len(asked.tokens):
                scored.append((batch.n_tokens - 1, asked))
        if (code := self.lib.llama_decode(self.context, batch)) != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        for row, asked in scored:
            logits_V = np.ctypeslib.as_array(self.lib.llama_get_logits_ith(self.context, row), shape=(self.num_vocab,))
            token = int(logits_V.argmax())
            asked.tokens.append(token)
            asked.tell(token)
            if token in self.ends or len(asked.tokens) == asked.num_prompt + asked.most:
                asked.tell(None)
                self.running.remove(asked)
                self.free.append(asked.slot)
                self.lib.llama_memory_seq_rm(self.lib.llama_get_memory(self.context), asked.slot, -1, -1)


def application(batches: Batches, tokenizer: Any, name: str) -> Starlette:
    """What ``foretoken bench serve`` asks for."""

    async def chat(request: Request) -> StreamingResponse:
        body = await request.json()
        prompt = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        asked = Asked(list(prompt), len(prompt), body["max_tokens"], asyncio.get_running_loop())
        batches.ask(asked)
        return StreamingResponse(events(asked), media_type="text/event-stream")

    async def events(asked: Asked) -> AsyncGenerator[bytes, None]:
        chunk = Chunks({"id": "-", "object": "chat.completion.chunk", "created": 0, "model": name}, usage=True)
        text = TextStream(tokenizer, prompt=asked.tokens)
        count = 0
        while (token := await asked.news.get()) is not None:
            count += 1
            if token not in batches.ends:
                text.push(token)
                yield chunk([{"index": 0, "delta": {"content": text.release()}, "finish_reason": None}])
        used = {"prompt_tokens": asked.num_prompt, "completion_tokens": count, "total_tokens": asked.num_prompt + count}
        yield chunk([{"index": 0, "delta": {"content": text.release(final=True)}, "finish_reason": "stop"}])
        yield chunk([], used)
        yield DONE

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="grown:base:100m", help="Llama layout")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--slots", type=int, default=32, help="requests that run at once")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--unified", action=argparse.BooleanOptionalAction, default=True, help="one cache for all slots"
    )
    parser.add_argument("--port", type=int, default=8090)
    options = parser.parse_args()
    lib = adapters.import_llama_cpp()
    if lib is None:
        raise SystemExit(2)
    tokenizer = AutoTokenizer.from_pretrained(adapters.folder_of(options.model))
    ends = {
        token for token in (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|end|>")) if token is not None
    }
    with tempfile.TemporaryDirectory() as folder:
        path = adapters.export_gguf(options.model, options.dtype, Path(folder) / "model.gguf")
        batches = Batches(
            lib,
            path,
            slots=options.slots,
            context=options.context,
            threads=options.threads,
            ends=ends,
            unified=options.unified,
        )
        batches.start()
        app = application(batches, tokenizer, options.model)
        uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="error", access_log=False)


if __name__ == "__main__":
    main()
