"""Supervised fine-tuning's rows: exactly what the assistant wrote trains, and nothing is lost."""

import gzip
import json
import re
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_like.config.data import ConversationsConfig
from nemo_like.data import conversations, json_rows
from nemo_like.data.answer_spans import num_unwritten
from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.datasets import without_overlap
from nemo_like.data.reasoning_gym import reward
from nemo_like.data.tokenizer import padding_id
from nemo_like.errors import UserError
from nemo_like.models.resolve import resolve_model
from tests.chat_templates import (
    END,
    LLAMA3,
    MARKED,
    MARKED_WITH_NEWLINES,
    PHI3,
    QWEN,
    QWEN3,
    STRIPS_THINK,
    THINK_IN_PROMPT,
    TURNS,
    build_chat,
    calling,
    thinking,
    tokenizer_of,
    trained_texts,
    write_rows,
)

THINKING = [dict(TURNS[0]), {"role": "assistant", "content": "<think>hm</think>yes"}, *TURNS[2:]]


ASKED = {"role": "user", "content": "what is the weather?"}
CALLING = {**TURNS[1], "tool_calls": [{"type": "function", "function": {"name": "weather"}}]}


def load(chat, source, with_validation=False, micro_batch_tokens=9999, context=9999, **config):
    return conversations.load(
        ConversationsConfig(train=str(source), **config),
        chat,
        micro_batch_tokens=micro_batch_tokens,
        context=context,
        seed=0,
        with_validation=with_validation,
    )


def rows_of(batch):
    """``(ids, mask)`` of each row."""
    lengths = batch.lengths.tolist()
    columns = [batch.tokens[name].split(lengths) for name in ("input_ids", "loss_mask")]
    return [(ids.tolist(), mask.tolist()) for ids, mask in zip(*columns, strict=True)]


# Where the assistant's tokens are.


@pytest.mark.parametrize("template", [QWEN, LLAMA3, PHI3, MARKED, MARKED_WITH_NEWLINES])
def test_an_answer_trains_from_its_first_token_to_its_end_token(tmp_path, template):
    chat, end = build_chat(tmp_path, template), END.get(template, "<|im_end|>")
    tokenizer = tokenizer_of(tmp_path)
    ids, mask = chat.render_conversation(TURNS)
    assert ids == tokenizer.apply_chat_template(TURNS, tokenize=True, return_dict=False)
    assert trained_texts(tokenizer, ids, mask) == [f"the first\nanswer{end}", f"and 2{end}"]
    first = mask.index(True)
    assert ids[:first] == chat.render(TURNS[:1])


@pytest.mark.parametrize("think", ["", "<think>\n"], ids=["derivable", "asks_with_think"])
def test_an_end_token_after_the_markers_trains_too(tmp_path, think):
    # With "think" the template asks in words that no answer begins with: only markers tell.
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + think + "{% endif %}"
    )
    ids, mask = build_chat(tmp_path, template).render_conversation(TURNS)
    trained = trained_texts(tokenizer_of(tmp_path), ids, mask)
    assert trained == ["the first\nanswer<|im_end|>", "and 2<|im_end|>"]


def test_turns_before_a_message_can_be_left_out(tmp_path):
    chat = build_chat(tmp_path, MARKED)
    ids, mask = chat.render_conversation(TURNS, from_message=2)
    assert trained_texts(tokenizer_of(tmp_path), ids, mask) == ["and 2<|im_end|>"]


def test_the_embedded_models_own_template_agrees_with_its_markers():
    folder = resolve_model("embedded")
    ids, mask = ChatTokenizer(str(folder)).render_conversation(TURNS)
    tokenizer = tokenizer_of(folder)
    marked = tokenizer.apply_chat_template(
        TURNS, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids == marked["input_ids"]
    assert mask == [bool(one) for one in marked["assistant_masks"]]


def test_a_default_system_text_is_rendered_once(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    ids, _ = chat.render_conversation(TURNS)
    assert tokenizer_of(tmp_path).decode(ids).count("You are helpful.") == 1


def test_a_template_that_rewrites_earlier_turns_trains_the_last_one_or_is_refused(tmp_path):
    chat = build_chat(tmp_path, STRIPS_THINK)
    path = write_rows(tmp_path / "r.jsonl", {"messages": TURNS}, {"messages": THINKING})
    with pytest.raises(UserError, match=r"line 2: .*message 1 in another way .*last_assistant"):
        load(chat, path)
    batch, _ = load(chat, path, train_on="last_assistant")
    for ids, mask in rows_of(batch):
        assert trained_texts(tokenizer_of(tmp_path), ids, mask) == ["and 2<|im_end|>"]


def test_markers_tell_what_cannot_be_derived(tmp_path):
    marked = STRIPS_THINK.replace(
        "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content.split('</think>')[-1] }}"
        "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}",
    )
    chat = build_chat(tmp_path, marked)
    ids, mask = chat.render_conversation(THINKING)
    assert trained_texts(tokenizer_of(tmp_path), ids, mask) == ["yes<|im_end|>", "and 2<|im_end|>"]


def test_a_template_that_gives_no_way_to_the_answers_is_refused_with_the_row(tmp_path):
    chat = build_chat(tmp_path, THINK_IN_PROMPT)
    path = write_rows(tmp_path / "r.jsonl", {"prompt": "a", "completion": "b"})
    with pytest.raises(UserError, match=rf"data\.train={path}, line 1: .*generation %}} markers"):
        load(chat, path)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "no end token"),
        (
            "{% for m in messages %}{{ m.role }}<|im_end|>{% endfor %}",
            "leaves out the text",
        ),
        ("{{ raise_exception('roles must alternate') }}", "template fails: roles must alternate"),
    ],
)
def test_a_template_that_cannot_serve_is_refused_with_the_row(tmp_path, template, message):
    asks = "{% if add_generation_prompt %}assistant{% endif %}"
    chat = build_chat(tmp_path, template + asks)
    path = write_rows(tmp_path / "r.jsonl", {"prompt": "a", "completion": "b"})
    with pytest.raises(UserError, match=f"line 1: .*{message}"):
        load(chat, path)


