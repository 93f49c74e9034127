"""Chat templates as models ship them, with tokenizers that have their special tokens.

Most come from installed packages: TRL keeps them to know models by, and mistral_common writes
Mistral's. SmolLM3's is in our own words.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_like.data.chat import ChatTokenizer

SMOLLM3 = """\
{%- if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif -%}
{%- set mode = "/think" if enable_thinking else "/no_think" -%}
<|im_start|>system
## Metadata

Reasoning Mode: {{ mode }}

## Custom Instructions

{% if messages[0].role == "system" %}{{ messages[0].content.rstrip() }}{% else -%}
You are a helpful assistant.{% endif %}
{% if tools %}
### Tools

<tools>
{% for tool in tools %}{{ tool | string }}
{% endfor %}</tools>

For each function call, return a JSON object within <tool_call></tool_call> tags.
{% endif %}<|im_end|>
{% for m in messages %}{% set content = m.content if m.content is string else "" -%}
{%- if m.role == "user" -%}
<|im_start|>user
{{ content }}<|im_end|>
{% elif m.role == "assistant" -%}
{%- if mode == "/think" -%}
<|im_start|>assistant
{{ content.lstrip("\\n") }}<|im_end|>
{% else -%}
<|im_start|>assistant
<think>

</think>
{{ content.lstrip("\\n") }}<|im_end|>
{% endif -%}
{%- elif m.role == "tool" -%}
<|im_start|>user
{{ content }}<|im_end|>
{% endif %}{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if mode == "/no_think" %}<think>

</think>
{% endif %}{% endif -%}"""


@dataclass(frozen=True)
class Family:
    """A template, the tokens that it needs, and how the model answers it."""

    name: str
    file: str = ""
    """Of TRL's templates; or ``mistral:VERSION``, or empty for ours."""
    ends: tuple[str, ...] = ("<|im_end|>",)
    """Tokens that end a turn, as the generation config has them; the first is the tokenizer's."""
    specials: tuple[str, ...] = ("<|im_start|>", "<|endoftext|>")
    plain: tuple[str, ...] = ()
    """Tokens of their own that count as text."""
    bos: str = "<|endoftext|>"
    call: str = ""
    """A tool call ``add(a=1)`` as the model writes it; empty: calls are not read."""
    thought: str = ""
    """Thinking as the model writes it before an answer; empty: it does not think."""
    switches: dict[str, Any] = field(default_factory=dict)
    between: str = "\n"
    """What stands between two calls."""
    closes: str = ""
    """What the model writes before the end token."""
    ends_begin: bool = False
    """Whether a turn ends with the mark of the next."""
    system: bool = True
    """Whether the template takes a system message."""
    rewrites: bool = False
    """Whether the template renders some earlier turn in another way once others follow."""


_THINK = ("<think>", "</think>")
_HERMES_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
XML = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
_LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>")
_LLAMA_CALL = '{"name": "add", "parameters": {"a": 1}}'
_GEMMA = ("<start_of_turn>", "<pad>")
_PHI = ("<|system|>", "<|user|>", "<|assistant|>")
_DEEPSEEK = tuple(
    f"<\uff5c{name}\uff5c>"
    for name in (
        "User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin",
        "tool▁call▁end", "tool▁sep", "tool▁outputs▁begin", "tool▁outputs▁end",
        "tool▁output▁begin", "tool▁output▁end",
    )
)  # fmt: skip
_DEEPSEEK_ENDS = ("<\uff5cend▁of▁sentence\uff5c>",)
_DEEPSEEK_BOS = "<\uff5cbegin▁of▁sentence\uff5c>"
_MISTRAL = (
    "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[THINK]",
    "[/THINK]",
)  # fmt: skip
_HARMONY = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|constrain|>")
_COHERE = (
    "<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>",
    "<|START_RESPONSE|>", "<|END_RESPONSE|>",
)  # fmt: skip
_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_LFM = ("<|im_start|>", "<|tool_call_start|>", "<|tool_call_end|>")

_QWEN_THINKS = {"plain": (*_THINK, *_HERMES_TOKENS), "thought": "<think>\nhm, {}\n</think>\n\n"}
_QWEN_IS_ASKED = _QWEN_THINKS | {"thought": "hm, {}\n</think>\n\n"}
"""The template opens the block in the prompt."""

