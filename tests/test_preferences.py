"""Preference pairs: the right completion is chosen, and both rows differ in it alone."""

import pytest
import torch

from nemo_like.config.data import PairsConfig
from nemo_like.data import preferences
from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.reasoning_gym import reward, rows
from nemo_like.data.token_rows import LengthFilter, Limit, TokenRow
from nemo_like.errors import UserError
from nemo_like.models.resolve import resolve_model
from tests.chat_templates import (
    END,
    LLAMA3,
    MARKED,
    PHI3,
    QWEN,
    STRIPS_THINK,
    build_chat,
    tokenizer_of,
    trained_texts,
    write_rows,
)
from tests.test_conversations import rows_of

USER = {"role": "user", "content": "which?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("good", "bad one"))
PLAIN = {"prompt": "which?", "chosen": "good", "rejected": "bad one"}


def load(chat, source, with_validation=False, micro_batch_tokens=9999, context=9999, **config):
    return preferences.load(
        PairsConfig(train=str(source), **config),
        chat,
        micro_batch_tokens=micro_batch_tokens,
        context=context,
        seed=0,
        with_validation=with_validation,
    )


@pytest.mark.parametrize("template", [QWEN, LLAMA3, PHI3, MARKED])
def test_rows_of_a_pair_share_a_prompt_and_end_with_one_end_token(tmp_path, template):
    chat, end = build_chat(tmp_path, template, prepend_bos=True), END.get(template, "<|im_end|>")
    batch, _ = load(chat, write_rows(tmp_path / "r.jsonl", PLAIN))
    tokenizer = tokenizer_of(tmp_path)
    prompt = chat.render([USER])
    for (ids, mask), answer in zip(rows_of(batch), (GOOD, BAD), strict=True):
        assert ids[: mask.index(True)] == prompt
        assert trained_texts(tokenizer, ids, mask) == [answer["content"] + end]
        whole = tokenizer.apply_chat_template([USER, answer], tokenize=True, return_dict=False)
        assert ids == whole[: len(ids)]
        assert tokenizer.decode(ids).endswith(answer["content"] + end)
        assert ids.count(tokenizer.bos_token_id) == (template is LLAMA3)
    assert batch.rows["num_loss_tokens"].tolist() == [5, 8]
    assert batch.rows["sample_mask"].all()


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "which?", "completions": ["good", "bad one"], "ranks": [0, 1]},
        {"prompt": "which?", "completions": ["bad one", "good"], "ranks": [1, 0]},
        {"prompt": [USER], "completions": [[BAD], [GOOD]], "ranks": [2.5, 1]},
        {
            "prompt": "which?",
            "chosen": [USER, GOOD],
            "rejected": [USER, BAD],
            "messages": [USER, GOOD],
        },
        {"prompt": "which? ", "chosen": [USER, GOOD], "rejected": [USER, BAD], "score_chosen": 8.0},
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": None, "chosen": [USER, {**GOOD, "name": None}], "rejected": [USER, BAD]},
        {**PLAIN, "completions": None, "ranks": None, "tools": None},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "which?"}]}]}
        | {
            "chosen": [{**GOOD, "content": [{"type": "text", "text": "good"}]}],
            "rejected": "bad one",
        },
    ],
)
def test_every_form_of_a_row_gives_the_same_pair(tmp_path, row):
    chat = build_chat(tmp_path, QWEN)
    batch, _ = load(chat, write_rows(tmp_path / "r.jsonl", row, PLAIN))
    found = rows_of(batch)
    assert found[:2] == found[2:]


def test_a_common_beginning_is_the_prompt_and_does_not_train(tmp_path):
    chat = build_chat(tmp_path, STRIPS_THINK)
    start = [USER, {"role": "assistant", "content": "<think>x</think>what?"}, USER]
    row = {"chosen": [*start, GOOD], "rejected": [*start, BAD]}
    batch, _ = load(chat, write_rows(tmp_path / "r.jsonl", row))
    texts = [trained_texts(tokenizer_of(tmp_path), *one) for one in rows_of(batch)]
    assert texts == [["good<|im_end|>"], ["bad one<|im_end|>"]]


