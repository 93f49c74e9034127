"""Data as people have it: files, columns, shapes, and mixtures of them."""

import csv
import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.algorithms.rows import read_rows
from nemo_like.algorithms.texts import _loader, read_texts
from nemo_like.cli import main
from nemo_like.compose.files import SHIPPED
from nemo_like.compose.load import compose_config
from nemo_like.config.data import ConversationsConfig, PairsConfig, PromptsConfig
from nemo_like.data import conversations, preferences
from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.datasets import Row, check_lengths, load_rows
from nemo_like.data.mixtures import MixtureLoader
from nemo_like.errors import UserError
from nemo_like.models.resolve import resolve_model
from tests.chat_templates import MARKED, QWEN, TURNS, build_chat, tokenizer_of
from tests.data_shapes import DAPO, DOLLY, FORMS, GSM8K, KTO, MMLU, SHAPES, TULU, Shape
from tests.key_loops import looped
from tests.key_steps import alone
from tests.small_runs import prompts_of, records

datasets.disable_progress_bars()
LIMITS = {"micro_batch_tokens": 8192, "context": 4096, "seed": 0, "with_validation": True}


@pytest.fixture(scope="module")
def chat():
    return ChatTokenizer(resolve_model("embedded"))


# Ways to keep rows.


def as_jsonl(folder, rows):
    return write(folder / "rows.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))


def as_gzip(folder, rows):
    path = folder / "rows.jsonl.gz"
    path.write_bytes(gzip.compress("".join(f"{json.dumps(row)}\n" for row in rows).encode()))
    return str(path)


def as_json(folder, rows):
    return write(folder / "rows.json", json.dumps(rows, indent=1))


def as_parquet(folder, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    return str(folder / "rows.parquet")


def as_folder(folder, rows):
    """Several files of several kinds, in the order of their names."""
    (folder / "rows").mkdir()
    (folder / "rows" / "README.md").write_text("# Rows\n")
    as_jsonl(folder, rows[:1])
    (folder / "rows.jsonl").rename(folder / "rows" / "a.jsonl")
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows[1:] or rows), folder / "rows" / "b.parquet"
    )
    return str(folder / "rows") if rows[1:] else str(folder / "rows" / "*.parquet")


def on_disk(folder, rows):
    datasets.Dataset.from_list(rows).save_to_disk(folder / "saved")
    return str(folder / "saved")


def split_on_disk(folder, rows):
    both = {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows[:1])}
    datasets.DatasetDict(both).save_to_disk(folder / "saved")
    return f"{folder / 'saved'}@train"


WAYS = [as_jsonl, as_gzip, as_json, as_parquet, as_folder, on_disk, split_on_disk]


def write(path, text):
    path.write_text(text)
    return str(path)


def prompts_in(source, **config):
    config = PromptsConfig(train=source, **config)
    return load_rows(config.train_parts, config, 0, 0)


def sft_rows(chat, source, **config):
    return split(conversations.load(ConversationsConfig(train=source, **config), chat, **LIMITS)[0])


def dpo_rows(chat, source, **config):
    return split(preferences.load(PairsConfig(train=source, **config), chat, **LIMITS)[0])


def split(batch):
    """``(ids, mask)`` of each row."""
    lengths = batch.lengths.tolist()
    columns = [batch.tokens[name].split(lengths) for name in ("input_ids", "loss_mask")]
    return [(ids.tolist(), mask.tolist()) for ids, mask in zip(*columns, strict=True)]


def ids_and_mask(turns, *, only_last):
    """What the embedded model's template makes of a conversation: written by hand."""
    tokenizer = tokenizer_of(resolve_model("embedded"))
    pieces, before = [], ""
    last = len(turns) - 1
    for index, (role, content) in enumerate(turns):
        before += f"<|im_start|>{role}\n"
        if role == "assistant" and (index == last or not only_last):
            pieces += [(before, False), (f"{content}<|im_end|>", True)]
            before = "\n"
        else:
            before += f"{content}<|im_end|>\n"
    if turns[-1][0] != "assistant":
        pieces.append((f"{before}<|im_start|>assistant\n", False))
    ids, mask = [], []
    for text, trains in pieces:
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids, mask = ids + found, mask + [trains] * len(found)
    return ids, mask


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("shape", [*SHAPES, *FORMS], ids=lambda shape: f"{shape.name}-{shape.run}")
def test_rows_of_a_known_shape_have_the_ids_and_mask_of_their_conversation(
    tmp_path, chat, shape, way
):
    source = way(tmp_path, shape.rows)
    index = random.Random(f"{shape.name}{way.__name__}").randrange(len(shape.rows))
    expected = ids_and_mask(shape.expected[index], only_last=shape.run == "dpo")
    if shape.run == "sft":
        assert sft_rows(chat, source, columns=shape.columns)[index] == expected
    elif shape.run == "dpo":
        assert dpo_rows(chat, source, columns=shape.columns)[2 * index] == expected
    else:
        row = prompts_in(source, columns=shape.columns)[index]
        assert chat.render(row.messages) == expected[0]
        if shape.answers:
            assert row.fields["answer"] == shape.answers[index]


