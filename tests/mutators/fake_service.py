"""An HTTP server on loopback that speaks OpenAI's protocol and misbehaves on request."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """One answer of the server.

    `hang_s` waits before it says anything; `drip` sends a byte every 0.1 s for ever; `cut` closes the
    connection in the middle of the body; `raw` is the body as it is.
    """

    text: str | None = ""
    status: int = 200
    finish: str = "stop"
    refusal: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    tokens: tuple[int, int] | None = (1000, 100)
    raw: bytes | None = None
    hang_s: float = 0.0
    drip: bool = False
    cut: bool = False
    choices: bool = True

    def body(self, echo: str) -> bytes:
        if self.raw is not None:
            return self.raw
        if self.status != 200:
            return json.dumps({"error": {"message": f"trouble {self.status} {echo}", "code": "x"}}).encode()
        message = {"role": "assistant", "content": self.text, "refusal": self.refusal}
        choice = {"index": 0, "finish_reason": self.finish, "message": message}
        body: dict[str, Any] = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
        body["choices"] = [choice] if self.choices else []
        if self.tokens:
            names = ("prompt_tokens", "completion_tokens", "total_tokens")
            body["usage"] = dict(zip(names, (*self.tokens, sum(self.tokens)), strict=True))
        return json.dumps(body).encode()


@dataclass
class Service:
    """What the server will say, in order (the last one again and again), and what it was asked."""

    url: str
    replies: list[Reply]
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@contextmanager
def serve(*replies: Reply) -> Iterator[Service]:
    """A server for the time of the context; every error it sends quotes the caller's Authorization header."""
    stop = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            service.requests.append(json.loads(self.rfile.read(length)))
            service.headers.append(dict(self.headers))
            reply = service.replies.pop(0) if len(service.replies) > 1 else service.replies[0]
            stop.wait(reply.hang_s)
            body = reply.body(self.headers["authorization"])
            self.send_response(reply.status)
            for name, value in {"content-type": "application/json", **reply.headers}.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.send(reply, body)

        def send(self, reply: Reply, body: bytes) -> None:
            try:
                self.wfile.write(body[: len(body) // 2] if reply.cut or reply.drip else body)
                while reply.drip and not stop.is_set():
                    self.wfile.write(b" ")
                    time.sleep(0.1)
            except OSError:
                return  # the client went away

        def log_message(self, *args: object) -> None:
            """Silence."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service = Service(f"http://127.0.0.1:{server.server_port}/v1", list(replies))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        stop.set()
        server.shutdown()
        server.server_close()
        thread.join()
