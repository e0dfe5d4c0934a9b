"""Exchanges of local SGD and variants; `tests/distributed/test_own_weights.py` has schedules."""

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.conformance.families.quantized import threshold_oracle, two_bits
from tests.oracle import codings
from tests.oracle.sbc import SBCOracle
from tests.oracle.small_floats import SmallFloatsOracle
from tf_redsync.exchange.requests import AllGather, AllToAll


def means_and_code(method, specs, step):
    """A flag, a mean for each tensor, and the code of the positions."""
    oracle = sbc_oracle(method, specs, 1)
    return [4 * (1 + len(specs) + codings.code_of("Golomb", oracle.sizes, oracle.k).words)]


def sbc_oracle(method, specs, workers):
    return SBCOracle([s.shape for s in specs], workers, method.density)


def _sbc(**options):
    return Descriptor(rs.SBC(**options), None, True, (AllGather,), means_and_code, sbc_oracle)


def _streaming(bits):
    def payload(method, specs, step):
        """Runs of 256 elements; with more than two workers, a block of runs per worker.

        A flag, a scale for each run, codes.
        """

        def sizes(workers):
            blocks = 1 if workers <= 2 else workers
            runs = -(-sum(s.size for s in specs) // (256 * blocks))
            message = 4 * (1 + runs + runs * 256 * bits // 32)
            return [message] if blocks == 1 else [workers * message, message]

        return sizes

    return Descriptor(
        rs.StreamingDiLoCo(value_bits=bits),
        rs.StreamingDiLoCo(value_bits=32),
        True,
        lambda workers: (AllGather,) if workers <= 2 else (AllToAll, AllGather),
        payload,
        lambda method, specs, workers: SmallFloatsOracle([s.shape for s in specs], workers, bits),
        steps=10,
    )


TABLE = {
    "local_sgd": Descriptor(rs.LocalSGD(steps=5), rs.LocalSGD(steps=1)),
    "diloco": Descriptor(rs.DiLoCo(steps=5), rs.DiLoCo(steps=1)),
    "post_local_sgd": Descriptor(
        rs.contrib.PostLocalSGD(steps=5), rs.contrib.PostLocalSGD(steps=1)
    ),
    "streaming_diloco": _streaming(4),
    "streaming_diloco_32": Descriptor(rs.StreamingDiLoCo(value_bits=32)),
    "streaming_diloco_8": _streaming(8),
    "sbc": _sbc(density=0.03),
    "sbc_preset": _sbc(**{f: getattr(rs.SBC.preset(1), f) for f in ("steps", "density")}),
    "sbc_dense": _sbc(density=1.0, steps=2, masking=False),
    "cd_sgd": Descriptor(
        rs.CDSGD(threshold=0.5, unit="absolute"),
        rs.CDSGD(full_every=1),
        True,
        (AllGather,),
        two_bits,
        threshold_oracle,
    ),
    "cd_sgd_full": Descriptor(rs.CDSGD(full_every=1, warm_up=None)),
}
