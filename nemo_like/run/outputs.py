"""Create the sinks that a run's configuration names."""

from pathlib import Path

from nemo_like.config.run import SINKS, RunConfig
from nemo_like.config.typed import flat
from nemo_like.observe.alarms import Alarms
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
        sinks.append(make(folder, config, kept_step if kept_step > 0 else None))
    return sinks, alarms
