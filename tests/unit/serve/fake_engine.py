"""A process in place of an engine's server: it answers as the tests' files in its folder say.

python fake_engine.py FOLDER ARGUMENTS...

A file `status-NAME` in the folder holds the status of all paths that end with NAME.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

folder, *arguments = sys.argv[1:]
FOLDER = Path(folder)
SLEEPS = (FOLDER / "sleeps").exists()
MEMORY = {
    "admitting": not SLEEPS,
    "reason": "asleep" if SLEEPS else None,
    "is_sleeping": SLEEPS,
    "engines": [{"ranks": [{"device": "cpu:0"}]}],
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        answers = {
            "/v1/rl_memory/memory": json.dumps(MEMORY),
            "/health": "",
            "/metrics": '# TYPE x gauge\nx{a="b"} 1.0\n',
        }
        self._answer(self._status(200 if self.path in answers else 404), answers.get(self.path, ""))

    def do_POST(self) -> None:
        if self.path == "/exit":
            os._exit(3)
        self._answer(self._status(200), "{}")

    def _status(self, usual: int) -> int:
        file = FOLDER / f"status-{self.path.rpartition('/')[2]}"
        return int(file.read_text()) if file.exists() else usual

    def _answer(self, status: int, body: str) -> None:
        (FOLDER / "key").write_text(self.headers.get("Authorization", ""))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


(FOLDER / "arguments").write_text(json.dumps(arguments))
(FOLDER / "key-variable").write_text(os.environ.get("VLLM_API_KEY", ""))
(FOLDER / "stdin").write_text(str(Path("/proc/self/fd/0").readlink()))
if (FOLDER / "fails").exists():
    sys.exit(7)
# Like an engine's core, it outlives its parent if nobody ends it; it is in a session of its own.
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
(FOLDER / "child").write_text(str(child.pid))
port = int(arguments[arguments.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