def test_a_text_beside_conversations_names_their_first_question_and_messages_the_whole_prompt(
    tmp_path,
):
    """A text is an id of the conversation, whose prompt is all that both begin with."""
    chat = build_chat(tmp_path, QWEN)
    system = {"role": "system", "content": "be kind"}
    start = [system, USER, GOOD, USER]
    row = {"chosen": [*start, GOOD], "rejected": [*start, BAD]}
    for prompt, first in (("which?", []), ([*start], []), ([system, USER], ["good<|im_end|>"])):
        batch, _ = load(chat, write_rows(tmp_path / "r.jsonl", {**row, "prompt": prompt}))
        texts = [trained_texts(tokenizer_of(tmp_path), *one) for one in rows_of(batch)]
        assert texts == [[*first, "good<|im_end|>"], [*first, "bad one<|im_end|>"]]


def test_a_prompt_ends_with_the_message_to_answer_where_answers_begin_alike(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    row = {"chosen": [USER, GOOD, GOOD], "rejected": [USER, GOOD, BAD]}
    batch, _ = load(chat, write_rows(tmp_path / "r.jsonl", row))
    texts = [trained_texts(tokenizer_of(tmp_path), *one) for one in rows_of(batch)]
    assert texts == [["good<|im_end|>"] * 2, ["good<|im_end|>", "bad one<|im_end|>"]]


def test_a_completion_may_be_longer_than_the_other_by_whole_turns(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    row = {"chosen": [USER, GOOD], "rejected": [USER, GOOD, USER, BAD]}
    batch, _ = load(chat, write_rows(tmp_path / "r.jsonl", row))
    texts = [trained_texts(tokenizer_of(tmp_path), *one) for one in rows_of(batch)]
    assert texts == [["good<|im_end|>"], ["good<|im_end|>", "bad one<|im_end|>"]]


CONTRARY = [
    ("score_chosen", 1, "score_rejected", 2.5),
    ("chosen_score", 1, "rejected_score", 2),
    ("chosen-rating", 1, "rejected-rating", 4.5),
    ("chosenReward", -2, "rejectedReward", -1),
    ("chosen_rank", 2, "rejected_rank", 1),
    ("chosen_avg_rating", "3.5", "rejected_avg_rating", "4"),
    ("preferred_votes", 3, "dispreferred_votes", 7),
]


def test_scores_that_agree_and_numbers_that_are_none_are_read(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    agreeing = [{better: bad, worse: good} for better, good, worse, bad in CONTRARY]
    none = [
        {"chosen_tokens": 1, "rejected_tokens": 9},
        {"chosen-rating": 3, "rejected-rating": 3.0},
        {"chosen-rating": None, "rejected-rating": 3},
        {"chosen_rating": "low", "rejected_rating": "high"},
        {"chosen_score": True, "rejected_score": 3},
    ]
    rows = [PLAIN, *({**PLAIN, **more} for more in (*agreeing, *none))]
    found = rows_of(load(chat, write_rows(tmp_path / "r.jsonl", *rows))[0])
    assert found == found[:2] * 13


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "chosen": "y"}, "a row needs 'prompt', 'chosen' and 'rejected'"),
        ({**PLAIN, "ranks": [0, 1]}, "only one of these forms"),
        ({"chosen": "y", "rejected": "z"}, "give the texts' common beginning as 'prompt', in mess"),
        (
            {"question": "x", "chosen": "y", "rejected": "z"},
            "set data.columns='{prompt: question}'",
        ),
        ({"prompt": "x", "completion": "y", "label": True}, "rows for KTO.* no run trains on; put"),
        ({"prompt": "x", "completion": "y"}, "one answer prefers nothing: it is for nemo-like sft"),
        ({"messages": [USER, GOOD]}, "one answer prefers nothing: it is for nemo-like sft"),
        ({"prompt": "x"}, "rows without an answer are for runs that sample"),
        (
            {"prompt": "other?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "whole conversations, and 'prompt' is neither what the user says first in both",
        ),
        ({"prompt": [BAD], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "take 'prompt' out"),
        ({"prompt": [USER, GOOD], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "is neither"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "no message in common"),
        ({"chosen": [USER, GOOD, USER], "rejected": [USER, BAD]}, "'chosen' must be text"),
        ({**PLAIN, "chosen": [USER, GOOD]}, "what comes before it is the prompt"),
        ({**PLAIN, "rejected": 5}, "'rejected' must be text"),
        ({**PLAIN, "rejected": None}, "it has prompt, chosen."),
        ({**PLAIN, "prompt": [USER, GOOD]}, "'prompt' must be text"),
        ({"prompt": "x", "completions": ["a", "b", "c"], "ranks": [0, 1, 2]}, "there is 3 in it"),
        ({"prompt": "x", "completions": ["a", "b"], "ranks": [1, 1]}, r"is \[1, 1\]"),
        ({"prompt": "x", "completions": ["a", "b"], "ranks": [1]}, "two different numbers"),
        ({"prompt": "x", "completions": ["a", "b"], "ranks": ["1", "2"]}, "two different numbers"),
        ({**PLAIN, "images": ["x.png"]}, "'images' is not supported"),
        *(
            (
                {**PLAIN, better: good, worse: bad},
                f"'{better}' is {good} and '{worse}' is {bad}, so .*"
                "rejected answer is the better one; exchange the two, or take these",
            )
            for better, good, worse, bad in CONTRARY
        ),
        (
            {"prompt": "x", "completions": ["a", "b"], "ranks": [1, 0], "scores": [5, 2]},
            r"'scores\[1\]' is 2 and 'scores\[0\]' is 5, so that the rejected",
        ),
        (
            {"prompt": "x", "completions": ["a", None], "ranks": [0, 1]},
            r"'completions\[1\]' must be t",
        ),
        (
            {"prompt": "x", "completions": [None, "b"], "ranks": [1, 0]},
            r"'completions\[0\]' must be t",
        ),
        (
            {"prompt": "?", "completions": [[USER, GOOD], [USER, BAD]], "ranks": [1, 0]},
            r"'completions\[1\]' and 'completions\[0\]' are whole .*; correct it\.",
        ),
        ({**PLAIN, "prompt": " "}, "the user's message in 'prompt' is empty"),
        ({**PLAIN, "rejected": ""}, "the assistant's message in 'rejected' is empty; give it text"),
        (
            {**PLAIN, "chosen": [{**GOOD, "content": ""}]},
            "assistant's message in 'chosen' is empty",
        ),
        (
            {"chosen": [USER, GOOD], "rejected": [USER, {**BAD, "content": ""}]},
            "'rejected' is empty",
        ),
        (
            {**PLAIN, "chosen": [{**GOOD, "mask": 0}]},
            "'mask' of .*it would train; take the row out,",
        ),
        (
            {**PLAIN, "rejected": [{**BAD, "weight": 0}]},
            "'weight' of the assistant's message 'bad one",
        ),
        ({**PLAIN, "weight": 0}, "'weight' is 0, and every row trains alike"),
    ],
)
def test_a_bad_row_is_named_by_key_file_and_line(tmp_path, row, message):
    chat = build_chat(tmp_path, QWEN)
    path = write_rows(tmp_path / "r.jsonl", PLAIN, row)
    with pytest.raises(UserError, match=rf"^data\.train={path}, line 2: .*{message}"):
        load(chat, path)


def test_pairs_that_prefer_nothing_are_left_out_and_counted(tmp_path, caplog):
    chat = build_chat(tmp_path, QWEN)
    path = write_rows(tmp_path / "r.jsonl", {**PLAIN, "rejected": "good"}, PLAIN)
    batch, _ = load(chat, path)
    assert len(batch) == 2
    assert "dropped 1 of 2 pairs as of two completions that are the same" in caplog.text


def test_overlong_pairs_are_refused_dropped_whole_or_cut(tmp_path, caplog):
    chat = build_chat(tmp_path, MARKED)
    before = len(chat.render([USER]))
    long = {**PLAIN, "rejected": "bad" * 9}
    path = write_rows(tmp_path / "r.jsonl", long, PLAIN)
    limit = before + len("bad one") + 1
    with pytest.raises(UserError, match=rf"line 1: the row has {before + 28} tokens"):
        load(chat, path, max_length=limit)
    batch, _ = load(chat, path, max_length=limit, overlong="drop")
    assert batch.lengths.tolist() == [before + 5, limit]
    assert "dropped 1 of 2 pairs" in caplog.text
    batch, _ = load(chat, path, max_length=limit, overlong="truncate_right")
    assert batch.lengths.tolist() == [before + 5, limit] * 2
    assert "cut 1 of 2 pairs" in caplog.text


def test_a_pair_is_dropped_whose_kept_tokens_differ_no_more_or_do_not_train(tmp_path, caplog):
    chat = build_chat(tmp_path, MARKED)
    before = len(chat.render([USER]))
    late = {**PLAIN, "chosen": "same beginning", "rejected": "same beginning!"}
    path = write_rows(tmp_path / "r.jsonl", late, {**PLAIN, "prompt": "a" * 99}, PLAIN)
    batch, _ = load(chat, path, max_length=before + 8, overlong="truncate_right")
    assert batch.lengths.tolist() == [before + 5, before + 8]
    assert "dropped 1 of 3 pairs as of two rows with the same first" in caplog.text
    assert "dropped 1 of 3 pairs as without a token to train" in caplog.text


def test_both_rows_of_a_pair_fit_one_micro_batch(tmp_path):
    chat = build_chat(tmp_path, MARKED)
    path = write_rows(tmp_path / "r.jsonl", PLAIN)
    length = len(chat.render([USER])) + len("bad one") + 1
    load(chat, path, micro_batch_tokens=2 * length)
    with pytest.raises(UserError, match=r"policy\.micro_batch_tokens for 2 rows allows"):
        load(chat, path, micro_batch_tokens=2 * length - 1)


def test_validation_pairs_are_no_training_pairs(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    path = write_rows(tmp_path / "r.jsonl", PLAIN, {**PLAIN, "prompt": "else?"})
    held_out = write_rows(tmp_path / "v.jsonl", {"chosen": [USER, BAD], "rejected": [USER, GOOD]})
    train, validation = load(chat, path, validation=held_out, with_validation=True)
    assert (len(train), len(validation)) == (2, 2)
    assert "else?" in tokenizer_of(tmp_path).decode(rows_of(train)[0][0])


def test_the_default_pairs_have_a_right_and_a_wrong_answer():
    tasks = {"chain_sum": {"max_terms": 2}, "prime_factorization": None}
    config = PairsConfig(tasks=tasks)
    pairs = preferences.read(config, config.train_parts[0], 24, 3)
    assert pairs == preferences.read(config, config.train_parts[0], 24, 3)
    assert pairs != preferences.read(config, config.train_parts[0], 24, 4)
    for pair, record in zip(pairs, rows(tasks, 24, 3), strict=True):
        assert pair.chosen.messages[:-1] == pair.rejected.messages[:-1]
        scored = [
            reward(completion=one.messages[-1]["content"], **record)["accuracy"]
            for one in (pair.chosen, pair.rejected)
        ]
        assert scored == [1.0, 0.0]
    train, validation = load(
        ChatTokenizer(str(resolve_model("embedded"))),
        "reasoning_gym",
        with_validation=True,
        num_train_rows=10,
        num_validation_rows=4,
    )
    assert (len(train), len(validation)) == (20, 8)


def test_a_task_whose_rows_all_have_one_answer_has_no_wrong_one():
    config = PairsConfig()
    with pytest.raises(UserError, match=r"row 0: no other row of data\.tasks\.chain_sum"):
        preferences.read(config, config.train_parts[0], 1, 0)


@pytest.mark.parametrize("first", [[False, False, True], [True, False, False]])
def test_a_pair_of_which_only_one_row_keeps_a_token_to_train_is_dropped(first):
    masks = [first, [not one for one in first]]
    pair = [
        TokenRow(ids=torch.tensor([1, 2, index]), mask=torch.tensor(mask))
        for index, mask in enumerate(masks)
    ]
    limit = Limit(num_tokens=1, key="data.max_length", overlong="truncate_right")
    rows = LengthFilter(limit=limit)
    assert rows.fit(pair, "row 1") == []
    assert dict(rows.dropped) == {"without a token to train within the first 1": 1}
