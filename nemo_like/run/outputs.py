"""The sinks that a run's configuration names, and what they get."""

import json
from pathlib import Path

from nemo_like.config.run import SINKS, RunConfig
from nemo_like.config.typed import flat
from nemo_like.observe.alarms import NODES, Alarms
from nemo_like.observe.sinks import JsonlFile, MetricSink


def open_sinks(folder: Path, config: RunConfig, kept_step: int) -> tuple[list[MetricSink], Alarms]:
    """All sinks but the console, and alarms that were fed the earlier records.

    ``kept_step``: the last step whose record is kept; -1: none.
    """
    jsonl = JsonlFile(folder / "metrics.jsonl")
    jsonl.truncate_after(kept_step)
    alarms = Alarms(flat(config.model_dump(mode="json")))
    for record in jsonl.records():
        alarms.add(record)
    sinks: list[MetricSink] = [jsonl]
    for spec in config.logging.sinks:
        make = SINKS.load("logging.sinks", spec)
        sinks.append(make(folder, config, kept_step if kept_step >= 0 else None))
    return sinks, alarms


def note_nodes(folder: Path, alarms: Alarms, hosts: dict[str, str]) -> None:
    """Keep the node of each worker, by the name of its log, for alarms and the viewer."""
    (folder / NODES).write_text(json.dumps(hosts, indent=1))
    alarms.hosts = hosts


def with_rates(numbers: dict[str, float]) -> dict[str, float]:
    """``numbers`` of a step and what follows from them."""
    found = dict(numbers)
    if (step_s := numbers.get("time/step_s")) is None:
        return found
    if "train/num_tokens" in numbers:
        found["train/tokens_per_s"] = numbers["train/num_tokens"] / step_s
    if "time/waiting_s" in numbers:
        found["time/driver_s"] = step_s - numbers["time/waiting_s"]
    return found
