"""The page at `/` and its files; and `/docs`, which shows the API. Neither needs a key; the page's requests do."""

from importlib import resources
from pathlib import Path

import fastapi_swagger.resources
from fastapi import FastAPI, Response

from ..errors import ApiError

FOLDER = Path(__file__).parents[1] / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    # Only this server's own files; no other page may frame it.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
DOCS_HEADERS = HEADERS | {
    # Swagger UI's stylesheet holds its icons.
    "Content-Security-Policy": HEADERS["Content-Security-Policy"].replace("img-src 'self'", "img-src 'self' data:")
}
SWAGGER = ("swagger-ui.css", "swagger-ui-bundle.js")


def install(app: FastAPI) -> None:
    """Add the routes. Files are read once: files added later are never served."""
    files = {
        path.relative_to(FOLDER).as_posix(): (path.read_bytes(), TYPES[path.suffix])
        for path in FOLDER.rglob("*")
        if path.suffix in TYPES
    }
    for name in SWAGGER:
        content = resources.files(fastapi_swagger.resources).joinpath(name).read_bytes()
        files[f"swagger/{name}"] = content, TYPES[Path(name).suffix]

    def file(name: str, headers: dict[str, str] = HEADERS) -> Response:
        if name not in files:
            raise ApiError(f"there is no page {name!r}", status=404, code="not_found")
        body, media_type = files[name]
        return Response(body, media_type=media_type, headers=headers)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return file("index.html")

    @app.get("/page/{name:path}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        return file(name)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return file("docs.html", DOCS_HEADERS)