def test_the_table_of_shapes_is_the_documented_one():
    page = (Path(__file__).parent.parent / "docs" / "data.md").read_text()
    for shape in SHAPES:
        assert shape.name in page
        written = json.dumps(shape.columns).replace('"', "")
        assert not shape.columns or written in page, written


@pytest.mark.parametrize(
    ("rows", "run", "remedy"),
    [
        (GSM8K, "grpo", "set data.columns='{prompt: question}'"),
        (GSM8K, "sft", "set data.columns='{prompt: question, completion: answer}'"),
        (DOLLY, "sft", "'{prompt: [instruction, context], completion: response}'"),
        (TULU, "grpo", "set data.columns.prompt to the first question alone, such as messages.0"),
        ([{**KTO[0], "label": False}], "sft", "'label' is false, which marks a bad answer"),
        (KTO, "dpo", "put a good and a bad answer of the same prompt into one row"),
        (KTO, "grpo", "set data.columns.reference=completion"),
    ],
)
def test_a_shape_that_is_not_read_as_it_is_names_the_key_to_set(tmp_path, chat, rows, run, remedy):
    source, read = as_jsonl(tmp_path, rows), {"sft": sft_rows, "dpo": dpo_rows}
    with pytest.raises(UserError) as refused:
        prompts_in(source) if run == "grpo" else read[run](chat, source)
    assert remedy in str(refused.value)


@pytest.mark.parametrize("run", ["sft", "dpo", "grpo"])
def test_every_shape_is_read_as_it_is_or_answered_in_one_sentence_with_what_to_do(
    tmp_path, chat, run
):
    read = {"sft": sft_rows, "dpo": dpo_rows, "grpo": lambda _, source: prompts_in(source)}[run]
    num_read = 0
    for shape in [*SHAPES, *FORMS, Shape("MMLU", "", MMLU, [])]:
        try:
            assert read(chat, as_jsonl(tmp_path, shape.rows)), shape.name
            num_read += 1
        except UserError as refused:
            text = str(refused)
            assert "\n" not in text
            assert re.search(r"set data\.columns|nemo-like (sft|dpo|rm|grpo)|write |put ", text), (
                text
            )
    assert num_read >= {"sft": 12, "dpo": 5, "grpo": 1}[run]


def test_a_text_that_is_rendered_already_ends_once(tmp_path, chat):
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    [(ids, mask)] = sft_rows(chat, as_jsonl(tmp_path, [{"text": text}]))
    assert chat.decode(ids, skip_special_tokens=False) == text.removesuffix("\n")
    assert mask.count(True) == len(ids) - 1


def test_a_reward_that_lacks_its_answer_names_the_columns_inside_objects(tmp_path):
    config = compose_config(
        SHIPPED, "grpo", [f"data.train={as_jsonl(tmp_path, DAPO)}", "environment.reward=math"]
    )
    with pytest.raises(UserError, match=r"reward_model\.ground_truth, .*set data\.columns\.answer"):
        read_rows(config)


# Files.


