"""``nemo-like dashboard RUN...``: curves, phases, configurations and rollouts in a browser.

It listens on the loopback address only, and refuses requests without the token in their path.
Requests name runs by number, never by path.
"""

import argparse
import asyncio
import hmac
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from nemo_like.errors import UserError
from nemo_like.viewer.runs import RunFolder, differences, find_runs, phases
from nemo_like.viewer.trajectories import IDENTITY

_PAGE = Path(__file__).parent / "page"
_FILES = {"": "index.html"} | {
    one: one for one in ("app.js", "rollouts.js", "style.css", "uPlot.min.css", "uPlot.iife.min.js")
}
_MOST_ROWS = 200
_MOST_SIBLINGS = 64
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}

Query = Mapping[str, str]


class Dashboard:
    """The pages and the JSON API of the dashboard."""

    def __init__(self, runs: Sequence[RunFolder]) -> None:
        self.token = secrets.token_urlsafe(24)
        self._runs = runs
        self._lock = threading.Lock()
        self._answers: dict[str, Callable[[Query], Any]] = {
            "api/runs": self._about,
            "api/metrics": self._metrics,
            "api/trajectories": self._trajectories,
            "api/group": self._group,
            "api/log": lambda query: self._run(query).log(),
        }

    def app(self) -> web.Application:
        """The application, not yet bound to an address."""
        app = web.Application()
        app.router.add_get("/{token}/{rest:.*}", self._handle)
        return app

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        token, rest = request.match_info["token"], request.match_info["rest"]
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            raise web.HTTPForbidden(text="The address lacks its token; use the one printed.")
        if rest in _FILES:
            return web.FileResponse(_PAGE / _FILES[rest], headers=_HEADERS)
        if rest not in self._answers:
            raise web.HTTPNotFound
        try:
            found = await asyncio.to_thread(self.answer, rest, request.query)
        except (ValueError, LookupError) as error:
            raise web.HTTPBadRequest(text=f"{type(error).__name__}: {error}") from error
        return web.json_response(found, headers=_HEADERS)

    def answer(self, rest: str, query: Query) -> Any:
        """The answer to a request, as JSON."""
        with self._lock:
            try:
                return self._answers[rest](query)
            except FileNotFoundError:  # the run merged files meanwhile
                return self._answers[rest](query)

    def _run(self, query: Query) -> RunFolder:
        number = int(query["run"])
        if not 0 <= number < len(self._runs):
            raise LookupError(f"there is no run {number}")
        return self._runs[number]

    def _about(self, _: Query) -> Any:
        runs = [
            {
                "name": one.name,
                "state": ". ".join([one.state(), *one.outcome()]),
                "samples_per_step": one.samples_per_step(),
                "alarms": [f"step {alarm.step}: {alarm.text}" for alarm in one.alarms],
            }
            for one in self._runs
        ]
        return {"runs": runs, "differences": differences(self._runs)}

    def _metrics(self, query: Query) -> Any:
        run = self._run(query)
        records = run.records()
        begin = int(query["from"]) if query.get("life") == str(run.life) else 0
        new = [one | {"phases": phases(one)} for one in records[begin:]]
        return {"life": str(run.life), "from": begin, "records": new}

    def _trajectories(self, query: Query) -> Any:
        """A page of the filtered rows, and statistics of all of them."""
        kept = self._run(query).trajectories
        kept.refresh()
        found, complete, prompt = kept.chosen(query), True, ""
        by, text = query.get("sort", "-step"), query.get("text", "")
        if like := query.get("like"):  # find trajectories with the same prompt
            alike = kept.chosen(_exactly(dict(zip(IDENTITY, like.split("/"), strict=True))))
            prompt = kept.read(alike)[0]["prompt"]
        if text or prompt:
            newest = by.startswith("-")
            found, complete = kept.search(found, _MOST_ROWS, text=text, prompt=prompt, last=newest)
        values = kept.columns[by.lstrip("-")][found]
        found = found[np.argsort(-values if by.startswith("-") else values, kind="stable")]
        begin = int(query.get("offset", 0))
        rewards = kept.columns["reward"][found]
        scored = rewards[~np.isnan(rewards)]
        return {
            "rows": list(kept.rows(found[begin : begin + _MOST_ROWS])),
            "total": len(found),
            "complete": complete,
            "reward": float(scored.mean()) if len(scored) else None,
            "prompt": prompt,
            "words": kept.words,
        }

    def _group(self, query: Query) -> Any:
        """The trajectories of one prompt at one step in full, or the one with an ``index`` alone.

        Of many, those around the index, and how many are left out.
        """
        kept = self._run(query).trajectories
        kept.refresh()
        names = IDENTITY if "alone" in query else IDENTITY[:-1]
        chosen = kept.chosen(_exactly({name: query[name] for name in names}))
        chosen = chosen[np.argsort(kept.columns["index"][chosen])]
        at = np.searchsorted(kept.columns["index"][chosen], int(query.get("index") or 0))
        begin = max(0, min(at - _MOST_SIBLINGS // 2, len(chosen) - _MOST_SIBLINGS))
        shown = chosen[begin : begin + _MOST_SIBLINGS]
        return {"shown": kept.read(shown), "left_out": len(chosen) - len(shown)}


def _exactly(values: Query) -> Query:
    """Limits that select exactly these values."""
    numbers = {name: value for name, value in values.items() if name != "phase"}
    limits = {f"{name}_{end}": one for name, one in numbers.items() for end in ("min", "max")}
    return {"phase": values["phase"], **limits}


def run(arguments: Sequence[str]) -> None:
    """Serve until interrupted; raises UserError."""
    parser = argparse.ArgumentParser(
        prog="nemo-like dashboard", description="Show runs in a browser on this machine."
    )
    parser.add_argument("runs", nargs="+", help="run.dir of a run, or a folder of such folders")
    parser.add_argument("--port", type=int, default=0, help="of 127.0.0.1 (default: any free one)")
    options = parser.parse_args(arguments)
    dashboard = Dashboard(find_runs(options.runs))
    try:
        asyncio.run(_serve(dashboard, options.port))
    except KeyboardInterrupt:
        return
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--port={options.port} cannot be used: {error}; choose another port, or leave it out."
        ) from error


async def _serve(dashboard: Dashboard, port: int) -> None:
    runner = web.AppRunner(dashboard.app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    sys.stdout.write(f"http://127.0.0.1:{runner.addresses[0][1]}/{dashboard.token}/\n")
    sys.stdout.flush()
    await asyncio.Event().wait()
