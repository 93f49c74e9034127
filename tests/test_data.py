"""Prompts: rendered once and the same way everywhere, in an order that can be continued."""

import json
import shutil
import sys
import time
from itertools import chain
from pathlib import Path

import pytest

from nemo_like.algorithms.texts import read_texts
from nemo_like.batch.micro_batches import plan_micro_batches
from nemo_like.compose.load import compose_config
from nemo_like.config.data import PromptsConfig
from nemo_like.data import conversations, preferences
from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.datasets import check_lengths, fingerprint, load_rows, without_overlap
from nemo_like.data.loader import PromptLoader
from nemo_like.data.mixtures import EpochLoader
from nemo_like.data.tokenizer import end_token_ids, load_tokenizer
from nemo_like.errors import UserError
from nemo_like.models.resolve import context_length, resolve_model
from nemo_like.observe.metrics import Metric, merge
from nemo_like.rewards.reward_text import RewardText
from tests.chat_templates import QWEN, QWEN3, build_chat, tokenizer_of
from tests.small_runs import prompts_of

CONFIGS = Path(__file__).parent.parent / "configs"


def write_rows(path, *rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def load(path, **config):
    config = PromptsConfig(train=path, **config)
    return load_rows(config.train_parts, config, 0, 0)


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


def test_a_null_counts_as_absent_and_reaches_the_reward_function_under_other_names(tmp_path):
    message = {"role": "user", "content": "x", "name": None}
    row = {"prompt": None, "messages": [message], "completion": None, "tools": None, "tag": None}
    (found,) = load(write_rows(tmp_path / "rows.jsonl", row))
    assert found.messages == ({"role": "user", "content": "x"},)
    assert found.fields == {"tag": None}


ROW = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("switch", "sentence"),
    [
        (
            "enable_thinkin",
            r"^data\.template_switches\.enable_thinkin is no switch of the model's "
            r"chat template; did you mean enable_thinking\?",
        ),
        ("content", r"did you mean enable_thinking\?"),  # the template sets it itself
        ("messages", r"did you mean enable_thinking\?"),  # transformers does
    ],
)
def test_a_switch_that_the_template_lacks_is_answered_with_those_it_has(tmp_path, switch, sentence):
    with pytest.raises(UserError, match=sentence):
        build_chat(tmp_path, QWEN3, **{switch: True})
    with pytest.raises(UserError, match=r"x is no switch .* template; it has none, so leave it"):
        build_chat(tmp_path, QWEN, x=True)
    sets = "{% if not think is defined %}{% set think = true %}{% endif %}{% if think %}{% endif %}"
    build_chat(tmp_path, sets + QWEN, think=False)


def test_template_switches_reach_every_text_that_is_rendered(tmp_path):
    """Prompts of training and evaluation, conversations and pairs."""
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("embedded"), folder)
    (folder / "chat_template.jinja").write_text(QWEN3)
    rows = write_rows(tmp_path / "p.jsonl", *prompts(8))
    texts = write_rows(tmp_path / "t.jsonl", {"messages": [ROW, {**ROW, "role": "assistant"}]})
    pairs = write_rows(tmp_path / "d.jsonl", {"prompt": "x", "chosen": "y", "rejected": "z"})
    block = tokenizer_of(folder)("<think>\n\n</think>\n\n", add_special_tokens=False)["input_ids"]

    def config(name, *overrides):
        told = [f"policy.model={folder}", "data.template_switches.enable_thinking=false"]
        return compose_config(CONFIGS, name, [*overrides, *told])

    def asks_with_block(ids):
        return list(ids[-len(block) :]) == block

    grpo = config("grpo", f"data.train={rows}", "environment.reward=math")
    loader, *_ = prompts_of(grpo)
    assert [asks_with_block(row.prompt_ids) for row in loader.next_rows(8)] == [True] * 8
    measured = config("eval", f"data.validation={rows}", "environment.reward=math")
    _, held_out, _ = prompts_of(measured)
    assert [asks_with_block(row.prompt_ids) for row in held_out] == [True] * 8
    for name, source, reader in (
        ("sft", texts, conversations.load),
        ("dpo", pairs, preferences.load),
        ("rm", pairs, preferences.load),
    ):
        found, _ = read_texts(config(name, f"data.train={source}"), reader, str(folder))
        mask = found.tokens["loss_mask"].tolist()
        assert asks_with_block(found.tokens["input_ids"][: mask.index(True)].tolist())


