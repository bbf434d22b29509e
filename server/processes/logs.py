"""Logging of this process and SGLang's: text as SGLang writes it, or a line of JSON per record."""

import json
import logging
import logging.config
import os
from pathlib import Path
from typing import Any

from ..log_names import REQUESTS, SERVER
from ..settings.settings import Settings
from .process import LOG_LEVEL

TRANSFORMERS = "transformers"
"""Transformers' logger. It warns of each prompt longer than the context, which the server refuses by itself."""
SGLANGS_FILE = "SGLANG_LOGGING_CONFIG_PATH"


def configure(settings: Settings) -> None:
    """Configure this process's logs; called again after SGLang has configured all loggers."""
    if settings.log_format == "json":
        logging.config.dictConfig(_json(settings))
    else:
        logging.basicConfig(level=settings.log_level.upper())
    logging.getLogger("outrider").setLevel(settings.log_level.upper())
    logging.getLogger(TRANSFORMERS).setLevel(sglang_level(settings).upper())
    server = logging.getLogger(SERVER)
    server.setLevel(logging.INFO)
    if settings.log_format == "text" and not server.handlers:  # as it is, without a prefix
        server.addHandler(logging.StreamHandler())
        server.propagate = False
    logging.getLogger(REQUESTS).setLevel(logging.WARNING if settings.log_requests == "none" else logging.INFO)


def configure_processes(settings: Settings, run_dir: Path) -> None:
    """Configure logs of processes that are started from now on, and of SGLang in this one."""
    os.environ[LOG_LEVEL] = settings.log_level.upper()
    if settings.log_format == "json":
        file = run_dir / "logging.json"
        file.write_text(json.dumps(_json(settings)))
        os.environ[SGLANGS_FILE] = str(file)


def sglang_level(settings: Settings) -> str:
    """Return SGLang's log level. It warns of intended states (no GPU, no CUDA graphs); only info and debug show it."""
    return "error" if settings.log_level == "warning" else settings.log_level


def _json(settings: Settings) -> dict[str, Any]:
    formatter = {
        "()": "pythonjsonlogger.json.JsonFormatter",
        "format": "%(levelname)s %(name)s %(process)d %(message)s",
        "rename_fields": {"levelname": "level", "name": "logger"},
        "timestamp": "time",
    }
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": formatter},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
        "root": {"level": sglang_level(settings).upper(), "handlers": ["stderr"]},
        # Transformers gives its logger a handler that writes plain text.
        "loggers": {TRANSFORMERS: {"level": sglang_level(settings).upper(), "handlers": [], "propagate": True}},
    }
