"""Section ``environment.judge``: a model that scores completions, at a server."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from nemo_like.config.section import Count, Section

JUDGE = "judge"


class JudgeConfig(Section):
    """A model at a server that speaks the OpenAI protocol, in place of a reward function."""

    url: str | None = None
    """Its address up to the version, ``http://localhost:8000/v1``."""
    model: str | None = None
    """The model's name there."""
    key_variable: str | None = None
    """Name of the environment variable that has the key, such as ``JUDGE_API_KEY``. None: no key is
    sent, whatever other keys the environment has."""
    template: str | None = None
    """What it is asked: a Jinja template, or a file with one, of ``prompt``, ``completion``,
    ``messages`` (of the prompt) and the row's fields. None: for a score from ``lowest`` to
    ``highest``."""
    pattern: str = r"[Ss]core\W+?(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the verdict; the last match counts."""
    verdicts: dict[str, float] = Field(default_factory=dict)
    """Rewards of verdicts that are words, ``{yes: 1, no: 0}``. Empty: verdicts are numbers."""
    lowest: float = 0.0
    """Number whose reward is 0."""
    highest: float = 10.0
    """Number whose reward is 1; others are in between. A number outside is no verdict."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Further parameters of its requests, such as ``{temperature: 0, max_tokens: 500}``."""
    tries: Count = 3
    """Requests for one completion, at most, after answers of 429 or 5xx and broken connections.
    Each may take its share of ``environment.timeout_s``; waits that the server asks for are kept.
    """
    max_requests: Count = 32
    """Requests of the whole run that are under way at once; reward processes share them evenly."""

    def faults(self, here: str) -> Iterator[str]:
        """What a judge that is used cannot be."""
        if self.url is None or self.model is None:
            missing = "model" if self.url else "url"
            yield f"{here}.{missing} is not set; a judge needs url and model."
        elif not self.url.startswith(("http://", "https://")):
            yield f"{here}.url={self.url} must begin with http:// or https://."
        template = self.template or "{{"
        if "{{" not in template and not Path(template).expanduser().is_file():
            yield (
                f"{here}.template={template} is neither a file nor a template, which has "
                "{{ completion }}."
            )
        try:
            if not re.compile(self.pattern).groups:
                yield f"{here}.pattern={self.pattern} has no group (...), which is the verdict."
        except re.error as error:
            yield f"{here}.pattern={self.pattern} is no regular expression: {error}."
        if not self.lowest < self.highest:
            yield f"{here}.lowest={self.lowest:g} must be below {here}.highest={self.highest:g}."
