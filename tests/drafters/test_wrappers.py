"""Wrappers of drafters pass on every method and attribute of the contract."""

from typing import Any

import pytest
import torch

from outrider.drafters.base import Draft, DraftBatch, Drafter, Features, Prefilled
from outrider.drafters.lookup_first import LookupFirst
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.weight_sets import WeightSets
from outrider.drafters.wrappers import DeferredObserve, Initialised, Wrapper

TABLE, ROWS = torch.zeros(2, 8, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
ATTRIBUTES = [*Drafter.__annotations__]
METHODS = [name for name in vars(Drafter) if not name.startswith("_") and name not in ATTRIBUTES]
FEATURES = Features(torch.zeros(1, 4), ROWS, ROWS, ROWS)
BATCH = DraftBatch(
    ROWS, ROWS + 1, TABLE, ROWS, torch.zeros(1), torch.zeros(1, 4, dtype=torch.int64), answer_lens=ROWS + 9
)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "allocate": (8,), "slot_state": (), "reserve_probs": (4,), "observe": (FEATURES,),
    "prefilled": (Prefilled(TABLE, ROWS, ROWS + 1, [1], 1),), "propose": (BATCH,), "reload": ("folder",), "drop": (0,),
    "look_up": (BATCH,),
}  # fmt: skip
DRAFT = Draft(torch.zeros(1, 4, dtype=torch.int64), ROWS, torch.zeros(1, 4))
ANSWERS = {"propose": DRAFT, "look_up": DRAFT, "slot_state": [torch.zeros(1)], "reserve_probs": (torch.zeros(1), None)}


class Model(Drafter):
    """Records its calls."""

    gamma, target_layers = 4, (1, 3)
    looks_up, shortens, assesses_itself, reads_output = (True,) * 4
    corpora = object()

    def __init__(self) -> None:
        self.called: list[str] = []

    def propose(self, batch: DraftBatch) -> Draft:
        raise NotImplementedError


def noted(name: str) -> Any:
    def call(model: Model, *arguments: Any) -> Any:
        model.called.append(name)
        return ANSWERS.get(name)

    return call


for method in METHODS:
    setattr(Model, method, noted(method))


MAKERS = {
    Wrapper: type("Plain", (Wrapper,), {"propose": lambda self, batch: self.model.propose(batch)}),
    DeferredObserve: DeferredObserve,
    Initialised: lambda model: Initialised(model, 3),
    LookupFirst: lambda model: LookupFirst(NgramDrafter(4), model, expected_run_length=1.0),
    WeightSets: WeightSets,
}
OWN = {LookupFirst: {"look_up", "corpora"}, WeightSets: {"drop"}}
"""Parts of the contract that a wrapper implements without its model."""


def kinds(base: type[Wrapper]) -> list[type[Wrapper]]:
    return [
        base,
        *(kind for each in base.__subclasses__() if each.__module__.startswith("outrider") for kind in kinds(each)),
    ]


@pytest.mark.parametrize("kind", kinds(Wrapper), ids=lambda kind: kind.__name__)
def test_every_call_and_attribute_reaches_the_model(kind):
    model = Model()
    wrapper = MAKERS[kind](model)
    own = OWN.get(kind, set())
    for name in ATTRIBUTES:
        assert name in own or getattr(wrapper, name) == getattr(model, name), name
    answers = {name: getattr(wrapper, name)(*ARGUMENTS[name]) for name in sorted(METHODS, key="propose".__eq__)}
    assert set(METHODS) - own <= set(model.called)
    assert answers["reserve_probs"] is ANSWERS["reserve_probs"]
    assert answers["slot_state"][-1] is ANSWERS["slot_state"][0]
