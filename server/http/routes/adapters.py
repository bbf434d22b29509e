"""SGLang's routes that load and unload LoRA adapters, for administrators."""

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from .. import openapi
from ..adapters import Adapters, LoadAdapter, UnloadAdapter
from ..requests import receive
from ..requests.validation import Limits


def install(app: FastAPI, limits: Limits, adapters: Adapters) -> None:
    def loaded() -> JSONResponse:
        return JSONResponse({"success": True, "loaded_adapters": adapters.names()})

    @app.post(
        "/load_lora_adapter",
        openapi_extra=openapi.request_body(LoadAdapter, lora_name="sql", lora_path="/adapters/sql"),
    )
    async def load(raw: Request) -> JSONResponse:
        request = await receive.receive_as(LoadAdapter, raw, limits)
        await adapters.load(request.lora_name, request.lora_path)
        return loaded()

    @app.post("/unload_lora_adapter", openapi_extra=openapi.request_body(UnloadAdapter, lora_name="sql"))
    async def unload(raw: Request) -> JSONResponse:
        request = await receive.receive_as(UnloadAdapter, raw, limits)
        await adapters.unload(request.lora_name)
        return loaded()
