"""``POST /v1/responses``, without a memory of earlier ones: text and function tools, in one piece or as events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from foretoken.serve.chat import chat_prompt
from foretoken.serve.errors import ApiError
from foretoken.serve.loop import Delta
from foretoken.serve.schema import (
    Function,
    FunctionCall,
    InputCall,
    InputCallOutput,
    Message,
    ResponsesRequest,
    ResponseTool,
    Sampling,
    Tool,
    ToolCall,
)
from foretoken.serve.service import Service, new_id, refuse_failure, structure
from foretoken.serve.stream import event
from foretoken.serve.tools import CallReader, calls_in

_UNLIMITED = 2**31  # the context's end is the limit


class Response:
    """One response that is to be made.

    Args:
        service: the model.
        body: what was asked.
    Raises:
        ApiError: it cannot be made; nothing runs.
    """

    def __init__(self, service: Service, body: ResponsesRequest) -> None:
        service.check_model(body.model)
        if body.background:
            raise ApiError(400, "background=true is not supported: leave it out, or use stream", param="background")
        self.service = service
        self.body = body
        self.id, self.message_id, self.created = new_id("resp"), new_id("msg"), int(time.time())
        self.with_tools = bool(body.tools) and body.tool_choice != "none"
        tools = [_tool(each) for each in body.tools or ()] if self.with_tools else None
        prompt = chat_prompt(service, _messages(body), tools)
        sampling = Sampling(model=body.model, temperature=body.temperature, top_p=body.top_p)
        form = None if body.text is None else body.text.format
        params = service.params(
            sampling, max_tokens=body.max_output_tokens or _UNLIMITED, structured_outputs=structure(form)
        )
        self.format = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
        self.params = params
        self.requests = service.requests([prompt], params, body, "input")

    async def answer(self) -> dict[str, Any]:
        """The whole response."""
        (delta,) = await self.service.whole(self.requests)
        text, calls = calls_in(delta.text) if self.with_tools else (delta.text, [])
        return self._object(delta, self._output(text, calls, _status(delta)))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The response as it comes, one event for whatever changes."""
        number = 0

        def said(kind: str, **fields: Any) -> bytes:
            nonlocal number
            number += 1
            return event({"type": kind, "sequence_number": number - 1, **fields}, kind)

        place = {"item_id": self.message_id, "output_index": 0, "content_index": 0}
        begun = self._object(None, [])
        with self.service.running(self.requests) as ticket:
            yield said("response.created", response=begun)
            yield said("response.in_progress", response=begun)
            yield said("response.output_item.added", output_index=0, item=self._message([], "in_progress"))
            yield said("response.content_part.added", **place, part=_part(""))
            reader = CallReader() if self.with_tools else None
            text, calls, last = "", list[dict[str, Any]](), None
            async for deltas in ticket.deltas():
                for last in deltas:
                    try:
                        refuse_failure(last)
                    except ApiError as error:
                        failed = self._object(None, []) | {"status": "failed", "error": _failure(error)}
                        yield said("response.failed", response=failed)
                        return
                    piece = last.text
                    if reader is not None:
                        piece, new = reader.read(piece, final=last.finish_reason is not None)
                        calls += new
                    text += piece
                    if piece:
                        yield said("response.output_text.delta", **place, delta=piece, logprobs=[])
        yield said("response.output_text.done", **place, text=text, logprobs=[])
        yield said("response.content_part.done", **place, part=_part(text))
        assert last is not None
        output = [self._message([_part(text)], _status(last)), *map(_function_call, calls)]
        yield said("response.output_item.done", output_index=0, item=output[0])
        for index, item in enumerate(output[1:], start=1):
            call = {"item_id": item["id"], "output_index": index}
            yield said("response.output_item.added", output_index=index, item=item | {"arguments": ""})
            yield said("response.function_call_arguments.delta", **call, delta=item["arguments"])
            yield said("response.function_call_arguments.done", **call, arguments=item["arguments"], name=item["name"])
            yield said("response.output_item.done", output_index=index, item=item)
        whole = self._object(last, output)
        yield said("response.completed" if whole["status"] == "completed" else "response.incomplete", response=whole)

    # ------------------------------------------------------------------ inside

    def _output(self, text: str, calls: Sequence[dict[str, Any]], status: str) -> list[dict[str, Any]]:
        message = [self._message([_part(text)], status)] if text or not calls else []
        return [*message, *map(_function_call, calls)]

    def _message(self, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
        return {"type": "message", "id": self.message_id, "status": status, "role": "assistant", "content": content}

    def _object(self, delta: Delta | None, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self.body
        status = "in_progress" if delta is None else _status(delta)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.service.name,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": None,
            "store": False,
            "temperature": self.params.temperature,
            "text": {"format": self.format},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": self.params.top_p,
            "truncation": "disabled",
            "usage": None if delta is None else self._usage(),
            "user": body.user,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.service.usage(self.requests, 1)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


def _messages(body: ResponsesRequest) -> list[Message]:
    """The conversation, as the chat template is given it; calls that follow each other are one message."""
    found = [Message(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*found, Message(role="user", content=body.input)]
    for item in body.input:
        if isinstance(item, InputCall):
            function = FunctionCall(name=item.name, arguments=item.arguments)
            call = ToolCall(id=item.call_id, function=function)
            if found and found[-1].tool_calls:
                found[-1].tool_calls.append(call)
            else:
                found.append(Message(role="assistant", tool_calls=[call]))
        elif isinstance(item, InputCallOutput):
            found.append(Message(role="tool", content=item.output, tool_call_id=item.call_id))
        else:
            content = item.content if isinstance(item.content, str) else "\n".join(each.text for each in item.content)
            found.append(Message(role=item.role, content=content))
    return found


def _tool(tool: ResponseTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.parameters)
    return Tool(type="function", function=function)


def _status(delta: Delta) -> str:
    return "incomplete" if delta.finish_reason == "length" else "completed"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _function_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {
        "type": "function_call",
        "id": new_id("fc"),
        "call_id": call["id"],
        "name": function["name"],
        "arguments": function["arguments"],
        "status": "completed",
    }


def _failure(error: ApiError) -> dict[str, Any]:
    return {"code": "server_error", "message": str(error)}
