"""Routes of the web page at `/`: static files."""

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from streamrag.serve.service import Service

FOLDER = Path(__file__).parent

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",  # the icon
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # a mistake cannot turn text into markup
    )
)

HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # cached, and revalidated by etag
}


def routes(service: Service) -> list[Route]:
    """Return the routes of the page, and of its files below /page/. It listens if there may be retrievals ahead."""
    listens = service.limits.max_retrievals_ahead > 0
    return [_route(path, listens) for path in sorted(FOLDER.iterdir()) if path.suffix in TYPES]


def _route(path: Path, listens: bool) -> Route:
    """Return the route of a file, `/` for index.html. Reads it once, here; a client with the same etag gets a 304."""
    content = path.read_bytes()
    if listens:
        content = content.replace(b'data-listens="no"', b'data-listens="yes"')
    etag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
    headers = {**HEADERS, "content-type": TYPES[path.suffix], "etag": etag}

    async def get(request: Request) -> Response:
        etags = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
        return Response(status_code=304, headers=headers) if etag in etags else Response(content, headers=headers)

    return Route("/" if path.name == "index.html" else f"/page/{path.name}", get)
