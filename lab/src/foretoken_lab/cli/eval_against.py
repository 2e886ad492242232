"""``foretoken eval --against``: how far a rounded model is from its weights in float32, or from another model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.cli.shared.console import display, emit_json, emit_laid_out, note, passing_note, quiet_transformers
from foretoken.cli.shared.options import check_model_name, load_model
from foretoken.core.errors import ConfigError, InputError, MismatchError
from foretoken.core.files import check_readable, home_expanded
from foretoken.core.importing import lean_imports
from foretoken.options.model import DTYPES, ModelOptions

if TYPE_CHECKING:
    from foretoken_lab.tasks.rounding_error import RoundingError

TEXT_TOKENS = 2048
SAMPLE = Path(__file__).parents[1] / "tasks" / "samples" / "prose_and_code.txt"
_FEWEST = 32  # tokens: a 99th percentile of fewer is their maximum
_REFERENCES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class _Text:
    """A text in windows of tokens."""

    name: str
    windows: list[list[int]]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.windows))


def run(
    model: str,
    against: str,
    paths: Sequence[Path],
    num_tokens: int | None,
    loading: ModelOptions,
    as_json: bool,
    verbose: bool,
    arguments: Sequence[str],
) -> int:
    """Measure a model over texts, and print a table or a JSON line for each text.

    Args:
        against: a dtype for the model's own weights, or another model, which is read in float32.
        paths: text or JSON Lines; none: a bundled text.
        num_tokens: of each text; None: ``TEXT_TOKENS``.
        loading: of the model; device, revision and trust_remote_code are also the reference's.
    Raises:
        ConfigError, InputError, MismatchError, ModelError: raised before weights are read, wherever the files suffice.
    """
    for path in paths:
        check_readable(path, "--text")
    reference, dtype = _reference(model, against)
    check_model_name(model)
    with passing_note("reading the text"), lean_imports():
        quiet_transformers(verbose)
        texts = _texts(model, reference, paths, num_tokens or TEXT_TOKENS, loading)
        _check_fits(against, model, reference, dtype, texts, loading)
    for text in texts:
        if num_tokens is not None and text.num_tokens < num_tokens:
            note(f"{text.name}: has {text.num_tokens} tokens, and {num_tokens} were wanted: all are read")

    from foretoken.core.provenance import provenance
    from foretoken_lab.tasks import rounding_error
    from foretoken_lab.tasks.reference import Reference

    windows = [text.windows for text in texts]
    num_rows = sum(text.num_tokens for text in texts)
    llm = load_model(model, {"method": "none"}, verbose=verbose, loading=loading, max_num_seqs=1)
    precision = llm.target.precision + (", keys int8" if loading.kv_cache_dtype == "int8" else "")
    facts = {
        "model": model,
        "dtype": llm.target.precision,
        "kv_cache_dtype": loading.kv_cache_dtype,
        "reference": against,
        "native": llm.target.native_decoder is not None,
    }
    found: list[RoundingError] = []
    with rounding_error.StoredLogits(num_rows, llm.target.vocab_size) as stored:
        with _progress(f"{model} in {precision}", num_rows) as progress:
            rounding_error.store(llm.target, windows, stored, progress)
        llm.close()
        del llm
        name = f"{reference} in {dtype}"
        with passing_note(f"loading {name}"), lean_imports():
            network = Reference.load(reference, dtype, device=loading.device, **_origin(model, reference, loading))
        with _progress(name, num_rows) as progress:
            for text, error in zip(texts, rounding_error.compare(stored, network, windows, progress), strict=True):
                found.append(error)
                if as_json:
                    origin = provenance(arguments, model=model, dtype=facts["dtype"])
                    emit_json({**facts, "text": text.name, **asdict(error), "provenance": origin})
    if not as_json:
        _print_table(f"{model}, {precision}, against {name}", texts, found)
    return 0


def _reference(model: str, against: str) -> tuple[str, str]:
    """The reference's model and dtype.

    Raises:
        ConfigError: it is neither a dtype that rounds nothing nor a model.
    """
    dtype = against.removeprefix("torch.")
    if dtype in _REFERENCES:
        return model, dtype
    if dtype in DTYPES:
        raise ConfigError(f"--against {against}: a reference is not rounded; name {', '.join(_REFERENCES)} or a model")
    if against.endswith((".jsonl", ".json")):
        raise ConfigError(
            f"--against {against}: a reference is a dtype or a model; outputs of another run are compared with "
            "--task NAME --against-outputs FILE.jsonl"
        )
    check_model_name(against, "--against")
    if not (":" in against or "/" in against or home_expanded(against).exists()):
        raise ConfigError(
            f"--against {against}: is neither a dtype ({', '.join(_REFERENCES)}) nor a model (a folder, a GGUF file, "
            "a hub id or zoo:NAME)"
        )
    return against, "float32"


def _texts(model: str, reference: str, paths: Sequence[Path], num_tokens: int, loading: ModelOptions) -> list[_Text]:
    """Read and cut the texts.

    Raises:
        InputError: a text is too short.
        MismatchError: the reference has other tokens.
    """
    from foretoken.models.load import load_config, load_tokenizer
    from foretoken.models.vocabulary import different_vocabulary
    from foretoken_lab.tasks.rounding_error import WINDOW, windows

    tokenizer = load_tokenizer(model, **loading.origin)
    configs = [load_config(model, **loading.origin)]
    if reference != model:
        origin = _origin(model, reference, loading)
        other = load_tokenizer(reference, **origin)
        reason = different_vocabulary(tokenizer, other)
        if reason is not None:
            raise MismatchError(
                f"--against {reference} has another vocabulary than '{model}' ({reason}): name a model with the same "
                "tokens"
            )
        configs.append(load_config(reference, **origin))
    size = min([WINDOW, *filter(None, [loading.max_model_len, *map(_longest, configs)])])
    begin = [each for each in tokenizer("").input_ids if each == tokenizer.bos_token_id]
    found = []
    for path in paths or (SAMPLE,):
        ids = list(islice(_tokens(tokenizer, path), num_tokens))
        if len(ids) < min(_FEWEST, num_tokens):
            raise InputError(f"--text {path}: holds {len(ids)} tokens; at least {_FEWEST} are needed")
        found.append(_Text(path.name, windows(ids, begin, size)))
    return found


def _origin(model: str, reference: str, loading: ModelOptions) -> dict[str, Any]:
    """What the reference is read with: a revision is the model's own."""
    return loading.origin if reference == model else {**loading.origin, "revision": None}


