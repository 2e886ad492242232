"""``foretoken generate``: prompts in, text out."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli.run.answers import answer_all, answer_one
from foretoken.cli.shared.options import (
    Device,
    DraftModel,
    Dtype,
    KvCacheDtype,
    MaxModelLen,
    MaxNumSeqs,
    Method,
    Model,
    Revision,
    Settings,
    Threads,
    TrustRemoteCode,
    Verbose,
    check_model_name,
    check_placement,
    load_model,
    temperature_option,
)
from foretoken.cli.shared.settings import DEFAULT_MODEL, chosen_recipe
from foretoken.core.errors import ConfigError, InputError
from foretoken.core.sampling import SamplingParams
from foretoken.data.prompts import Prompt, check_text, read_prompts

_SAMPLING, _FACE = "Sampling", "Prompts and output"


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="What to say to the model. Without it (or with '-') standard input is read.", show_default=False
        ),
    ] = None,
    model: Model = DEFAULT_MODEL,
    method: Method = None,
    sets: Settings = None,
    draft_model: DraftModel = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="Tokens to generate at most.", rich_help_panel=_SAMPLING)
    ] = 128,
    temperature: Annotated[float, temperature_option(_SAMPLING)] = 0.0,
    top_p: Annotated[
        float,
        typer.Option("--top-p", help="Keep the smallest set of tokens with this mass.", rich_help_panel=_SAMPLING),
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option("--top-k", help="Keep the k most probable tokens; 0 keeps all.", rich_help_panel=_SAMPLING)
    ] = 0,
    min_p: Annotated[
        float,
        typer.Option("--min-p", help="Drop tokens below this share of the best one.", rich_help_panel=_SAMPLING),
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Fix every random choice.", rich_help_panel=_SAMPLING)
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            "--stop", metavar="TEXT", help="End the text before this string. Repeatable.", rich_help_panel=_SAMPLING
        ),
    ] = None,
    stop_token_id: Annotated[
        list[int] | None,
        typer.Option("--stop-token-id", metavar="ID", help="End at this token. Repeatable.", rich_help_panel=_SAMPLING),
    ] = None,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Above 1: less repetition.", rich_help_panel=_SAMPLING)
    ] = 1.0,
    presence_penalty: Annotated[
        float,
        typer.Option("--presence-penalty", help="Taken once off tokens already written.", rich_help_panel=_SAMPLING),
    ] = 0.0,
    frequency_penalty: Annotated[
        float,
        typer.Option("--frequency-penalty", help="Taken off for every time it was written.", rich_help_panel=_SAMPLING),
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            "--logit-bias", metavar="ID=VALUE", help="Add to a token's logit. Repeatable.", rich_help_panel=_SAMPLING
        ),
    ] = None,
    min_tokens: Annotated[
        int, typer.Option("--min-tokens", help="No end before so many tokens.", rich_help_panel=_SAMPLING)
    ] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the model's own end of text.", rich_help_panel=_SAMPLING)
    ] = False,
    n: Annotated[int, typer.Option("--n", help="Completions of every prompt.", rich_help_panel=_SAMPLING)] = 1,
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs", metavar="K", help="With --json: the K best log-probabilities.", rich_help_panel=_SAMPLING
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE.jsonl",
            help="One JSON object a line: 'prompt', 'messages' or 'turns' (the first); beside it its own 'max_tokens', "
            "'temperature', …",
            rich_help_panel=_FACE,
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option("--system", metavar="TEXT", help="A system message before the prompt.", rich_help_panel=_FACE),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", "--no-chat", help="No chat template: continue the prompt as it is.", rich_help_panel=_FACE
        ),
    ] = False,
    json: Annotated[
        bool,
        typer.Option("--json", help="One JSON object a prompt on stdout, and nothing else.", rich_help_panel=_FACE),
    ] = False,
    dtype: Dtype = "auto",
    kv_cache_dtype: KvCacheDtype = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    max_model_len: MaxModelLen = None,
    device: Device = "auto",
    threads: Threads = None,
    max_num_seqs: MaxNumSeqs = 16,
    verbose: Verbose = False,
) -> int:
    """Generate text, several tokens per model call.

    The text goes to stdout, one line of statistics to stderr. The chat
    template is applied where the model has one (--raw leaves it out). Without
    a prompt, standard input is read; with --prompts a whole file, many prompts
    at a time.

    [bold]Examples[/bold]

      foretoken generate "Tom has 12 marbles. He buys 30 more. How many has he now?"

      foretoken generate "I need a hotel in London." --method draft_model

      foretoken generate "Anna has 15 apples and eats 4. How many are left?" --set num_speculative_tokens=4

      echo "def add(a, b):" | foretoken generate --raw --temperature 0.8 --seed 1

      foretoken generate --prompts questions.jsonl --json > answers.jsonl
    """
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=stop,
        stop_token_ids=stop_token_id or (),
        logprobs=logprobs,
        n=n,
        logit_bias=_parse_bias(logit_bias or []),
        ignore_eos=ignore_eos,
    )
    config = chosen_recipe(method, sets, target=model, draft_model=draft_model)
    check_placement(dtype, device, kv_cache_dtype)
    check_model_name(model)
    if logprobs is not None and not json:
        raise ConfigError("--logprobs are shown in the JSON objects only: add --json")
    if system is not None and raw:
        raise ConfigError("--system needs the chat template that --raw leaves out: keep one")
    # everything that can be wrong with the input is found before the model is loaded
    records = _gather_prompts(prompt, prompts)
    for record in () if json else records:
        for name in ("logprobs", "prompt_logprobs"):
            if record.params.get(name) is not None:
                raise InputError(f"{record.place}: {name} are shown in the JSON objects only: add --json")
    llm = load_model(
        model,
        config,
        verbose=verbose,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        device=device,
        threads=threads,
        max_num_seqs=max_num_seqs,
        revision=revision,
        trust_remote_code=trust_remote_code,
        max_model_len=max_model_len,
    )
    try:
        if system is not None and not llm.is_chat_model:
            raise ConfigError(f"--system needs a chat model, and {model} has no chat template")
        chat = llm.is_chat_model and not raw
        inputs = [_token_ids(llm, record, system, chat=chat) for record in records]
        if prompts is None and n == 1:
            return answer_one(llm, records[0], inputs[0], params, json=json)
        return answer_all(llm, records, inputs, [_params_of(record, params) for record in records], json=json)
    finally:
        llm.close()


def _gather_prompts(argument: str | None, path: Path | None) -> list[Prompt]:
    if path is not None:
        if argument is not None:
            raise ConfigError("both a prompt and --prompts were given: keep one")
        return read_prompts(path, requests=True)
    if argument is not None and argument != "-":
        return [Prompt("0", check_text(argument, "the prompt"))]
    if argument is None and sys.stdin.isatty():
        raise ConfigError("no prompt: give one as an argument, on standard input, or with --prompts FILE.jsonl")
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 text (byte {error.start + 1})") from None
    # the line end that echo and editors add is not part of the prompt
    place = "the prompt on standard input"
    return [Prompt("0", check_text(text.removesuffix("\n").removesuffix("\r"), place), place=place)]


def _params_of(record: Prompt, params: SamplingParams) -> SamplingParams:
    """The command's params, but for what a record asks for itself."""
    try:
        return dataclasses.replace(params, **record.params)
    except ConfigError as error:
        raise InputError(f"{record.place}: {error}") from None


