"""Random histories of a training: whatever comes, workers stay equal, and nothing is lost.

Hypothesis makes up tensors, a method, and a history of steps, bad steps, saves, kills, restorations
on as many workers or others, and learning rates. What fails is made as short as possible.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.conformance.histories import Workers
from tests.conformance.table import TABLE
from tests.deep import DEEP
from tests.loops import loop
from tf_redsync.exchange.layout import TensorSpec

SHAPES = [(), (1,), (3,), (0, 2), (17,), (5, 4), (33, 3), (2, 3, 4)]
LARGE = [(64, 33), (257, 3)]  # for methods that refuse all of these
SEEDS = st.integers(0, 2**16)
COUNTS = st.sampled_from([1, 2, 3, 4] if DEEP else [1, 2, 3])
SCALES = st.sampled_from([1.0, 1e-4, 1e3])
RATES = st.sampled_from([0.1, 0.003, 1.0])


@dataclasses.dataclass
class Ledger:
    """What went in and what came out, by tensor, over a whole history, in float64."""

    put_in: list[np.ndarray]
    delivered: list[np.ndarray]
    scale: float = 0.0
    steps: int = 0

    @classmethod
    def of(cls, specs):
        return cls([np.zeros(s.shape) for s in specs], [np.zeros(s.shape) for s in specs])

    def copy(self):
        lists = ([a.copy() for a in arrays] for arrays in (self.put_in, self.delivered))
        return Ledger(*lists, self.scale, self.steps)

    def add(self, grads, totals):
        for i, total in enumerate(totals):
            self.put_in[i] += sum(np.float64(one[i]) for one in grads)
            self.delivered[i] += np.float64(total)
        sizes = [np.abs(a).max() for one in grads for a in one if a.size]
        self.scale = max([self.scale, *map(float, sizes)])
        self.steps += 1

    def missing(self, residuals):
        """The largest difference between what went in and what is anywhere."""
        rows = zip(self.put_in, self.delivered, residuals, strict=True)
        return max(float(np.abs(a - b - r).max(initial=0.0)) for a, b, r in rows)


def specs_of(shapes):
    last = len(shapes) - 1
    return [TensorSpec(f"t/{i}", s, i, output_layer=i == last) for i, s in enumerate(shapes)]


class History(RuleBasedStateMachine):
    """See the module. `NAMES` are the methods to take one from."""

    NAMES = tuple(TABLE)

    @initialize(data=st.data(), workers=COUNTS)
    def begin(self, data, workers):
        name = data.draw(st.sampled_from(self.NAMES), label="method")
        self.descriptor = TABLE[name]
        shapes = st.sampled_from(self.served(SHAPES) or self.served(LARGE))
        drawn = data.draw(st.lists(shapes, min_size=1, max_size=3), label="shapes")
        specs = specs_of(drawn)
        self.specs, self.rate = tuple(specs), 0.1
        self.workers = self.made(workers)
        self.ledger, self.saved = Ledger.of(self.specs), None
        self.since: list = []  # the steps since it was saved

    def served(self, shapes):
        """Those that the method serves, if it is tried on no others."""
        if not self.descriptor.served_only:
            return shapes
        refuses = self.descriptor.method.refuses
        return [shape for shape in shapes if all(not refuses(s) for s in specs_of([shape]))]

    def made(self, workers):
        return Workers(self.descriptor, self.specs, workers)

    def gradients(self, seed, scale):
        rng = np.random.default_rng([seed, len(self.specs)])
        grads = []
        for _ in range(self.workers.workers):
            share = 0.2 if rng.random() < 0.3 else 1.0
            one = [np.asarray(rng.standard_normal(s.shape) * scale) for s in self.specs]
            kept = [rng.random(g.shape) < share for g in one]
            grads.append([np.asarray(g * k, np.float32) for g, k in zip(one, kept, strict=True)])
        return grads

    @rule(seed=SEEDS, scale=SCALES)
    def step(self, seed, scale):
        grads = self.gradients(seed, scale)
        found = self.workers.train(grads, self.rate)
        assert found.finite
        self.ledger.add(grads, found.totals[0])
        self.since.append((grads, self.rate))

    @rule(seed=SEEDS, value=st.sampled_from([np.nan, np.inf, -np.inf]), where=SEEDS)
    def bad_step(self, seed, value, where):
        """On one worker one element is not a number: nothing changes on any."""
        grads = self.gradients(seed, 1.0)
        rank, tensor = where % len(grads), where % len(self.specs)
        assume(self.descriptor.agrees and grads[rank][tensor].size)
        grads[rank][tensor].flat[where % grads[rank][tensor].size] = value
        before = self.workers.bits()
        found = self.workers.train(grads, self.rate)
        assert not found.finite, "nobody has noticed"
        assert self.workers.bits() == before, "a bad step has left a trace"
        self.since.append((grads, self.rate))

    @rule(rate=RATES)
    def learning_rate(self, rate):
        self.rate = rate

    @rule()
    def save(self):
        before = self.workers.bits()
        self.saved = self.workers.save(), self.ledger.copy(), self.workers.workers
        assert self.workers.bits() == before, "saving changed something"
        self.since = []

    @precondition(lambda self: self.saved is not None)
    @rule()
    def kill_and_go_on(self):
        """Restored on as many workers, the same steps lead to the same bits."""
        file, ledger, workers = self.saved
        assume(workers == self.workers.workers)
        expected, self.ledger = self.workers.bits(), ledger.copy()
        self.workers = self.made(workers)
        self.workers.load(file)
        for grads, rate in self.since:
            found = self.workers.train(grads, rate)
            if found.finite:
                self.ledger.add(grads, found.totals[0])
        assert self.workers.bits() == expected, "it went on in another way than before"

    @precondition(lambda self: self.saved is not None)
    @rule(workers=COUNTS)
    def kill_and_restore(self, workers):
        """What was not saved is gone; the rest is there, on any number of workers."""
        file, ledger, _ = self.saved
        self.ledger, self.since = ledger.copy(), []
        self.workers = self.made(workers)
        self.workers.load(file)
        assert int(self.workers.step.numpy()) == ledger.steps
        self.saved = None  # the next one is of other workers

    @invariant()
    def workers_are_equal(self):
        if self.descriptor.agrees:
            first, *others = self.workers.weights_of
            for other in others:
                for a, b in zip(first, other, strict=True):
                    assert a.tobytes() == b.tobytes(), "the workers have different weights"
        for name, group in self.workers.states[0].variables_by_name.items():
            for copies in group if self.workers.states[0].kinds[name] == "shared" else []:
                assert len({c.numpy().tobytes() for c in copies}) == 1, f"{name} is not shared"

    @invariant()
    def nothing_is_lost(self):
        if self.descriptor.method.traits.conserves:
            missing = self.ledger.missing(self.workers.residuals())
            allowed = 2e-6 * max(1, self.ledger.steps) * self.workers.workers * self.ledger.scale
            note(f"missing {missing}, allowed {allowed}")
            assert missing <= allowed, f"{missing} of {self.ledger.scale} is nowhere"


def limits(examples, steps, **more):
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=not DEEP,
        database=None,
        suppress_health_check=list(HealthCheck),
        **more,
    )


TestHistory = History.TestCase
TestHistory.settings = limits(15, 12)


def of_one_method(name, made=Workers):
    """A machine for one method, and perhaps with workers that have a fault."""

    class HistoryOfOne(History):
        NAMES = (name,)

        def made(self, workers):
            return made(self.descriptor, self.specs, workers)

    return HistoryOfOne


class Forgetful(Workers):
    """Its residuals are not in what it saves."""

    def load(self, file):
        super().load(file)
        for copies in self.states[0].variables_by_name["residual"]:
            for copy in copies:
                copy.assign(np.zeros(copy.shape, np.float32))


class Drifting(Workers):
    """A skipped step changes a weight of one worker."""

    def train(self, grads, rate):
        found = super().train(grads, rate)
        if not found.finite:
            self.weights_of[-1][0] += np.float32(1e-6)
        return found


@loop(
    "fault, text",
    [
        (Forgetful, "is nowhere|in another way than before"),
        (Drifting, "has left a trace|in another way than before"),
    ],
)
def test_what_is_lost_is_found(fault, text):
    machine = of_one_method("redsync_exact", fault)
    with pytest.raises(AssertionError, match=text):
        run_state_machine_as_test(machine, settings=limits(40, 20, phases=[Phase.generate]))


@pytest.mark.deep  # a quarter of an hour
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", TABLE)
def test_histories_of_each_method(name):
    run_state_machine_as_test(of_one_method(name), settings=limits(15, 15))
