"""Settings of models that keep a recurrent state of each request."""

from __future__ import annotations

from dataclasses import replace

from ..errors import UserError
from ..model import families
from ..model.target import Model
from .memory import REQUESTS
from .parallel import TOGETHER
from .settings import Settings


def with_recurrent(settings: Settings, model: Model) -> Settings:
    """Settings with a bound of requests, for which states are kept; others as they are. Raises UserError where states
    would be divided over ranks, or sent."""
    if not families.is_recurrent(model):
        return settings
    if settings.parallel.tp_size > 1:
        raise UserError(f"{model.name} keeps a state of each request, which --tp-size does not spread; leave it out")
    if settings.parallel.role:
        raise UserError(f"{model.name} keeps a state of each request, which stays in one server; {TOGETHER}")
    return replace(settings, max_running_requests=settings.max_running_requests or REQUESTS)