FAMILIES = [
    Family("qwen2.5", "qwen2_5", plain=_HERMES_TOKENS[:2], call=HERMES),
    Family("qwen3", "qwen3", call=HERMES, rewrites=True, **_QWEN_THINKS),
    Family(
        "qwen3 without thinking", "qwen3", call=HERMES, plain=(*_THINK, *_HERMES_TOKENS),
        switches={"enable_thinking": False}, rewrites=True,
    ),
    Family("qwen3-2507", "qwen3_instruct_2507", plain=_HERMES_TOKENS, call=HERMES),
    Family("qwen3.5", "qwen3_5_think", call=XML, rewrites=True, **_QWEN_IS_ASKED),
    Family("qwen3.5 without thinking", "qwen3_5_nothink", call=XML, plain=_THINK, rewrites=True),
    Family("qwen3.6", "qwen3_6", call=XML, rewrites=True, **_QWEN_IS_ASKED),
    Family("qwen3.8", "qwen3_8", call=XML, **_QWEN_IS_ASKED),
    Family("nemotron-3", "nemotron_3_nano", call=XML, **_QWEN_IS_ASKED),
    Family("llama-3", "llama3", ("<|eot_id|>", "<|end_of_text|>"), _LLAMA, bos="<|begin_of_text|>"),
    Family(
        "llama-3.1", "llama3_1", ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"), _LLAMA,
        bos="<|begin_of_text|>", call=_LLAMA_CALL, between="; ",
    ),
    Family(
        "llama-3.2", "llama3_2", ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"), _LLAMA,
        bos="<|begin_of_text|>", call=_LLAMA_CALL, between="; ",
    ),
    Family("mistral-v3", "mistral:v3", ("</s>",), _MISTRAL, bos="<s>",
           call='[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', rewrites=True),
    Family("mistral-v13", "mistral:v13", ("</s>",), _MISTRAL, bos="<s>",
           call='[TOOL_CALLS]add[ARGS]{"a": 1}', thought="[THINK]hm, {}[/THINK]"),
    Family("gemma", "gemma", ("<end_of_turn>", "<eos>"), _GEMMA, bos="<bos>", system=False),
    Family("gemma-3", "gemma3", ("<end_of_turn>", "<eos>"), _GEMMA, bos="<bos>"),
    Family("gemma-4", "gemma4_v5", ("<turn|>", "<eos>"),
           ("<|turn>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool>",
            "<tool|>", "<|tool_response>", "<tool_response|>", '<|"|>', "<|think|>"), bos="<bos>",
           thought="<|channel>thought\nhm, {}\n<channel|>"),
    Family("phi-3", "phi3", ("<|end|>", "<|endoftext|>"), _PHI),
    Family("phi-3.5", "phi3_5", ("<|end|>", "<|endoftext|>"), _PHI),
    Family("deepseek-v3", "deepseekv3", _DEEPSEEK_ENDS, _DEEPSEEK,
           bos=_DEEPSEEK_BOS, plain=_THINK, thought="hm, {}\n</think>\n\n",
           rewrites=True),
    Family("deepseek-r1-distill", "deepseek_r1_distill", _DEEPSEEK_ENDS, _DEEPSEEK,
           bos=_DEEPSEEK_BOS, plain=_THINK, thought="hm, {}\n</think>\n\n",
           rewrites=True),
    Family("smollm3", plain=(*_THINK, *_HERMES_TOKENS), thought="<think>\nhm, {}\n</think>\n"),
    Family("smollm3 without thinking", plain=(*_THINK, *_HERMES_TOKENS),
           switches={"enable_thinking": False}),
    Family("glm-4.5", "glm4moe", ("<|user|>", "<|endoftext|>", "<|observation|>"), _GLM,
           plain=(*_THINK, *_HERMES_TOKENS, "<arg_key>", "</arg_key>"),
           call="<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
           thought="\n<think>hm, {}</think>\n", rewrites=True, ends_begin=True),
    Family("gpt-oss", "gptoss", ("<|return|>", "<|call|>"), _HARMONY,
           thought="<|channel|>analysis<|message|>hm, {}<|end|><|start|>assistant"
                   "<|channel|>final<|message|>", rewrites=True),
    Family("lfm2.5", "lfm2_2_5_v2", specials=_LFM, plain=_THINK, bos="<|startoftext|>",
           call="<|tool_call_start|>[add(a=1)]<|tool_call_end|>",
           thought="<think>hm, {}</think>", rewrites=True),
    Family("command", "cohere2", ("<|END_OF_TURN_TOKEN|>",), _COHERE, bos="<BOS_TOKEN>",
           closes="<|END_RESPONSE|>"),
    Family("muse", "muse_glimmer", ("<|eot|>",), ("<|start|>", "<|message|>", "<|eom|>"),
           bos="<|begin|>"),
]  # fmt: skip


def template_of(family: Family) -> str:
    """The template's text."""
    if not family.file:
        return SMOLLM3
    if family.file.startswith("mistral:"):
        return _mistral(family.file.removeprefix("mistral:"))
    import trl

    path = Path(trl.__file__).parent / "chat_templates" / f"{family.file}.jinja"
    return path.read_text(encoding="utf-8")


def _mistral(version: str) -> str:
    from mistral_common.integrations.chat_templates.chat_templates import generate_chat_template
    from mistral_common.tokens.tokenizers.base import TokenizerVersion

    return generate_chat_template(
        spm=version == "v3",
        tokenizer_version=TokenizerVersion(version),
        image_support=False,
        audio_support=False,
        thinking_support=version == "v13",
        default_system_prompt=None,
        plain_thinking_support=False,
        use_special_token_variables=True,
        model_settings_fields=None,
        reasoning_effort_values=None,
        reasoning_effort_default=None,
    )


def build(folder: Path, family: Family) -> ChatTokenizer:
    """A byte-level tokenizer with the family's tokens and template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    newline = "\u010a"  # as byte-level tokenizers write it
    vocabulary = {token: i for i, token in enumerate([*alphabet, newline * 2])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(newline, newline)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = dict.fromkeys([family.bos, *family.ends, *family.specials])
    tokenizer.add_special_tokens([AddedToken(one, normalized=False) for one in special])
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in family.plain])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=family.bos, eos_token=family.ends[0]
    )
    fast.chat_template = template_of(family)
    fast.save_pretrained(folder)
    ends = [fast.convert_tokens_to_ids(one) for one in family.ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return ChatTokenizer(str(folder), family.switches)