def test_a_reward_model_is_told_the_switches_that_its_own_template_knows(tmp_path):
    folder = tmp_path / "scores"
    shutil.copytree(resolve_model("embedded"), folder)
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "score"}}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(QWEN3)

    loaded = []
    sys.setprofile(
        lambda frame, event, _: (
            event == "call" and frame.f_code is load_tokenizer.__code__ and loaded.append(frame)
        )
    )
    try:
        text = RewardText(str(folder), {"enable_thinking": False, "date": "today"})
    finally:
        sys.setprofile(None)
    assert text.chat.switches == {"enable_thinking": False}
    assert len(loaded) == 1


@pytest.mark.parametrize("value", ["[1]", "{a: 1}"])
def test_a_switch_is_yes_or_no_a_number_or_text(value):
    with pytest.raises(UserError, match=r"data\.template_switches\.x=.* must be true, false, a nu"):
        compose_config(CONFIGS, "sft", [f"data.template_switches.x={value}"])


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
        (
            '{"prompt": ""}',
            "line 2: the user's message in 'prompt' is empty; give it text, or take",
        ),
        (
            '{"messages": [{"role": "user", "content": " "}]}',
            "line 2: the user's message in 'messages' is empty; ",
        ),
        ('{"messages": []}', "line 2: 'messages' must be text, or a list"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "ends with the one to answer"),
        ('{"prompt": "x", "completion": "y"}', "'completion' is what the model writes"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "ends with the one to answer"),
        ('{"messages": [{"role": "user", "content": null}]}', "'content' of message 0 is null"),
        ('{"messages": [{"role": "Human", "content": "x"}]}', "'Human', which must be 'user'"),
        ('{"messages": [{"role": "user", "content": "x", "tool_calls": "f"}]}', "no list of obj"),
        ('{"prompt": "x", "tools": [{"name": "f"}]}', "'tools' has no effect here"),
        ('{"problem": "x", "solution": "y"}', "set data.columns='{prompt: problem}'; other entri"),
        ('{"text": "x"}', "it has text; texts are for nemo-like sft."),
        ('{"chosen": "x", "rejected": "y"}', "; pairs are for nemo-like dpo and nemo-like rm."),
        ('{"prompt": "x", "messages": [{}]}', "set data.columns.prompt to the one to use"),
        (
            '{"prompt": "x", "messages": [{"role": "assistant"}]}',
            "set data.columns.prompt to the one to use, prompt or messages.",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "x"}]}',
            "leave out the assistant's last message, or set data.columns.prompt to the first",
        ),
        (
            '{"conversations": [{"from": "human", "value": "x"}]}',
            "set data.columns.prompt to what is asked, such as conversations.0.value, or to",
        ),
        ('{"prompt": "x", "prompt": "y"}', "line 2: not JSON ('prompt' is given twice)"),
        ('{"prompt": "x", "n": {"k": 1, "k": 2}}', "line 2: not JSON ('k' is given twice)"),
        ('{"prompt": "x", "n": NaN}', "line 2: not JSON (NaN is not a JSON number; write null)"),
        ('{"prompt": "x", "n": -Infinity}', "line 2: not JSON (-Infinity is not a JSON number"),
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


