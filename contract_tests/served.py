"""For tests: a package index of this machine's own, and archives to put on it."""

from __future__ import annotations

import io
import re
import tarfile
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def wheel(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def sdist(name: str, files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path, content in files.items():
            member = tarfile.TarInfo(f"{name}/{path}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


class Served:
    """A simple index in memory; counts the bytes that it hands out.

    `files` are served by name, and listed under their project's; `failing` names answer with a status instead, and
    `slow` ones a byte at a time, with so many seconds between two.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.failing: dict[str, int] = {}
        self.slow: dict[str, float] = {}
        self.sent = self.answers = 0
        index = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                name = self.path.rstrip("/").rpartition("/")[2]
                if name in index.failing:
                    self._answer(index.failing[name], b"no")
                elif name in index.projects():
                    links = "".join(f'<a href="/files/{file}">{file}</a>' for file in index.files)
                    self._answer(200, f"<html><body>{links}</body></html>".encode(), "text/html")
                elif name in index.files:
                    self._range(index.files[name])
                else:
                    self._answer(404, b"")

            def _range(self, content: bytes) -> None:
                wanted = self.headers.get("Range", "").removeprefix("bytes=")
                if not wanted:
                    return self._answer(200, content)
                if not re.fullmatch(r"\d*-\d*", wanted):
                    return self._answer(416, b"")
                first, _, last = wanted.partition("-")
                start = int(first) if first else max(0, len(content) - int(last))
                end = min(int(last) if first and last else len(content) - 1, len(content) - 1)
                extra = {"Content-Range": f"bytes {start}-{end}/{len(content)}"}
                return self._answer(206, content[start : end + 1], **extra)

            def _answer(self, code: int, body: bytes, kind: str = "application/octet-stream", **extra: str) -> None:
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                for header, value in extra.items():
                    self.send_header(header, value)
                # Counted before it is sent: the client may look at the counts as soon as it has the answer.
                index.sent += len(body)
                index.answers += 1
                self.end_headers()
                pause = index.slow.get(self.path.rstrip("/").rpartition("/")[2])
                for at in range(len(body)) if pause else ():
                    try:
                        self.wfile.write(body[at : at + 1])
                    except OSError:  # the client has had enough
                        return
                    time.sleep(pause or 0)
                if not pause:
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128  # of the usual five, what comes at once is sent again a second later

        self.server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple/"

    def projects(self) -> set[str]:
        """The projects that have a page."""
        return {file.partition("-")[0].replace("_", "-") for file in self.files}

    def close(self) -> None:
        """Stop serving."""
        self.server.shutdown()
        self.server.server_close()
