"""SGLang's routes that load and unload LoRA adapters, for administrators."""

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from .. import openapi
from ..adapters import Adapters, LoadAdapter, UnloadAdapter
from ..requests import receive
from ..requests.validation import Limits


class LoadedAdapters(BaseModel):
    success: bool = True
    loaded_adapters: list[str]


def install(app: FastAPI, limits: Limits, adapters: Adapters) -> None:

    def loaded() -> JSONResponse:
        return JSONResponse(LoadedAdapters(loaded_adapters=list(adapters.names())).model_dump())

    @app.post(
        "/load_lora_adapter",
        openapi_extra=openapi.request_body(LoadAdapter, lora_name="sql", lora_path="/adapters/sql"),
        responses=openapi.responses(LoadedAdapters),
    )
    async def load(raw: Request) -> JSONResponse:
        request = await receive.receive_as(LoadAdapter, raw, limits)
        await adapters.load(request.lora_name, request.lora_path)
        return loaded()

    @app.post(
        "/unload_lora_adapter",
        openapi_extra=openapi.request_body(UnloadAdapter, lora_name="sql"),
        responses=openapi.responses(LoadedAdapters),
    )
    async def unload(raw: Request) -> JSONResponse:
        request = await receive.receive_as(UnloadAdapter, raw, limits)
        await adapters.unload(request.lora_name)
        return loaded()