def test_several_files_are_read_in_the_order_that_is_given(tmp_path):
    for name in "abc":
        write(tmp_path / f"{name}.jsonl", json.dumps({"prompt": name}))
    listed = [str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl")]
    assert [row.prompt for row in prompts_in(listed)] == ["b", "a"]
    assert [row.prompt for row in prompts_in(f"{tmp_path}/[a-b].jsonl")] == ["a", "b"]
    assert [row.prompt for row in prompts_in(str(tmp_path))] == ["a", "b", "c"]


def test_a_bad_row_of_one_of_several_files_is_named_by_its_file(tmp_path):
    write(tmp_path / "a.jsonl", json.dumps({"prompt": "x"}))
    write(tmp_path / "b.json", json.dumps([{"prompt": "x"}, {"prompt": 5}]))
    with pytest.raises(UserError, match=rf"^data\.train={tmp_path}, b\.json, row 2: 'prompt' must"):
        prompts_in(str(tmp_path))


def test_a_folder_with_several_splits_is_read_one_at_a_time(tmp_path):
    for name in ("train-0.jsonl", "train-1.jsonl", "test-0.jsonl"):
        write(tmp_path / name, json.dumps({"prompt": name}))
    with pytest.raises(UserError, match=r"files of several splits, such as .*@train\."):
        prompts_in(str(tmp_path))
    found = prompts_in(f"{tmp_path}@train")
    assert [row.prompt for row in found] == ["train-0.jsonl", "train-1.jsonl"]
    with pytest.raises(UserError, match=r"the folder has no .* whose name begins with dev"):
        prompts_in(f"{tmp_path}@dev")


def test_cells_of_csv_stay_the_text_that_they_are(tmp_path):
    golds = ["2024-01-05", "007", "1e5", "true", "", 'a "b",\nc', "1,234"]
    for suffix, separator in (("csv", ","), ("tsv", "\t")):
        with (tmp_path / f"rows.{suffix}").open("w", newline="") as file:
            writer = csv.writer(file, delimiter=separator)
            writer.writerows([["prompt", "answer"], *(["x", gold] for gold in golds)])
        rows = prompts_in(str(tmp_path / f"rows.{suffix}"))
        assert [row.fields["answer"] for row in rows] == golds


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_answers_stay_the_text_that_was_written(tmp_path, way):
    golds = ["2024-01-05", "007", "1e5", "true", "NaN"]
    source = way(tmp_path, [{"prompt": "x", "answer": gold} for gold in golds])
    assert [row.fields["answer"] for row in prompts_in(source)] == golds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt,answer\nx\n", r"line 2: 1 cells, and the header has 2"),
        ("prompt,prompt\nx,y\n", "the header names a column twice"),
        ('prompt,answer\n"x', "line 2: unexpected end of data"),
        ("prompt\n", "has no rows"),
    ],
)
def test_a_csv_file_that_does_not_fit_its_header_is_refused_by_line(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        prompts_in(write(tmp_path / "rows.csv", text))


@pytest.mark.parametrize("line", [1, 2, 50, 4002])
def test_a_line_of_a_csv_file_that_is_not_utf8_is_named(tmp_path, line):
    lines = [b"prompt,answer", *(b"how much is it?,%d" % i for i in range(5000))]
    lines[line - 1] = b"caf\xe9,1"
    (tmp_path / "rows.csv").write_bytes(b"\n".join(lines))
    with pytest.raises(UserError, match=rf"rows\.csv, line {line} is not UTF-8: "):
        prompts_in(str(tmp_path / "rows.csv"))


def test_a_broken_parquet_file_is_refused(tmp_path):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1" + bytes(40))
    with pytest.raises(UserError, match=r"rows\.parquet cannot be read as Parquet: "):
        prompts_in(str(tmp_path / "rows.parquet"))


def test_a_column_of_bytes_is_refused_by_row(tmp_path):
    with pytest.raises(UserError, match=r"row 1: a value is bytes, .*; take that column out"):
        prompts_in(as_parquet(tmp_path, [{"prompt": "x", "image": b"\x00"}]))


@pytest.mark.parametrize("first", [0, 1])
def test_a_column_that_is_null_in_one_file_and_not_in_the_other_is_read(tmp_path, chat, first):
    rows = [{"messages": None, "text": "plain"}, {"messages": TULU[0]["messages"], "text": None}]
    for index, row in enumerate(rows):
        (tmp_path / str(index)).mkdir()
        as_parquet(tmp_path / str(index), [row])
    order = [str(tmp_path / str(index) / "rows.parquet") for index in (first, 1 - first)]
    found = sft_rows(chat, order)
    assert found[1 - first] == ids_and_mask(SHAPES[8].expected[0], only_last=False)


# Hugging Face.


def hub_cache(folder, rows):
    """The cache of datasets as after a download of ``our/numbers``."""
    cached = folder / "our___numbers" / "default" / "0.0.0" / "0123456789abcdef"
    source = as_jsonl(folder, rows)
    made = datasets.load_dataset(
        "json", data_files={"train": source}, cache_dir=str(folder / "made")
    )
    path = Path(made["train"].cache_files[0]["filename"])
    cached.parent.mkdir(parents=True)
    path.parent.rename(cached)
    (cached / path.name).rename(cached / "numbers-train.arrow")
    info = json.loads((cached / "dataset_info.json").read_text())
    info |= {"builder_name": "numbers", "dataset_name": "numbers", "config_name": "default"}
    for one in info["splits"].values():
        one["dataset_name"] = "numbers"
    (cached / "dataset_info.json").write_text(json.dumps(info))


READ = """
import sys
from nemo_like.config.data import PromptsConfig
from nemo_like.data.datasets import load_rows
from nemo_like.errors import UserError
config = PromptsConfig(train=sys.argv[1])
try:
    print([row.prompt for row in load_rows(config.train_parts, config, 0, 0)])
except UserError as error:
    print("refused:", error)
"""


def read_offline(cache, source):
    return subprocess.run(
        [sys.executable, "-c", READ, source],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_a_data_set_of_the_hub_is_read_from_the_cache_or_refused_in_one_sentence(tmp_path):
    hub_cache(tmp_path, [{"prompt": "a"}, {"prompt": "b"}])
    assert read_offline(tmp_path, "our/numbers@train") == "['a', 'b']\n"
    told = read_offline(tmp_path, "our/letters:main@train")
    assert told.startswith(
        "refused: data.train=our/letters:main@train: no network reaches the hub, "
    )
    assert "hf download our/letters --repo-type dataset" in told
    assert told.count("\n") == 1


def test_splits_on_disk_are_named(tmp_path):
    source = split_on_disk(tmp_path, [{"prompt": "a"}])
    with pytest.raises(UserError, match=r"saved holds the splits train, test; name one, .*@train"):
        prompts_in(source.removesuffix("@train"))


def test_a_package_that_is_missing_is_named_with_what_installs_it(tmp_path):
    source = split_on_disk(tmp_path, [{"prompt": "a"}])
    hidden = "import sys; sys.modules['datasets'] = None\n"
    hidden += "import importlib.util as u; find = u.find_spec\n"
    hidden += "u.find_spec = lambda name, *a: None if name == 'datasets' else find(name, *a)\n"
    told = subprocess.run(
        [sys.executable, "-c", hidden + READ, source], capture_output=True, text=True, check=True
    ).stdout
    assert told.startswith("refused: ")
    assert "pip install 'nemo-like[data]'" in told


# Columns.


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"prompt": "qestion"},
            r"line 1: data\.columns\.prompt=qestion: the row has no such column",
        ),
        (
            {"prompt": "question", "answer": "meta.gold"},
            r"columns are question, meta\.key, meta\.n",
        ),
        ({"prompt": "meta.list.3"}, "the row has no such column"),
        ({"prompt": ["question", "meta"]}, "only texts can be joined"),
    ],
)
def test_a_column_that_rows_do_not_have_is_answered_with_those_they_have(
    tmp_path, columns, message
):
    row = {"question": "x", "meta": {"key": 1, "n.m": 2, "list": [1, 2]}}
    with pytest.raises(UserError, match=message):
        prompts_in(as_jsonl(tmp_path, [row]), columns=columns)