def test_an_end_token_that_sampling_does_not_know_is_trained_and_named_once(tmp_path, caplog):
    chat = build_chat(tmp_path, LLAMA3, all_ends=False)
    for _ in range(2):
        ids, mask = chat.render_conversation(TURNS)
    trained = trained_texts(tokenizer_of(tmp_path), ids, mask)
    assert trained == ["the first\nanswer<|eot_id|>", "and 2<|eot_id|>"]
    assert caplog.text.count("ends answers with <|eot_id|>") == 1


def test_an_answer_that_begins_with_a_newline_is_tokenised_as_it_would_be_sampled(tmp_path):
    """Tokenised whole, the header's newline and the answer's are one token that no engine sees."""
    chat = build_chat(tmp_path, QWEN)
    turns = [TURNS[0], {"role": "assistant", "content": "\nhi"}]
    ids, mask = chat.render_conversation(turns)
    first = mask.index(True)
    assert ids[:first] == chat.render(turns[:1])
    tokenizer = tokenizer_of(tmp_path)
    assert trained_texts(tokenizer, ids, mask) == ["\nhi<|im_end|>"]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(turns, tokenize=False)


def test_a_padding_that_ends_rows_is_no_padding(tmp_path):
    """transformers scores a row at its last token that is none: with it, at another token."""
    chat = build_chat(tmp_path, QWEN)
    pad, begin, end = (chat.token_ids()[f"<|{name}|>"] for name in ("pad", "begin", "im_end"))
    assert [padding_id(tmp_path, one) for one in (None, end, begin)] == [pad, pad, begin]
    tokenizer = tokenizer_of(tmp_path)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path)
    assert padding_id(tmp_path, end) is None


def test_a_header_is_tokenised_as_a_prompt_whatever_the_answer_begins_with(tmp_path):
    """GPT-2's rule makes two tokens of a header's two newlines, but of a prompt's end one."""
    chat = build_chat(tmp_path, LLAMA3, as_gpt2=True)
    ids, mask = chat.render_conversation(TURNS)
    prompt = chat.render(TURNS[:1])
    tokenizer = tokenizer_of(tmp_path)
    assert ids[: mask.index(True)] == prompt
    assert tokenizer.decode(prompt[-1]) == "\n\n"
    assert trained_texts(tokenizer, ids, mask) == ["the first\nanswer<|eot_id|>", "and 2<|eot_id|>"]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(TURNS, tokenize=False)


def test_a_text_that_would_begin_or_end_turns_is_refused(tmp_path):
    """Rendered before, or put there by whoever wrote it; other special tokens are only tokens."""
    chat, llama = build_chat(tmp_path / "qwen", QWEN), build_chat(tmp_path / "llama", LLAMA3)
    for text in ("a<|im_end|>b", "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"):
        for turn in (0, 1):
            turns = [dict(one) for one in TURNS]
            turns[turn]["content"] = text
            for render in (chat.render_conversation, chat.render):
                with pytest.raises(UserError, match=rf"message {turn} has '<\|im_"):
                    render(turns)
    other = [TURNS[0], {"role": "assistant", "content": "a<|user|>b<|im_end|>"}]
    ids, mask = chat.render_conversation(other)
    assert trained_texts(tokenizer_of(tmp_path / "qwen"), ids, mask) == ["a<|user|>b<|im_end|>"]
    told = QWEN.replace("You are helpful.", "Think after <|user|>.")
    build_chat(tmp_path / "told", told).render_conversation(other)  # what its prompt asks for
    with pytest.raises(UserError, match=r"message 0 has '<\|begin\|>'"):
        llama.render([{"role": "user", "content": "<|begin|>hi"}])
    llama.render([{"role": "user", "content": "<|im_start|>, as others mark turns"}])


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """``(chat, its plain tokenizer, end of a turn)`` of several families."""
    built = {"embedded": (folder := resolve_model("embedded"), ChatTokenizer(str(folder)))}
    for name, template in {"qwen": QWEN, "marked": MARKED, "phi": PHI3}.items():
        folder = tmp_path_factory.mktemp(name)
        built[name] = (folder, build_chat(folder, template))
    ends = {"phi": "<|end|>"}
    return [
        (chat, tokenizer_of(folder), ends.get(name, "<|im_end|>"))
        for name, (folder, chat) in built.items()
    ]


TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(texts=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4))
def test_trained_tokens_are_the_answers_and_their_ends(chats, texts):
    roles = ("user", "assistant")
    turns = [
        {"role": role, "content": text}
        for pair in texts
        for role, text in zip(roles, pair, strict=True)
    ]
    for chat, tokenizer, end in chats:
        ids, mask = chat.render_conversation(turns)
        assert trained_texts(tokenizer, ids, mask) == [f"{answer}{end}" for _, answer in texts]
        assert ids[: mask.index(True)] == chat.render(turns[:1])


