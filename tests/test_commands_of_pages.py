"""Commands on pages: cheap ones run, runs are composed and checked up to where Ray would start.

A fence may have a title: what it needs that tests do not have. Its commands are composed all the
same. With ``--full`` the pages of the first run and of agents are run from top to bottom.
"""

import ast
import functools
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from nemo_like.cli import COMMANDS, main
from nemo_like.compose import registry
from nemo_like.compose.files import SHIPPED
from nemo_like.compose.main import _checked, _composed, _parse
from nemo_like.launch.command import ConfigParser
from nemo_like.models.resolve import resolve_model
from tests.small_runs import ROOT, small_config

PAGES = [
    *("README.md", "CONTRIBUTING.md"),
    *sorted(one.relative_to(ROOT).as_posix() for one in (ROOT / "docs").rglob("*.md")),
    *sorted(one.relative_to(ROOT).as_posix() for one in (ROOT / "examples").glob("*/README.md")),
]
_FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]*)\")?\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^    ((?:nemo-like|python) (?:.*\\\n)*.*)", re.MULTILINE)
_ASSIGNS = re.compile(r"[A-Z_]+=")
OF_THE_SYSTEM = {"source", "export", "ls", "tail", "tensorboard", ".venv/bin/pre-commit"}
"""What blocks without a title may use besides."""
STANDS_FOR = {
    "TEACHER": "policy/folder",
    "/path/to/hf_folder": "policy/folder",
    "/path/to/agent.py": "agent.py",
}
_ELLIPSES = {"...", "…"}


@dataclass(frozen=True)
class Block:
    """One fence: its language, what it needs, and its text."""

    kind: str
    title: str
    text: str

    def commands(self):
        """Words of each command, without variables before it."""
        for line in self.text.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
            lexer.whitespace_split, lexer.commenters = True, "#"
            words: list[str] = []
            for word in [*lexer, ";"]:
                if set(word) <= set(";&|<>"):
                    while words and _ASSIGNS.match(words[0]):
                        words.pop(0)
                    if words:
                        yield [STANDS_FOR.get(one, one) for one in words]
                    words = []
                    if word in "<>":
                        break
                else:
                    key, equals, value = word.partition("=")
                    words.append(f"{key}{equals}{STANDS_FOR.get(value, value)}")


def blocks(page):
    text = (ROOT / page).read_text()
    yield from (Block(*found) for found in _FENCE.findall(text))
    yield from (Block("bash", "", one) for one in _INDENTED.findall(_FENCE.sub("", text)))


@functools.cache
def _config_of_a_run():
    return yaml.safe_dump(small_config("elsewhere", small=()).model_dump(mode="json"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a reader's shell would be: a clone with what earlier commands of the page made."""
    for name in ("benchmarks", "examples", "configs", "slurm", "nemo_like"):
        (tmp_path / name).symlink_to(ROOT / name)
    model = resolve_model("embedded")
    for made in ("policy/folder", "runs/first/final", "runs/gsm8k/final"):
        (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / made).symlink_to(model)
    for run in ("first", "mine"):
        (tmp_path / "runs" / run).mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / run / "config.yaml").write_text(_config_of_a_run())
    wrote = '{"step": 1, "prompt": "1 + 1 =", "completion": "2", "messages": [], "reward": 1.0}\n'
    (tmp_path / "runs/first/trajectories.jsonl").write_text(wrote)
    (tmp_path / "agent.py").write_text("print(1)")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_can_be_typed(page, folder, capsys):
    for block in blocks(page):
        if block.title.endswith((".yaml", ".py")):
            (folder / block.title).write_text(block.text)
        if block.kind == "python":
            ast.parse(block.text)
        if block.kind == "bash":
            for words in block.commands():
                if not _ELLIPSES & set(words):
                    _type(words, block)


def _type(words, block):
    match words:
        case ["nemo-like", name, *rest] if name in registry.names():
            _compose(name, rest)
        case ["python", script, *rest] if Path(script).name.startswith("run_"):
            _compose(Path(script).stem.removeprefix("run_"), rest)
        case ["python", script, *rest] if script.endswith("raft.py"):
            _compose(f"{script}:ALGORITHM", rest)
        case ["nemo-like", "slurm", "submit", *rest]:
            main(["slurm", "render", *rest])
        case ["nemo-like", "slurm", "status" | "logs" | "cancel", *_]:
            assert block.title, words
        case ["nemo-like", "show" | "dashboard" | "report" as command, *_]:
            assert f'"{command}"' in (ROOT / "tests" / "test_viewer.py").read_text()
        case ["nemo-like", command, *rest] if command in COMMANDS or command[:2] == "--":
            if block.title and command in ("plan", "data", "try-reward"):
                _load(command, rest)
            else:
                main([command, *rest])
        case ["make", target]:
            assert f"\n{target}:" in (ROOT / "Makefile").read_text()
        case ["python", script, *_]:
            assert Path(script).is_file(), words
        case [program, *_]:
            assert block.title or program in OF_THE_SYSTEM, f"{words} needs a title, or a test"


def _compose(name, words):
    algorithm = registry.find(name)
    if "--help" in words:
        main([name, *words])
    else:
        _checked(_composed(algorithm, SHIPPED, _parse(words, algorithm, SHIPPED)))


def _load(command, words):
    parser = ConfigParser(command, "", "")
    parser.add_argument("--rows")
    options = parser.parse_intermixed_args(words)
    if command == "try-reward":
        reward, data, *options.words = options.words
        options.words += [f"environment.reward={reward}", f"data.train={data}"]
    parser.load(options)


@pytest.mark.full
@pytest.mark.parametrize("page", ["docs/start/first-run.md", "docs/start/agent.md"])
def test_a_page_runs_from_top_to_bottom(page, tmp_path):
    for name in ("examples", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    for one in blocks(page):
        if one.title.endswith(".py"):
            (tmp_path / one.title).write_text(one.text)
    text = "\n".join(one.text for one in blocks(page) if one.kind == "bash" and not one.title)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", text], cwd=tmp_path, env=env)
    assert done.returncode == 0


def test_the_messages_of_the_page_of_remedies_are_those_of_the_code():
    """Values are … in both, and so is what a log fills in."""
    said = {
        text
        for path in (ROOT / "nemo_like").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (text := _message(node)) is not None
    }
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    listed = re.findall(r"^\| `([^`]+)` \|", page, flags=re.MULTILINE)
    assert len(listed) > 30
    for message in listed:
        assert any(message in one for one in said), message


def _message(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(\.\d)?[sdg]", "…", node.value)
    if isinstance(node, ast.JoinedStr):
        parts = (one.value if isinstance(one, ast.Constant) else "…" for one in node.values)
        return "".join(map(str, parts))
    return None
