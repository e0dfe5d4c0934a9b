"""SignSGD, Signum, EF-SignSGD, 1-bit SGD, 1-bit Adam."""

import numpy as np
import tensorflow as tf

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.oracle.signs import OneBitAdamOracle, OneBitOracle, ScaledSignOracle, VoteOracle
from tf_redsync.exchange.layout import BucketLayout
from tf_redsync.exchange.requests import AllGather, AllReduce, AllToAll


def message(method, specs, step):
    """A flag; for each tensor a scale and one bit per element, in whole words."""
    return [4 * (1 + sum(1 + -(-s.size // 32) for s in specs))]


def two_phases(method, specs, step):
    """A flag; for each tensor two means and one bit per element of a block; to owners, to all."""

    def message_of_blocks(workers):
        lengths = [-(-s.size // workers) for s in specs]
        return 4 * (1 + sum(2 + -(-n // 32) for n in lengths))

    return [lambda workers: workers * message_of_blocks(workers), message_of_blocks]


def votes(method, specs, workers):
    momentum = method.momentum if isinstance(method, rs.contrib.Signum) else 0.0
    return VoteOracle([s.shape for s in specs], workers, momentum)


def _oracle(cls):
    return lambda method, specs, workers: cls([s.shape for s in specs], workers)


def momenta(specs):
    """Momenta at the end of the first stage; 0 for some elements, which never had a gradient."""
    generator = np.random.default_rng(7)
    found = [generator.standard_normal(s.shape).astype(np.float32) for s in specs]
    return [np.where(np.abs(m) < 0.2, np.float32(0), m) for m in found]


def underflowed(specs):
    """The same; also 0 for some elements whose last gradient was long ago."""
    return [np.where(np.abs(m) > 1.5, np.float32(0), m) for m in momenta(specs)]


def second_stage(method, specs):
    first = method.init(BucketLayout(tuple(specs), 1))
    seen = [tf.constant((m != 0).astype(np.float32)) for m in momenta(specs)]
    return {**first, "momentum": [tf.constant(m) for m in underflowed(specs)], "seen": seen}


def one_bit_adam(method, specs, workers):
    variances = [m**2 for m in momenta(specs)]
    shapes = [s.shape for s in specs]
    return OneBitAdamOracle(shapes, workers, method.beta_1, underflowed(specs), variances)


def end_of_round(method, specs, step):
    """The sum of rates, and two phases of bits."""
    return [4, *two_phases(method, specs, step)]


RATES = 0.25  # sum over a round


def after_a_round(method, specs):
    """Variances of elements with a gradient, and 0."""
    first = method.init(BucketLayout(tuple(specs), 1))
    variances = [tf.constant(m**2) for m in momenta(specs)]
    return {**first, "variance": variances, "rates": [tf.constant(RATES)]}


class ZeroOneAdamOracle(OneBitOracle):
    """The end of a round of 0/1 Adam, by the paper: from changes of the weights, over K, to moves.

    Rates are those of the first round, and 0 after it: then nothing moves.
    """

    def __init__(self, shapes, workers, scales, rates):
        super().__init__(shapes, workers)
        self.scales, self.rates = scales, rates

    def step(self, grads):
        seen = [s > 1e-6 for s in self.scales]
        own = [
            [
                np.where(m, -s * np.float64(g) / self.rates if self.rates else 0, 0)
                for m, s, g in zip(seen, self.scales, worker, strict=True)
            ]
            for worker in grads
        ]
        momenta = super().step(own, seen)
        moved = [-self.rates * m / s for m, s in zip(momenta, self.scales, strict=True)]
        self.rates = 0.0
        return moved


def zero_one_adam(method, specs, workers):
    scales = [np.abs(m) + method.epsilon for m in momenta(specs)]
    return ZeroOneAdamOracle([s.shape for s in specs], workers, scales, RATES)


TABLE = {
    "one_bit_adam": Descriptor(
        rs.contrib.OneBitAdam(),
        None,
        True,
        (AllToAll, AllGather),
        two_phases,
        one_bit_adam,
        1e-5,
        10,
        start=second_stage,
        patience=None,
    ),
    "zero_one_adam": Descriptor(
        rs.contrib.ZeroOneAdam(),
        None,
        True,
        (AllReduce, AllToAll, AllGather),
        end_of_round,
        zero_one_adam,
        1e-5,
        10,
        start=after_a_round,
        patience=None,
    ),
    "sign_sgd": Descriptor(rs.SignSGD(), None, True, (AllGather,), message, votes, steps=15),
    "signum": Descriptor(rs.contrib.Signum(), None, True, (AllGather,), message, votes, steps=15),
    "ef_sign_sgd": Descriptor(
        rs.EFSignSGD(), None, True, (AllGather,), message, _oracle(ScaledSignOracle), 1e-5, 15
    ),
    "one_bit_sgd": Descriptor(
        rs.contrib.OneBitSGD(),
        None,
        True,
        (AllToAll, AllGather),
        two_phases,
        _oracle(OneBitOracle),
        1e-5,
        10,
    ),
}