# What only the template wrote.

EMPTY = "<think>\n\n</think>\n\n"
ASKED_AGAIN = [{"role": "user", "content": "two?"}]


@pytest.mark.parametrize("switches", [{}, {"enable_thinking": False}])
def test_an_empty_block_of_thinking_that_only_the_template_wrote_does_not_train(tmp_path, switches):
    chat = build_chat(tmp_path, QWEN3, **switches)
    tokenizer = tokenizer_of(tmp_path)
    ids, mask = chat.render_conversation([*ASKED_AGAIN, TURNS[3]])
    assert tokenizer.decode(ids).endswith(f"assistant\n{EMPTY}and 2<|im_end|>\n")
    assert trained_texts(tokenizer, ids, mask) == ["and 2<|im_end|>"]
    told_not_to = tokenizer.apply_chat_template(
        ASKED_AGAIN, add_generation_prompt=True, enable_thinking=False, return_dict=False
    )
    assert ids[: mask.index(True)] == told_not_to


@pytest.mark.parametrize(
    ("answer", "trained"),
    [
        ({"content": "2", "reasoning_content": "1 + 1"}, "<think>\n1 + 1\n</think>\n\n2<|im_end|>"),
        ({"content": "<think>\n1 + 1\n</think>\n\n2"}, "<think>\n1 + 1\n</think>\n\n2<|im_end|>"),
        ({"content": EMPTY + "2"}, EMPTY + "2<|im_end|>"),  # as the row's author has it
        ({"content": "2", "reasoning_content": " "}, "2<|im_end|>"),
        ({"content": "2", "reasoning_content": None}, "2<|im_end|>"),
        (
            {"content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]},
            '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>',
        ),
    ],
)
def test_what_the_rows_author_wrote_trains(tmp_path, answer, trained):
    chat = build_chat(tmp_path, QWEN3)
    path = write_rows(
        tmp_path / "r.jsonl", {"messages": [*ASKED_AGAIN, {"role": "assistant", **answer}]}
    )
    (row,) = rows_of(load(chat, path)[0])
    assert trained_texts(tokenizer_of(tmp_path), *row) == [trained]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("<think>", "</think>"),
        ("\n<think></think>\n", ""),
        ("<think>\n\n</think>\n", ""),
        ("[THINK]", "[/THINK]"),
        ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
        ("<|begin_of_thought|>\n\n", "<|end_of_thought|>\n\n"),
        ("Thoughts: ", "\nAnswer: "),
    ],
)
def test_an_empty_block_is_known_by_its_marks_or_by_what_it_is_around(tmp_path, before, after):
    chat = build_chat(tmp_path, thinking(before, after))
    tokenizer = tokenizer_of(tmp_path)
    turns = [*TURNS[:3], {"role": "assistant", "content": " \n2"}]
    ids, mask = chat.render_conversation(turns)
    assert tokenizer.decode(ids).count(f"assistant\n{before}{after}") == 2
    assert trained_texts(tokenizer, ids, mask) == ["the first\nanswer<|im_end|>", " \n2<|im_end|>"]
    if after:
        turns[1] = {**turns[1], "reasoning_content": "hm"}
        ids, mask = chat.render_conversation(turns)
        assert trained_texts(tokenizer, ids, mask) == [
            f"{before}hm{after}the first\nanswer<|im_end|>",
            " \n2<|im_end|>",
        ]


@pytest.mark.parametrize("before", ["<|channel|>final<|message|>", " ", "\n"])
def test_what_a_sampled_answer_begins_with_trains(tmp_path, before):
    """The name of a channel, and white space, which an engine samples after the header."""
    chat = build_chat(tmp_path, thinking(before, "").replace("(m.reasoning_content or '')", "''"))
    ids, mask = chat.render_conversation(TURNS[:2])
    expected = [f"{before}the first\nanswer<|im_end|>"]
    assert trained_texts(tokenizer_of(tmp_path), ids, mask) == expected


def test_white_space_before_an_answer_takes_no_time():
    start = time.process_time()
    assert num_unwritten(" " * 600 + "2", {"role": "assistant", "content": "2"}, "") == 0
    assert time.process_time() - start < 1


def test_markers_around_an_empty_block_do_not_make_it_train(tmp_path):
    inside = "{% generation %}{{ m.content }}"
    assert inside in MARKED
    marked = MARKED.replace(inside, inside.replace("m.content", "'<think></think>' + m.content"))
    chat = build_chat(tmp_path, marked)
    ids, mask = chat.render_conversation(TURNS)
    trained = trained_texts(tokenizer_of(tmp_path), ids, mask)
    assert trained == ["the first\nanswer<|im_end|>", "and 2<|im_end|>"]


# Rows.


def as_parts(message):
    half = len(message["content"]) // 2
    texts = message["content"][:half], message["content"][half:]
    return {**message, "content": [{"type": "text", "text": text} for text in texts]}