def test_a_name_that_is_given_twice_among_many_is_found_at_once(tmp_path):
    path = tmp_path / "rows.jsonl"
    names = [*range(300_000), 299_999]
    path.write_text('{"prompt": "x", ' + ", ".join(f'"{name}": 1' for name in names) + "}")
    start = time.process_time()
    with pytest.raises(UserError, match=r"line 1: not JSON \('299999' is given twice\)"):
        load(str(path))
    assert time.process_time() - start < 10


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
    limits = {
        "micro_batch_tokens": 9999,
        "context": shortest + 8,
        "longest_completion": ("generation.max_new_tokens", 8),
    }
    with pytest.raises(
        UserError,
        match=rf"row 1 has {shortest + 49} tokens \(the first row is 0\), and the model's context",
    ):
        check_lengths(rows, chat, **limits, config=PromptsConfig(), key="data.train")
    config = PromptsConfig(overlong="drop")
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
        limits = (99, 99, ("generation.max_new_tokens", 9))
        check_lengths(rows, ChatTokenizer(str(folder)), *limits, PromptsConfig(), "data.train")


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


@pytest.mark.parametrize("generation_config", [None, {"eos_token_id": 2}, {"eos_token_id": None}])
@pytest.mark.parametrize(
    "place", [lambda ids: {"eos_token_id": ids}, lambda ids: {"text_config": {"eos_token_id": ids}}]
)
def test_end_of_sequence_ids_of_the_models_configuration_count_too(
    tmp_path, place, generation_config
):
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"vocab_size": 100} | place([3, 17])))
    assert end_token_ids(tmp_path, 2) == (2, 3, 17)
    config.write_text(json.dumps({"vocab_size": 100} | place(17)))
    others = {2} if generation_config == {"eos_token_id": 2} else set()
    assert set(end_token_ids(tmp_path, None)) == {17} | others
    # A leftover of another tokenizer: no token of this model.
    config.write_text(json.dumps({"vocab_size": 17} | place([3, 17])))
    assert end_token_ids(tmp_path, 2) == (2, 3)
    for content in ("", "[]", json.dumps(place(["</s>"]))):
        config.write_text(content)
        with pytest.raises(UserError, match=r"config\.json.*; repair"):
            end_token_ids(tmp_path, 2)


def test_the_context_is_the_models_own(tiny_model, tmp_path):
    assert context_length(tiny_model()) == 256
    (tmp_path / "config.json").write_text('{"model_type": "bloom"}')
    with pytest.raises(UserError, match="has no max_position_embeddings, the most tokens of a row"):
        context_length(str(tmp_path))


def test_fewer_prompts_than_a_step_takes_are_said(tmp_path, tiny_model, caplog):
    path = write_rows(tmp_path / "r.jsonl", *prompts(3))
    overrides = (f"data.train={path}", "environment.reward=math", "policy.model=" + tiny_model())
    config = compose_config(CONFIGS, "grpo", [*overrides, "grpo.num_prompts_per_step=4"])
    loader, *_ = prompts_of(config)
    assert "data.train has 3 prompts, and grpo.num_prompts_per_step=4 repeats some" in caplog.text
    assert len({row.index for row in loader.next_rows(4)}) == 3


def test_the_engine_has_room_for_the_completions_of_validations(tmp_path, tiny_model):
    """Rows that train keep theirs, and need not leave room for more."""
    train, held_out = (
        write_rows(tmp_path / f"{one[0]}.jsonl", {"prompt": one, "answer": "1"})
        for one in ("a" * 8, "b" * 4)
    )
    told = [f"data.train={train}", f"data.validation={held_out}", f"policy.model={tiny_model()}"]
    told.append("environment.reward=math")

    def longest(*overrides):
        return prompts_of(compose_config(CONFIGS, "grpo", [*told, *overrides]))[2]

    shorter = len(ChatTokenizer(tiny_model()).render([{"role": "user", "content": "b" * 4}]))
    assert longest() == shorter + 4 + 64
    assert longest("validation.max_new_tokens=200") == shorter + 200
    # What is only measured needs no room in a micro-batch.
    assert (
        longest("validation.max_new_tokens=200", "policy.micro_batch_tokens=128") == shorter + 200
    )
    with pytest.raises(UserError, match=r"row 0 has .* lower validation\.max_new_tokens"):
        longest("validation.max_new_tokens=250")


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


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_run_that_is_resumed_twice_goes_on_where_it_was(rows, shuffle):
    straight = indices(
        PromptLoader(rows, fingerprint=fingerprint(rows), seed=1, shuffle=shuffle), 3, 2, 5
    )
    found, state = [], None
    for count in (3, 2, 5):
        loader = PromptLoader(rows, fingerprint=fingerprint(rows), seed=1, shuffle=shuffle)
        if state is not None:
            loader.load_state(state)
        found += indices(loader, count)
        state = json.loads(json.dumps(loader.state()))
    assert found == straight
    assert sorted(row for batch in found for row in batch) == list(range(10))


