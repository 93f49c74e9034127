"""Tokenizers with the chat templates of several model families, and what they make of rows."""

import json
from itertools import groupby
from pathlib import Path

from nemo_like.data.chat import ChatTokenizer

QWEN = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n"
    "{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
STRIPS_THINK = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PHI3 = (  # closes the whole conversation with an end token of its own
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_WITH_NEWLINES = (  # as TRL's for Qwen2.5: the newlines before and after are in the markers
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ '\n' + m.content }}<|im_end|>\n{% endgeneration %}{% else %}"
    "{{ '\n' + m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINK_IN_PROMPT = (  # asks with an open <think> that it does not write before a given answer
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
_ASKS = (  # with an empty block where it is told not to think
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '{empty}' }}{% endif %}"
    "{% endif %}"
)
QWEN3 = (  # thinks; the last answer has a block of thinking even where it is empty
    "{% set ns = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set content = m.content %}{% set thought = '' %}"
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
    "{% elif '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1] %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.asked and (loop.last or thought) %}"
    "{{ '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}"
    "{{ content.lstrip('\n') }}{% else %}{{ '<|im_start|>assistant\n' + content }}{% endif %}"
    "{% for c in m.tool_calls %}{% set f = c.function %}"
    '{{ ("\n" if content else "") + \'<tool_call>\n{"name": "\' + f.name + \'", "arguments": \' }}'
    "{% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}"
    "{{ '}\n</tool_call>' }}{% endfor %}<|im_end|>{{ '\n' }}"
    "{% else %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>{{ '\n' }}{% endif %}"
    "{% endfor %}" + _ASKS.replace("{empty}", "<think>\\n\\n</think>\\n\\n")
)
END = {LLAMA3: "<|eot_id|>", PHI3: "<|end|>"}
"""What ends a turn, where it is not ``<|im_end|>``."""

TURNS = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "the first\nanswer"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "and 2"},
]


def thinking(before: str, after: str) -> str:
    """A template that writes these two around an answer's thinking, empty or not."""
    around = [one.replace("\n", "\\n") for one in (before, after)]
    return (
        "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}{% if m.role == 'assistant' %}"
        f"{{{{ '{around[0]}' + (m.reasoning_content or '') + '{around[1]}' }}}}{{% endif %}}"
        "{{ m.content }}<|im_end|>{{ '\n' }}{% endfor %}"
        + _ASKS.replace("{empty}", "".join(around))
    )


def calling(arguments: str) -> str:
    """A template that writes the arguments ``a`` of tool calls by an expression."""
    return QWEN.replace(
        "{{ m.content }}",
        "{{ m.content }}{% for c in m.tool_calls %}{% set a = c.function.arguments %}"
        f"{{{{ c.function.name }}}}:{arguments}{{% endfor %}}",
    )


def build_chat(
    folder: Path,
    template: str,
    *,
    prepend_bos: bool = False,
    all_ends: bool = True,
    as_gpt2: bool = False,
    **switches: object,
) -> ChatTokenizer:
    """A byte-level tokenizer in which two newlines are one token, as in Qwen's and Llama's.

    ``prepend_bos``: plain text gets a BOS; ``all_ends``: the generation config has the template's
    end token, which is not the tokenizer's end-of-sequence token for Llama 3 and Phi 3;
    ``as_gpt2``: the last of several white spaces before letters stands apart; ``switches``: of the
    template.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    specials = ["<|pad|>", "<|begin|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|end|>"]
    specials += ["<|start_header_id|>", "<|end_header_id|>", "<|user|>", "<|assistant|>"]
    newline = "\u010a"  # as byte-level tokenizers write it
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*specials, *alphabet, newline * 2])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(newline, newline)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=as_gpt2)
    tokenizer.decoder = decoders.ByteLevel()
    if prepend_bos:
        tokenizer.post_processor = TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", vocabulary["<|begin|>"])]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|begin|>",
        eos_token="<|im_end|>",
        additional_special_tokens=specials[2:],
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    ends = [vocabulary["<|im_end|>"]]
    if all_ends:
        ends.append(vocabulary[END.get(template, "<|im_end|>")])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return ChatTokenizer(str(folder), switches)


def tokenizer_of(folder: Path | str):
    """The plain tokenizer of a folder, to compare with."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def trained_texts(tokenizer, ids, mask) -> list[str]:
    """Text of each run of trained tokens."""
    runs = groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1]))
    return [tokenizer.decode([int(one) for one, _ in pairs]) for trains, pairs in runs if trains]


def write_rows(path: Path, *rows) -> str:
    """A .jsonl file."""
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)
