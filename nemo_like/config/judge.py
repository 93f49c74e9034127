"""Section ``environment.judge``: a model on a server that scores completions."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from nemo_like.config.section import Count, Positive, Section

JUDGE = "judge"


class JudgeConfig(Section):
    """A model on an OpenAI-compatible server that scores completions."""

    url: str | None = None
    """Base URL of the server, including the version: ``http://localhost:8000/v1``."""
    model: str | None = None
    """The model's name on that server."""
    key_variable: str | None = None
    """Environment variable with the API key, such as ``JUDGE_API_KEY``. None: no key is sent, even
    if the environment has one."""
    template: str | None = None
    """The judge's prompt: a Jinja template, or a file with one, with ``prompt``, ``completion``,
    ``messages`` (of the prompt) and the row's fields. None: ask for a score from 0 to
    ``highest``."""
    pattern: str = r"[Ss]core\W+?(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the verdict; the last match counts."""
    verdicts: dict[str, float] = Field(default_factory=dict)
    """The reward for each verdict in words, ``{yes: 1, no: 0}``. Empty: verdicts are numbers."""
    highest: Positive = 10.0
    """Score that gives reward 1; 0 gives 0. Others than those in between are not a verdict."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Extra request parameters, such as ``{temperature: 0, max_tokens: 500}``."""
    max_requests: Count = 32
    """Most requests of the whole run in flight at once, shared evenly by the reward processes."""

    def faults(self, here: str) -> Iterator[str]:
        """Errors in a section that the run uses."""
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