def test_a_position_of_another_data_set_starts_it_at_its_beginning(tmp_path, rows, caplog):
    loader = PromptLoader(rows, fingerprint=fingerprint(rows), seed=1, shuffle=False)
    loader.next_rows(6)
    other = load(write_rows(tmp_path / "other.jsonl", {"prompt": "x"}, {"prompt": "y"}))
    fresh = PromptLoader(other, fingerprint=fingerprint(other), seed=1, shuffle=False)
    fresh.load_state(loader.state())
    assert indices(fresh, 2) == [[0, 1]]
    assert "starts at its beginning" in caplog.text


def test_a_position_under_another_seed_starts_the_rows_at_their_beginning(rows, caplog):
    loader = PromptLoader(rows, fingerprint=fingerprint(rows), seed=1, shuffle=True)
    loader.next_rows(6)
    fresh, same = (
        PromptLoader(rows, fingerprint=fingerprint(rows), seed=2, shuffle=True) for _ in range(2)
    )
    fresh.load_state(loader.state())
    assert indices(fresh, 10) == indices(same, 10)
    assert "another seed; this data starts at its beginning" in caplog.text


# Finite epochs.


def epochs(rows, batch_size, num_epochs=2, *, shuffle=True):
    return EpochLoader(
        rows,
        fingerprint=fingerprint(rows),
        batch_size=batch_size,
        num_epochs=num_epochs,
        seed=1,
        shuffle=shuffle,
    )


def numbers(batch):
    return [row.index for row in batch]


@pytest.mark.parametrize(("batch_size", "sizes"), [(5, [5, 5]), (4, [4, 4, 2]), (16, [10])])
def test_an_epoch_ends_with_a_smaller_batch(rows, batch_size, sizes):
    loader = epochs(rows, batch_size)
    assert loader.steps_per_epoch == len(sizes)
    batches = [numbers(batch) for batch in loader]
    assert [len(batch) for batch in batches] == sizes * 2
    orders = indices(
        PromptLoader(rows, fingerprint=fingerprint(rows), seed=1, shuffle=True), 10, 10
    )
    used = [order[: sum(sizes)] for order in orders]
    assert list(chain(*batches)) == used[0] + used[1]
    assert next(loader, "end") == "end"


@pytest.mark.parametrize("batch_size", [3, 5])
def test_a_run_continues_after_any_step_also_at_the_exact_end_of_an_epoch(rows, batch_size):
    def make():
        return epochs(rows, batch_size)

    straight = list(epochs(rows, batch_size))
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


def test_the_batches_that_are_left_are_those_that_come(rows):
    loader = epochs(rows, 4)
    for taken in range(2 * loader.steps_per_epoch):
        assert loader.steps_left == 2 * loader.steps_per_epoch - taken
        next(loader)
    assert loader.steps_left == 0
    # Two rows of the first pass, and all of the second.
    loader.load_state(loader.state() | {"epoch": 0, "position": 8})
    assert loader.steps_left == 4


@pytest.mark.parametrize(("batch_size", "of_a_pass"), [(3, 4), (4, 3), (5, 2), (9, 2), (10, 1)])
def test_steps_that_are_left_are_those_that_come(rows, batch_size, of_a_pass):
    loader = epochs(rows, batch_size)
    left = [loader.steps_left]
    for _ in loader:
        left.append(loader.steps_left)
    assert left == list(range(2 * of_a_pass, -1, -1))
