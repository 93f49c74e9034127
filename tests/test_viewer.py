"""``nemo-like show`` and ``dashboard``: what a run's folder holds, and nothing else."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import ClientSession, web
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from yarl import URL

from nemo_like.algorithms.grpo.config import GRPOConfig
from nemo_like.cli import main
from nemo_like.config.run import RunSection
from nemo_like.errors import UserError
from nemo_like.observe.phase_trace import PhaseTrace
from nemo_like.observe.trajectory_files import VOCABULARY, TrajectoryFiles
from nemo_like.run.folder import save_config
from nemo_like.viewer.dashboard import Dashboard
from nemo_like.viewer.report import _times, joined_trace
from nemo_like.viewer.runs import differences, find_runs, phases
from nemo_like.viewer.trajectories import Trajectories
from tests.not_here import cannot_test
from tests.test_trajectory_files import keep, one, opened, table

HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
LABEL = "<b id=injected>run"
POLICY, GENERATION = "policy-0", "generation-0"


def log(folder, step, **values):
    names = {"reward": "rollout/reward", "rollout_s": "time/rollout_s", "step_s": "time/step_s"}
    record = {"step": step, "time": 1000.0 + step}
    record |= {names.get(name, name): value for name, value in values.items()}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def made_run(folder, *, seed=0, num_steps=5):
    """A run's folder, by the code that writes one: groups of three, prompts that come again."""
    folder.mkdir(parents=True)
    save_config(folder, GRPOConfig(run=RunSection(seed=seed, dir=str(folder))), continued=False)
    (folder / "run.log").write_text(f"INFO begun\n2026 ERROR worker: {HOSTILE}\n")
    (folder / "metrics.jsonl").touch()
    files = TrajectoryFiles(folder / "trajectories", 0, 1e9)
    for step in range(1, num_steps + 1):
        log(folder, step, reward=step / 10, rollout_s=0.6, step_s=1.0)
        group = [
            one(10 * step, i, f"answer {step}.{i}", i / 2, prompt=f"prompt {step % 2}")
            for i in range(3)
        ]
        keep(files, table(step, *group, one(10 * step + 1, 0, HOSTILE, None, ids=(1,) * 9)))
    return folder


@pytest.fixture
def folder(tmp_path):
    return made_run(tmp_path / LABEL)


@contextmanager
def served(*folders):
    """A dashboard on a real port, and ``get(path, **query)`` of its status, headers and body."""
    dashboard = Dashboard(find_runs(map(str, folders)))
    with asyncio.Runner() as runner:
        server = web.AppRunner(dashboard.app())
        runner.run(server.setup())
        runner.run(web.TCPSite(server, "127.0.0.1", 0).start())
        root = f"http://127.0.0.1:{server.addresses[0][1]}"

        async def fetch(url):
            async with ClientSession() as session, session.get(url) as answer:
                return answer.status, answer.headers, await answer.text()

        def get(path, *, raw=False, **query):
            text = path if raw else f"/{dashboard.token}/{path}"
            url = URL(root + text, encoded=True).extend_query(query)
            return runner.run(fetch(url))

        get.token = dashboard.token
        get.json = lambda path, **query: json.loads(get(path, **query)[2])
        yield get
        runner.run(server.cleanup())


def test_nothing_is_answered_without_the_token(folder):
    with served(folder) as get:
        wrong = get.token[:-1] + ("A" if get.token[-1] != "A" else "B")
        for path in ("", "app.js", "api/runs", "api/metrics?run=0", "api/log?run=0"):
            assert get(path)[0] == 200, path
            assert get(f"/{wrong}/{path}", raw=True)[0] == 403
            assert get(f"/{path}", raw=True)[0] in (403, 404)
            assert get(f"/api/{path}?token={get.token}", raw=True)[0] in (403, 404)


def test_no_other_file_can_be_read(folder):
    secret = folder.parent / "secret.txt"
    secret.write_text("s3cret")
    with served(folder) as get:
        for way in ("../secret.txt", "..%2fsecret.txt", "%2e%2e/%2e%2e/secret.txt", str(secret)):
            for path in (way, f"page/{way}", f"api/log/{way}", "dashboard.py", "uPlot.LICENSE"):
                status, _, body = get(path)
                assert status in (403, 404), path
                assert "s3cret" not in body
        for run in ("../", str(secret), "-1", "1", "0/../..", ""):
            status, _, body = get("api/log", run=run)
            assert status == 400, run
            assert "s3cret" not in body


