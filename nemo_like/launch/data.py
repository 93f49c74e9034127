"""``nemo-like data``: what a run would read, without Ray or a GPU.

Rows as the model sees them with the tokens that train, lengths, and what would be left out and why.
"""

import logging
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_like.algorithms.rows import check_rows, read_rows
from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.data import PairsConfig, RowsConfig
from nemo_like.config.model_files import set_trust
from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.config.texts import TextRunConfig
from nemo_like.data import conversations, preferences
from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.datasets import Row
from nemo_like.launch.command import ConfigParser, whole_number
from nemo_like.models.resolve import context_length, resolve_policy
from nemo_like.rewards.math.reward import has_readable_answer

_USAGE = "nemo-like data [config name] [key=value ...] [--rows N]"
_SHARES = (0, 0.5, 0.9, 0.99, 1)
_MOST_NAMED = 5


@dataclass(frozen=True)
class Sample:
    """One row as it would be used."""

    ids: Sequence[int]
    mask: Sequence[bool]
    part: str = ""
    fields: str = ""
    """What the reward function gets, in short."""


def run(arguments: Sequence[str]) -> None:
    """Print the report on the configuration that ``arguments`` give; raises UserError."""
    parser = ConfigParser("data", _USAGE, __doc__)
    parser.add_argument("--rows", type=whole_number(0), default=2, help="samples to show (2)")
    options = parser.parse_intermixed_args(arguments)
    config = parser.load(options)
    set_trust(config.policy.trust_remote_code)
    report(config, str(resolve_policy(config)), Console(highlight=False), options.rows)


def report(config: Any, model_path: str, terminal: Console, num_shown: int) -> None:
    """The report on a checked configuration; raises UserError for a row that cannot be used."""
    handler = _Printer(terminal)
    logger = logging.getLogger("nemo_like")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        chat = ChatTokenizer(model_path, config.data.template_switches)
        if is_refused := config.data.overlong == "refuse":
            config = config.replace(data=config.data.replace(overlong="drop"))
        read: Any = _prompts if isinstance(config, SamplingRunConfig) else _texts
        for key, samples in read(config, model_path, chat).items():
            if samples:
                _print(terminal, key, samples, chat, config, num_shown)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    if is_refused and handler.num_dropped:
        terminal.print(
            "data.overlong=refuse: a run would end at the first row that is too long.", style="red"
        )


class _Printer(logging.Handler):
    """What a run would log about its rows."""

    def __init__(self, terminal: Console) -> None:
        super().__init__()
        self._terminal = terminal
        self.num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        too_long = "as longer than" in text or "as too long" in text
        self.num_dropped += too_long
        self._terminal.print(Text(text, style="yellow"))


def _prompts(
    config: SamplingRunConfig, model_path: str, chat: ChatTokenizer
) -> Mapping[str, list[Sample]]:
    found = {}
    for name, rows in read_rows(config).items():
        kept, _ = check_rows(config, name, rows, model_path, chat)
        found[name] = [
            Sample(one.prompt_ids, [False] * len(one.prompt_ids), one.part, _fields(one))
            for one in kept
        ]
        each = config.environment.by_name
        _warn_of_answers(name, [row for row in rows if each[row.environment].reward == "math"])
    return found


def _fields(row: Row) -> str:
    return ", ".join(f"{name}={str(value)[:60]!r}" for name, value in row.fields.items())


def _warn_of_answers(key: str, rows: Sequence[Row]) -> None:
    bad = [row for row in rows if not has_readable_answer(row.fields.get("answer"))]
    if bad:
        named = [f"row {row.index} ({row.fields.get('answer')!r:.40})" for row in bad[:_MOST_NAMED]]
        logging.getLogger(__name__).warning(
            "%s: environment.reward=math cannot read the answer of %d of %d rows, and would mask "
            "their completions: %s",
            key,
            len(bad),
            len(rows),
            ", ".join(named),
        )


