"""optuna-dashboard over a study, on loopback, for looking only.

The dashboard has no passwords and live buttons that delete trials, and a study whose trials were deleted
cannot be resumed. So whatever is not a GET is refused here, and so is a request that names another host: a
page elsewhere could reach a loopback server under a name of its own.
"""

import errno
import json
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import optuna
from optuna.artifacts import FileSystemArtifactStore
from optuna.storages import BaseStorage
from optuna_dashboard import save_plotly_graph_object, wsgi

from evotune.errors import StudyError
from evotune.history import History, load
from evotune.journal import FILE, Lock
from evotune.plots import figures
from evotune.trials import ARTIFACTS, JOURNAL_FILE, mend, quiet, storage_at

HOST = "127.0.0.1"
_LOOK_S = 5.0
# A figure is appended to the storage's file whenever it is renewed, so that it is seldom: a study of 1,000
# candidates renews its three some 40 times.
_GROWTH = 1.125


def storage_of(directory: Path, url: str) -> BaseStorage:
    """The study's storage, its figures brought up to date. Raises StudyError when nothing is there.

    Works beside a run of the study: only an idle study's files are mended.
    """
    quiet()
    if not url and not (directory / JOURNAL_FILE).exists():
        raise StudyError(f"{directory} holds no study; `python -m evotune run` makes one")
    try:
        with Lock(directory):
            if not url:
                mend(directory)
    except StudyError:  # a run has it, or nothing can be written: then nothing needs mending or nothing can
        pass
    storage = storage_at(directory, url)
    if (directory / FILE).exists():
        save_figures(load(directory), storage)
    return storage


def save_figures(history: History, storage: BaseStorage) -> None:
    """Put the study's figures on its page; earlier ones are replaced. Without room to write, as they were."""
    name = history.begun.config["study"]["name"]
    study = optuna.load_study(study_name=name, storage=storage)
    try:
        for figure_id, figure in figures(history).items():
            save_plotly_graph_object(study, figure, graph_object_id=figure_id)
    except OSError:
        return


def follow(directory: Path, storage: BaseStorage, over: threading.Event) -> None:
    """Renew the figures of a study that goes on, until `over`: when an eighth more candidates are judged than
    they show, and when nothing has been recorded for a while."""
    journal, size, history = directory / FILE, 0, None
    shown = len(load(directory).judged) if journal.exists() else 0
    while not over.wait(_LOOK_S):
        try:
            size, before = journal.stat().st_size, size
            if size != before:
                history = load(directory)
        except (OSError, StudyError):  # between a file and its first records, say
            continue
        judged = len(history.judged) if history else 0
        if history and judged > shown and (judged >= _GROWTH * shown or size == before):
            save_figures(history, storage)
            shown = judged


@contextmanager
def server(storage: BaseStorage, directory: Path, port: int) -> Iterator[WSGIServer]:
    """The bound server, for the caller to run; port 0 takes a free one. Raises StudyError for a busy port."""
    app = wsgi(storage, FileSystemArtifactStore(str(directory / ARTIFACTS)))
    try:
        bound = make_server(HOST, port, _looking_only(app), _Server, _Silent)
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise StudyError(
            f"port {port} {reason}; give another with --port, or --port 0 for a free one"
        ) from error
    except OverflowError as error:
        raise StudyError(f"port {port} is no port: give 0 to 65535") from error
    with bound:
        yield bound


def serve(directory: Path, url: str, port: int, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C. Raises StudyError. `say` is told the address once it answers."""
    storage, over = storage_of(directory, url), threading.Event()
    with server(storage, directory, port) as bound:
        warnings.filterwarnings("ignore", module="optuna")  # its importance evaluator's, per poll of the page
        # Not in the main thread: shutdown() waits for serve_forever(), which Ctrl-C would have left.
        thread = threading.Thread(target=bound.serve_forever, daemon=True)
        thread.start()
        following = threading.Thread(target=follow, args=(directory, storage, over), daemon=True)
        following.start()
        try:
            say(f"http://{HOST}:{bound.server_port}/dashboard/")
            thread.join()
        except KeyboardInterrupt:
            bound.shutdown()
            over.set()
            following.join()  # no figure is cut short


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes a connection early is no news."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """A line per poll of the page would bury everything else."""


def _looking_only(app: WSGIApplication) -> WSGIApplication:
    def checked(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        host = str(environ.get("HTTP_HOST", "")).rsplit(":", 1)[0]
        if host not in (HOST, "localhost"):
            return _refused(start_response, f"this server is {HOST}, not {host}")
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _refused(
                start_response, "evotune's dashboard is for looking only: the journal is the record"
            )
        return app(environ, start_response)

    return checked


def _refused(start_response: StartResponse, reason: str) -> Iterable[bytes]:
    body = json.dumps({"reason": reason}).encode()
    headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    start_response("403 Forbidden", headers)
    return [body]
