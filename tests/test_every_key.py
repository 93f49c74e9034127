"""Every key of every algorithm has an effect or is refused: a walk over all that is documented.

``key_table.py`` has for each key a changed value and what shows its effect: what the key's last
reader makes of it (``key_probes.py``) differs, a refusal, or another test. A key without an entry
fails.
"""

import json
import shutil
from functools import cache

import pytest
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from nemo_like.algorithms.session import launch
from nemo_like.compose import registry
from nemo_like.compose.load import Composed
from nemo_like.config.section import keys_of, section_of
from nemo_like.errors import UserError, WaitTimeoutError
from nemo_like.models.resolve import resolve_model
from tests.key_steps import alone
from tests.key_table import TABLES, Proven, Refused, Seen, by_key
from tests.small_runs import ROOT, records

ALGORITHMS = list(TABLES)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What entries name in braces."""
    folder = tmp_path_factory.mktemp("keys")

    def write(name, *rows):
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return str(folder / name)

    prompts = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(8)]
    texts = [{"prompt": f"{i} + 1 =", "completion": str(i + 1)} for i in range(8)]
    pairs = [{"prompt": f"{i} + 1 =", "chosen": str(i + 1), "rejected": "no"} for i in range(8)]
    other = folder / "other"
    other.mkdir()
    for path in resolve_model("embedded").iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    weights = load_file(other / "model.safetensors")
    save_file({name: one * 1.1 for name, one in weights.items()}, other / "model.safetensors")
    for name in ("scores", "other_scores"):
        shutil.copytree(other, folder / name)
        config = json.loads((other / "config.json").read_text())
        config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "score"}}
        (folder / name / "config.json").write_text(json.dumps(config))
    return {
        "folder": str(folder / "run"),
        "scores": str(folder / "scores"),
        "other_scores": str(folder / "other_scores"),
        "other": str(other),
        "prompts": write("prompts.jsonl", *prompts),
        "overlong_prompts": write("long.jsonl", *prompts, {"prompt": "1 " * 2000, "answer": "1"}),
        "texts": write("texts.jsonl", *texts),
        "pairs": write("pairs.jsonl", *pairs),
    }


@pytest.fixture(scope="module")
def process_group(local_ray):
    with alone():
        yield


def schema_of(algorithm):
    return registry.find(algorithm).config


@cache
def defaults_of(schema):
    return OmegaConf.create(schema().model_dump())


def config_of(algorithm, overrides, files):
    schema = schema_of(algorithm)
    values = [one.format(s=schema.section, **files) for one in overrides]
    raw = OmegaConf.merge(defaults_of(schema), OmegaConf.from_dotlist(values))
    return Composed(raw, schema).load()


def keys_in(algorithm):
    return {key for key, field in keys_of(schema_of(algorithm)) if section_of(field) is None}


def table_of(algorithm):
    entries, small = TABLES[algorithm]
    section = schema_of(algorithm).section
    return {key.replace("{s}", section): one for key, one in by_key(entries).items()}, small


def observe(by, algorithm, overrides, files):
    """What ``by`` finds; a refusal is an observation, too."""
    try:
        return by(config_of(algorithm, overrides, files))
    except UserError as error:
        return f"refused: {error}"


def observe_twice(by, algorithm, overrides, files, known):
    """Without a change: what differs then is no effect."""
    if (by, overrides) not in known:
        first, second = (observe(by, algorithm, overrides, files) for _ in range(2))
        assert first == second, f"{by.__name__} is not the same twice"
        known[by, overrides] = first
    return known[by, overrides]


def fault(entry, algorithm, small, files, known):
    """What is wrong with an entry; None if its effect or refusal is there."""
    before = (*small, *entry.beside)
    match entry:
        case Seen():
            found = observe_twice(entry.by, algorithm, before, files, known)
            changed = observe(entry.by, algorithm, (*before, *entry.also, entry.change), files)
            if isinstance(changed, str) and changed.startswith("refused: "):
                return changed
            return f"{entry.by.__name__} sees no effect" if found == changed else None
        case Refused():
            try:
                config_of(algorithm, (*before, entry.change), files)
            except UserError as error:
                return None if entry.why in str(error) else f"refused with: {error}"
            return "is accepted"
        case Proven():
            config_of(algorithm, (*before, entry.change), files)
            path, _, name = entry.test.partition("::")
            source = (ROOT / path).read_text()
            if f"def {name}(" not in source:
                return f"there is no {entry.test}"
            leaf = entry.key.rpartition(".")[2]
            return None if leaf in source else f"{path} does not name {leaf}"
    raise AssertionError(entry)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_documented_key_has_its_entry(algorithm):
    table, _ = table_of(algorithm)
    keys = keys_in(algorithm)
    assert {*table} == keys
    page = (ROOT / "docs" / "config.md").read_text()
    assert not [key for key in keys if f"| `{key}` |" not in page]


def test_every_algorithm_has_its_table():
    assert set(TABLES) == set(registry.names())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_key_has_an_effect_or_is_refused(algorithm, files, process_group):
    table, small = table_of(algorithm)
    known = {}
    faults = {key: fault(entry, algorithm, small, files, known) for key, entry in table.items()}
    assert not {key: one for key, one in faults.items() if one is not None}


def test_a_key_that_nothing_reads_would_be_found(files, process_group):
    entry = Seen("checkpoint.every_minutes=60")
    assert fault(entry, "grpo", TABLES["grpo"][1], files, {}) == "loop sees no effect"
    assert fault(Refused("run.seed=1"), "grpo", (), files, {}) == "is accepted"


# What only whole runs, or the source, can show.

TEXTS = (
    "data.num_train_rows=16",
    "data.num_validation_rows=4",
    "logging.sinks=[]",
    "checkpoint.export=false",
    "run.dir={folder}",
)


@pytest.mark.usefixtures("local_ray")
def test_limits_of_waits_end_a_run(files, tmp_path):
    def run(limit):
        folder = {"folder": tmp_path / limit.partition("=")[0]}
        config = config_of("sft", (*TEXTS, "sft.max_steps=1", limit), files | folder)
        launch(registry.find("sft"), config)

    with pytest.raises(WaitTimeoutError, match=r"0\.01 s"):
        run("cluster.start_timeout_s=0.01")
    with pytest.raises(WaitTimeoutError, match=r"0\.01 s"):
        run("cluster.call_timeout_s=0.01")


@pytest.mark.usefixtures("local_ray")
def test_the_temperature_of_given_texts_reaches_both_models(files, tmp_path):
    """So high a one makes any two distributions equal; at one of 1 these are 0.1 nats apart."""
    hot = ("distillation.max_steps=1", "teacher.model={other}", "distillation.temperature=1e4")
    name = "off_policy_distillation"
    launch(registry.find(name), config_of(name, (*TEXTS, *hot), files | {"folder": tmp_path}))
    assert 0 <= records(tmp_path)[0]["validation/loss"] < 1e-5
    assert not (tmp_path / "final").exists()