def _token_ids(llm: Any, record: Prompt, system: str | None, *, chat: bool) -> list[int]:
    """What the model will see of a prompt; one that does not fit is refused under the name of its place."""
    if record.messages and not chat:
        raise InputError(f"{record.place} is a conversation, which needs the chat template that is left out here")
    if record.messages and system is not None and record.messages[0]["role"] == "system":
        raise InputError(f"{record.place} has a system message, and --system gives another: keep one")
    if chat:
        first = [] if system is None else [{"role": "system", "content": system}]
        said = record.messages or ({"role": "user", "content": record.text},)
        try:
            ids = llm.chat_prompt([*first, *said])["prompt_token_ids"]
        except InputError as error:
            raise InputError(f"{record.place}: {error}") from None
    else:
        ids = list(llm.tokenizer(record.text)["input_ids"])
    room = llm.target.max_length
    if len(ids) >= room:
        raise InputError(
            f"{record.place} has {len(ids)} tokens; the context holds {room}, the output included: shorten it"
        )
    return ids


def _parse_bias(texts: list[str]) -> dict[int, float] | None:
    bias: dict[int, float] = {}
    for text in texts:
        token, _, value = text.partition("=")
        try:
            key, added = int(token), float(value)
        except ValueError:
            raise ConfigError(f"--logit-bias '{text}': write ID=VALUE, for example 42=-5") from None
        if key in bias:
            raise ConfigError(f"--logit-bias gives token {key} twice: keep one")
        bias[key] = added
    return bias or None