def test_every_form_of_a_row_gives_the_same_tokens(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    user, assistant = TURNS[:2]
    path = write_rows(
        tmp_path / "r.jsonl",
        {"messages": [user, assistant]},
        {"prompt": user["content"], "completion": assistant["content"]},
        {"prompt": [user], "completion": assistant["content"], "source": "kept by nobody"},
        {"prompt": [user], "completion": [assistant]},
        {"messages": [user, assistant], "prompt": user["content"], "chosen": [user, assistant]},
        {"prompt": user["content"], "messages": None, "completion": assistant["content"]},
        {"messages": [{**user, "name": None}, {**assistant, "tool_calls": None}], "tools": None},
        {"messages": [user, {**assistant, "tool_calls": []}]},
        {"messages": [as_parts(user), as_parts(assistant)], "label": True},
    )
    batch, held_out = load(chat, path)
    assert held_out is None
    first, *others = rows_of(batch)
    assert others == [first] * 8
    ids, mask = chat.render_conversation([user, assistant])
    assert first == (ids[:-1], mask[:-1])  # without the newline after the end token
    assert batch.rows["num_loss_tokens"].tolist() == [sum(mask)] * 9
    assert batch.rows["sample_mask"].all()


def test_a_completion_trains_without_the_answers_in_its_prompt(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    path = write_rows(
        tmp_path / "r.jsonl",
        {"prompt": TURNS[:3], "completion": "and 2"},
        {"prompt": TURNS[:1], "completion": TURNS[1:]},
    )
    tokenizer = tokenizer_of(tmp_path)
    one, both = (trained_texts(tokenizer, *row) for row in rows_of(load(chat, path)[0]))
    assert one == ["and 2<|im_end|>"]
    assert both == ["the first\nanswer<|im_end|>", "and 2<|im_end|>"]


def test_all_trains_every_token_but_the_first(tmp_path):
    chat = build_chat(tmp_path, LLAMA3)
    path = write_rows(tmp_path / "r.jsonl", {"messages": TURNS}, {"text": "plain"})
    for ids, mask in rows_of(load(chat, path, train_on="all")[0]):
        assert mask == [False] + [True] * (len(ids) - 1)


def test_rows_have_one_beginning_and_text_one_end(tmp_path):
    """The template writes a BOS and the tokenizer would put another before it."""
    chat = build_chat(tmp_path, LLAMA3, prepend_bos=True)
    tokenizer = tokenizer_of(tmp_path)
    bos, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    path = write_rows(
        tmp_path / "r.jsonl",
        {"messages": TURNS},
        {"text": "plain"},
        {"text": "<|begin|>plain<|im_end|>"},
    )
    conversation, text, with_tokens = rows_of(load(chat, path)[0])
    assert conversation[0].count(bos) == 1
    assert chat.render(TURNS[:1]).count(bos) == 1
    assert text == with_tokens
    assert text[0] == [bos, *tokenizer("plain", add_special_tokens=False)["input_ids"], end]
    assert text[1] == [False] + [True] * 6


def test_a_system_prompt_is_put_before_conversations_that_have_none(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    own = [{"role": "system", "content": "mine"}, *TURNS[:2]]
    path = write_rows(
        tmp_path / "r.jsonl",
        {"messages": TURNS},
        {"messages": own},
        {"prompt": "x", "completion": "y"},
    )
    batch, _ = load(chat, path, system_prompt="be brief")
    texts = [tokenizer_of(tmp_path).decode(ids) for ids, _ in rows_of(batch)]
    assert ["be brief" in text for text in texts] == [True, False, True]


NOT_TO_TRAIN = [
    ("mask", 0),
    ("loss_mask", 0),
    ("train", False),
    ("trainable", "false"),
    ("training", False),
    ("loss", False),
    ("weight", 0.0),
    ("label", 0),
    ("masked", True),
]
ROWS_NOT_TO_TRAIN = [
    ("weight", 0),
    ("sample_weight", 2),
    ("loss_multiplier", 0.0),
    ("train", False),
    ("loss_mask", [0, 1]),
    ("mask", "User"),
    ("masked", True),
]


def marked(index, name, value):
    """A conversation of which one message has an entry more."""
    turns = [dict(one) for one in TURNS]
    turns[index][name] = value
    return {"messages": turns}


def test_a_row_that_says_of_its_messages_what_happens_is_read(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    rows = [{"messages": TURNS}]
    yes = [(name, value not in (False, 0, "false")) for name, value in NOT_TO_TRAIN]
    rows += [marked(1, name, not value) for name, value in yes]
    rows += [marked(0, name, value) for name, value in NOT_TO_TRAIN]
    rows += [{"messages": TURNS, name: 1} for name, value in ROWS_NOT_TO_TRAIN if value is not True]
    rows += [
        {"messages": TURNS, "weight": None, "label": 3, "loss_mask": []},
        marked(0, "weight", 1),
    ]
    first, *others = rows_of(load(chat, write_rows(tmp_path / "r.jsonl", *rows))[0])
    assert others == [first] * (len(rows) - 1)
    assert len(rows) == 27


def test_answers_that_are_not_to_train_train_no_more_when_they_are_part_of_the_prompt(tmp_path):
    """What the refusal recommends."""
    chat = build_chat(tmp_path, QWEN)
    turns = marked(1, "mask", 0)["messages"]
    path = write_rows(tmp_path / "r.jsonl", {"prompt": turns[:3], "completion": turns[3:]})
    [row] = rows_of(load(chat, path)[0])
    assert trained_texts(tokenizer_of(tmp_path), *row) == ["and 2<|im_end|>"]
    path = write_rows(tmp_path / "all.jsonl", marked(0, "train", False))
    with pytest.raises(UserError, match=r"it would train; set data\.train_on=assistant, or take"):
        load(chat, path, train_on="all")
    path = write_rows(tmp_path / "last.jsonl", marked(1, "train", False))
    [row] = rows_of(load(chat, path, train_on="last_assistant")[0])
    assert trained_texts(tokenizer_of(tmp_path), *row) == ["and 2<|im_end|>"]


def test_a_message_may_be_empty_where_others_speak_or_tools_are_called(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    silent = [{"role": "system", "content": ""}, *TURNS]
    assert rows_of(load(chat, write_rows(tmp_path / "r.jsonl", {"messages": silent}))[0])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x", "answer": "y"}, "a row needs 'messages', .* it has question, answer"),
        ({"prompt": "x"}, "a row needs 'messages'"),
        ({"messages": TURNS, "text": "x"}, "only one of these forms; it has messages, text"),
        ({"messages": TURNS[:3]}, "ends with one of the assistant"),
        ({"messages": TURNS[1:2]}, "at least two"),
        ({"messages": [{"role": "user"}, TURNS[1]]}, "'role', 'content'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}, TURNS[1]]}, "'content'"),
        ({"messages": TURNS[1:]}, "the conversation begins with the assistant"),
        ({"prompt": TURNS[:2], "completion": "x"}, "'prompt' must be text"),
        ({"prompt": "x", "completion": 5}, "'completion' must be text"),
        ({"prompt": "x", "completion": TURNS[2:]}, "begins and ends with one of the assistant"),
        ({"text": ""}, "at least one character"),
        ({"text": 5}, "'text' must be text"),
        ({"messages": TURNS, "tools": [{}]}, "the model's chat template takes no tools; "),
        (
            {"prompt": "x", "completion": "y", "tools": [{}]},
            "the model's chat template takes no tools; ",
        ),
        ({"messages": TURNS, "tools": "[{"}, "'tools' is text that is not JSON"),
        ({"messages": TURNS, "tools": [1]}, "'tools' must be a list of objects"),
        ({"text": "x", "tools": [{}]}, "'tools' has no effect on 'text'"),
        ({"text": "x", "system": "y"}, "'system' must be text, and beside messages without"),
        ({"messages": TURNS, "system": 5}, "'system' must be text"),
        ({"messages": [TURNS[0], {**TURNS[1], "content": None}]}, "'content' of message 1 is null"),
        (
            {"messages": [TURNS[0], {**TURNS[1], "weight": 0}]},
            r"'weight' of the assistant's message 'the first\\nanswer' is 0, and it would train",
        ),
        *(
            (
                marked(1, name, value),
                f"'{name}' of the assistant's .* it would train; write what comes",
            )
            for name, value in NOT_TO_TRAIN
        ),
        *(
            (marked(3, name, value), f"'{name}' of .*'and 2' is {value}, and it would train; ")
            for name, value in NOT_TO_TRAIN
        ),
        (marked(1, "weight", 0.5), "is 0.5, and a message trains as a whole or not at all; "),
        (
            marked(1, "train_detail", [{"begin_offset": 0}]),
            "'train_detail' of .* as a whole or not",
        ),
        (marked(0, "train", True), "'train' of the user's .* only answers train; take 'train' out"),
        *(
            ({"messages": TURNS, name: value}, re.escape(f"'{name}' is {value}, and every row"))
            for name, value in ROWS_NOT_TO_TRAIN
        ),
        (
            {"prompt": "x", "completion": "y", "weight": 0.5},
            "'weight' is 0.5, and every row trains",
        ),
        ({"text": "x", "weight": 0}, "'weight' is 0, and every row trains alike; take the row out"),
        (
            {"messages": TURNS, "label": 0},
            "'label' is 0, which .*rename 'label' if it means someth",
        ),
        ({"messages": TURNS, "label": -1}, "'label' is -1, which marks a bad answer"),
        (
            {"prompt": "", "completion": "y"},
            "the user's message in 'prompt' is empty; give it text",
        ),
        (
            {"prompt": "x", "completion": " \n"},
            "the assistant's message in 'completion' is empty; ",
        ),
        (
            {"messages": [TURNS[0], {**TURNS[1], "content": ""}]},
            "assistant's message in 'messages' is",
        ),
        (
            {"messages": [{**TURNS[0], "content": "\t"}, TURNS[1]]},
            "user's message in 'messages' is e",
        ),
        (
            {"prompt": "x", "completion": [TURNS[1], {**TURNS[2], "content": ""}, TURNS[3]]},
            "'comp.* is e",
        ),
        ({"text": " "}, "at least one character"),
        ({"messages": [*TURNS[:2], {**TURNS[2], "role": "User"}, TURNS[3]]}, "must be 'user'"),
        ({"messages": [TURNS[0], CALLING, *TURNS[2:]]}, "leaves out the tool calls of message 1"),
        ({"messages": [ASKED, CALLING, *TURNS[2:]]}, "leaves out the tool calls of message 1"),
        ({"messages": [TURNS[0], {**TURNS[1], "reasoning_content": "hm"}]}, "'reasoning_content'"),
        ({"messages": TURNS, "functions": [{}]}, "'functions' is not supported"),
        (
            {"messages": TURNS, "prompt": "else?"},
            "of these forms; it has messages, prompt",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, TURNS[1]]},
            "has a part of type 'image_url', and only text is read",
        ),
        ({"prompt": "x", "completion": "y", "label": False}, "'label' is false, which marks a bad"),
        ({"prompt": "x", "completion": "y", "label": 0}, "'label' is 0, which marks a bad answer"),
        ({"prompt": "x", "completion": "y", "label": 0.0}, r"'label' is 0\.0, which marks a bad"),
        ({"prompt": "x", "completion": "y", "label": "0"}, "'label' is 0, which marks a bad"),
        ({"messages": TURNS, "label": "False"}, "'label' is false, which marks a bad answer"),
        ({"messages": TURNS, "label": False}, "pair both kinds for nemo-like dpo"),
        (
            {"messages": [{"role": "system", "content": "x"}, *TURNS], "system": "y"},
            "take it out of the row, or out of 'messages'",
        ),
        (
            {"messages": [{"from": "function_call", "value": "x"}, TURNS[1]]},
            "message 0 is from 'function_call', which is no known role",
        ),
        (
            {"messages": [TURNS[0], {**CALLING, "tool_calls": [{"arguments": "{x"}]}]},
            "the arguments of a tool call of message 1 are text that is not JSON",
        ),
    ],
)
def test_a_bad_row_is_named_by_key_file_and_line(tmp_path, row, message):
    chat = build_chat(tmp_path, QWEN)
    path = write_rows(tmp_path / "r.jsonl", {"messages": TURNS}, row)
    with pytest.raises(UserError, match=rf"^data\.train={path}, line 2: .*{message}"):
        load(chat, path)


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        (
            {"question": 1, "answer": 2},
            "; set data.columns='{prompt: question, completion: answer}'.",
        ),
        (
            {"problem": 1, "solution": 2, "answer": 3},
            "set data.columns='{prompt: problem, completion: solution}'.",
        ),
        (
            {"instruction": 1, "input": "", "output": 2},
            "set data.columns='{prompt: [instruction, input], completion: output}'.",
        ),
        (
            {"instruction": 1, "context": "", "response": 2},
            "set data.columns='{prompt: [instruction, context], completion: response}'.",
        ),
        ({"prompt": 1, "response": 2}, "; set data.columns='{completion: response}'."),
        (
            {"question": 1, "choices": [2], "answer": 3},
            "write question and choices as one 'prompt' and the right choice in words as "
            "'completion' ('answer' says which it is).",
        ),
        (
            {"prompt": "x", "chosen": [TURNS[0]], "rejected": [TURNS[0]]},
            "set data.columns='{messages: chosen}'.",
        ),
        ({"question": 1, "chosen": "x", "rejected": "y"}, "'{prompt: question, completion: chos"),
        ({"chosen": "\n\nHuman: x", "rejected": "y"}, "set data.columns='{messages: chosen}'."),
        (
            {"prompt": "x"},
            "without an answer are for runs that sample, such as nemo-like grpo.",
        ),
        ({"tokens": [1]}, "it has tokens."),
    ],
)
def test_a_row_in_a_known_shape_is_answered_with_how_to_write_it(tmp_path, row, remedy):
    chat = build_chat(tmp_path, QWEN)
    with pytest.raises(UserError) as refused:
        load(chat, write_rows(tmp_path / "r.jsonl", row))
    assert remedy in str(refused.value)


