"""SignSGD, Signum, EF-SignSGD, 1-bit SGD."""

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.oracle.signs import OneBitOracle, ScaledSignOracle, VoteOracle
from tf_redsync.exchange.requests import AllGather, AllToAll


def message(method, specs, step):
    """A flag; then a scale and a bit an element, in whole words, for each tensor."""
    return [4 * (1 + sum(1 + -(-s.size // 32) for s in specs))]


def two_phases(method, specs, step):
    """A flag; for each tensor two means and a bit an element of a block; to each owner, to all."""

    def message_of_blocks(workers):
        lengths = [-(-s.size // workers) for s in specs]
        return 4 * (1 + sum(2 + -(-n // 32) for n in lengths))

    return [lambda workers: workers * message_of_blocks(workers), message_of_blocks]


def votes(method, specs, workers):
    momentum = method.momentum if isinstance(method, rs.Signum) else 0.0
    return VoteOracle([s.shape for s in specs], workers, momentum)


def _oracle(cls):
    return lambda method, specs, workers: cls([s.shape for s in specs], workers)


TABLE = {
    "sign_sgd": Descriptor(rs.SignSGD(), None, True, (AllGather,), message, votes, steps=15),
    "signum": Descriptor(rs.Signum(), None, True, (AllGather,), message, votes, steps=15),
    "ef_sign_sgd": Descriptor(
        rs.EFSignSGD(), None, True, (AllGather,), message, _oracle(ScaledSignOracle), 1e-5, 15
    ),
    "one_bit_sgd": Descriptor(
        rs.OneBitSGD(),
        None,
        True,
        (AllToAll, AllGather),
        two_phases,
        _oracle(OneBitOracle),
        1e-5,
        10,
    ),
}