def test_it_listens_on_this_machine_only(folder):
    with dashboard_process(folder) as url:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", url)
        port = f":{URL(url).port:04X}"
        lines = Path("/proc/net/tcp").read_text().splitlines()
        listening = [line.split()[1] for line in lines if port in line and " 0A " in line]
        assert listening == [f"0100007F{port}"]


@contextmanager
def dashboard_process(*folders):
    """The command as users type it; its address."""
    code = "from nemo_like.cli import main; main()"
    command = [sys.executable, "-c", code, "dashboard", *map(str, folders)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def test_answers_are_data_that_a_browser_does_not_run(folder):
    with served(folder) as get:
        found = get.json("api/trajectories", run=0, failed=1, sort="step")
        assert [row["group"] for row in found["rows"]] == [11, 21, 31, 41, 51]
        _, headers, body = get("api/group", run=0, phase="train", step=1, group=11)
        assert headers["Content-Type"].startswith("application/json")
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert json.loads(body)["shown"][0]["text"] == HOSTILE
        page = get("")[1]
        assert page["Content-Security-Policy"].startswith("default-src 'self';")
        assert page["Referrer-Policy"] == "no-referrer"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"step_min": 4, "sort": "step"}, [(4, 0), (4, 1), (4, 2), (4, 0), (5, 0)]),
        ({"reward_min": 0.5, "reward_max": 0.6, "sort": "-step"}, [(5, 1), (4, 1), (3, 1)]),
        ({"num_tokens_min": 4, "sort": "step"}, [(1, 0), (2, 0), (3, 0)]),
        ({"end": "length"}, []),
        ({"end": "never"}, []),
        ({"text": "ANSWER 2."}, [(2, 0), (2, 1), (2, 2)]),
        ({"text": "no number", "sort": "-step"}, [(5, 0), (4, 0)]),
        ({"text": "answer", "reward_max": 0, "sort": "step"}, [(1, 0), (2, 0), (3, 0)]),
        ({"like": "train/2/20/1", "phase": "train", "sort": "step"}, [(2, 0), (2, 1), (2, 2)]),
    ],
)
def test_rollouts_are_found(folder, asked, expected):
    with served(folder) as get:
        rows = get.json("api/trajectories", run=0, **asked)["rows"]
        assert [(row["step"], row["index"]) for row in rows][: len(expected) or 1] == expected


def test_the_same_prompt_is_found_at_other_steps(folder):
    with served(folder) as get:
        found = get.json("api/trajectories", run=0, like="train/2/20/1", sort="step")
        assert found["prompt"] == "prompt 0"
        assert [row["step"] for row in found["rows"]] == [2, 2, 2, 4, 4, 4]


def test_a_wrong_question_is_refused_in_words(folder):
    with served(folder) as get:
        for query in ({"step_min": "x"}, {"sort": "nothing"}, {"like": "train/9/9/9"}, {"like": 1}):
            assert get("api/trajectories", run=0, **query)[0] == 400, query
        assert get("api/trajectories")[0] == 400


def test_siblings_come_whole(folder):
    with served(folder) as get:
        found = get.json("api/group", run=0, phase="train", step=2, group=20, index=1)
        assert [each["index"] for each in found["shown"]] == [0, 1, 2]
        assert found["left_out"] == 0
        found = get.json("api/group", run=0, phase="train", step=2, group=20, index=1, alone=1)
        (alone,) = found["shown"]
        assert alone["rows"][0]["ids"] == [7, 8, 1, 2, 3]
        assert alone["rows"][0]["mask"] == [0, 0, 1, 1, 1]
        assert alone["rows"][0]["versions"] == [-1, -1, 0, 0, 0]
        assert alone["messages"] == [{"role": "user", "content": "prompt 0"}]


def test_bytes_that_make_no_character_are_shown_as_such(tmp_path):
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"b": 256, "<unk>": 257}
    tokenizer = Tokenizer(BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(tmp_path / VOCABULARY))
    kept = Trajectories(tmp_path)
    assert kept._pieces([0x41, 0xFF, 256, 256]) == ["A", "\N{REPLACEMENT CHARACTER}", "b", "b"]
    assert "".join(kept._pieces([0xE2, 0x82, 0xAC, 256])) == "\N{EURO SIGN}b"