CALLED = {"city": "Sao Paulo", "days": [1, 2]}
JSON = '{"city": "Sao Paulo", "days": [1, 2]}'


@pytest.mark.parametrize("given", [CALLED, JSON, JSON.replace(": ", ":")])
@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ("{{ a | tojson }}", JSON),
        ("{% if a is string %}{{ a }}{% else %}{{ a | tojson }}{% endif %}", JSON),
        ("{% for k, v in a.items() %}<{{ k }}>{{ v }}{% endfor %}", "<city>Sao Paulo<days>[1, 2]"),
        ("{{ '' + a }}", JSON),  # takes text only
        ("{{ a }}", JSON),  # would write an object as Python does
    ],
)
def test_arguments_of_a_tool_call_are_written_once(tmp_path, arguments, written, given):
    chat = build_chat(tmp_path, calling(arguments))
    call = {"type": "function", "id": None, "function": {"name": "weather", "arguments": given}}
    turns = [TURNS[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    path = write_rows(tmp_path / "r.jsonl", {"messages": turns})
    (row,) = rows_of(load(chat, path)[0])
    (trained,) = trained_texts(tokenizer_of(tmp_path), *row)
    assert trained == f"weather:{written}<|im_end|>"
    prompt = [*conversations._conversation({"messages": turns}, None, "").messages, TURNS[2]]
    assert trained in tokenizer_of(tmp_path).decode(chat.render(prompt))


@pytest.mark.parametrize("given", ["{not json", '"Paris"', "[1]"])
def test_arguments_that_are_no_object_are_left_as_the_row_has_them(tmp_path, given):
    chat = build_chat(tmp_path, calling("{{ a | tojson }}"))
    call = {"function": {"name": "weather", "arguments": given}}
    ids, mask = chat.render_conversation([TURNS[0], {**TURNS[1], "tool_calls": [call]}])
    (trained,) = trained_texts(tokenizer_of(tmp_path), ids, mask)
    assert trained == f"the first\nanswerweather:{json.dumps(given)}<|im_end|>"


def test_tool_calls_train_where_the_template_writes_them(tmp_path):
    template = QWEN.replace(
        "{{ m.content }}",
        "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}",
    )
    chat = build_chat(tmp_path, template)
    path = write_rows(tmp_path / "r.jsonl", {"messages": [TURNS[0], CALLING]})
    batch, _ = load(chat, path)
    (row,) = rows_of(batch)
    assert trained_texts(tokenizer_of(tmp_path), *row) == ["the first\nanswerweather<|im_end|>"]


@pytest.mark.parametrize("role", ["system", "developer", "usr"])
def test_a_message_that_the_template_leaves_out_is_refused(tmp_path, role):
    known = "{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}"
    chat = build_chat(tmp_path, QWEN.replace("{{ m.content }}", known))
    messages = [{"role": role, "content": "be  brief"}, *TURNS]
    with pytest.raises(UserError, match=f"leaves out message 0, whose role is '{role}'"):
        chat.render(messages[:2])
    with pytest.raises(UserError, match=f"leaves out message 0, whose role is '{role}'"):
        chat.render_conversation(messages)


def test_reasoning_trains_where_the_template_writes_it(tmp_path):
    thinks = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    chat = build_chat(tmp_path, QWEN.replace("{{ m.content }}", thinks + "{{ m.content }}"))
    answer = {**TURNS[3], "reasoning_content": "one  more"}
    ids, mask = chat.render_conversation([*TURNS[:3], answer])
    last = trained_texts(tokenizer_of(tmp_path), ids, mask)[-1]
    assert last == "<think>one  more</think>and 2<|im_end|>"


def test_a_template_that_would_have_the_model_write_its_own_header_is_refused(tmp_path):
    asks = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    with pytest.raises(UserError, match=r"does not write '<\|im_start\|>assistant' where it asks"):
        build_chat(tmp_path, QWEN.replace(asks, ""))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b'{"text": "a"}\n' * 9, mtime=0)[:-9], "a broken gzip file"),
        (b"ARROW1\0\0", "a file in Arrow format"),
        ('{"text": "a"}\n'.encode("utf-16"), "a file in UTF-16 format"),
        (b' [\n {"text": "a"},\n {"text" "b"}\n]', "line 3: not a JSON list"),
        (b'{\n "text": "a"\n}', "line 1: not JSON .*; a row is one JSON object on one line"),
    ],
)
def test_a_file_in_another_format_is_told_from_a_bad_row(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^data\.train={path}.*{message}"):
        list(json_rows.read(path, "data.train"))


def test_files_without_rows_are_refused(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="has no rows"):
        load(chat, tmp_path / "empty.jsonl")
    with pytest.raises(UserError, match="no such file"):
        load(chat, tmp_path / "missing.jsonl")


# Length.


def lengths_of(chat, row):
    """``(tokens before the answer, tokens of the row)``."""
    prompt = {"role": "user", "content": row["prompt"]}
    answer = {"role": "assistant", "content": row["completion"]}
    _, mask = chat.render_conversation([prompt, answer])
    return mask.index(True), mask.index(True) + sum(mask)


def test_a_row_that_fits_exactly_is_never_cut(tmp_path, caplog):
    chat = build_chat(tmp_path, QWEN)
    row = {"prompt": "abc", "completion": "defg"}
    path = write_rows(tmp_path / "r.jsonl", row)
    _, length = lengths_of(chat, row)
    for overlong in ("refuse", "drop", "truncate_right"):
        for limits in ({"context": length}, {"micro_batch_tokens": length}, {"max_length": length}):
            batch, _ = load(chat, path, overlong=overlong, **limits)
            assert batch.lengths.tolist() == [length]
    assert not caplog.text


@pytest.mark.parametrize(
    ("limits", "key"),
    [
        ({"context": 30}, "the model's context"),
        ({"micro_batch_tokens": 30}, r"policy\.micro_batch_tokens"),
        ({"max_length": 30}, r"data\.max_length"),
    ],
)
def test_an_overlong_row_is_refused_with_its_line_and_the_limits_name(tmp_path, limits, key):
    chat = build_chat(tmp_path, MARKED)
    row = {"prompt": "a", "completion": "b" * 50}
    _, length = lengths_of(chat, row)
    path = write_rows(tmp_path / "r.jsonl", row)
    with pytest.raises(
        UserError, match=rf"line 1: the row has {length} tokens, and {key} allows 30"
    ):
        load(chat, path, **limits)


def test_a_limit_above_what_the_model_holds_is_refused(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    path = write_rows(tmp_path / "r.jsonl", {"messages": TURNS})
    with pytest.raises(
        UserError, match=r"data\.max_length=65 is above the 64 tokens that the model"
    ):
        load(chat, path, max_length=65, context=64)


def test_overlong_rows_are_dropped_and_counted(tmp_path, caplog):
    chat = build_chat(tmp_path, MARKED)
    short = {"prompt": "a", "completion": "b"}
    path = write_rows(tmp_path / "r.jsonl", {"prompt": "a", "completion": "b" * 99}, short)
    _, length = lengths_of(chat, short)
    batch, _ = load(chat, path, max_length=length, overlong="drop")
    assert batch.lengths.tolist() == [length]
    assert f"data.train: dropped 1 of 2 rows as longer than {length} tokens" in caplog.text
    with pytest.raises(UserError, match="none of 2 rows is left: 2 longer than 9"):
        load(chat, path, max_length=9, overlong="drop")


def test_the_kept_part_of_a_cut_answer_trains_and_a_row_without_any_is_dropped(tmp_path, caplog):
    chat = build_chat(tmp_path, MARKED)
    rows = [
        {"prompt": "a", "completion": "bcdefgh"},  # cut within the answer
        {"prompt": "a" * 9, "completion": "b"},  # nothing of the answer is left
        {"prompt": "a", "completion": "b"},  # fits
    ]
    before, _ = lengths_of(chat, rows[0])
    path = write_rows(tmp_path / "r.jsonl", *rows)
    batch, _ = load(chat, path, max_length=before + 3, overlong="truncate_right")
    cut, whole = rows_of(batch)
    tokenizer = tokenizer_of(tmp_path)
    assert trained_texts(tokenizer, *cut) == ["bcd"]
    assert trained_texts(tokenizer, *whole) == ["b<|im_end|>"]
    assert batch.rows["num_loss_tokens"].tolist() == [3, 2]
    assert "cut 1 of 3 rows" in caplog.text
    assert "dropped 1 of 3 rows as without a token to train" in caplog.text


# Data sets.


def test_validation_rows_are_no_training_rows(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    path = write_rows(
        tmp_path / "train.jsonl",
        *({"prompt": f"{i}?", "completion": "train"} for i in range(4)),
        {"text": "a text"},
    )
    held_out = write_rows(
        tmp_path / "held_out.jsonl",
        {"messages": [{"role": "user", "content": "2?"}, TURNS[1]]},
        {"text": "a text"},
    )
    train, validation = load(chat, path, validation=held_out, with_validation=True)
    tokenizer = tokenizer_of(tmp_path)
    texts = [tokenizer.decode(ids) for ids, _ in rows_of(train)]
    assert [text.split("user\n")[1][0] for text in texts] == ["0", "1", "3"]
    assert len(validation) == 2
    train, validation = load(chat, path, validation=held_out, with_validation=False)
    assert (len(train), validation) == (5, None)


@pytest.mark.parametrize(
    "message",
    [
        {"content": "caf\u00e9 one?", "role": "user"},
        {"role": "user", "content": "cafe\u0301 one?"},
        {"role": "user", "content": "caf\u00e9\r\none? "},
        {"role": "user", "content": "caf\u00e9 one?", "name": "Ann"},
    ],
)
def test_prompts_that_read_the_same_overlap_however_they_are_kept(message):
    def row(message):
        return conversations.Conversation(where="", messages=(message, TURNS[1]))

    held_out, other = row({"role": "user", "content": "caf\u00e9 one?"}), row(TURNS[0])
    assert without_overlap([row(message), other], [held_out]) == [other]


def test_conversations_overlap_where_all_but_the_last_answer_is_the_same():
    def row(*messages):
        return conversations.Conversation(where="", messages=messages)

    other_start = row(TURNS[0], {"role": "assistant", "content": "else"}, *TURNS[2:])
    other_answer = row(*TURNS[:3], {"role": "assistant", "content": "else"})
    assert without_overlap([row(*TURNS), other_start, other_answer], [row(*TURNS)]) == [other_start]


def test_completions_of_several_messages_overlap_where_their_prompts_are_the_same():
    def row(*messages):
        return conversations.Conversation(where="", messages=messages, num_prompt_messages=1)

    other_prompt = row({"role": "user", "content": "else"}, *TURNS[1:])
    other_completion = row(TURNS[0], {"role": "assistant", "content": "else"}, *TURNS[2:])
    assert without_overlap([other_completion, other_prompt], [row(*TURNS)]) == [other_prompt]


def test_the_default_is_questions_with_answers_that_earn_full_marks():
    chat = ChatTokenizer(str(resolve_model("embedded")))
    config = ConversationsConfig(num_train_rows=20, num_validation_rows=5)
    rows = conversations.read(config, config.train_parts[0], 20, 3)
    assert rows == conversations.read(config, config.train_parts[0], 20, 3)
    question, answer = (message["content"] for message in rows[0].messages)
    digits = question.split(":")[1].rstrip("= ")
    assert answer == f"<answer>{eval(digits)}</answer>"  # sums of five one-digit numbers
    scored = reward(question, answer, task="chain_sum", answer=str(eval(digits)), metadata={})
    assert (scored["reward"], scored["accuracy"]) == (1.0, 1.0)
    train, validation = load(
        chat, "reasoning_gym", with_validation=True, num_train_rows=20, num_validation_rows=5
    )
    assert (len(train), len(validation)) == (20, 5)
    assert (train.rows["num_loss_tokens"] > 0).all()


def test_a_task_without_a_single_right_answer_is_refused_by_name():
    config = ConversationsConfig(tasks={"propositional_logic": None})
    with pytest.raises(UserError, match=r"data\.tasks\.propositional_logic has no single right"):
        conversations.read(config, config.train_parts[0], 5, 0)


def test_tokens_of_many_rows_are_those_of_each_row_alone(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    path = write_rows(
        tmp_path / "r.jsonl",
        *({"prompt": f"{i} + {i} =", "completion": str(2 * i)} for i in range(500)),
    )
    rows = rows_of(load(chat, path)[0])
    for i in (0, 7, 499):
        turns = [
            {"role": "user", "content": f"{i} + {i} ="},
            {"role": "assistant", "content": str(2 * i)},
        ]
        ids, mask = chat.render_conversation(turns)
        assert rows[i] == (ids[:-1], mask[:-1])


def test_use_changes_nothing_about_the_tokenizer(tmp_path):
    chat = build_chat(tmp_path / "before", LLAMA3, prepend_bos=True)
    load(chat, write_rows(tmp_path / "r.jsonl", {"messages": TURNS}, {"text": "x"}))
    chat._tokenizer.save_pretrained(tmp_path / "after")
    before, after = (tokenizer_of(tmp_path / name) for name in ("before", "after"))
    assert after.chat_template == before.chat_template
    assert after.special_tokens_map == before.special_tokens_map
    assert json.loads(after.backend_tokenizer.to_str()) == json.loads(
        before.backend_tokenizer.to_str()
    )
