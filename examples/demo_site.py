"""A site on loopback: the documentation, by `streamrag.demo.demo_folder`, with the latency of a real one.

Run as a program it serves a folder, and prints its port first: `python demo_site.py FOLDER`.
"""

import ctypes
import math
import random
import signal
import sys
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

MEDIAN_LATENCY_S, LATENCY_SPREAD, MAX_LATENCY_S = 0.35, 0.5, 1.0
"""Log-normal; each page keeps its own latency from request to request, so that paired runs are comparable."""

PR_SET_PDEATHSIG = 1
"""Source: prctl(2)."""


class SlowHandler(SimpleHTTPRequestHandler):
    """Serves files after each one's own latency."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        latency_s = random.Random(self.path).lognormvariate(math.log(MEDIAN_LATENCY_S), LATENCY_SPREAD)
        time.sleep(min(latency_s, MAX_LATENCY_S))
        super().do_GET()

    def end_headers(self) -> None:
        """Let crawlers that cache pages do so for as long as GitHub Pages does."""
        self.send_header("Cache-Control", "max-age=600")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the crawler's side is the interesting one."""


def main() -> None:
    ctypes.CDLL(None).prctl(
        PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0
    )  # a demo that is killed leaves nothing behind
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SlowHandler, directory=sys.argv[1]))
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
