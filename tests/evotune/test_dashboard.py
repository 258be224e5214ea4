"""The dashboard over a finished toy study: figures, refusals, and pages as a real browser shows them."""

import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import optuna
import pytest
from optuna.artifacts import get_all_artifact_meta

from evotune import dashboard
from evotune.dashboard import HOST, follow, serve, server, storage_of
from evotune.errors import StudyError
from evotune.history import History, load
from evotune.journal import FILE
from evotune.plots import figures
from evotune.study import StudyRun
from tests.evotune.toy import run_study, setup_of, study_file

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--virtual-time-budget=20000",
    "--window-size=1400,1600",
)


@dataclass(frozen=True)
class Site:
    url: str
    directory: Path
    history: History
    study: optuna.Study


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> StudyRun:
    return run_study(setup_of(study_file(tmp_path_factory.mktemp("dashboard"))))


@pytest.fixture(scope="module")
def site(loop: StudyRun) -> Iterator[Site]:
    directory = loop.setup.directory
    storage = storage_of(directory, "")
    with server(storage, directory, 0) as bound:
        thread = threading.Thread(target=bound.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        study = optuna.load_study(study_name="toy", storage=storage)
        yield Site(f"http://{HOST}:{bound.server_port}", directory, loop.history, study)
        bound.shutdown()
        thread.join()


def fetch(url: str, method: str = "GET", host: str | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(url, method=method, headers={"Host": host} if host else {})
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_the_study_page_has_the_figures(site: Site) -> None:
    status, body = fetch(f"{site.url}/api/studies/0")
    assert status == 200
    told = json.loads(body)
    assert {plot["id"] for plot in told["plotly_graph_objects"]} == {"front", "progress", "lineage"}
    assert told["objective_names"][0] == "speedup:long"


def test_figures_are_replaced_not_piled_up(site: Site) -> None:
    storage_of(site.directory, "")
    told = json.loads(fetch(f"{site.url}/api/studies/0")[1])
    assert len(told["plotly_graph_objects"]) == 3


def test_figures_follow_a_study_that_goes_on(
    loop: StudyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for every candidate, since each renewal stays in the storage's file; but for all at a pause."""
    lines = (loop.setup.directory / FILE).read_bytes().splitlines(keepends=True)
    ends = [number for number, line in enumerate(lines, 1) if b'"kind":"result"' in line]
    looked, renewed, over = threading.Event(), queue.Queue[int](), threading.Event()

    def looking(directory: Path) -> History:
        found = load(directory)
        looked.set()
        return found

    monkeypatch.setattr(dashboard, "load", looking)
    monkeypatch.setattr(dashboard, "save_figures", lambda history, storage: renewed.put(len(history.judged)))
    monkeypatch.setattr(dashboard, "_LOOK_S", 0.2)
    journal = tmp_path / FILE
    journal.write_bytes(b"".join(lines[: ends[15]]))
    thread = threading.Thread(target=follow, args=(tmp_path, loop.opened.book.study._storage, over))
    thread.start()
    assert looked.wait(20)
    with journal.open("ab", buffering=0) as file:
        file.write(b"".join(lines[ends[15] : ends[19]]))
        assert renewed.get(timeout=20) == 20
        file.write(b"".join(lines[ends[19] : ends[20]]))
        assert renewed.get(timeout=20) == 21
    over.set()
    thread.join()
    assert renewed.empty()


@pytest.mark.parametrize("method", ["DELETE", "POST", "PUT"])
def test_nothing_can_be_changed_by_a_click(site: Site, method: str) -> None:
    status, body = fetch(f"{site.url}/api/studies/0", method)
    assert status == 403
    assert "looking only" in json.loads(body)["reason"]
    assert fetch(f"{site.url}/api/studies/0")[0] == 200


def test_another_name_for_this_machine_is_refused(site: Site) -> None:
    assert fetch(f"{site.url}/api/studies", host="evil.example")[0] == 403
    port = site.url.rsplit(":", 1)[1]
    assert fetch(f"{site.url}/api/studies", host=f"localhost:{port}")[0] == 200


def test_a_busy_port_is_one_clear_line(site: Site) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StudyError, match=f"^port {port} is in use; give another with --port"):
            serve(site.directory, "", port, lambda address: None)


def test_a_port_that_is_none_is_refused(site: Site) -> None:
    with pytest.raises(StudyError, match="65535"):
        serve(site.directory, "", 70000, lambda address: None)


def test_a_directory_without_a_study_is_named(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="holds no study"):
        storage_of(tmp_path, "")


def test_figures_tell_the_study(loop: StudyRun) -> None:
    history, made = loop.history, figures(loop.history)
    lineage = made["lineage"].data[-1]
    assert len(lineage.x) == len(history.branches)
    assert list(lineage.text)[0].startswith("b00<br>")
    assert len(set(zip(lineage.x, lineage.y, strict=True))) == len(history.branches)  # no two on one spot
    front = made["front"].data[-1]
    assert 0 < len(front.x) < len(history.judged)
    for line in made["progress"].data:
        assert list(line.y) == sorted(line.y)
    assert all(len(figure.to_json()) < 40_000 for figure in made.values())


def test_a_model_cannot_write_markup_into_a_figure(loop: StudyRun) -> None:
    loud = replace(loop.history.branches[1], note='<a href="javascript:alert(1)">fast</a>')
    history = replace(loop.history, branches=(loop.history.branches[0], loud, *loop.history.branches[2:]))
    text = figures(history)["lineage"].to_json()
    assert "javascript" in text
    assert "\\u003ca href" not in text
    assert "<a href" not in text


@pytest.fixture(scope="module")
def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None and os.environ.get("CI"):
        pytest.fail("CI must look at the dashboard in a real browser, and chromium is not installed")
    if found is None:
        pytest.skip("needs chromium")
    return found


def browse(chromium: str, url: str, *more: str) -> str:
    """The page's document after its scripts ran for 20 s of virtual time."""
    command = [chromium, *FLAGS, *more, "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return done.stdout


def test_a_browser_shows_the_front_page(site: Site, chromium: str, tmp_path: Path) -> None:
    page = browse(chromium, f"{site.url}/dashboard/", f"--user-data-dir={tmp_path}")
    assert 'href="/dashboard/studies/0"' in page
    assert re.search(r">[^<]*\btoy\b[^<]*<", page)


def test_a_browser_shows_a_trials_note(site: Site, chromium: str, tmp_path: Path) -> None:
    entry = next(e for e in site.history.entries if e.passed and e.asked.branch != "b00")
    url = f"{site.url}/dashboard/studies/0/trials?numbers={entry.asked.trial}"
    page = browse(chromium, url, f"--user-data-dir={tmp_path}")
    assert f"Candidate {entry.asked.index}: passed" in page
    assert "median time, speedup" in page
    assert f"Difference to {site.history.added(entry.asked.branch).parent}" in page


def test_a_browser_opens_an_artifact(site: Site, chromium: str, tmp_path: Path) -> None:
    trial = site.study.trials[3]
    profile = f"--user-data-dir={tmp_path}"
    (meta,) = [
        m for m in get_all_artifact_meta(trial, storage=site.study._storage) if m.filename.endswith(".c")
    ]
    name = f"{trial.user_attrs['branch']}-{trial.user_attrs['candidate']:05}.c"
    assert meta.filename == name
    url = f"{site.url}/dashboard/studies/0/trials?numbers={trial.number}"
    page = browse(chromium, url, f"--user-data-dir={tmp_path}")
    assert name in page
    opened = browse(chromium, f"{site.url}/artifacts/0/{trial._trial_id}/{meta.artifact_id}", profile)
    assert "EVOLVE-BEGIN body" in opened


def test_the_command_says_where_and_ends_on_interrupt(site: Site) -> None:
    command = [sys.executable, "-m", "evotune", "dashboard", str(site.directory), "--port", "0"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        told = process.stdout.readline()
        address = told.split()[-1]
        assert told.startswith("The dashboard answers at http://127.0.0.1:")
        assert fetch(address)[0] == 200
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")
