"""Random training histories: workers stay equal and no gradient is lost.

Hypothesis generates tensors, a method, and a history of steps, non-finite steps, saves, kills,
restorations on the same or another number of workers, and learning rates. It shrinks failures.
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
LARGE = [(64, 33), (257, 3)]  # for methods that refuse all shapes above
SEEDS = st.integers(0, 2**16)
COUNTS = st.sampled_from([1, 2, 3, 4] if DEEP else [1, 2, 3])
SCALES = st.sampled_from([1.0, 1e-4, 1e3])
RATES = st.sampled_from([0.1, 0.003, 1.0])


@dataclasses.dataclass
class Ledger:
    """Sums of all gradients and all totals of a history, by tensor, in float64."""

    gradients_sum: list[np.ndarray]
    delivered: list[np.ndarray]
    scale: float = 0.0
    steps: int = 0

    @classmethod
    def of(cls, specs):
        return cls([np.zeros(s.shape) for s in specs], [np.zeros(s.shape) for s in specs])

    def copy(self):
        lists = ([a.copy() for a in arrays] for arrays in (self.gradients_sum, self.delivered))
        return Ledger(*lists, self.scale, self.steps)

    def add(self, grads, totals):
        for i, total in enumerate(totals):
            self.gradients_sum[i] += sum(np.float64(one[i]) for one in grads)
            self.delivered[i] += np.float64(total)
        sizes = [np.abs(a).max() for one in grads for a in one if a.size]
        self.scale = max([self.scale, *map(float, sizes)])
        self.steps += 1

    def missing(self, residuals):
        """The largest difference between gradients and totals plus residuals."""
        rows = zip(self.gradients_sum, self.delivered, residuals, strict=True)
        return max(float(np.abs(a - b - r).max(initial=0.0)) for a, b, r in rows)


def specs_of(shapes):
    last = len(shapes) - 1
    return [
        TensorSpec(f"t/{i}", s, position=i, output_layer=i == last) for i, s in enumerate(shapes)
    ]


class History(RuleBasedStateMachine):
    """Random history, see the module's docstring. Methods are drawn from `NAMES`."""

    NAMES = tuple(TABLE)

    @initialize(data=st.data(), workers=COUNTS)
    def begin(self, data, workers):
        name = data.draw(st.sampled_from(self.NAMES), label="method")
        self.descriptor = TABLE[name]
        shapes = st.sampled_from(self.served(SHAPES) or self.served(LARGE))
        drawn = data.draw(st.lists(shapes, min_size=1, max_size=3), label="shapes")
        specs = specs_of(drawn)
        self.specs, self.rate = tuple(specs), 0.1
        self.workers = self.make_workers(workers)
        self.ledger, self.saved = Ledger.of(self.specs), None
        self.since: list = []  # steps since the last save

    def served(self, shapes):
        """The shapes to test: all, or only those that the method serves."""
        if not self.descriptor.served_only:
            return shapes
        refuses = self.descriptor.method.refuses
        return [shape for shape in shapes if all(not refuses(s) for s in specs_of([shape]))]

    def make_workers(self, workers):
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
        """One element of one worker is non-finite: no worker's state changes."""
        grads = self.gradients(seed, 1.0)
        rank, tensor = where % len(grads), where % len(self.specs)
        assume(self.descriptor.agrees and grads[rank][tensor].size)
        grads[rank][tensor].flat[where % grads[rank][tensor].size] = value
        before = self.workers.bits()
        found = self.workers.train(grads, self.rate)
        assert not found.finite, "the step was not detected as non-finite"
        assert self.workers.bits() == before, "a non-finite step has changed the state"
        self.since.append((grads, self.rate))

    @rule(rate=RATES)
    def learning_rate(self, rate):
        self.rate = rate

    @rule()
    def save(self):
        before = self.workers.bits()
        self.saved = self.workers.save(), self.ledger.copy(), self.workers.workers
        assert self.workers.bits() == before, "saving changed the state"
        self.since = []

    @precondition(lambda self: self.saved is not None)
    @rule()
    def kill_and_resume(self):
        """Restored on the same number of workers, the same steps give the same bits."""
        file, ledger, workers = self.saved
        assume(workers == self.workers.workers)
        expected, self.ledger = self.workers.bits(), ledger.copy()
        self.workers = self.make_workers(workers)
        self.workers.load(file)
        for grads, rate in self.since:
            found = self.workers.train(grads, rate)
            if found.finite:
                self.ledger.add(grads, found.totals[0])
        assert self.workers.bits() == expected, "the resumed run differs from the first one"

    @precondition(lambda self: self.saved is not None)
    @rule(workers=COUNTS)
    def kill_and_restore(self, workers):
        """A restored run on any number of workers has everything that was saved."""
        file, ledger, _ = self.saved
        self.ledger, self.since = ledger.copy(), []
        self.workers = self.make_workers(workers)
        self.workers.load(file)
        assert int(self.workers.step.numpy()) == ledger.steps
        self.saved = None  # the saved state belongs to the earlier number of workers

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
    def gradients_are_conserved(self):
        if self.descriptor.method.traits.conserves:
            missing = self.ledger.missing(self.workers.residuals())
            allowed = 2e-6 * max(1, self.ledger.steps) * self.workers.workers * self.ledger.scale
            note(f"missing {missing}, allowed {allowed}")
            assert missing <= allowed, f"{missing} of {self.ledger.scale} is lost"


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


def of_one_method(name, make_workers=Workers):
    """A state machine for one method, optionally with faulty workers."""

    class HistoryOfOne(History):
        NAMES = (name,)

        def make_workers(self, workers):
            return make_workers(self.descriptor, self.specs, workers)

    return HistoryOfOne


class LosesResiduals(Workers):
    """Workers that lose their residuals when they are saved."""

    def load(self, file):
        super().load(file)
        for copies in self.states[0].variables_by_name["residual"]:
            for copy in copies:
                copy.assign(np.zeros(copy.shape, np.float32))


class DriftsOnSkippedStep(Workers):
    """A skipped step changes a weight of one worker."""

    def train(self, grads, rate):
        found = super().train(grads, rate)
        if not found.finite:
            self.weights_of[-1][0] += np.float32(1e-6)
        return found


@loop(
    "fault, text",
    [
        (LosesResiduals, "is lost|the resumed run differs"),
        (DriftsOnSkippedStep, "has changed the state|the resumed run differs"),
    ],
)
def test_history_detects_faults(fault, text):
    machine = of_one_method("redsync_exact", fault)
    with pytest.raises(AssertionError, match=text):
        run_state_machine_as_test(machine, settings=limits(40, 20, phases=[Phase.generate]))


@pytest.mark.deep  # a quarter of an hour
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", TABLE)
def test_histories_of_each_method(name):
    run_state_machine_as_test(of_one_method(name), settings=limits(15, 15))
