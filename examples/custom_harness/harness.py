"""An agent that knows nothing of its trainer: it asks, checks, and asks once more."""

from collections.abc import Mapping
from typing import Any

import openai

CLIENT = openai.AsyncOpenAI(base_url="http://unused", api_key="unused")  # its set-up takes a while


async def run(row: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    """The reward: 1 for a right answer, half for one at the second try."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    for reward in (1.0, 0.5):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content or ""
        if f"<answer>{row['answer']}</answer>" in text:
            return {"reward": reward, "right": 1.0}
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": f"No. {row['prompt']}"},
        ]
    return {"reward": 0.0, "right": 0.0}
