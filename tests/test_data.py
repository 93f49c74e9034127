"""Prompts: rendered once and the same way everywhere, in an order that can be continued."""

import json
from itertools import chain
from pathlib import Path

import pytest

from nemo_like.algorithms.rows import read_rows
from nemo_like.algorithms.setup import prepare
from nemo_like.batch.micro_batches import plan_micro_batches
from nemo_like.compose.load import compose_config
from nemo_like.config.data import PromptsConfig
from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.datasets import check_lengths, fingerprint, load_rows, without_overlap
from nemo_like.data.loader import EpochLoader, PromptLoader
from nemo_like.errors import UserError
from nemo_like.models.context import context_length
from nemo_like.observe.metrics import Metric, merge

CONFIGS = Path(__file__).parent.parent / "configs"


def write_rows(path, *rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def load(path, **config):
    return load_rows(path, PromptsConfig(**config), 0, 0, "data.train")


def prompts(count):
    return [{"prompt": f"{i} + 1 =", "answer": i + 1} for i in range(count)]


def test_a_row_is_text_or_chat_and_keeps_every_other_field(tmp_path):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chat.append({"role": "user", "content": "c"})
    path = write_rows(
        tmp_path / "rows.jsonl", {"prompt": "2 + 2 =", "answer": 4, "tag": "x"}, {"messages": chat}
    )
    text, conversation = load(path)
    assert text.prompt == "2 + 2 ="
    assert text.fields == {"answer": 4, "tag": "x"}
    assert conversation.prompt == "c"
    assert [m["role"] for m in conversation.messages] == ["user", "assistant", "user"]


def test_a_system_prompt_is_put_before_prompts_that_have_none(tmp_path):
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "x"}]
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": "x"}, {"messages": own})
    first, second = load(path, system_prompt="be brief")
    assert first.messages[0] == {"role": "system", "content": "be brief"}
    assert second.messages[0]["content"] == "mine"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "line 2: not JSON"),
        ("[1, 2]", "line 2: a row must be a JSON object"),
        ('{"question": "x"}', "line 2: a row needs either 'prompt' or 'messages'; it has question"),
        ('{"prompt": "x", "messages": []}', "line 2: a row needs either"),
        ('{"prompt": 5}', "line 2: 'prompt' must be text"),
        ('{"messages": []}', "line 2: 'messages' must be text, or a list"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "ends with the one to answer"),
        ('{"prompt": "x", "completion": "y"}', "'completion' is what the model writes"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "ends with the one to answer"),
        ('{"messages": [{"role": "user", "content": null}]}', "'content' of message 0 is null"),
        ('{"messages": [{"role": "Human", "content": "x"}]}', "'Human', which must be 'user'"),
        ('{"messages": [{"role": "user", "content": "x", "tool_calls": "f"}]}', "no list of obj"),
        ('{"prompt": "x", "tools": [{"name": "f"}]}', "'tools' is not supported"),
        ('{"prompt": "x", "prompt": "y"}', "line 2: not JSON ('prompt' is given twice)"),
        ('{"prompt": "x", "n": {"k": 1, "k": 2}}', "line 2: not JSON ('k' is given twice)"),
        ('{"prompt": "x", "n": NaN}', "line 2: not JSON (NaN is no JSON number; write null)"),
        ('{"prompt": "x", "n": -Infinity}', "line 2: not JSON (-Infinity is no JSON number"),
        ('{"prompt": "x", "n": 1e999}', "line 2: not JSON (the number 1e999 is too large)"),
        ('{"prompt": "x", "n": ' + "9" * 5000 + "}", "line 2: not JSON (Exceeds the limit (4300"),
        ('{"prompt": "x", "n": ' + "[" * 100_000, "line 2: nested too deep"),
        ('{"prompt": "half \\ud83d"}', "line 2: not JSON (half of a surrogate pair"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(UserError) as error:
        load(str(path))
    assert message in str(error.value)
    assert f"data.train={path}" in str(error.value)


def test_a_file_in_another_encoding_is_named_by_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(UserError, match=r"line 2: not UTF-8 \(byte 16\); save the file as UTF-8"):
        load(str(path))


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_files_from_any_editor_have_the_same_rows(tmp_path, newline):
    path = tmp_path / "rows.jsonl"
    lines = ['{"prompt": "a\u2028 \\ud83d\\ude42"}', "", "  ", '{"prompt": "b"}']
    path.write_bytes(b"\xef\xbb\xbf" + newline.join(lines).encode())
    assert [row.prompt for row in load(str(path))] == ["a\u2028 \U0001f642", "b"]


def test_overlong_prompts_are_refused_by_number_or_dropped_and_counted(
    tmp_path, tiny_model, caplog
):
    rows = load(write_rows(tmp_path / "r.jsonl", {"prompt": "a"}, {"prompt": "b" * 50}))
    chat = ChatTokenizer(tiny_model())
    shortest = len(chat.render(rows[0].messages))
    limits = {"micro_batch_tokens": 9999, "context": shortest + 8, "max_new_tokens": 8}
    with pytest.raises(
        UserError, match=f"row 1 has {shortest + 49} tokens, and the model's context"
    ):
        check_lengths(rows, chat, **limits, config=PromptsConfig(), key="data.train")
    config = PromptsConfig(overlong_prompts="drop")
    kept, longest = check_lengths(rows, chat, **limits, config=config, key="data.train")
    assert [row.index for row in kept] == [0]
    assert longest == shortest
    limits |= {"micro_batch_tokens": shortest + 7}
    with pytest.raises(UserError, match=r"row 0 has .* and policy\.micro_batch_tokens leaves"):
        check_lengths(rows, chat, **limits, config=PromptsConfig(), key="data.train")
    assert "dropped 1 of 2" in caplog.text


def test_a_template_that_fails_names_the_row(tmp_path, tiny_model):
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(tiny_model(), folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system turn') }}")
    rows = load(write_rows(tmp_path / "r.jsonl", {"prompt": "a"}))
    with pytest.raises(UserError, match="row 0: the chat template fails: no system turn"):
        check_lengths(rows, ChatTokenizer(str(folder)), 99, 99, 9, PromptsConfig(), "data.train")


def test_special_tokens_come_from_the_template_alone(tmp_path, tiny_model):
    """A tokenizer that also prepends BOS must not give two."""
    import shutil

    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    shutil.copytree(tiny_model(), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    bos = tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder)("ab")["input_ids"].count(bos) == 1
    ids = ChatTokenizer(str(folder)).render([{"role": "user", "content": "ab"}])
    assert ids.count(bos) == 1
    assert ids[0] == bos


def test_all_end_of_sequence_ids_are_known(tmp_path, tiny_model):
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(tiny_model(), folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 17]}')
    assert ChatTokenizer(str(folder)).eos_token_ids == (2, 17)
    (folder / "generation_config.json").write_text('{"eos_token_id": null}')
    assert ChatTokenizer(str(folder)).eos_token_ids == (2,)
    for content in ("", "[]", '{"eos_token_id": ["</s>"]}'):
        (folder / "generation_config.json").write_text(content)
        with pytest.raises(UserError, match=r"generation_config\.json.*; repair"):
            ChatTokenizer(str(folder))


def test_the_context_is_the_models_own(tiny_model, tmp_path):
    assert context_length(tiny_model()) == 256
    (tmp_path / "config.json").write_text('{"model_type": "bloom"}')
    with pytest.raises(UserError, match="has no max_position_embeddings, the most tokens of a row"):
        context_length(str(tmp_path))


def test_fewer_prompts_than_a_step_takes_are_said(tmp_path, tiny_model, caplog):
    path = write_rows(tmp_path / "r.jsonl", *prompts(3))
    overrides = (f"data.train={path}", "environment.reward=math", "policy.model=" + tiny_model())
    config = compose_config(CONFIGS, "grpo", [*overrides, "grpo.num_prompts_per_step=4"])
    prepared = prepare(config, read_rows(config), tiny_model())
    assert "data.train has 3 prompts, and grpo.num_prompts_per_step=4 repeats some" in caplog.text
    assert len({row.index for row in prepared.loader.next_rows(4)}) == 3


# The order of prompts.


@pytest.fixture
def rows(tmp_path):
    return load(write_rows(tmp_path / "r.jsonl", *prompts(10)))


def indices(loader, *counts):
    return [[row.index for row in loader.next_rows(count)] for count in counts]


def test_every_epoch_has_each_row_once_in_an_order_of_its_own(rows):
    loader = PromptLoader(rows, fingerprint=fingerprint(rows), seed=1, shuffle=True)
    first, second = indices(loader, 10, 10)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert indices(PromptLoader(rows, fingerprint=fingerprint(rows), seed=1, shuffle=True), 10) == [
        first
    ]
    assert indices(PromptLoader(rows, fingerprint=fingerprint(rows), seed=2, shuffle=True), 10) != [
        first
    ]
    assert indices(
        PromptLoader(rows, fingerprint=fingerprint(rows), seed=1, shuffle=False), 10
    ) == [list(range(10))]


@pytest.mark.parametrize("count", [3, 4, 5, 10, 25])
def test_a_saved_position_continues_without_repeat_or_gap(rows, count):
    straight = indices(
        PromptLoader(rows, fingerprint=fingerprint(rows), seed=1, shuffle=True), *[count] * 6
    )
    loader = PromptLoader(rows, fingerprint=fingerprint(rows), seed=1, shuffle=True)
    before = indices(loader, *[count] * 2)
    state = json.loads(json.dumps(loader.state()))
    resumed = PromptLoader(rows, fingerprint=fingerprint(rows), seed=1, shuffle=True)
    resumed.load_state(state)
    assert before + indices(resumed, *[count] * 4) == straight


def test_a_position_of_another_data_set_starts_it_at_its_beginning(tmp_path, rows, caplog):
    loader = PromptLoader(rows, fingerprint=fingerprint(rows), seed=1, shuffle=False)
    loader.next_rows(6)
    other = load(write_rows(tmp_path / "other.jsonl", {"prompt": "x"}, {"prompt": "y"}))
    fresh = PromptLoader(other, fingerprint=fingerprint(other), seed=1, shuffle=False)
    fresh.load_state(loader.state())
    assert indices(fresh, 2) == [[0, 1]]
    assert "starts at its beginning" in caplog.text


# Finite epochs.


def epochs(rows, batch_size, num_epochs=2, *, drop_last=False, shuffle=True):
    return EpochLoader(
        rows,
        fingerprint=fingerprint(rows),
        batch_size=batch_size,
        num_epochs=num_epochs,
        seed=1,
        shuffle=shuffle,
        drop_last=drop_last,
    )


def numbers(batch):
    return [row.index for row in batch]


@pytest.mark.parametrize(
    ("batch_size", "drop_last", "sizes"),
    [
        (5, False, [5, 5]),
        (5, True, [5, 5]),
        (4, False, [4, 4, 2]),
        (4, True, [4, 4]),
        (16, False, [10]),
    ],
)
def test_an_epoch_ends_with_a_smaller_batch_or_without_it(rows, batch_size, drop_last, sizes):
    loader = epochs(rows, batch_size, drop_last=drop_last)
    assert loader.steps_per_epoch == len(sizes)
    batches = [numbers(batch) for batch in loader]
    assert [len(batch) for batch in batches] == sizes * 2
    orders = indices(
        PromptLoader(rows, fingerprint=fingerprint(rows), seed=1, shuffle=True), 10, 10
    )
    used = [order[: sum(sizes)] for order in orders]
    assert list(chain(*batches)) == used[0] + used[1]
    assert next(loader, "end") == "end"


def test_epochs_without_a_batch_are_refused(rows):
    with pytest.raises(UserError, match="batch size of 11 leaves no batch of the 10 rows"):
        epochs(rows, 11, drop_last=True)


@pytest.mark.parametrize("batch_size", [3, 5])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_run_continues_after_any_step_also_at_the_exact_end_of_an_epoch(
    rows, batch_size, drop_last
):
    def make():
        return epochs(rows, batch_size, drop_last=drop_last)

    straight = list(epochs(rows, batch_size, drop_last=drop_last))
    for saved_at in range(len(straight) + 1):
        stopped, resumed = make(), make()
        before = [next(stopped) for _ in range(saved_at)]
        resumed.load_state(json.loads(json.dumps(stopped.state())))
        assert before + list(resumed) == straight


def test_every_row_of_a_small_validation_batch_counts_once(tmp_path):
    correct = [1, 1, 1, 1, 0]
    rows = load(write_rows(tmp_path / "v.jsonl", *prompts(5)))
    parts = [
        {"accuracy": Metric(sum(correct[i] for i in batch) / len(batch), weight=len(batch))}
        for batch in map(numbers, epochs(rows, 2, num_epochs=1, shuffle=False))
    ]
    assert [part["accuracy"].weight for part in parts] == [2, 2, 1]
    assert merge(parts)["accuracy"].value == 0.8


def test_ranks_share_an_epoch_without_duplicates_or_padding(rows):
    seen = []
    for batch in epochs(rows, 4, num_epochs=1):
        plan = plan_micro_batches([1] * len(batch), num_ranks=3, max_tokens=2)
        seen += [batch[row].index for rank in range(3) for row in plan.rows(rank)]
    assert sorted(seen) == list(range(10))


def test_training_rows_whose_prompt_is_validated_are_left_out(tmp_path):
    train = load(write_rows(tmp_path / "t.jsonl", *prompts(5)))
    held_out = load(write_rows(tmp_path / "v.jsonl", *prompts(2)))
    assert [row.index for row in without_overlap(train, held_out)] == [2, 3, 4]
    with pytest.raises(UserError, match="Every training prompt is also among the 5 validation"):
        without_overlap(train, train)


def test_the_custom_reward_example_is_readable_data():
    path = Path(__file__).parent.parent / "examples" / "custom_reward" / "rows.jsonl"
    assert len(load(str(path))) == 64


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_batches_that_are_left_are_those_that_come(rows, drop_last):
    loader = epochs(rows, 4, drop_last=drop_last)
    for taken in range(2 * loader.steps_per_epoch):
        assert loader.steps_left == 2 * loader.steps_per_epoch - taken
        next(loader)
    assert loader.steps_left == 0
    # Two rows of the first pass, and all of the second.
    loader.load_state(loader.state() | {"epoch": 0, "position": 8})
    assert loader.steps_left == (2 if drop_last else 4)
