"""Runs that are small enough for tests, in this process and with the ``hf`` engine."""

import json
import re
from pathlib import Path

import pytest

from nemo_like.algorithms.rows import read_rows
from nemo_like.algorithms.sampling import read_prompts
from nemo_like.algorithms.session import find_model, launch
from nemo_like.compose import registry
from nemo_like.compose.load import check, checked, compose_config
from nemo_like.data.chat import ChatTokenizer

ROOT = Path(__file__).parent.parent
SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2)))
"""Three seeds for what has to learn; one of them without ``--full``."""
SMALL = (
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "generation.max_new_tokens=32",
    "data.num_train_rows=40",
    "data.num_validation_rows=8",
    "logging.sinks=[]",
)


SMALL_ON_A_FILE = tuple(one for one in SMALL if "rows" not in one)
"""The file has as many rows as it has."""


_MEASURED = re.compile(r"time|driver/|.*(tokens_per_s|memory_(gib|retries)|/slowest)")


def numbers(record):
    """Those of a step that are the same whenever it is made."""
    return {name: value for name, value in record.items() if not _MEASURED.match(name)}


def last_of(overrides):
    """Each key once, with its last value: a command refuses a key that is typed twice."""
    return list({str(one).partition("=")[0]: str(one) for one in overrides}.values())


def small_config(folder, *overrides, small=SMALL, name="grpo"):
    """What ``run`` runs with; overrides win."""
    always = ("generation.backend=hf", "cluster.call_timeout_s=120", f"run.dir={folder}")
    return compose_config(ROOT / "configs", name, [*small, *always, *overrides])


def run(folder, *overrides, small=SMALL, name="grpo"):
    """Run to the end; returns the records of metrics.jsonl by step."""
    run_config(small_config(folder, *overrides, small=small, name=name))
    return records(folder)


def run_config(config):
    """Run to the end, in this process."""
    launch(registry.find(registry.name_of(type(config))), config)


def accept(schema, **sections):
    """The configuration of these sections, given as plain values; UserError if it is refused."""
    config = checked(schema, sections)
    check(config)
    return config


def prompts_of(config):
    """What ``read_prompts`` gives to a run: its loader, validation rows and longest row."""
    model_path = find_model(config)
    chat = ChatTokenizer(model_path, config.data.template_switches)
    return read_prompts(config, read_rows(config), model_path, chat)


def records(folder):
    """Records of metrics.jsonl by step; each step is there once, and in order."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    found = {record["step"]: record for record in map(json.loads, lines)}
    assert [json.loads(line)["step"] for line in lines] == sorted(found)
    return found
