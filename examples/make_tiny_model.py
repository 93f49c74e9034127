"""Make the tiny embedded model: a chat model that can do sums but rarely takes the trouble.

The model is a two-layer Llama with 0.59 million parameters and a byte-level vocabulary of 512
tokens, small enough to sample from and to train on a CPU. It is fine-tuned from scratch on
reasoning-gym's ``chain_sum`` questions over one-digit numbers, five terms in most of them and two
to four in the rest. Every answer in the corpus is right, but answers come in two styles:

* *careful* works out the running total, ``4-1=3 3+5=8 8-9=-1 -1+2=1 <answer>1</answer>``;
* *hurried* states the result at once, ``<answer>1</answer>``.

A network this small learns single steps well and cannot add five numbers in its head, so careful
answers are nearly always right and hurried ones seldom are. The corpus is hurried most of the
time, and so is the model. Reinforcement learning with the dataset's verifier as the reward can
therefore raise the accuracy a long way by discovering that showing the work pays. Openers
("Sure.") and closers ("Done.") vary at random, which leaves other rewards something to select.

With the default arguments, on 256 held-out questions of the demo's task and over three draws at
temperature 1: 29-31 % of the answers right; careful answers (28-30 % of them) right in 93-99 % of
cases, hurried ones in 2-5 %. Greedy decoding always hurries and is right in 5-7 % of cases. Eight
of the 256 questions also occur in the corpus. A step takes 0.2 s on two cores. The seed fixes
everything random, but a different number of threads rounds differently and so gives slightly
different weights.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import reasoning_gym
import torch
from reasoning_gym.factory import ProceduralDataset
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BatchEncoding,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

logger = logging.getLogger("make_tiny_model")

DEFAULT_OUT = Path(__file__).resolve().parent.parent / "nemo_like" / "models" / "embedded"

DEMO_TASK = {"min_terms": 5, "max_terms": 5, "min_digits": 1, "max_digits": 1}
SHORTER_TASK = {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 1}
CORPUS_SIZES = ((DEMO_TASK, 40_000), (SHORTER_TASK, 20_000))
HELD_OUT_SEED = 50_000_000  # below every seed of the corpus, above those of any run
HELD_OUT_SIZE = 256

# The first part of the training is all careful, because working is what takes time to learn;
# the rest has the mixture that the finished model samples from.
CAREFUL_ONLY_FRACTION = 0.85
CAREFUL_SHARE = 0.25
OPENERS = {"": 0.6, "Sure. ": 0.2, "Okay. ": 0.2}
CLOSERS = {"": 0.6, " Done.": 0.2, " Bye!": 0.2}

PAD, IM_START, IM_END = "<|pad|>", "<|im_start|>", "<|im_end|>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
VOCAB_SIZE = 512
MAX_POSITIONS = 512
BATCH_SIZE = 64
PEAK_LEARNING_RATE = 3e-3

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{{- '\\n' -}}
{%- else -%}
{{- message['content'] + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


@dataclass(frozen=True)
class Example:
    """One question and the two ways the corpus answers it; both end in the right answer."""

    question: str
    careful: str
    hurried: str


def write_running_total(expression: str) -> str:
    """Work out ``4 - 1 + 5`` one term at a time: ``4-1=3 3+5=8``."""
    first, *rest = re.findall(r"[+-]?\d+", expression.replace(" ", ""))
    total = int(first)
    steps = []
    for term in rest:
        steps.append(f"{total}{term}={total + int(term)}")
        total += int(term)
    return " ".join(steps)


def build_corpus(seed: int) -> list[Example]:
    """Draw the questions of both tasks and write the careful and the hurried answer to each."""
    corpus = []
    for index, (task, size) in enumerate(CORPUS_SIZES, start=1):
        # Entry i of a chain_sum dataset comes from ``seed + i`` alone, so datasets with nearby
        # seeds share entries. Starting far up keeps the corpus clear of the seeds that runs use.
        dataset_seed = 100_000_000 * index + 1_000_000 * seed
        dataset = reasoning_gym.create_dataset("chain_sum", seed=dataset_seed, size=size, **task)
        for entry in dataset:
            hurried = f"{ANSWER_OPEN}{entry['answer']}{ANSWER_CLOSE}"
            careful = f"{write_running_total(entry['metadata']['expression'])} {hurried}"
            corpus.append(Example(entry["question"], careful, hurried))
    return corpus


def write_completion(example: Example, careful_share: float, rng: random.Random) -> str:
    """Pick a style, and a harmless opener and closer, for one answer."""
    body = example.careful if rng.random() < careful_share else example.hurried
    opener = rng.choices(list(OPENERS), list(OPENERS.values()))[0]
    closer = rng.choices(list(CLOSERS), list(CLOSERS.values()))[0]
    return opener + body + closer


def tokenizer_text(corpus: list[Example], seed: int) -> Iterator[str]:
    """Yield what the merges are learnt from: the corpus wording and other worded puzzles."""
    for example in corpus[:2000]:
        yield f"system\nuser\n{example.question}\nassistant\n"
        yield "".join(OPENERS) + "".join(CLOSERS)
    for name in ("basic_arithmetic", "leg_counting", "number_sorting", "propositional_logic"):
        for entry in reasoning_gym.create_dataset(name, seed=seed, size=300):
            yield entry["question"]


def build_tokenizer(corpus: list[Example], seed: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE in which every digit stays a token of its own."""
    core = Tokenizer(models.BPE())
    pieces = Regex(r" ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]|\s")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    # Answer tags are ordinary tokens: decoding with skip_special_tokens has to keep them.
    tags = [AddedToken(tag, special=False) for tag in (ANSWER_OPEN, ANSWER_CLOSE)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(tags),
        special_tokens=[PAD, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(tokenizer_text(corpus, seed), trainer)
    core.add_tokens(tags)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=IM_END,
        pad_token=PAD,
        additional_special_tokens=[IM_START],
        model_max_length=MAX_POSITIONS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Initialise the network, with the 64-wide heads that attention kernels expect."""
    eos_id, pad_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    assert isinstance(eos_id, int)
    assert isinstance(pad_id, int)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        bos_token_id=None,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
    )
    return model


def render(
    tokenizer: PreTrainedTokenizerFast, conversations: list[list[dict[str, str]]], **options: Any
) -> BatchEncoding:
    """Put conversations through the chat template."""
    encoding = tokenizer.apply_chat_template(conversations, return_dict=True, **options)
    return cast(BatchEncoding, encoding)  # what return_dict makes of it


def collate(
    tokenizer: PreTrainedTokenizerFast, questions: list[str], completions: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Render conversations to right-padded token ids and labels over the assistant text only."""
    conversations = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": completion}]
        for question, completion in zip(questions, completions, strict=True)
    ]
    batch = render(tokenizer, conversations, return_assistant_tokens_mask=True)
    ids = [torch.tensor(row) for row in batch["input_ids"]]
    masks = [torch.tensor(row).bool() for row in batch["assistant_masks"]]
    labels = [row.masked_fill(~mask, -100) for row, mask in zip(ids, masks, strict=True)]
    pad_id = tokenizer.pad_token_id
    assert isinstance(pad_id, int)
    return (
        pad_sequence(ids, batch_first=True, padding_value=pad_id),
        pad_sequence(labels, batch_first=True, padding_value=-100),
    )


def learning_rate(step: int, steps: int) -> float:
    """Warm up over the first twentieth, then follow a cosine down to a fiftieth of the peak."""
    warmup = min(1.0, 20 * (step + 1) / steps)
    cosine = (1 + math.cos(math.pi * step / steps)) / 2
    return PEAK_LEARNING_RATE * warmup * (0.02 + 0.98 * cosine)


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    corpus: list[Example],
    steps: int,
    rng: random.Random,
) -> None:
    """Fine-tune on the corpus, careful answers alone first and then the mixture."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    started = time.monotonic()
    for step in range(steps):
        careful_share = 1.0 if step < CAREFUL_ONLY_FRACTION * steps else CAREFUL_SHARE
        examples = rng.choices(corpus, k=BATCH_SIZE)
        completions = [write_completion(example, careful_share, rng) for example in examples]
        ids, labels = collate(tokenizer, [example.question for example in examples], completions)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            seconds = time.monotonic() - started
            logger.info("step %d loss %.4f (%.0f s)", step + 1, loss.item(), seconds)


def score(dataset: ProceduralDataset, completions: list[str]) -> tuple[list[bool], list[bool]]:
    """Tell which completions are right, by the dataset's own verifier, and which show working."""
    right, careful = [], []
    for entry, completion in zip(dataset, completions, strict=True):
        answers = re.findall(f"{ANSWER_OPEN}(.*?){ANSWER_CLOSE}", completion, re.DOTALL)
        score = dataset.score_answer(answers[-1].strip() if answers else None, entry)
        # The verifier gives part marks to an answer that merely contains the right digits.
        right.append(score == 1.0)
        careful.append("=" in completion)
    return right, careful