def _texts(
    config: TextRunConfig, model_path: str, chat: ChatTokenizer
) -> Mapping[str, list[Sample]]:
    load: Any = preferences.load if isinstance(config.texts, PairsConfig) else conversations.load
    train, held_out = load(
        config.texts,
        chat,
        micro_batch_tokens=config.policy.micro_batch_tokens,
        context=context_length(model_path),
        seed=config.run.seed,
        with_validation=config.validation.every_steps > 0,
    )
    names = [part.name for part in config.texts.train_parts]
    return {
        "data.train": _samples(train, names),
        "data.validation": [] if held_out is None else _samples(held_out, []),
    }


def _samples(batch: TensorBatch, names: Sequence[str]) -> list[Sample]:
    lengths = batch.lengths.tolist()
    columns = [batch.tokens[name].split(lengths) for name in (keys.INPUT_IDS, keys.LOSS_MASK)]
    part_of = batch.rows[keys.PART].tolist() if keys.PART in batch.rows else None
    name_of = [""] * len(batch) if part_of is None else [names[index] for index in part_of]
    return [
        Sample(ids.tolist(), mask.tolist(), name)
        for ids, mask, name in zip(*columns, name_of, strict=True)
    ]


def _print(
    terminal: Console,
    key: str,
    samples: list[Sample],
    chat: ChatTokenizer,
    config: Any,
    num_shown: int,
) -> None:
    data: RowsConfig = config.data
    per_unit = 2 if isinstance(data, PairsConfig) else 1
    what = f"{len(samples) // 2} pairs" if per_unit == 2 else f"{len(samples)} rows"
    terminal.print(Text(f"{key}: {what}", style="bold"))
    if data.mixes and key == "data.train":
        counts, whole = Counter(one.part for one in samples), sum(data.weights.values())
        for name, weight in data.weights.items():
            terminal.print(
                f"  {name}: {counts[name] // per_unit} of them, {weight / whole:.1%} of each step"
            )
    terminal.print(_lengths(samples))
    doubled = sum(chat.cuts.begins_twice(one.ids) for one in samples)
    if doubled:
        terminal.print(f"{doubled} rows begin with two BOS tokens.", style="red")
    units = range(len(samples) // per_unit)
    for unit in sorted(random.Random(config.run.seed).sample(units, min(num_shown, len(units)))):
        for one in samples[unit * per_unit : (unit + 1) * per_unit]:
            name = f"{'pair' if per_unit == 2 else 'row'} {unit}"
            terminal.rule(f"{name}: {len(one.ids)} tokens, {sum(one.mask)} train")
            text = rendered(one, chat, in_colour=terminal.color_system is not None)
            terminal.print(text, soft_wrap=True)
            if one.fields:
                terminal.print(Text(f"reward function: {one.fields}", style="dim"), soft_wrap=True)


def rendered(sample: Sample, chat: ChatTokenizer, *, in_colour: bool) -> Text:
    """The whole text; what trains is green, or in ⟦⟧ where there are no colours."""
    text = Text()
    pairs = zip(sample.ids, sample.mask, strict=True)
    for trains, tokens in groupby(pairs, key=lambda pair: pair[1]):
        piece = chat.decode([token for token, _ in tokens], skip_special_tokens=False)
        marked = f"⟦{piece}⟧" if trains and not in_colour else piece
        text.append(marked, style="bold green" if trains else "dim")
    return text


def _lengths(samples: Iterable[Sample]) -> Table:
    table = Table("", "min", "50 %", "90 %", "99 %", "max", box=None)
    columns = {
        "tokens": sorted(len(one.ids) for one in samples),
        "that train": sorted(sum(one.mask) for one in samples),
    }
    for name, numbers in columns.items():
        places = (round(share * (len(numbers) - 1)) for share in _SHARES)
        if numbers[-1]:
            table.add_row(name, *(str(numbers[place]) for place in places))
    return table