def test_a_column_is_a_name_a_path_or_several_texts(tmp_path):
    row = {"a.b": "dotted", "a": {"b": "inside", "c": [{"d": "listed"}]}, "e": None, "f": 5}
    columns = {"prompt": ["a.b", "e", "f"], "gold": "a.b", "last": "a.c.-1.d"}
    (found,) = prompts_in(as_jsonl(tmp_path, [row]), columns=columns)
    assert found.prompt == "dotted\n\n5"
    assert found.fields == {"a": row["a"], "gold": "dotted", "last": "listed"}


def test_a_column_that_a_run_does_not_read_is_refused():
    with pytest.raises(
        UserError, match=r"data\.columns\.promt would have no effect: rows have mess"
    ):
        compose_config(SHIPPED, "sft", [f"data.train={__file__}", "data.columns.promt=x"])
    with pytest.raises(UserError, match="rows of reasoning_gym have the names that are read"):
        compose_config(SHIPPED, "sft", ["data.columns.prompt=x"])


# Tools.

WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAME = "{{ c.function.name }}"
AS_JSON = NAME + "{{ c.function.arguments | tojson }}"
AS_ITEMS = NAME + "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"
AS_TEXT = NAME + "{{ '' + c.function.arguments }}"


def tool(name, *parameters):
    properties = {one: {"type": "string"} for one in parameters}
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"properties": properties}},
    }


def calls(arguments, **content):
    call = {"id": "c1", "type": "function", "function": {"name": "go", "arguments": arguments}}
    return [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "tool_calls": [call], **content},
        {"role": "tool", "tool_call_id": "c1", "content": "there"},
        {"role": "assistant", "content": "There."},
    ]


