"""Texts made in the HTTP process equal SGLang's detokenizer process."""

import copy
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from answering import Answering, hooked, keep_nothing, tokenizer
from running import ForkedServer, wait_until
from sglang.srt.managers.detokenizer_manager import run_detokenizer_process
from sglang.srt.managers.io_struct import BatchTokenIDOutput, sock_recv, sock_send
from sglang.srt.server_args import ServerArgs
from small_target import SmallTarget

from outrider.server.model import target
from outrider.server.plugin.hooks import answer_ends
from outrider.server.processes.detokenizer import Detokenizer

TEXTS = (
    "Is it so?\nAnswer: yes. User: next ### \u96ea\u96ea and \U0001f600\U0001f468\u200d\U0001f469 caf\u00e9 "
    "\u0928\u092e\u0938\u094d\u0924\u0947 end",
    "\U0001f600" * 9 + " two, three; <|im_start|>user\nThe capital<|im_end|>\n",
    "a\n\n\nb ## c ### d\n\n e\u0301 \ufffd \u96ea",
)
REQUESTS: tuple[dict[str, Any], ...] = (
    {"stream": True},
    {"stream": False},
    {"stream": True, "stop": ["###", "User:", " \u96ea"]},
    {"stream": False, "stop": ["three;", "c ###"], "no_stop_trim": True},
    {"stream": True, "skip_special_tokens": False, "ignore_eos": True},
    {"stream": True, "skip_special_tokens": False, "spaces_between_special_tokens": False, "stop": ["<|im_end|>"]},
    {"stream": True, "stop_token_ids": {30, 42}, "no_stop_trim": True},
)


@pytest.fixture(scope="module")
def arguments() -> ServerArgs:
    return ServerArgs(model_path=target.plain_folder(None), device="cpu")


@pytest.fixture(scope="module")
def sglangs(arguments: ServerArgs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Any], Any]]:
    folder = tmp_path_factory.mktemp("sockets")
    names = {name: f"ipc://{folder}/{name}" for name in ("tokenizer_ipc_name", "detokenizer_ipc_name")}
    ports: Any = SimpleNamespace(**names)
    process = multiprocessing.get_context("spawn").Process(target=run_detokenizer_process, args=(arguments, ports))
    process.start()
    with zmq.Context() as context, context.socket(zmq.PULL) as answers, context.socket(zmq.PUSH) as messages:
        answers.bind(ports.tokenizer_ipc_name)
        answers.setsockopt(zmq.RCVTIMEO, 120_000)
        messages.connect(ports.detokenizer_ipc_name)

        def ask(message: Any) -> Any:
            sock_send(messages, message)
            return sock_recv(answers)

        yield ask
    process.kill()
    process.join()


def messages(runs_of: Callable[[int], int]) -> Iterator[BatchTokenIDOutput]:
    """Scheduler outputs for all `TEXTS` and `REQUESTS`, with tokens in runs of `runs_of(step)`."""
    sent: list[BatchTokenIDOutput] = []
    rows = []
    for number, (text, request) in enumerate((text, request) for text in TEXTS for request in REQUESTS):
        ids = [*tokenizer().encode(text), tokenizer().eos_token_id]
        answering = Answering(**request, max_new_tokens=len(ids))
        answering.request.rid = str(number)
        object.__setattr__(
            answering.streamer, "send_to_detokenizer", SimpleNamespace(send_output=lambda one, _=None: sent.append(one))
        )
        rows.append((answering, ids))
    step, at = 0, 0
    while rows:
        run = runs_of(step)
        for answering, ids in rows:
            answering.step(ids[at : at + run])
        step, at = step + 1, at + run
        rows = [(answering, ids) for answering, ids in rows if at < len(ids) and not answering.request.finished()]
        if sent:
            yield together(sent)
        sent.clear()


def together(batches: list[BatchTokenIDOutput]) -> BatchTokenIDOutput:
    whole = copy.copy(batches[0])
    for name in BatchTokenIDOutput.__struct_fields__:
        if any(isinstance(getattr(batch, name), list) for batch in batches):
            setattr(whole, name, [entry for batch in batches for entry in getattr(batch, name) or [None]])
    return whole


@pytest.mark.slow
@pytest.mark.parametrize("runs_of", [lambda _: 1, lambda _: 3, lambda step: 1 + step % 5], ids=["1", "3", "1 to 5"])
def test_texts_equal_sglangs_process(
    runs_of: Callable[[int], int], arguments: ServerArgs, sglangs: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts, ids, ends, logprobs and counts of each step are compared."""
    keep_nothing(monkeypatch)
    texts: dict[str, str] = {}
    with hooked(answer_ends.register):
        ours = None
        for message in messages(runs_of):
            ours = ours or Detokenizer(arguments, tokenizer())
            theirs = sglangs(message)
            made = ours.handle_batch_token_id_out(copy.deepcopy(message))
            assert len(made.time_stats) == len(theirs.time_stats)
            made.time_stats = theirs.time_stats = None  # these compare by identity
            assert made == theirs
            for rid, text in zip(theirs.rids, theirs.output_strs, strict=True):
                texts[rid] = texts.get(rid, "") + text
        assert ours is not None
        assert not ours.decode_status
    assert len(texts) == len(TEXTS) * len(REQUESTS)
    assert texts["0"] == TEXTS[0]


@pytest.mark.server
def test_sglangs_processes_make_the_texts_when_requested(tmp_path: Path, small_target: SmallTarget) -> None:
    """The server ends when one of them does."""
    flags = (*small_target.flags("off"), "--max-total-tokens", "4096", "--", "--detokenizer-worker-num", "2")
    with ForkedServer(tmp_path / "log", *flags) as apart:
        children = apart.children()
        assert {"scheduler", "detokenizer"} < {*children}
        body = {"prompt": "One, two", "max_tokens": 20, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
        choice = apart.post("completions", body)["choices"][0]
        assert apart.post("detokenize", {"tokens": choice["token_ids"]}) == {"text": choice["text"]}
        children["detokenizer"].kill()
        assert apart.process.wait(30) == 1
        wait_until(lambda: not any(child.is_running() for child in children.values()), 5)
