"""A model hub on this machine, as far as fetching the files of a repository asks it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from trainer.inputs import hub_answers

COMMIT = "c0ffee" + "0" * 34


@contextmanager
def serving(
    monkeypatch: pytest.MonkeyPatch, cache: Path, repositories: Mapping[str, Mapping[str, bytes]]
) -> Iterator[None]:
    """Serve repositories ("datasets/owner/name", "models/owner/name") with their files while the context is open."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0].lstrip("/")
            if path.startswith("api/"):
                kind, owner, name, what = path.removeprefix("api/").split("/")[:4]
                files = repositories.get(f"{kind}/{owner}/{name}")
                if files is None:
                    self._answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})
                elif what == "tree":
                    tree = [
                        {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                        for file, content in files.items()
                    ]
                    self._answer(json.dumps(tree).encode())
                else:
                    siblings = [{"rfilename": file} for file in files]
                    document = {"id": f"{owner}/{name}", "sha": COMMIT, "siblings": siblings}
                    self._answer(json.dumps(document).encode())
                return
            name, _, file = path.partition("/resolve/")
            name = name if name.startswith("datasets/") else f"models/{name}"
            content = repositories[name][file.partition("/")[2]]
            etag = hashlib.sha1(content).hexdigest()
            self._answer(content, 200, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

        def _answer(self, content: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with monkeypatch.context() as patched:
        patched.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        patched.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
        patched.setenv("no_proxy", "127.0.0.1")
        hub_answers.cache_clear()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
            hub_answers.cache_clear()