@pytest.mark.parametrize("written", [AS_JSON, AS_ITEMS, AS_TEXT], ids=["json", "items", "text"])
def test_arguments_as_text_or_object_and_any_empty_content_give_the_same_ids(tmp_path, written):
    chat = build_chat(tmp_path, WITH_TOOLS.replace("CALL", written))
    forms = [
        {"messages": calls(arguments, **content), "tools": tools}
        for arguments in ({"city": "Paris"}, '{"city": "Paris"}')
        for content in ({"content": None}, {"content": ""}, {})
        for tools in ([tool("go", "city")], json.dumps([tool("go", "city")]))
    ]
    found = sft_rows(chat, as_jsonl(tmp_path, forms))
    assert all(row == found[0] for row in found)
    text = tokenizer_of(tmp_path).decode(found[0][0])
    assert "Paris" in text
    assert "\\" not in text
    assert json.dumps(tool("go", "city")) in text


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_tools_of_other_rows_leave_no_trace(tmp_path, way):
    chat = build_chat(tmp_path, WITH_TOOLS.replace("CALL", AS_JSON))
    rows = [
        {"messages": calls({name: "1"}, content=""), "tools": [tool("go", name)]} for name in "xyz"
    ]
    expected = sft_rows(chat, as_jsonl(tmp_path, rows))
    found = sft_rows(chat, way(tmp_path, rows))
    assert found == expected
    text = tokenizer_of(tmp_path).decode(found[0][0])
    assert json.dumps(tool("go", "x")) in text
    assert "null" not in text


@pytest.mark.parametrize("order", ["before", "after"])
def test_rows_without_tools_take_none_from_the_others(tmp_path, order):
    chat = build_chat(tmp_path, WITH_TOOLS.replace("CALL", AS_JSON))
    asked = {"messages": calls({"city": "Paris"}, content=""), "tools": [tool("go", "city")]}
    plain = {"messages": [calls({})[0], calls({})[3]]}
    alone = sft_rows(chat, as_jsonl(tmp_path, [asked]))
    both = [plain, asked] if order == "before" else [asked, plain]
    found = sft_rows(chat, as_jsonl(tmp_path, both))
    assert found[both.index(asked)] == alone[0]
    text = tokenizer_of(tmp_path).decode(found[both.index(plain)][0])
    assert '"go"' not in text


def test_what_a_tool_said_is_not_lost_in_silence(tmp_path):
    keeps = WITH_TOOLS.replace("CALL", AS_JSON)
    ignores = keeps.replace("{% for m in messages", "{% for m in messages if m.role != 'tool'")
    assert ignores != keeps
    rows = as_jsonl(
        tmp_path, [{"messages": calls({"city": "Paris"}), "tools": [tool("go", "city")]}]
    )
    sft_rows(build_chat(tmp_path / "keeps", keeps), rows)
    with pytest.raises(UserError, match="leaves out message 2, whose role is 'tool'; put its text"):
        sft_rows(build_chat(tmp_path / "ignores", ignores), rows)


def test_messages_as_json_text_are_messages(tmp_path, chat):
    user, assistant = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}
    for name, said in (("prompt", [user]), ("messages", [user])):
        rows = as_jsonl(
            tmp_path, [{name: json.dumps(said), "answer": "2"}, {name: said, "answer": "2"}]
        )
        first, second = prompts_in(rows)
        assert first.messages == second.messages
    forms = [
        {"messages": [user, assistant]},
        {"messages": json.dumps([user, assistant])},
        {"prompt": json.dumps([user]), "completion": json.dumps([assistant])},
        {
            "messages": json.dumps(
                [{"from": "human", "value": "1+1"}, {"from": "gpt", "value": "2"}]
            )
        },
    ]
    found = sft_rows(chat, as_jsonl(tmp_path, forms))
    assert all(row == found[0] for row in found)
    lists = [{"prompt": one, "answer": "2"} for one in ("[1, 2] sorted?", '[{"a": 1}]', "[]", "[")]
    kept = prompts_in(as_jsonl(tmp_path, lists))
    assert [row.messages[-1]["content"] for row in kept] == [row["prompt"] for row in lists]


@pytest.mark.parametrize("name", ["prompt", "completion"])
def test_messages_as_python_prints_them_are_refused(tmp_path, chat, name):
    row = {"prompt": "1+1", "completion": "2"} | {name: str([{"role": "user", "content": "x"}])}
    with pytest.raises(UserError, match=f"'{name}' is the text of a Python list .*json.dumps"):
        sft_rows(chat, as_jsonl(tmp_path, [row]))


# Mixtures.


def mixture(sizes, weights, *, batch_size=10, shuffle=True, seed=1):
    parts = {name: [(name, i) for i in range(size)] for name, size in sizes.items()}
    return MixtureLoader(
        parts, weights, fingerprint=str, batch_size=batch_size, seed=seed, shuffle=shuffle
    )


