"""Updates: the new part of a request since its reader's last call; for the library's streams and the server."""

from dataclasses import dataclass, field

from foretoken.engine.request import Request, TokenLogprob


@dataclass(slots=True)
class Update:
    """The new part of one completion.

    Attributes:
        index: which completion of the prompt.
        text: released text; may be empty while a character or a stop string is incomplete.
        token_ids: new tokens.
        drafted: for each of them, whether it was drafted (else the target emitted it).
        sources: for each of them, which of several drafters wrote it; empty for the target, and for the only drafter.
        refused: for each of them, how many draft tokens were refused in its step: counted at the step's last token.
        logprobs: one entry for each of them, if they were requested.
        finish_reason: None while it runs; then "stop", "length", "cancelled" or "error".
        error: the message if it failed.
        unserved: whether the driver ended it: it was late, or the server was shutting down or had failed.
        unfit: whether no text exists that satisfies what the request requires.
    """

    index: int
    text: str
    token_ids: list[int]
    drafted: list[bool]
    logprobs: list[TokenLogprob]
    finish_reason: str | None = None
    error: str | None = None
    unserved: bool = False
    unfit: bool = False
    sources: list[str] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)

    def join(self, later: "Update") -> None:
        """Append a later update of the same completion."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.drafted += later.drafted
        self.sources += later.sources
        self.refused += later.refused
        self.logprobs += later.logprobs
        self.finish_reason, self.error = later.finish_reason, later.error
        self.unserved, self.unfit = later.unserved, later.unfit


@dataclass(slots=True)
class Tracked:
    """A request under way, and how much of it has been read and counted.

    Attributes:
        request: the engine's.
        index: which completion of its prompt.
        num_read, steps_read: tokens that updates have brought, and the steps that emitted them.
        num_counted, steps_counted, drafted, accepted: what the totals have of it.
        unserved: see :class:`Update`.
    """

    request: Request
    index: int = 0
    num_read: int = 0
    steps_read: int = 0
    num_counted: int = 0
    steps_counted: int = 0
    drafted: int = 0
    accepted: int = 0
    unserved: bool = False

    @property
    def has_news(self) -> bool:
        """Whether there are unread tokens, or the request has ended."""
        return self.request.finished or self.request.num_output > self.num_read

    def update(self) -> Update:
        """Take the new part. The engine's lock must be held: tokens, text and end belong to one moment."""
        request = self.request
        assert request.text is not None
        tokens = request.tokens[request.num_prompt + self.num_read :]
        if request.finished:
            request.text.close()
        steps = request.metrics.emitted[self.steps_read :]
        drafted = [place < step.drafted for step in steps for place in range(step.tokens)]  # the accepted path is first
        sources = [name for step in steps for name in (*step.sources, *[""] * (step.tokens - len(step.sources)))]
        refused = [count for step in steps for count in (*[0] * (step.tokens - 1), step.refused)[: step.tokens]]
        missing = len(tokens) - len(drafted)  # of a step that failed at its end
        drafted, sources, refused = drafted + [False] * missing, sources + [""] * missing, refused + [0] * missing
        logprobs = [] if request.logprobs is None else request.logprobs[self.num_read :]
        self.num_read += len(tokens)
        self.steps_read += len(steps)
        text = request.text.release(final=request.finished)
        ended = (request.finish_reason, request.error, self.unserved, request.unfit)
        return Update(self.index, text, tokens, drafted, logprobs, *ended, sources, refused)