def _longest(config: Any) -> int | None:
    found = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def _tokens(tokenizer: Any, path: Path) -> Iterator[int]:
    """Of plain text as it stands, of JSON Lines one document after the other, without special tokens of ours."""
    from foretoken.data.documents import documents
    from foretoken.data.readers import is_json_lines, read_paragraphs
    from foretoken.train.rendering import encoder

    if not is_json_lines(path):
        for piece in read_paragraphs(path):
            yield from tokenizer(piece, add_special_tokens=False).input_ids
        return
    encode = encoder(tokenizer)
    for document in documents(path):
        yield from encode([document])[0]


def _check_fits(
    against: str, model: str, reference: str, dtype: str, texts: Sequence[_Text], loading: ModelOptions
) -> None:
    """Refuse a reference or logits that do not fit, before weights are read."""
    from foretoken.models.load import load_config, place_of
    from foretoken_lab.tasks.reference import bytes_of_reference, check_disk, check_memory

    config = load_config(reference, **_origin(model, reference, loading))
    check_disk(sum(text.num_tokens for text in texts), config.get_text_config(decoder=True).vocab_size)
    if place_of(loading.device).type == "cpu":
        longest = max(len(window) for text in texts for window in text.windows)
        check_memory(against, bytes_of_reference(config, dtype, longest, trust_remote_code=loading.trust_remote_code))


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    done = 0
    with display(title) as show:

        def advance(rows: int) -> None:
            nonlocal done
            done += rows
            show(f"{done:,} of {total:,} tokens", done / total)

        show(f"0 of {total:,} tokens", 0.0)
        yield advance


def _print_table(title: str, texts: Sequence[_Text], found: Sequence[RoundingError]) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("text", no_wrap=True)
    for name in ("tokens", "mean KL", "median", "p99", "same best", "perplexity", "reference's", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    for text, error in zip(texts, found, strict=True):
        nats = (error.mean_kl, error.median_kl, error.p99_kl)
        table.add_row(
            text.name,
            f"{error.num_tokens:,}",
            *(f"{each:.2g}" if each < 1e-3 else f"{each:.4f}" for each in nats),
            f"{error.same_best:.1%}",
            *("" if each is None else f"{each:.2f}" for each in (error.perplexity, error.reference_perplexity)),
            "" if error.perplexity_change is None else f"{error.perplexity_change:+.2%}",
        )
    emit_laid_out(table)
