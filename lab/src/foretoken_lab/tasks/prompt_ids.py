"""The prompt of a question, as token ids."""

from __future__ import annotations

from foretoken.engine.llm import LLM


def question_ids(llm: LLM, question: str) -> list[int]:
    """Return what a model reads of a user's question: through its chat template if it has one."""
    if llm.is_chat_model:
        return llm.chat_prompt([{"role": "user", "content": question}])["prompt_token_ids"]
    return list(llm.tokenizer(question)["input_ids"])