def test_each_step_has_the_exact_share_of_each_part():
    loader = mixture({"a": 7, "b": 3}, {"a": 0.6, "b": 0.4})
    for _ in range(9):
        assert Counter(name for name, _ in next(loader)) == {"a": 6, "b": 4}
    shown = {name: metric.value for name, metric in loader.pop_metrics().items()}
    assert shown["data/a/num_rows"] == 54
    assert shown["data/b/num_rows"] == 36
    assert shown["data/b/epoch"] == 12
    assert loader.pop_metrics()["data/a/num_rows"].value == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from([0.1, 0.25, 1, 3, 1e-3])),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.integers(1, 13), min_size=1, max_size=12),
    st.integers(0, 12),
)
def test_a_mixture_has_exact_shares_whole_passes_and_resumes_where_it_was(parts, counts, cut):
    sizes = {str(i): size for i, (size, _) in enumerate(parts)}
    weights = {str(i): weight for i, (_, weight) in enumerate(parts)}
    straight, stopped = mixture(sizes, weights), mixture(sizes, weights)
    taken = []
    for count in counts:
        batch = straight.next_rows(count)
        taken += batch
        assert len(batch) == count
        for name, weight in weights.items():
            share = weight / sum(weights.values()) * len(taken)
            assert abs(sum(part == name for part, _ in taken) - share) < len(parts)
    for name, size in sizes.items():
        of_part = [i for part, i in taken if part == name]
        for first in range(0, len(of_part) - size + 1, size):
            assert sorted(of_part[first : first + size]) == list(range(size))
    before = [row for count in counts[:cut] for row in stopped.next_rows(count)]
    resumed = mixture(sizes, weights)
    resumed.load_state(json.loads(json.dumps(stopped.state())))
    assert before + [row for count in counts[cut:] for row in resumed.next_rows(count)] == taken


def test_parts_are_used_up_before_any_row_comes_again():
    loader = mixture({"a": 3, "b": 4, "c": 3}, {"a": 3, "b": 4, "c": 3})
    assert len(set(next(loader))) == 10


def test_new_weights_count_from_where_a_run_was_continued():
    loader = mixture({"a": 50, "b": 50}, {"a": 1, "b": 1})
    seen = next(loader)
    other = mixture({"a": 50, "b": 50}, {"a": 4, "b": 1})
    other.load_state(loader.state())
    batch = next(other)
    assert Counter(name for name, _ in batch) == {"a": 8, "b": 2}
    assert not set(seen) & set(batch)
    assert other.num_drawn == 20


def test_a_part_with_other_rows_starts_at_its_beginning_and_says_so(caplog):
    loader = mixture({"a": 5, "b": 5}, {"a": 1, "b": 1}, batch_size=4)
    next(loader)
    other = mixture({"a": 5, "b": 6}, {"a": 1, "b": 1}, batch_size=4)
    other.load_state(loader.state())
    assert caplog.text.count("starts at its beginning") == 1
    fresh = mixture({"a": 5, "b": 6}, {"a": 1, "b": 1}, batch_size=4)
    assert [row for row in next(other) if row[0] == "b"] == [r for r in next(fresh) if r[0] == "b"]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("-1", "a has the weight -1, which must be a number of at least 0"),
        ("0", "all weights are 0; give one above it"),
        ("true", "a has the weight True, which must be a number"),
    ],
)
def test_weights_that_mean_nothing_are_refused(tmp_path, weights, message):
    source = as_jsonl(tmp_path, [{"prompt": "x", "completion": "y"}])
    with pytest.raises(UserError, match=message):
        compose_config(
            SHIPPED,
            "sft",
            [f"data.train={{a: {{path: {source}, weight: {weights}}}}}", "sft.max_steps=1"],
        )


def test_a_mixture_needs_a_number_of_steps_and_its_validation_no_weights(tmp_path):
    source = as_jsonl(tmp_path, [{"prompt": "x", "completion": "y"}])
    mixed = f"{{a: {{path: {source}, weight: 1}}}}"
    with pytest.raises(
        UserError, match=r"sft\.max_steps=null: data\.train is a mixture, .* set sft"
    ):
        compose_config(SHIPPED, "sft", [f"data.train={mixed}"])
    with pytest.raises(UserError, match=r"validation\.a\.weight would have no effect"):
        compose_config(SHIPPED, "sft", [f"data.train={source}", f"data.validation={mixed}"])


