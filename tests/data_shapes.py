"""A few rows in the shape of well-known data sets, and the conversations that they stand for.

``docs/data.md`` has the same table; ``test_data_sources.py`` compares ids and masks.
"""

from dataclasses import dataclass, field
from typing import Any

Turns = list[tuple[str, str]]


@dataclass(frozen=True)
class Shape:
    """Rows of one data set, read by one kind of run."""

    name: str
    run: str
    rows: list[dict[str, Any]]
    expected: list[Turns]
    """The whole conversation of each row; of pairs the chosen one."""
    columns: dict[str, Any] = field(default_factory=dict)
    answers: tuple[Any, ...] = ()
    """``answer`` of each row, for a reward."""


def asked(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def said(question, answer):
    return [("user", question), ("assistant", answer)]


GSM8K = [
    {"question": "Tom has 3 pens and buys 4.", "answer": "3+4=<<3+4=7>>7 pens.\n#### 7"},
    {"question": "A box has 12 eggs; 5 break.", "answer": "12-5=7\n#### 7"},
    {"question": "How much is 10 x 123?", "answer": "10*123=1230\n#### 1,230"},
]
MATH = [
    {
        "problem": "What is $\\frac12+\\frac13$?",
        "level": "Level 1",
        "type": "Algebra",
        "solution": "We add: $\\boxed{\\frac{5}{6}}$.",
    },
    {
        "problem": "Compute $2^3$.",
        "level": "Level 2",
        "type": "Algebra",
        "solution": "$\\boxed{8}$",
    },
]
DAPO = [
    {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"Solve: {i} + 1."}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(i + 1), "style": "rule"},
        "extra_info": {"index": f"id-{i}"},
    }
    for i in range(3)
]
OPENR1 = [
    {
        "problem": f"{i}+1?",
        "solution": f"It is {i + 1}.",
        "answer": str(i + 1),
        "uuid": f"u{i}",
        "generations": ["a", "b"],
        "correctness_count": 1,
        "messages": asked(f"{i}+1?", f"<think>\nadd\n</think>\n\n{i + 1}"),
    }
    for i in range(3)
]
NUMINA = [
    {
        "source": "olympiads",
        "problem": f"{i} x 2?",
        "solution": f"\\boxed{{{2 * i}}}",
        "messages": asked(f"{i} x 2?", f"\\boxed{{{2 * i}}}"),
    }
    for i in range(3)
]
TULU = [
    {"id": "a", "messages": asked("Hi", "Hello!"), "source": "ai2/x"},
    {"id": "b", "messages": [*asked("1?", "One."), *asked("2?", "Two.")], "source": "ai2/y"},
]
ULTRACHAT = [
    {"prompt": "Hi", "prompt_id": "a", "messages": [*asked("Hi", "Hello!"), *asked("Bye", "Ciao")]},
    {"prompt": "1?", "prompt_id": "b", "messages": asked("1?", "One.")},
]
ULTRAFEEDBACK = [
    {
        "prompt": "Name a color.",
        "prompt_id": "a",
        "chosen": asked("Name a color.", good),
        "rejected": asked("Name a color.", "Dog."),
        "messages": asked("Name a color.", good),
        "score_chosen": 8.0,
        "score_rejected": 2.0,
    }
    for good in ("Blue.", "Red.")
]
HH = [
    {
        "chosen": "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: A color?\n\nAssistant: Blue.",
        "rejected": "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: A color?\n\nAssistant: Go away.",
    },
    {
        "chosen": "\n\nHuman: 1?\n\nAssistant: One.\n\nIt is.",
        "rejected": "\n\nHuman: 1?\n\nAssistant: Two.",
    },
]
SHAREGPT = [
    {
        "id": "x",
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "Hi"},
            {"from": "gpt", "value": "Hello!"},
        ],
    },
    {
        "id": "y",
        "conversations": [{"from": "human", "value": "1?"}, {"from": "gpt", "value": "1."}],
    },
]
ALPACA = [
    {"instruction": "Name a color.", "input": "", "output": "Blue.", "text": "Below is ..."},
    {"instruction": "Translate.", "input": "Hallo", "output": "Hello", "text": "Below is ..."},
]
DOLLY = [{"instruction": "Sum up.", "context": "Long.", "response": "Short.", "category": "qa"}]
ORCA = [{"system": "Be kind.", "question": "Color?", "chosen": "Blue.", "rejected": "Dog."}]
KTO = [
    {"prompt": "Hi", "completion": "Hello!", "label": True},
    {"prompt": "1?", "completion": "One.", "label": True},
]

