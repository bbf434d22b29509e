"""Detokenize in the HTTP process, by SGLang's own code, instead of in SGLang's separate process.

Schedulers send their output straight to the tokenizer manager. On a CPU a further process costs the engine's threads
more core time than the decoding of tokens itself: each step's output is written, sent and read once more. On a GPU
machine cores are free and the event loop may limit the throughput of many requests, so SGLang's process stays.
"""

import asyncio
import logging
import os
import signal
from typing import Any

from sglang.srt.managers.detokenizer_manager import DETOKENIZER_MAX_STATES, DetokenizerManager, LimitedCapacityDict
from sglang.srt.managers.io_struct import BatchTokenIDOutput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.parser.response_template import tool_close_token_ids
from sglang.srt.runtime_context import get_serving
from sglang.srt.server_args import PortArgs, ServerArgs
from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class Detokenizer(DetokenizerManager):
    """SGLang's detokenizer without a process of its own: its handlers are called directly.

    tokenizer: Transformers' tokenizer that SGLang has made for a text model; None: make one.
    """

    def __init__(self, server_args: ServerArgs, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        super().__init__(server_args, None)

    def init_ipc_channels(self, port_args: Any, server_args: ServerArgs) -> None:
        """Open no sockets."""

    def init_tokenizer(self, server_args: ServerArgs) -> None:
        if isinstance(self.tokenizer, PreTrainedTokenizerBase):
            self.vocab_size = len(self.tokenizer)
        else:
            super().init_tokenizer(server_args)

    def init_running_status(self, server_args: ServerArgs) -> None:
        """Set up without SGLang's watchdog and processor time meter: this process has the tokenizer manager's."""
        self.decode_status = LimitedCapacityDict(capacity=DETOKENIZER_MAX_STATES)
        self.disable_tokenizer_batch_decode = get_serving().disable_tokenizer_batch_decode
        self.is_tool_call_parser_gpt_oss = get_serving().tool_call_parser == "gpt-oss"
        self.tool_close_token_ids = tool_close_token_ids(get_serving().tool_call_parser, self.tokenizer)


class DetokenizingManager(TokenizerManager):
    """SGLang's tokenizer manager that also detokenizes the schedulers' output."""

    def __init__(self, server_args: ServerArgs, port_args: PortArgs) -> None:
        super().__init__(server_args, port_args)
        # A processor's tokenizer decodes with other defaults.
        self._detokenizer = Detokenizer(server_args, self.tokenizer if self.processor is None else None)

    async def _handle_batch_output(self, recv_obj: Any) -> None:
        if isinstance(recv_obj, BatchTokenIDOutput):
            try:
                recv_obj = self._detokenizer.handle_batch_token_id_out(recv_obj)
            except BaseException:  # a panic of the tokenizers' library is no Exception
                logger.exception("the text of tokens could not be made")
                os.kill(os.getpid(), signal.SIGQUIT)  # SGLang's own process reports its failure the same way
                await asyncio.Event().wait()  # send no more output, like a process that has ended
        await super()._handle_batch_output(recv_obj)