def test_parts_of_a_run_have_columns_of_their_own_and_one_of_weight_0_is_never_read(tmp_path):
    for name, rows in (("gsm", GSM8K), ("dapo", DAPO)):
        (tmp_path / name).mkdir()
        as_jsonl(tmp_path / name, rows)
    (tmp_path / "bad.jsonl").write_text("not a row\n")
    config = compose_config(
        SHIPPED,
        "grpo",
        [
            f"data.train.gsm={{path: {tmp_path}/gsm/rows.jsonl, weight: 3}}",
            "data.train.gsm.columns={prompt: question}",
            f"data.train.dapo={{path: {tmp_path}/dapo, weight: 1}}",
            f"data.train.off={{path: {tmp_path}/bad.jsonl, weight: 0}}",
            "data.columns={answer: reward_model.ground_truth}",
            "environment.reward=math",
            "grpo.num_prompts_per_step=4",
        ],
    )
    loader, *_ = prompts_of(config)
    batch = next(loader)
    assert Counter(row.part for row in batch) == {"gsm": 3, "dapo": 1}
    assert {row.fields["answer"] for row in batch if row.part == "dapo"} <= {"1", "2", "3"}


def test_pairs_of_a_mixture_stay_together_in_their_shares(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        as_jsonl(
            tmp_path / name,
            [{"prompt": f"{name}{i}", "chosen": "y", "rejected": "n"} for i in range(4)],
        )
    config = compose_config(
        SHIPPED,
        "dpo",
        [
            f"data.train={{a: {{path: {tmp_path}/a, weight: 3}}, b: {{path: {tmp_path}/b}}}}",
            "dpo.max_steps=2",
            "dpo.num_pairs_per_step=4",
        ],
    )
    train, _ = read_texts(config, preferences.load, str(resolve_model("embedded")))
    loader = _loader(config, train)
    for _ in range(3):
        units = next(loader)
        assert sorted(unit // 4 for unit in units) == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("name", "batch"), [("sft", "sft.num_rows_per_step=8"), ("grpo", "grpo.num_prompts_per_step=8")]
)
def test_a_run_logs_the_rows_of_each_part_and_keeps_its_place_in_them(
    local_ray, tmp_path, name, batch
):
    """With stand-ins for the workers."""
    for part in "ab":
        (tmp_path / part).mkdir()
        row = {"completion": "y"} if name == "sft" else {"answer": "1"}
        as_jsonl(tmp_path / part, [{"prompt": f"{part}{i}", **row} for i in range(9)])
    mixed = f"{{a: {{path: {tmp_path}/a, weight: 3}}, b: {{path: {tmp_path}/b}}}}"
    keys = [f"data.train={mixed}", f"{name}.max_steps=3", batch, "checkpoint.every_steps=2"]
    keys += ["validation.every_steps=0", "environment.reward=math"][: 1 + (name == "grpo")]
    with alone():
        looped(compose_config(SHIPPED, name, keys), tmp_path / "run")
    logged = list(records(tmp_path / "run").values())
    assert [one["data/a/num_rows"] for one in logged] == [6, 6, 6]
    assert [one["data/b/num_rows"] for one in logged] == [2, 2, 2]
    assert [one["data/a/epoch"] for one in logged] == pytest.approx([6 / 9, 12 / 9, 2])
    saved = json.loads((tmp_path / "run" / "checkpoints" / "step_2" / "driver.json").read_text())
    assert saved["loader"]["taken"] == {"a": 12, "b": 4}
    assert saved["loader"]["parts"]["a"]["epoch"] == 1


def test_a_part_of_which_no_row_is_left_is_named():
    with pytest.raises(UserError, match=r"data\.train\.b: no row is left; take this part out"):
        mixture({"a": 3, "b": 0}, {"a": 1, "b": 1})


# Cut rows.

SEVEN = ("generation.max_new_tokens", 7)


def prompt_of(chat, overlong, room):
    config, text = PromptsConfig(overlong=overlong), "ABCDEFGHIJ"
    rows = rows_with([{"role": "system", "content": "s"}, {"role": "user", "content": text}])
    most = len(chat.render(rows[0].messages)) - len(text) + room
    return check_lengths(rows, chat, 4096, most + 7, SEVEN, config, "data.train")[0]


def rows_with(messages):
    return [Row(index=0, messages=tuple(messages), fields={})]


def test_left_cuts_the_beginning_of_the_longest_message_and_right_its_end(tmp_path, caplog):
    chat = build_chat(tmp_path, QWEN)
    for overlong, kept in (("truncate_left", "GHIJ"), ("truncate_right", "ABCD")):
        (row,) = prompt_of(chat, overlong, 4)
        assert row.prompt == kept
        assert list(row.prompt_ids) == chat.render(row.messages)
        assert f"cut 1 of 1 prompts to {len(row.prompt_ids)} tokens" in caplog.text
    (row,) = prompt_of(chat, "truncate_left", 10)
    assert row.prompt == "ABCDEFGHIJ"
    with pytest.raises(UserError, match="every prompt is longer than"):
        prompt_of(chat, "truncate_left", 0)


@settings(max_examples=40, deadline=None)
@given(st.text("ab é漢😀", min_size=2, max_size=40).filter(str.strip), st.integers(1, 20))
def test_a_cut_prompt_always_fits_and_keeps_one_end(tmp_path_factory, text, room):
    chat = ChatTokenizer(resolve_model("embedded"))
    for overlong in ("truncate_left", "truncate_right"):
        rows = rows_with([{"role": "user", "content": text}])
        most = len(chat.render([{"role": "user", "content": ""}])) + room
        try:
            kept, longest = check_lengths(
                rows, chat, 4096, most + 7, SEVEN, PromptsConfig(overlong=overlong), "data.train"
            )
        except UserError:
            continue  # nothing would be left
        assert longest <= most
        end = text.endswith if overlong == "truncate_left" else text.startswith
        assert end(kept[0].prompt)


def test_the_end_of_a_row_is_kept_where_its_beginning_is_cut(tmp_path, caplog):
    chat = build_chat(tmp_path, MARKED)
    source = as_jsonl(tmp_path, [{"prompt": "abcdefgh", "completion": "xyz"}])
    ((ids, mask),) = sft_rows(chat, source, max_length=4, overlong="truncate_left")
    assert tokenizer_of(tmp_path).decode(ids) == "xyz<|im_end|>"
    assert mask == [False, True, True, True]
    assert "cut 1 of 1 rows to 4 tokens" in caplog.text


def test_both_rows_of_a_pair_lose_the_same_beginning_or_the_pair_goes(tmp_path, caplog):
    chat = build_chat(tmp_path, MARKED)
    source = as_jsonl(tmp_path, [{"prompt": "abcdefgh", "chosen": "xyz", "rejected": "w"}])
    whole = dpo_rows(chat, source)
    most = len(whole[0][0]) - 5
    kept = dpo_rows(chat, source, max_length=most, overlong="truncate_left")
    assert [ids for ids, _ in kept] == [ids[5:] for ids, _ in whole]
    with pytest.raises(UserError, match="of two rows of which nothing common would be left"):
        dpo_rows(chat, source, max_length=4, overlong="truncate_left")


# The command.


def shown(capsys, *arguments):
    main(["data", *arguments])
    return capsys.readouterr().out


def test_the_command_shows_texts_with_what_trains_and_what_is_left_out(tmp_path, capsys):
    rows = [{"messages": TURNS}, {"prompt": "a", "completion": "b" * 900}]
    out = shown(capsys, "sft", f"data.train={as_jsonl(tmp_path, rows)}", "data.max_length=200")
    assert "⟦the first\nanswer<|im_end|>⟧\n<|im_start|>user\ntwo?" in out
    assert "⟦and 2<|im_end|>⟧" in out
    assert "data.train: dropped 1 of 2 rows as longer than 200 tokens" in out
    assert "data.overlong=refuse: a run would end at the first row" in out
    assert "that train" in out


def test_the_command_names_rows_whose_answer_no_grader_reads(tmp_path, capsys):
    rows = [{"prompt": "1+1?", "answer": "2"}, {"prompt": "x?", "answer": None}]
    out = shown(
        capsys, f"data.train={as_jsonl(tmp_path, rows)}", "environment.reward=math", "--rows=1"
    )
    assert "cannot read the answer of 1 of 2 rows" in out
    assert "row 1 (None)" in out
    assert out.count("<|im_start|>assistant") == 1


def test_the_command_counts_the_parts_of_a_mixture_and_doubled_beginnings(tmp_path, capsys):
    mixed = f"{{a: {{path: {as_jsonl(tmp_path, TULU)}, weight: 3}}, b: {{path: {tmp_path}}}}}"
    out = shown(capsys, "sft", f"data.train={mixed}", "sft.max_steps=1")
    assert "a: 2 of them, 75.0% of each step" in out
    assert "b: 2 of them, 25.0% of each step" in out
    assert "two BOS" not in out


def test_the_command_counts_rows_that_begin_twice(tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(resolve_model("embedded"), model)
    settings_of = json.loads((model / "tokenizer_config.json").read_text())
    settings_of["bos_token"] = "<|im_start|>"
    (model / "tokenizer_config.json").write_text(json.dumps(settings_of))
    (model / "chat_template.jinja").write_text("{{ bos_token }}{{ bos_token }}" + MARKED)
    source = as_jsonl(tmp_path, TULU)
    out = shown(capsys, "sft", f"data.train={source}", f"policy.model={model}")
    assert "2 rows begin with two BOS tokens" in out


def test_the_command_needs_neither_ray_nor_an_engine():
    code = (
        "import sys; from nemo_like.cli import main; main(['data', 'data.num_train_rows=4'])\n"
        "assert not {'ray', 'vllm'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
