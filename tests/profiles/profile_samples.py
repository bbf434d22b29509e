"""A fingerprint and a grid for the tests of profiles."""

from outrider.profiles.fingerprint import Fingerprint
from outrider.profiles.store import Profile
from outrider.scheduler.cost.prefill import PrefillPoint
from outrider.scheduler.cost.step_times import Point

HERE = Fingerprint(
    device="AMD EPYC (family 25, model 17, stepping 1)", cores=2, threads=2, target="0123456789abcdef",
    drafter="dspark", gamma=7, drafter_checkpoint="fedcba9876543210", dtype="bfloat16", attention_backend="outrider",
    instruction_set="avx512bf16", sglang="0.5.21", step_revision=1,
)  # fmt: skip

POINTS = (
    *(
        Point(requests, requests * n, requests * 128, (1e-2 + 1e-3 * requests * n, 1.1e-2 + 1e-3 * requests * n))
        for requests in (1, 2, 4)
        for n in (1, 2, 4, 8)
    ),
    Point(1, 0, 128, (2e-3,)),
    Point(4, 0, 512, (3e-3,)),
)


def profile(name: str = "epyc", fingerprint: Fingerprint = HERE, measured_at: str = "2026-01-01T00:00:00Z") -> Profile:
    return Profile(
        name=name, fingerprint=fingerprint,
        points=tuple(sorted(POINTS, key=lambda p: (p.requests, p.tokens, p.context))), thorough=True,
        measured_at=measured_at, measured_how="outrider tune",
        prefills=(PrefillPoint(128, 0, 0.05), PrefillPoint(64, 1024, 0.04)),
    )  # fmt: skip