def test_of_many_siblings_the_one_that_was_asked_for_is_shown(folder):
    group = [one(70, i, f"answer {i}", prompt="many") for i in reversed(range(100))]
    keep(TrajectoryFiles(folder / "trajectories", 0, 1e9), table(7, *group))
    with served(folder) as get:
        for index, first in ((0, 0), (70, 36), (99, 36)):
            found = get.json("api/group", run=0, phase="train", step=7, group=70, index=index)
            shown = [each["index"] for each in found["shown"]]
            assert sorted(shown) == [*range(first, first + 64)]
            assert found["left_out"] == 36


def test_a_search_that_finds_many_says_that_there_are_more(folder):
    rows = [one(100 + i, 0, "needle", i // 150, prompt="many") for i in range(300)]
    keep(TrajectoryFiles(folder / "trajectories", 0, 1e9), table(8, *rows))
    with served(folder) as get:
        for sort in ("-step", "step"):
            found = get.json("api/trajectories", run=0, text="needle", sort=sort)
            assert (found["total"], found["complete"]) == (200, False)
            groups = sorted(row["group"] for row in found["rows"])
            begin = 200 if sort == "-step" else 100
            assert groups == [*range(begin, begin + 200)]
            assert found["reward"] == pytest.approx(150 / 200 if sort == "-step" else 50 / 200)
        found = get.json("api/trajectories", run=0, text="needle", step_min=8, reward_max=0)
        assert (found["total"], found["complete"]) == (150, True)


def test_a_run_under_way_is_followed(folder):
    with served(folder) as get:
        first = get.json("api/metrics", run=0)
        assert len(first["records"]) == 5
        assert get.json("api/trajectories", run=0)["total"] == 20
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 6, "train/loss": NaN}\n{"step": 7, "tr')
        keep(TrajectoryFiles(folder / "trajectories", 0, 1e9), table(6, one(60)))
        new = get.json("api/metrics", run=0, **{"from": 5, "life": first["life"]})
        assert [(one["step"], one["train/loss"]) for one in new["records"]] == [(6, None)]
        assert get.json("api/trajectories", run=0)["total"] == 21
        assert get.json("api/runs")["runs"][0]["state"].startswith("step 6 of ")


def test_a_resumed_run_is_read_from_its_beginning(folder):
    with served(folder) as get:
        life = get.json("api/metrics", run=0)["life"]
        aside = folder / "aside"
        aside.write_text('{"step": 1}\n{"step": 2}\n')
        aside.replace(folder / "metrics.jsonl")
        again = get.json("api/metrics", run=0, **{"from": 5, "life": life})
        assert (again["from"], [one["step"] for one in again["records"]]) == (0, [1, 2])


def test_phases_of_a_step_add_up_to_its_time():
    times = {"step": 1.0, "rollout": 0.6, "train": 0.25, "waiting": 0.8, "validation": 2.0}
    found = phases({f"time/{name}_s": value for name, value in times.items()} | {"step": 1})
    assert found.pop("other") == pytest.approx(0.15)
    assert found == {"rollout": 0.6, "train": 0.25, "validation": 2.0}


def test_what_two_runs_were_told_differently(tmp_path):
    runs = find_runs([str(made_run(tmp_path / name, seed=i)) for i, name in enumerate("ab")])
    assert differences(runs) == {"run.seed": [0, 1]}
    assert runs[0].samples_per_step() == (
        GRPOConfig().loop.num_prompts_per_step * GRPOConfig().loop.num_generations_per_prompt
    )
    assert [run.name for run in find_runs([str(tmp_path)])] == ["a", "b"]


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(UserError, match=r"holds no run, as it has no metrics\.jsonl; give the"):
        find_runs([str(tmp_path)])


def test_a_copied_run_without_its_trajectories_is_shown(folder, capsys):
    shutil.rmtree(folder / "trajectories")
    main(["show", str(folder)])
    assert "rollout/reward" in capsys.readouterr().out
    with served(folder) as get:
        assert get.json("api/trajectories", run=0)["total"] == 0


def test_names_of_metrics_are_no_markup(folder, capsys):
    log(folder, 6, **{"rollout/a[/b]": 1.0, "rollout/[bold]x": 2.0})
    main(["show", str(folder)])
    said = capsys.readouterr().out
    assert "rollout/a[/b]" in said
    assert "rollout/[bold]x" in said


def test_phases_that_the_first_run_lacks_are_in_the_table_of_two(tmp_path):
    runs = [made_run(tmp_path / name) for name in "ab"]
    log(runs[1], 6, step_s=5.0, **{"time/validation_s": 4.0})
    report = "\n".join(map(str, _times(find_runs(map(str, runs)))))
    assert "'validation', '0.000', '0.667', '0%'" in report


def test_show_prints_where_a_run_stands(folder, capsys):
    main(["show", str(folder), "--samples=1"])
    said = re.sub(" +\n", "\n", capsys.readouterr().out)
    assert said.startswith(f"{LABEL}: step 5 of ")
    assert re.search(r"rollout/reward +0\.5 +5\n", said)
    assert re.search(r"rollout +0\.600 +60% ", said)
    assert "step 5, train, group 50: reward 0.000, final, 3 tokens\n" in said
    assert "answer 5.0" in said
    assert f"ERROR worker: {HOSTILE}" in said
    main(["show", str(folder), "--step=2"])
    assert "answer 2.0" in capsys.readouterr().out


def test_a_terminal_obeys_nothing_that_a_model_wrote(folder, capsys):
    escape = one(60, 0, "\x1b]0;owned\x07\x9b2J done\n")
    keep(TrajectoryFiles(folder / "trajectories", 0, 1e9), table(6, escape))
    main(["show", str(folder)])
    said = capsys.readouterr().out
    assert r"\x1b]0;owned\x07\x9b2J done" in said
    assert not {*said} & {"\x1b", "\x07", "\x9b"}


def test_two_who_follow_a_growing_run_get_each_record_once(tmp_path):
    """Two pages ask at once; a line that is half written is left until it is whole."""
    folder = made_run(tmp_path / "run", num_steps=0)
    dashboard = Dashboard(find_runs([str(folder)]))

    def follow(_):
        found, life = [], ""
        while len(found) < 49:
            query = {"run": "0", "from": str(len(found)), "life": life}
            answer = dashboard.answer("api/metrics", query)
            found, life = found[: answer["from"]] + answer["records"], answer["life"]
        return [one["step"] for one in found]

    with ThreadPoolExecutor(2) as pool, (folder / "metrics.jsonl").open("a") as file:
        pages = pool.map(follow, range(2))
        for step in range(49):
            line = json.dumps({"step": step, "time": 0.0}) + "\n"
            for part in (line[:9], line[9:]):
                file.write(part)
                file.flush()
                dashboard.answer("api/metrics", {"run": "0", "from": "0"})
        assert [*pages] == [[*range(49)]] * 2


def test_a_report_names_the_bottleneck_and_what_a_change_saves(tmp_path, capsys):
    """Validations after every step take 3 s of 5; every 14th one is 10 % of the time."""
    first, second = made_run(tmp_path / LABEL, num_steps=0), made_run(tmp_path / "b", num_steps=0)
    for folder, validation in ((first, 3.0), (second, 0.3)):
        config = (folder / "config.yaml").read_text()
        every = "every_steps: 1" if folder is first else "every_steps: 9"
        config = re.sub(r"(?<=validation:\n  )every_steps: \d+", every, config)
        (folder / "config.yaml").write_text(config)
        for step in range(1, 41):
            times = {"time/rollout_s": 1.5, "time/train_s": 0.5, "time/validation_s": validation}
            log(folder, step, step_s=2.0, reward=step / 40, **times, **{"time/driver_s": 0.6})
    (first / "summary.json").write_text('{"wall_s": 300.0}')
    main(["report", str(first), str(second), f"--out={tmp_path}"])
    assert capsys.readouterr().out == f"{tmp_path}/report.html\n{tmp_path}/report.md\n"
    text = " ".join((tmp_path / "report.md").read_text().split())
    assert "finished, model embedded, 300 s in total, 200 s of it in steps" in text
    assert "Bottleneck: validation takes 3 of 5 s of a step (60%)." in text
    saving = "validation.every\\_steps=14 (now 1) saves about 2.8 s of 5 s a step, 56%."
    assert f"validation takes 60% of the time; {saving}" in text
    assert "Bottleneck: rollout takes 1.5 of 2.3 s of a step (65%)." in text
    assert "grpo.num\\_prompts\\_per\\_step=32 (now 16) halves that per sample" in text
    assert "| validation.every\\_steps | 1 | 9 |" in text
    assert "| rollout/reward | b | 0.1375 | 0.8875 | 0.025 | 1 |" in text
    page = (tmp_path / "report.html").read_text()
    assert LABEL not in page
    assert "&lt;b id=injected&gt;run" in page
    assert '<path d="M0.0 26.0 L4.1 25.4 L' in page


def test_a_report_of_a_run_without_steps_says_so(tmp_path):
    main(["report", str(made_run(tmp_path / "a", num_steps=0))])
    assert "- Nothing stands out." in (tmp_path / "a" / "report.md").read_text()


def test_alarms_are_shown_with_the_step_that_raised_them(tmp_path, capsys):
    folder = made_run(tmp_path / "run", num_steps=9)
    with served(folder) as get:
        for step in range(10, 25):
            log(folder, step, step_s=1.0, **{"rollout/truncated_share": 1.0})
            get("api/metrics", run=0)
            assert len(get.json("api/runs")["runs"][0]["alarms"]) == (step >= 19)
        (alarm,) = get.json("api/runs")["runs"][0]["alarms"]
    assert alarm == "step 19: 100% of completions are cut off; set generation.max_new_tokens=128"
    main(["show", str(folder)])
    assert f"Alarm at {alarm}" in capsys.readouterr().out


def test_a_real_run_is_read_back(straight):
    """The tokens of a run of six steps, as the policy trained on them."""
    found = opened(straight / "trajectories")
    steps = found.columns["step"][found.chosen({"phase": "train"})]
    assert steps.tolist() == [step for step in range(1, 7) for _ in range(16)]
    validated = found.columns["step"][found.chosen({"phase": "validation"})]
    assert validated.tolist() == [step for step in (0, 2, 4, 6) for _ in range(8)]
    excerpt = [json.loads(line) for line in (straight / "trajectories.jsonl").open()]
    group = found.read(found.chosen({"phase": "train", "step_max": "1", "index_max": "0"}))
    assert [each["text"] for each in group] == [each["completion"] for each in excerpt[:4]]
    assert [each["messages"] for each in group] == [each["messages"] for each in excerpt[:4]]
    assert {each["error"] for each in excerpt} == {None}
    records = [json.loads(line) for line in (straight / "metrics.jsonl").open()]
    assert found.columns["reward"][found.chosen({"step_min": "6", "phase": "train"})].mean() == (
        pytest.approx(records[6]["rollout/reward"])
    )
    for each, said in zip(group, excerpt, strict=False):
        row = each["rows"][0]
        assert sum(row["mask"]) == said["num_tokens"]
        assert {*row["versions"]} == {-1, said["weight_version"]}
        given = [value for value, bit in zip(row["logprobs"], row["mask"], strict=True) if not bit]
        assert {*given} == {0.0}
        assert sum(row["logprobs"]) < 0
        assert said["completion"] in "".join(row["texts"])
        assert "<|im_start|>" in row["texts"]
    for phase, behind in (("train", 1), ("validation", 0)):  # one optimizer step a step
        chosen = found.chosen({"phase": phase})
        ages = found.columns["step"][chosen] - found.columns["weight_version"][chosen]
        assert {*ages.tolist()} == {behind}


def test_a_trace_has_the_phases_of_every_process(straight, tmp_path, capsys):
    main(["report", str(straight), f"--out={tmp_path}", f"--trace={tmp_path / 'trace.json'}"])
    assert capsys.readouterr().out.endswith("trace.json\n")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    host = os.uname().nodename
    names = {one["pid"]: one["args"]["name"] for one in events if one["ph"] == "M"}
    assert [*names.values()] == [f"{name} on {host}" for name in ("driver", GENERATION, POLICY)]
    phases = {(names[e["pid"]].partition(" ")[0], e["name"]) for e in events if e["ph"] == "X"}
    assert phases >= {
        *(("driver", name) for name in ("step", "rollout", "refit", "train", "validation")),
        *((GENERATION, "rollout"), (POLICY, "train"), (POLICY, "send_weights")),
    }

    def span(process, name):
        found = [e for e in events if names[e["pid"]].startswith(process) and e["name"] == name]
        return [(one["ts"], one["ts"] + one["dur"]) for one in found]

    steps, trained = span("driver", "step"), span(POLICY, "train")
    assert len(steps) == len(trained) == 6
    for (begin, end), (first, last) in zip(steps, trained, strict=True):
        assert begin < first < last < end
    assert json.loads((straight / "nodes.json").read_text()) == {POLICY: host, GENERATION: host}


def test_a_trace_of_a_run_without_phases_is_refused(folder, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["report", str(folder), f"--trace={tmp_path / 'trace.json'}"])
    assert "has no *.trace.jsonl; copy them too." in capsys.readouterr().err


def test_calls_side_by_side_are_on_lanes_of_their_own(tmp_path):
    trace = PhaseTrace(tmp_path, "a")
    with trace.phase("first"):
        with trace.phase("second"):
            pass
        with trace.phase("third"):
            pass
    trace.close()
    (tmp_path / "a.trace.jsonl").open("a").write('{"cut')
    found = [(one.get("tid"), one["name"]) for one in joined_trace(tmp_path)["traceEvents"]]
    assert found == [(None, "process_name"), (1, "second"), (1, "third"), (0, "first")]


# In a browser


@pytest.fixture
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        cannot_test("the package playwright is not installed", "NEMO_LIKE_REQUIRE_BROWSER")
    if (path := shutil.which("chromium")) is None:
        cannot_test("chromium is not installed", "NEMO_LIKE_REQUIRE_BROWSER")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


def test_a_browser_shows_runs_and_runs_nothing_of_them(browser, tmp_path):
    from playwright.sync_api import expect

    first, second = made_run(tmp_path / LABEL), made_run(tmp_path / "second", seed=1)
    with dashboard_process(first, second) as url:
        page = browser.new_page(viewport={"width": 1200, "height": 760})
        faults = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda one: one.type == "error" and faults.append(one.text))

        def at(view, selector):
            page.goto(f"{url}#{view}")
            page.wait_for_selector(selector)
            return page.locator(selector)

        charts = at("curves", "[data-metric] canvas")
        assert charts.count() == 2  # the reward, and the time of a step
        assert at("phases?run=0", ".lane").count() == 5
        assert at("config", "main td").all_inner_texts() == ["run.seed", "0", "1"]
        assert HOSTILE in at("log?run=0", "main pre").inner_text()
        assert at("rollouts?run=0&failed=1", "tr.link").count() == 5
        page.fill("input[name=text]", "answer 3")
        page.press("input[name=text]", "Enter")
        expect(page.locator("tr.link")).to_have_count(0)
        page.click("input[name=failed]")
        expect(page.locator("tr.link")).to_have_count(3)
        assert page.url.endswith("#rollouts?run=0&text=answer+3&sort=-step")
        page.locator("tr.link").first.click()
        page.wait_for_selector(".trajectory")
        assert page.locator(".trajectory").count() == 3
        assert page.locator(".trajectory.here").count() == 1
        shades = "[...document.querySelectorAll('.tokens span')].map((one) => one.style.background)"
        given, trained = "rgb(229, 231, 235)", "rgb(187, 247, 208)"
        assert trained not in page.evaluate(shades)
        page.select_option("select[name=color]", "mask")
        expect(page.locator(".tokens span").nth(2)).to_have_css("background-color", trained)
        assert page.evaluate(shades)[:5] == [given] * 2 + [trained] * 3
        failed = at("group?run=0&phase=train&step=1&group=11&index=0", ".trajectory .failed")
        assert failed.inner_text() == "no number"

        at("curves", "[data-metric] canvas")
        for step in range(6, 16):
            log(first, step, reward=1.0, step_s=1.0, **{"rollout/truncated_share": 1.0})
        expect(page.locator("#runs")).to_contain_text("step 15 of")
        expect(page.locator("#runs .alarm")).to_contain_text("generation.max_new_tokens=128")
        assert page.evaluate("window.hacked") is None
        assert page.locator("#injected, main img, main script").count() == 0
        assert faults == []
        page.close()
