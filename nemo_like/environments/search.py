"""Questions about a local corpus, which the policy searches by words."""

import functools
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

from nemo_like.environments.tools import Tools
from nemo_like.errors import UserError

_WORD = re.compile(r"\w+")
_K1, _B = 1.2, 0.75


class Index:
    """Documents ranked by BM25 (Robertson and Zaragoza, 2009, Eq. 3.15).

    >>> Index(["red apples", "a green apple", "a house"]).best("green apple", 5)
    [1]
    """

    def __init__(self, documents: list[str]) -> None:
        self.documents = documents
        self._counts = [Counter(_words(one)) for one in documents]
        self._lengths = [one.total() for one in self._counts]
        self._mean = sum(self._lengths) / max(1, len(documents))
        self._found_in = Counter(word for one in self._counts for word in one)

    def best(self, query: str, count: int) -> list[int]:
        """Positions of the best documents that have any word of the query, the best one first."""
        words = _words(query)
        scores = [self._score(words, i) for i in range(len(self.documents))]
        found = [i for i, score in enumerate(scores) if score > 0]
        return sorted(found, key=lambda i: (-scores[i], i))[:count]

    def _score(self, words: list[str], position: int) -> float:
        counts, length = self._counts[position], self._lengths[position]
        score = 0.0
        for word in words:
            if count := counts[word]:
                n = self._found_in[word]
                rarity = math.log(1 + (len(self.documents) - n + 0.5) / (n + 0.5))
                norm = _K1 * (1 - _B + _B * length / self._mean)
                score += rarity * count * (_K1 + 1) / (count + norm)
        return score


class Search(Tools):
    """``Tools`` with a search, and perhaps others."""

    def __init__(self, corpus: str, num_results: int = 3, **how: Any) -> None:
        """``corpus``: a .jsonl file of ``{"text": ...}``, or a text file in which empty lines part
        documents; ``how``: of ``Tools``."""
        index = _index(corpus)

        def search(query: str) -> str:
            """
            Search the documents.

            Args:
                query: Words to look for.
            """
            found = index.best(query, num_results)
            texts = [f"[{place + 1}] {index.documents[one]}" for place, one in enumerate(found)]
            return "\n".join(texts) or "Nothing was found."

        super().__init__(tools=[search, *how.pop("tools", ())], **how)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


@functools.cache
def _index(corpus: str) -> Index:
    """One for all conversations of a process."""
    path = Path(corpus).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"corpus={corpus} cannot be read: {error.strerror}.") from error
    if path.suffix != ".jsonl":
        return Index([one.strip() for one in re.split(r"\n\s*\n", text) if one.strip()])
    try:
        return Index([str(json.loads(line)["text"]) for line in text.split("\n") if line.strip()])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"corpus={corpus}: each line must be {{'text': ...}}: {error!r}."
        ) from error