SHAPES = [
    Shape(
        "GSM8K",
        "grpo",
        GSM8K,
        [[("user", row["question"])] for row in GSM8K],
        {"prompt": "question"},
        tuple(row["answer"] for row in GSM8K),
    ),
    Shape(
        "GSM8K",
        "sft",
        GSM8K,
        [said(row["question"], row["answer"]) for row in GSM8K],
        {"prompt": "question", "completion": "answer"},
    ),
    Shape(
        "MATH",
        "grpo",
        MATH,
        [[("user", row["problem"])] for row in MATH],
        {"prompt": "problem", "answer": "solution"},
        tuple(row["solution"] for row in MATH),
    ),
    Shape(
        "DAPO-Math-17k",
        "grpo",
        DAPO,
        [[("user", f"Solve: {i} + 1.")] for i in range(3)],
        {"answer": "reward_model.ground_truth"},
        ("1", "2", "3"),
    ),
    Shape(
        "OpenR1-Math",
        "grpo",
        OPENR1,
        [[("user", f"{i}+1?")] for i in range(3)],
        {"prompt": "problem"},
        ("1", "2", "3"),
    ),
    Shape(
        "OpenR1-Math",
        "sft",
        OPENR1,
        [said(f"{i}+1?", f"<think>\nadd\n</think>\n\n{i + 1}") for i in range(3)],
    ),
    Shape(
        "NuminaMath",
        "grpo",
        NUMINA,
        [[("user", f"{i} x 2?")] for i in range(3)],
        {"prompt": "problem", "answer": "solution"},
        tuple(row["solution"] for row in NUMINA),
    ),
    Shape(
        "NuminaMath",
        "sft",
        NUMINA,
        [said(f"{i} x 2?", f"\\boxed{{{2 * i}}}") for i in range(3)],
    ),
    Shape(
        "Tulu-SFT", "sft", TULU, [said("Hi", "Hello!"), [*said("1?", "One."), *said("2?", "Two.")]]
    ),
    Shape(
        "UltraChat",
        "sft",
        ULTRACHAT,
        [[*said("Hi", "Hello!"), *said("Bye", "Ciao")], said("1?", "One.")],
    ),
    Shape(
        "UltraFeedback",
        "dpo",
        ULTRAFEEDBACK,
        [said("Name a color.", "Blue."), said("Name a color.", "Red.")],
    ),
    Shape(
        "UltraFeedback",
        "grpo",
        ULTRAFEEDBACK,
        [[("user", "Name a color.")], [("user", "Name a color.")]],
        {"prompt": "prompt"},
    ),
    Shape(
        "HH-RLHF",
        "dpo",
        HH,
        [[*said("Hi", "Hello!"), *said("A color?", "Blue.")], said("1?", "One.\n\nIt is.")],
    ),
    Shape(
        "HH-RLHF",
        "sft",
        HH,
        [[*said("Hi", "Hello!"), *said("A color?", "Blue.")], said("1?", "One.\n\nIt is.")],
        {"messages": "chosen"},
    ),
    Shape(
        "ShareGPT",
        "sft",
        SHAREGPT,
        [[("system", "Be brief."), *said("Hi", "Hello!")], said("1?", "1.")],
    ),
    Shape(
        "Alpaca",
        "sft",
        ALPACA,
        [said("Name a color.", "Blue."), said("Translate.\n\nHallo", "Hello")],
        {"prompt": ["instruction", "input"], "completion": "output"},
    ),
    Shape(
        "Dolly",
        "sft",
        DOLLY,
        [said("Sum up.\n\nLong.", "Short.")],
        {"prompt": ["instruction", "context"], "completion": "response"},
    ),
    Shape(
        "Orca DPO pairs",
        "dpo",
        ORCA,
        [[("system", "Be kind."), *said("Color?", "Blue.")]],
        {"prompt": "question"},
    ),
    Shape("KTO", "sft", KTO, [said("Hi", "Hello!"), said("1?", "One.")]),
]

ARGILLA = [
    {
        "source": "x",
        "instruction": "Name a color.",
        "chosen": asked("Name a color.", "Blue."),
        "chosen-rating": 4.0,
        "rejected": asked("Name a color.", "Dog."),
        "rejected-rating": 1.0,
    }
]
SCORED = [
    {name: row[name] for name in ("chosen", "rejected", "score_chosen", "score_rejected")}
    for row in ULTRAFEEDBACK
]
AIME = [{"id": 60, "problem": "x?", "solution": "..", "answer": 204, "url": "u", "year": 2024}]
NULLS = {"name": None, "tool_calls": None, "tool_call_id": None}
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "Hello"}]},
]
HI = said("Hi", "Hello")
FORMS = [
    Shape("Argilla", "dpo", ARGILLA, [said("Name a color.", "Blue.")]),
    Shape("scored", "dpo", SCORED, [said("Name a color.", one) for one in ("Blue.", "Red.")]),
    Shape("AIME", "grpo", AIME, [[("user", "x?")]], {"prompt": "problem"}, (204,)),
    Shape("null", "sft", [{"prompt": "Hi", "completion": "Hello", "extra": None}], [HI]),
    Shape(
        "messages null", "sft", [{"prompt": "Hi", "completion": "Hello", "messages": None}], [HI]
    ),
    Shape("parts", "sft", [{"messages": PARTS}], [HI]),
    Shape(
        "nulls",
        "sft",
        [{"messages": [m | NULLS for m in asked("Hi", "Hello")], "tools": None}],
        [HI],
    ),
    Shape(
        "developer",
        "sft",
        [{"messages": [{"role": "developer", "content": "Be brief"}, *asked("Hi", "Hello")]}],
        [[("developer", "Be brief"), *HI]],
    ),
]
"""Other ways to write the same, which no data set has a name for here."""
MMLU = [{"question": "Which?", "choices": ["a", "b"], "answer": 1, "subject": "s"}]
