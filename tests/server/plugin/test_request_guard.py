"""A request that cannot be prepared ends with an error; the engine continues."""

from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import poison
import pytest
from own_process import found_by_fork
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling import sampling_batch_info
from sglang.srt.sampling.sampling_params import SamplingParams
from small_target import SmallTarget

from outrider.server.plugin.hooks.request_guard import prepare
from outrider.server.processes.engine import EXIT_SECONDS

VOCABULARY = 49152
TOKENIZER = SimpleNamespace(eos_token_id=2, additional_stop_token_ids=None)


def request(**fields: Any) -> Req:
    params = SamplingParams(**{"max_new_tokens": 8, **fields.pop("sampling", {})})
    ids = array("q", fields.pop("input_ids", [1, 2, 3]))
    made = Req("guarded", "", ids, params, eos_token_ids={2}, vocab_size=VOCABULARY, **fields)
    made.tokenizer = TOKENIZER
    return made


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> None:
    deterministic, features = SimpleNamespace(), SimpleNamespace(enable_custom_logit_processor=False)
    deterministic.enable_deterministic_inference = False
    engine = SimpleNamespace(deterministic=deterministic, features=features)
    monkeypatch.setattr(sampling_batch_info, "get_exec", lambda: engine)


@pytest.mark.usefixtures("flags")
@pytest.mark.parametrize("fields", [{"input_ids": []}, poison.POISONS["logprob tokens"]], ids=str)
def test_what_sglang_mostly_refuses_before_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"prompt without tokens|token with a logprob outside"):
        prepare(request(**fields), VOCABULARY)


@pytest.mark.usefixtures("flags")
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 2**31 - 1, "top_p": 1e-300, "min_p": 1.0, "sampling_seed": -(2**63)},
        {"logit_bias": {"0": -100.0, "49151": 100.0}, "min_new_tokens": 4, "stop_token_ids": {0, 49151}},
        {"frequency_penalty": 2.0, "presence_penalty": -2.0, "repetition_penalty": 2.0},
        {"custom_params": {"another": object()}},
    ],
)
def test_valid_requests_pass(sampling: dict[str, Any]) -> None:
    prepare(request(sampling=sampling), VOCABULARY)


@pytest.mark.server
def test_other_answers_continue_when_a_request_cannot_be_prepared(small_target: SmallTarget) -> None:
    report = found_by_fork(Path(poison.__file__), str(small_target.folder), str(small_target.dspark))
    assert report["meanwhile"]
    assert "out-of-vocabulary" in report["ends"].pop("logprob tokens")
    for name, end in report["ends"].items():
        assert end.startswith("500 the engine cannot prepare this request: "), (name, end)
        assert "\n" not in end
    assert report["same"]
    assert report["after"]
    assert report["ending"] < EXIT_SECONDS / 2  # it ended without a timeout
