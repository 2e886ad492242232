"""``foretoken calibrate``: measure a model on text, for methods that need such statistics before they decode."""

from __future__ import annotations

import typer

from foretoken_lab.cli import calibrate_scylla, calibrate_sparse, calibrate_vocabulary

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


@app.callback(epilog="Example: foretoken calibrate sparse --model zoo:moe --corpus chats.jsonl --out sparse.json")
def calibrate() -> None:
    """Measure what sparse verification, trimmed drafting and Scylla have to know of a model."""


app.command("scylla")(calibrate_scylla.scylla)
app.command("sparse")(calibrate_sparse.sparse)
app.command("vocabulary")(calibrate_vocabulary.vocabulary)