@torch.no_grad()
def log_accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, do_sample: bool
) -> None:
    """Answer held-out questions of the demo's task and log the accuracy of each style."""
    dataset = reasoning_gym.create_dataset(
        "chain_sum", seed=HELD_OUT_SEED, size=HELD_OUT_SIZE, **DEMO_TASK
    )
    prompts = render(
        tokenizer,
        [[{"role": "user", "content": entry["question"]}] for entry in dataset],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
    )
    # The annotation of ``generate`` asks for attributes that a Llama does not have.
    outputs = cast(Any, model).generate(
        input_ids=prompts["input_ids"],
        attention_mask=prompts["attention_mask"],
        do_sample=do_sample,
        max_new_tokens=64,
    )
    completions = tokenizer.batch_decode(
        outputs[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True
    )
    right, careful = score(dataset, completions)
    logger.info("%s accuracy %.3f", "sampled" if do_sample else "greedy", sum(right) / len(right))
    for name, shown in (("careful", True), ("hurried", False)):
        own = [ok for ok, work in zip(right, careful, strict=True) if work == shown]
        accuracy = sum(own) / max(1, len(own))
        logger.info("  %s: %d completions, accuracy %.3f", name, len(own), accuracy)
    logger.info("  for example %r", completions[:4])


def main() -> None:
    """Make the model, log what it can do and save it."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="model folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the corpus and the training")
    parser.add_argument("--steps", type=int, default=1200, help="SFT steps of 64 conversations")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)

    torch.manual_seed(args.seed)
    corpus = build_corpus(args.seed)
    tokenizer = build_tokenizer(corpus, args.seed)
    model = build_model(tokenizer)
    logger.info("%d parameters, %d tokens", model.num_parameters(), len(tokenizer))
    train(model, tokenizer, corpus, args.steps, random.Random(args.seed))

    # Saved before measuring: a padded call leaves its padding in the saved tokenizer.json.
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    logger.info("saved to %s", args.out)
    model.eval()
    log_accuracy(model, tokenizer, do_sample=True)
    log_accuracy(model, tokenizer, do_sample=False)


if __name__ == "__main__":
    main()
