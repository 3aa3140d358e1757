"""The playground: a page at `/` that talks to this server, and the files it is made of."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePosixPath
from types import MappingProxyType

from fastapi import APIRouter, HTTPException, Request, Response

_CONTENT_TYPES = MappingProxyType(
    {
        ".html": "text/html; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
    }
)
# Nothing from elsewhere, nothing inline, no frame around the page, and no string that becomes markup or code: a model's
# output cannot become more than text.
_HEADERS = MappingProxyType(
    {
        "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        # The files have fixed names: a browser asks each time (304 where nothing changed), so that a newer server never
        # meets an older page.
        "Cache-Control": "no-cache",
    }
)


@dataclass(frozen=True)
class PageFile:
    """A file of the page: its bytes, its content type, and the entity tag that follows from the bytes."""

    content: bytes
    content_type: str
    etag: str


def page_files() -> Mapping[str, PageFile]:
    """The files of the page by name, read from the package. Names are flat: no folder, so no path to climb."""
    found = {}
    for entry in files("foredraft.server").joinpath("playground").iterdir():
        if content_type := _CONTENT_TYPES.get(PurePosixPath(entry.name).suffix):
            content = entry.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[entry.name] = PageFile(content, content_type, etag)
    return found


def playground_router() -> APIRouter:
    """Routes for `/` and `/playground/{name}`, outside the OpenAPI document. An unknown name is a 404.

    The page uses relative addresses only, so it also works behind a proxy that adds a prefix and a slash after it.
    """
    router = APIRouter(include_in_schema=False)
    known = page_files()

    def answer(request: Request, name: str) -> Response:
        file = known.get(name)
        if file is None:
            raise HTTPException(404, "the playground has no such file")
        headers = {**_HEADERS, "ETag": file.etag}
        tags = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
        if file.etag in tags or "*" in tags:
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=file.content_type)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        return answer(request, "index.html")

    @router.api_route("/favicon.ico", methods=["GET", "HEAD"])
    async def icon(request: Request) -> Response:
        return answer(request, "icon.svg")

    @router.api_route("/playground/{name}", methods=["GET", "HEAD"])
    async def file_of_page(request: Request, name: str) -> Response:
        return answer(request, name)

    return router
