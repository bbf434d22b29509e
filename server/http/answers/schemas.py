"""Schemas of answers: SGLang's models, with the fields that `speculation` adds."""

from typing import Literal

from pydantic import BaseModel
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    CompletionResponse,
    CompletionResponseChoice,
    UsageInfo,
)


class CompletionTokensDetails(BaseModel):
    """OpenAI's: draft tokens that the target accepted, and draft tokens that it rejected."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(UsageInfo):
    completion_tokens_details: CompletionTokensDetails


class SpeculativeDecoding(BaseModel):
    """vLLM's. Steps exclude the first token; acceptance_histogram[j]: steps that accepted j draft tokens."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_steps: int
    num_spec_tokens: int


class Metrics(BaseModel):
    speculative_decoding: SpeculativeDecoding


class TracedToken(BaseModel):
    """token: its text. confidence: probability of acceptance if all earlier drafts are kept; null for the target's."""

    token: str
    source: Literal["target", "model", "lookup", "across", "grammar"]
    confidence: float | None


class TracedTokens(BaseModel):
    trace: list[TracedToken]


class ChatChoice(ChatCompletionResponseChoice):
    speculation: TracedTokens | None = None


class TextChoice(CompletionResponseChoice):
    speculation: TracedTokens | None = None


class ChatAnswer(ChatCompletionResponse):
    choices: list[ChatChoice]  # type: ignore[assignment]
    usage: Usage
    metrics: Metrics | None = None


class TextAnswer(CompletionResponse):
    choices: list[TextChoice]  # type: ignore[assignment]
    usage: Usage
    metrics: Metrics | None = None
