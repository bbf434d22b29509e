"""Which prompt chunks are read: simulated traffic keeps bounds, shares, levels and turns."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from outrider.scheduler.cost.prefill import PrefillCost, PrefillPoint, pairs_of
from outrider.scheduler.pauses import SHARE, Pauses, Prompt, level_share, turn_of

FORWARD, TOKEN, PAIR = 0.012, 0.0005, 2e-7
STEP = 0.02
BOUND = 0.2


def taken(tokens: int, context: int = 0) -> float:
    return FORWARD + TOKEN * tokens + PAIR * pairs_of([tokens], [context])


def made_cost(factor: float = 1.0) -> PrefillCost:
    shapes = [(n, c) for n in (16, 64, 256, 1024) for c in (0, 1024, 4096)]
    return PrefillCost(PrefillPoint(n, c, taken(n, c) * factor) for n, c in shapes)


@dataclass
class Waiting:
    tokens: int
    arrival: int
    came: float
    done: int = 0
    first_token: float | None = None

    @property
    def prompt(self) -> Prompt:
        left = self.tokens - self.done
        return Prompt(left, self.done, turn_of(self.arrival, left))


@dataclass
class Simulation:
    """A scheduler with its own clock that builds batches as SGLang does."""

    pauses: Pauses
    arrivals: list[tuple[float, int]]  # seconds, tokens
    share: float = 0.0
    clock: float = 0.0
    read: int = 0
    gaps: list[float] = field(default_factory=list)
    stepping: float = 0.0

    def run(self, seconds: float) -> list[Waiting]:
        queue: list[Waiting] = []
        everyone: list[Waiting] = []
        begun: Waiting | None = None
        arrivals, last_step = sorted(self.arrivals), 0.0
        self.pauses.observe_step(STEP)
        while self.clock < seconds:
            while arrivals and arrivals[0][0] <= self.clock:
                came, tokens = arrivals.pop(0)
                queue.append(Waiting(tokens, self.read, came))
                everyone.append(queue[-1])
            queue.sort(key=lambda each: each.prompt.turn)
            chunk = None
            if queue or begun:
                chunk = self.pauses.choose([each.prompt for each in queue], begun and begun.prompt)
            if chunk is None:
                self.pauses.stepped()
                self.clock += STEP
                self.stepping += STEP
                self.pauses.observe_step(STEP)
                self.gaps.append(self.clock - last_step)
                last_step = self.clock
                continue
            left, lengths, contexts, took = chunk.tokens, [], [], []
            if begun is not None:
                took.append((begun, min(chunk.unfinished or left, left, begun.tokens - begun.done)))
            for each in queue:
                room = left - sum(count for _, count in took)
                unfinished = begun is not None and took[0][1] < begun.tokens - begun.done
                if room <= 0 or (unfinished and room < each.tokens):
                    break
                took.append((each, min(room, each.tokens)))
            for each, count in took:
                lengths.append(count)
                contexts.append(each.done)
            pairs = pairs_of(lengths, contexts)
            long = any(each.done + count < each.tokens for each, count in took)
            self.pauses.launch(self.pauses.cost.seconds(sum(lengths), pairs), long=long, level_share=self.share)
            seconds_taken = FORWARD + TOKEN * sum(lengths) + PAIR * pairs
            self.clock += seconds_taken
            self.read += sum(lengths)
            self.pauses.observe_chunk(sum(lengths), pairs, seconds_taken)
            begun = None
            for each, count in took:
                each.done += count
                if each.done == each.tokens:
                    each.first_token = self.clock
                else:
                    assert begun is None, "SGLang keeps one unfinished prompt"
                    begun = each
            queue = [each for each in queue if not each.done]
        return everyone


def test_answers_never_pause_longer_than_the_bound() -> None:
    rng = np.random.default_rng(0)
    arrivals = [(float(when), int(rng.choice([50, 200, 1000, 6000]))) for when in np.cumsum(rng.exponential(1.0, 100))]
    simulation = Simulation(Pauses(BOUND, made_cost()), arrivals)
    simulation.run(120)
    assert max(simulation.gaps) <= BOUND * 1.02 + STEP
    assert np.quantile(simulation.gaps, 0.99) > BOUND / 2


def test_the_bound_holds_once_a_server_without_measurements_has_read_two_prompts() -> None:
    cost = PrefillCost()
    cost.observe(6, pairs_of([6], [0]), taken(6))  # the request that warms up
    simulation = Simulation(Pauses(BOUND, cost), [(0.5, 5000), (12.0, 5000), (24.0, 5000)])
    simulation.run(40)
    assert max(simulation.gaps) <= BOUND * 1.25 + STEP
    assert max(gap for gap in simulation.gaps[len(simulation.gaps) // 3 :]) <= BOUND * 1.1 + STEP


def test_a_machine_that_becomes_slower_is_noticed_while_serving() -> None:
    simulation = Simulation(Pauses(BOUND, made_cost(0.4)), [(0.0, 5000), (10.0, 5000)])
    simulation.run(25)
    assert max(simulation.gaps[-40:]) <= BOUND * 1.05 + STEP


def test_answers_keep_their_share_and_the_prompt_waits_no_longer() -> None:
    simulation = Simulation(Pauses(BOUND, made_cost()), [(0.0, 6000)])
    (long,) = simulation.run(30)
    alone = taken(6000)
    assert long.first_token <= alone / (1 - SHARE) * 1.15
    before = [
        gap for gap, end in zip(simulation.gaps, np.cumsum(simulation.gaps), strict=True) if end < long.first_token
    ]
    assert len(before) * STEP / long.first_token >= SHARE * 0.95


def test_the_more_prompts_wait_the_less_time_have_answers() -> None:
    shares = []
    for number in (1, 2, 4):
        simulation = Simulation(Pauses(BOUND, made_cost()), [(0.0, 6000)] * number)
        simulation.run(8)
        shares.append(simulation.stepping / simulation.clock)
        assert max(simulation.gaps) <= BOUND * 1.02 + STEP
    assert shares == pytest.approx([SHARE, max(SHARE / 4, STEP / BOUND), max(SHARE / 16, STEP / BOUND)], rel=0.15)


@pytest.mark.parametrize("tokens", [1, 50, 200])
def test_a_short_prompt_passes_a_long_one_and_its_pending_decode_steps(tokens: int) -> None:
    simulation = Simulation(Pauses(BOUND, made_cost()), [(0.0, 6000), (1.0, tokens), (2.05, tokens), (3.1, tokens)])
    long, *short = simulation.run(30)
    for each in short:
        assert each.first_token - each.came <= BOUND + taken(tokens) + 2 * STEP
        assert each.first_token < long.first_token


@pytest.mark.parametrize(("tokens", "passes"), [(50, True), (400, False)])
def test_where_reading_is_slow_a_short_prompt_passes_though_it_breaks_the_bound(tokens: int, passes: bool) -> None:
    pauses = Pauses(BOUND, made_cost(10.0))
    assert pauses.cost.seconds(tokens, pairs_of([tokens], [0])) > BOUND
    chunk = pauses.choose([Prompt(tokens, 0, turn_of(1000, tokens))], Prompt(5000, 1000, turn_of(0, 5000)))
    assert (chunk.unfinished is not None and chunk.tokens - chunk.unfinished >= tokens) == passes


@pytest.mark.parametrize(("tokens", "arrival", "passes"), [(50, 12000, True), (400, 12000, False), (50, 80000, False)])
def test_short_prompts_pass_a_long_one_that_is_almost_read(tokens: int, arrival: int, passes: bool) -> None:
    pauses = Pauses(BOUND, made_cost())
    chunk = pauses.choose([Prompt(tokens, 0, turn_of(arrival, tokens))], Prompt(900, 5100, turn_of(0, 900)))
    assert (chunk.unfinished is not None) == passes


def test_a_short_prompt_waits_for_service_levels_no_longer_than_twice_the_bound() -> None:
    came = np.arange(2.0, 20.0, 3.1).tolist()
    arrivals = [(0.0, 6000), *((when, 50) for when in came)]
    simulation = Simulation(Pauses(BOUND, made_cost()), arrivals, share=0.9)
    long, *short = simulation.run(60)
    assert long.first_token is None or long.first_token > 40
    for each in short:
        assert each.first_token - each.came <= 3 * BOUND + taken(50) + 2 * STEP


def test_a_flood_of_short_prompts_starves_no_long_one() -> None:
    """Short prompts come faster than they can be read."""
    flood = [(when, 100) for when in np.arange(0.5, 200, 0.04).tolist()]
    simulation = Simulation(Pauses(BOUND, made_cost()), [(0.0, 3000), *flood])
    long, *_ = simulation.run(120)
    assert long.first_token is not None


def test_service_levels_get_the_time_they_need_from_every_prompt() -> None:
    share = level_share(np.array([30.0, 0.0]), 50.0)
    assert 0.6 < share < 0.7
    flood = [(when, 100) for when in np.arange(0.0, 60, 0.04).tolist()]
    simulation = Simulation(Pauses(BOUND, made_cost()), flood, share=share)
    simulation.run(20)
    assert simulation.stepping / simulation.clock >= share * 0.98
    assert max(simulation.gaps) <= BOUND * 1.02 + STEP


def test_levels_that_no_step_keeps_are_ignored() -> None:
    assert level_share(np.array([100.0, 0.0]), 50.0) == 0
    assert level_share(np.array([0.0]), 50.0) == 0
    assert level_share(np.array([45.0, 10.0]), 50.0) == 0.9


def test_without_answers_a_chunk_is_larger_and_never_refused() -> None:
    pauses = Pauses(BOUND, made_cost())
    for _ in range(3):
        chunk = pauses.choose([Prompt(6000, 0, 0)], None, answering=False)
        assert BOUND < taken(chunk.tokens) <= 2 * BOUND * 1.05
        pauses.launch(taken(chunk.tokens), long=True, level_share=0.0)


def test_a_bound_that_one_forward_breaks_still_reads_chunks_worth_a_forward() -> None:
    pauses = Pauses(FORWARD / 2, made_cost())
    chunk = pauses.choose([Prompt(6000, 0, 0)], None)
    assert taken(chunk.tokens) - FORWARD >= 0.8 * FORWARD


def test_a_prompt_that_fits_into_a_chunk_is_not_cut() -> None:
    pauses = Pauses(BOUND, made_cost())
    chunk = pauses.choose([Prompt(200, 0, 0), Prompt(250, 0, 1), Prompt(50, 0, 2)], None)
    assert chunk.tokens == 200
    filled = pauses.choose([Prompt(200, 0, 0), Prompt(2500, 0, 1)], None)
    assert 200 < filled.tokens < 450


def test_chunks_end_where_pages_do() -> None:
    pauses = Pauses(BOUND, made_cost(), page=64)
    chunk = pauses.choose([Prompt(50, 0, 0)], Prompt(6000, 512, 9e9))
    assert chunk.tokens % 64 == chunk.unfinished % 64 == 0
    assert chunk.tokens - chunk.unfinished == 64


def test_prompts_that_wait_in_order_of_arrival_do_not_pass() -> None:
    pauses = Pauses(BOUND, made_cost(), in_turn=False)
    chunk = pauses.choose([Prompt(50, 0, 0)], Prompt(6000, 0, 9e9))
    assert chunk.unfinished is None
    pauses.launch(BOUND, long=True, level_share=0.0)
    pauses.observe_chunk(chunk.tokens, pairs_of([chunk.tokens], [0]), BOUND)
    pauses.stepped()
    assert pauses.choose([Prompt(50, 0, 0)], Prompt(6000, 0, 9e9)) is None


def test_the_cost_grows_with_the_context_and_its_inverse_agrees() -> None:
    cost = made_cost()
    for context in (0, 1000, 5000):
        tokens = cost.largest(BOUND, context)
        assert cost.seconds(tokens, pairs_of([tokens], [context])) <= BOUND
        assert cost.seconds(tokens + 1, pairs_of([tokens + 1], [context])) > BOUND
        assert taken(tokens, context) == pytest.approx(BOUND, rel=0.05)
    assert cost.largest(FORWARD / 2, 0) == 0


def test_impossible_times_are_ignored() -> None:
    cost = made_cost()
    before = cost.seconds(100, 5000)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        cost.observe(100, 5000, seconds)
    assert cost.seconds(100, 5000) == before
    cost.observe(100, 5000, 100.0)  # a hiccup
    assert cost.seconds(100, 5000) < 1.5 * before


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_times_of_another_minute_are_unlearned_within_a_prompt(factor: float) -> None:
    cost = PrefillCost()
    for times in (factor, 1.0):
        for context in range(0, 2400, 100):
            cost.observe(100, pairs_of([100], [context]), times * taken(100, context))
    for context in (0, 1200, 3000):
        assert cost.seconds(100, pairs_of([100], [context])) == pytest.approx(taken(100, context), rel=0.3)


def test_times_of_short_prompts_tell_of_long_ones() -> None:
    """The machine has become twice as slow as its profile says; only prompts of one chunk have shown it."""
    cost = made_cost()
    for _ in range(40):
        cost.observe(60, pairs_of([60], [0]), 2 * taken(60))
    assert cost.seconds(100, pairs_of([100], [4000])) == pytest.approx(2 * taken(100, 4000), rel=0.1)


def test_damaged_points_are_explained() -> None:
    with pytest.raises(ValueError, match="a measured prefill"):
        PrefillPoint.from_json({"tokens": 0, "context": 0, "seconds": 1.0})
