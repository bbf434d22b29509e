"""Steps of an exact shape, and the restored state afterwards."""

from types import SimpleNamespace

import torch
from planned_steps import GAMMA, HALVED, admit, begin, logged, prefill, run

from outrider.drafters.base import Draft, DraftBatch, Drafter, Features
from outrider.drafters.lookup_first import LookupFirst
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.wrappers import Initialised
from outrider.server.plugin import measuring, worker_rpc

VOCABULARY = 97


class Model(Drafter):
    """Drafts the anchor for all requests."""

    gamma = GAMMA
    observed = asked = 0

    def allocate(self, slots: int) -> None:
        pass

    def observe(self, features: Features) -> None:
        self.observed += len(features.slots)

    def propose(self, batch: DraftBatch) -> Draft:
        self.asked += 1
        tokens = batch.anchors[:, None].repeat(1, GAMMA)
        return Draft(tokens, torch.full_like(batch.anchors, 2), torch.ones(tokens.shape), drafting=len(tokens))


def worker_of(planning, drafter):
    target = SimpleNamespace(model_config=SimpleNamespace(vocab_size=97))
    return SimpleNamespace(
        drafter=drafter, planning=planning, target_worker=target, optional=planning.optional,
        draft=SimpleNamespace(graphs=None),
    )  # fmt: skip


def test_the_model_drafts_for_all_and_other_tokens_are_verified(make):
    model = Model()
    served = LookupFirst(NgramDrafter(GAMMA + 2), Initialised(model, 9), expected_run_length=1.0)
    served.allocate(16)
    worker = worker_of(make(), served)
    measuring.begin(worker)
    anchors, table = torch.tensor([5, 5, 8]), torch.zeros(3, 16, dtype=torch.int32)
    draft = worker.drafter.propose(
        DraftBatch(anchors, torch.tensor([4, 7, 7]), table, torch.arange(3), torch.zeros(3), torch.zeros(3, GAMMA + 2))
    )
    assert (model.asked, draft.drafting, draft.lens.tolist()) == (1, 3, [GAMMA + 2] * 3)
    assert draft.probs is None  # a point mass keeps the distribution
    assert len(draft.tokens.unique()) > GAMMA
    assert draft.tokens.min() >= 0
    assert draft.tokens.max() < VOCABULARY
    places = torch.arange(3)
    worker.drafter.observe(Features(None, anchors, places, places + 1))
    assert model.observed == 3
    assert served.lookup.history.tokens[1:4].tolist() == anchors.tolist()
    measuring.end(worker)
    assert worker.drafter is served


def test_on_a_gpu_every_other_step_goes_without_the_model():
    nothing = torch.zeros(3, dtype=torch.int64, device="meta")
    batch = DraftBatch(nothing, nothing, nothing[None], nothing, nothing.float(), nothing[:, None])
    drafter = measuring.TimedDrafter(Model(), VOCABULARY)
    assert [drafter.propose(batch).drafting for _ in range(5)] == [0, 3, 0, 3, 0]


def test_all_drafts_are_verified_past_the_answers_end_and_not_learned_from(make, value):
    served = make()
    worker = worker_of(served, Model())
    prefill(served, 2)
    run(served, 2)
    measuring.begin(worker)
    measuring.begin(worker)
    planning = worker.planning
    prefill(planning, 2, 3, planned=False)
    most = int(planning.requests.lengths[2])
    assert admit(planning, begin(planning, 2, 3, contexts=most)).verify_lens.tolist() == [GAMMA] * 2
    run(planning, 2, 3)
    begin(planning, 2, 3)
    assert len(planning.state()["steps"]["seconds"]) == 1
    assert planning.state()["steps"]["tokens"] == [2 * (GAMMA + 1)]
    measuring.end(worker)
    measuring.end(worker)
    assert worker.planning is served
    assert value("outrider_verified_tokens_total") == GAMMA
    assert served.state()["records"]["accepted"] == [0]
    assert logged(served) == []  # the end of the step before is unknown


def test_a_drafter_that_is_exchanged_meanwhile_is_planned_for(make):
    served, calibration = make(), HALVED
    worker = worker_of(served, Model())
    worker.use_drafter = lambda folder: worker.planning.plan_by(served.planner, calibration)
    scheduler = SimpleNamespace(draft_worker=worker, dllm_config=None, is_fully_idle=lambda: False)
    for name in (worker_rpc.MEASURE, worker_rpc.USE, worker_rpc.SERVE):
        worker_rpc._set(None, scheduler, SimpleNamespace(server_args={name: "learned"}))
    assert worker.planning is served
    assert served.calibration is calibration
