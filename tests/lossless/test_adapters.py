"""LoRA adapters and the model in one batch: each answer equals that of its merged model."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import is_greedy, merged, write_adapter
from asking import MODEL, complete, tokens
from metrics_page import metric
from running import HTTP, ForkedServer, Server, changed
from small_target import SmallTarget
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.server.model import target

pytestmark = pytest.mark.server
NAMES = (MODEL, "sql", "poems")
FLAGS = ("--dtype", "float32", "--activations", "float", "--max-total-tokens", "4096", "--context-length", "1024")
FLAGS += ("--chunked-prefill-size", "64", "--planner", "verify-all", "--enable-lora")
GREEDY: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
SEEDED: dict[str, Any] = {"max_tokens": 40, "temperature": 0.7, "seed": 4, "ignore_eos": True}


def start(log: Path, small_target: SmallTarget, adapter_folders: dict[str, Path], **env: str) -> Iterator[Server]:
    paths = ",".join(f"{name}={adapter_folders[name]}" for name in NAMES[1:])
    flags = (*FLAGS, *small_target.flags(), "--lora-paths", paths)
    with ForkedServer(log, *flags, **env) as started:
        yield started


@pytest.fixture(scope="module")
def adapter_server(
    tmp_path_factory: pytest.TempPathFactory, small_target: SmallTarget, adapter_folders: dict[str, Path]
) -> Iterator[Server]:
    yield from start(tmp_path_factory.mktemp("served") / "log", small_target, adapter_folders)


def ask_all(server: Server, prompts: list[str], *, speculate: bool, **body: Any) -> list[dict[str, Any]]:
    asked = [(name, prompt) for prompt in prompts for name in NAMES]
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda a: complete(server, a[1], speculate=speculate, model=a[0], **body), asked))


def spoken_by(models: dict[str, PreTrainedModel], answer: dict[str, Any]) -> list[str]:
    """Names of the models that give this answer."""
    choice = answer["choices"][0]
    return [n for n, each in models.items() if is_greedy(each, choice["prompt_token_ids"], choice["token_ids"])]


def counted(server: Server, kind: str, name: str) -> float:
    return metric(server.url, f"outrider_adapter_{kind}_tokens_total", adapter=name)


def test_a_batch_of_several(adapter_server: Server, adapted: dict[str, PreTrainedModel], prompts: list[str]) -> None:
    some = prompts[:4]
    for body in (GREEDY, SEEDED):
        without = ask_all(adapter_server, some, speculate=False, **body)
        before = {name: counted(adapter_server, "accepted", name) for name in NAMES[1:]}
        drafted = ask_all(adapter_server, some, speculate=True, **body)
        assert [tokens(answer) for answer in drafted] == [tokens(answer) for answer in without]
        for name in NAMES[1:]:
            assert counted(adapter_server, "accepted", name) > before[name]
            assert counted(adapter_server, "drafted", name) >= counted(adapter_server, "verified", name) > 0
        if body is GREEDY:
            models = {name: adapted[name] for name in NAMES}
            assert [spoken_by(models, answer) for answer in drafted] == [[name] for name in NAMES] * len(some)


def test_prefixes_are_shared_within_an_adapter_alone(
    adapter_server: Server, adapted: dict[str, PreTrainedModel]
) -> None:
    prompt = "Here is a long story that nobody has told before. " * 6
    for again in (False, True):
        for name in NAMES:
            answer = complete(adapter_server, prompt, speculate=True, model=name, max_tokens=16, temperature=0)
            assert name in spoken_by(adapted, answer)
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert (cached > 50) if again else (cached < 10)  # first only the template's beginning is shared


def post(server: Server, path: str, name: str, **body: str) -> Any:
    return HTTP.post(f"{server.url}/{path}_lora_adapter", json=body | {"lora_name": name}, timeout=60)


def test_loaded_and_unloaded_while_serving(
    adapter_server: Server, adapter_folders: dict[str, Path], adapted: dict[str, PreTrainedModel], prompts: list[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    poems, later = (str(adapter_folders[name]) for name in ("poems", "later"))
    assert post(adapter_server, "load", "sql", lora_path=later).status_code == 409
    refused = post(adapter_server, "load", "later", lora_path=str(tmp_path / "none"))
    assert refused.status_code == 400
    assert "there is no such folder" in refused.json()["error"]["message"]
    loaded = post(adapter_server, "load", "later", lora_path=later)
    assert loaded.json() == {"success": True, "loaded_adapters": ["sql", "poems", "later"]}
    listed = HTTP.get(f"{adapter_server.url}/v1/models").json()["data"]
    expected = [(MODEL, None), ("sql", MODEL), ("poems", MODEL), ("later", MODEL)]
    assert [(each["id"], each["parent"]) for each in listed] == expected
    with ThreadPoolExecutor(4) as pool:
        long = {"max_tokens": 900, "temperature": 0, "ignore_eos": True, "model": "later"}
        running = [pool.submit(complete, adapter_server, prompts[i], speculate=bool(i), **long) for i in (0, 1)]
        others = pool.submit(complete, adapter_server, prompts[2], speculate=True, model="sql", **GREEDY)
        time.sleep(0.1)
        assert not any(each.done() for each in running)
        assert post(adapter_server, "unload", "later").json()["loaded_adapters"] == ["sql", "poems"]
        assert not wait(running, timeout=3).not_done, "unloading did not wait for the adapter's requests"
        for each in running:
            assert spoken_by({"later": adapted["later"]}, each.result()) == ["later"]
        assert spoken_by({"sql": adapted["sql"]}, others.result()) == ["sql"]
    unknown = HTTP.post(f"{adapter_server.url}/v1/completions", json={"model": "later", "prompt": "x", "max_tokens": 1})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert HTTP.get(f"{adapter_server.url}/v1/models/later").status_code == 404
    assert post(adapter_server, "unload", "later").status_code == 404
    # An adapter must not use data of an earlier one with its name.
    assert post(adapter_server, "load", "later", lora_path=poems).status_code == 200
    answer = complete(adapter_server, prompts[0], speculate=True, model="later", **GREEDY)
    assert spoken_by({name: adapted[name] for name in ("later", "poems")}, answer) == ["poems"]
    assert post(adapter_server, "unload", "later").status_code == 200


def test_every_api_takes_an_adapter(adapter_server: Server, prompts: list[str]) -> None:
    client, turn = adapter_server.client(), {"role": "user", "content": prompts[5]}
    body = {"messages": [turn], "max_tokens": 24, "temperature": 0}
    chat, base = (client.chat.completions.create(model=name, **body) for name in ("sql", MODEL))
    response = client.responses.create(model="sql", input=prompts[5], max_output_tokens=24, temperature=0)
    message = HTTP.post(f"{adapter_server.url}/v1/messages", json=body | {"model": "sql"}).json()
    assert (chat.model, response.model, message["model"]) == ("sql",) * 3
    assert chat.choices[0].message.content == response.output_text == message["content"][0]["text"]
    assert chat.choices[0].message.content != base.choices[0].message.content


def test_layers_that_sglang_runs(
    tmp_path: Path, small_target: SmallTarget, adapter_folders: dict[str, Path], adapted: dict[str, PreTrainedModel],
    prompts: list[str],
) -> None:  # fmt: skip
    models = {name: adapted[name] for name in NAMES}
    for plain in start(tmp_path / "log", small_target, adapter_folders, OUTRIDER_CPU_KERNELS="0"):
        assert "run in one call" not in plain.output()
        without = ask_all(plain, prompts[:1], speculate=False, **GREEDY)
        drafted = ask_all(plain, prompts[:1], speculate=True, **GREEDY)
        assert [tokens(answer) for answer in drafted] == [tokens(answer) for answer in without]
        assert [spoken_by(models, answer) for answer in drafted] == [[name] for name in NAMES]


def test_weights_in_blocks(tmp_path: Path, prompts: list[str]) -> None:
    plain = Path(target.plain_folder(None))
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    adapter = write_adapter(tmp_path / "sql", model, 1, rank=4, strength=0.12)
    models = {MODEL: model, "sql": merged(plain, adapter)}
    with ForkedServer(tmp_path / "log", *FLAGS, "--lora-paths", f"sql={adapter}") as server:
        for name in models:
            answer = complete(server, prompts[0], speculate=True, model=name, **GREEDY)
            assert spoken_by(models, answer) == [name]


def test_swapped_adapters_are_noticed(
    tmp_path: Path, small_target: SmallTarget, adapter_folders: dict[str, Path], adapted: dict[str, PreTrainedModel],
    prompts: list[str],
) -> None:  # fmt: skip
    """A planted fault: verification swaps the adapters."""
    for faulty in start(tmp_path / "log", small_target, adapter_folders, **changed("swapped-adapters")):
        answers = ask_all(faulty, prompts[:2], speculate=True, **GREEDY)
        models = {name: adapted[name] for name in NAMES}
        assert [spoken_by(models, answer) for answer in answers] != [[name] for name in NAMES] * 2
