"""Prefers short completions; a right answer, if the row has one, is measured but not rewarded."""

SCALE_CHARACTERS = 20


def reward(prompt: str, completion: str, answer: str = "", **fields: object) -> dict[str, float]:
    """1 for an empty completion, 0.5 at 20 characters, 0.25 at 60."""
    return {
        "reward": 1 / (1 + len(completion) / SCALE_CHARACTERS),
        "length_chars": float(len(completion)),
        "right": float(f"<answer>{answer}</answer>" in completion),
    }
