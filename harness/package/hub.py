#!/usr/bin/env python3
"""A hub on loopback with one repository and one file, for the stopwatch test: hub.py FILE PORT_FILE.

It answers what `hearth pull loopback/tiny-GGUF` asks; crates/hub/tests has the hub that tests the protocol.
"""

import hashlib
import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "1" * 40
REPOSITORY = "loopback/tiny-GGUF"
FILE = Path(sys.argv[1])
CONTENT = FILE.read_bytes()
HASH = hashlib.sha256(CONTENT).hexdigest()
NAME = "tiny-Q8_0.gguf"


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path = self.path.split("?")[0]
        if path.startswith(f"/api/models/{REPOSITORY}/revision/"):
            self.answer({"sha": COMMIT})
        elif path == f"/api/models/{REPOSITORY}/tree/{COMMIT}":
            lfs = {"oid": HASH, "size": len(CONTENT)}
            self.answer([{"type": "file", "path": NAME, "size": len(CONTENT), "oid": "2" * 40, "lfs": lfs}])
        elif path == f"/{REPOSITORY}/resolve/{COMMIT}/{NAME}":
            self.content()
        else:
            self.answer({"error": "not found"}, 404)

    do_HEAD = do_GET

    def answer(self, value, status=200):
        self.send(status, json.dumps(value).encode(), {"content-type": "application/json"})

    def content(self):
        headers = {"etag": f'"{HASH}"', "accept-ranges": "bytes", "x-repo-commit": COMMIT}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        if not wanted:
            self.send(200, CONTENT, headers)
            return
        first, last = int(wanted[1]), int(wanted[2] or len(CONTENT) - 1)
        headers["content-range"] = f"bytes {first}-{last}/{len(CONTENT)}"
        self.send(206, CONTENT[first : last + 1], headers)

    def send(self, status, body, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
Path(sys.argv[2]).write_text(str(server.server_port))
server.serve_forever()
