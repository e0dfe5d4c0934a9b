"""On a GPU a step's messages stay in GPU memory, by TensorFlow's kernel registry."""

import json

import pytest

from tests.deep import DEEP
from tests.distributed.cluster import run_workers
from tf_redsync.ops import native

pytestmark = pytest.mark.distributed

SMALL = 32  # elements: flags, counts, sender ranks, fingerprints of four weights
# Ops that run on the host only after weights were found to differ.
AFTER_ALL = ("EagerPyFunc",)
WARM_UP = "warm_up=rs.DenseWarmUp(steps=3)"  # known without `fit`
TOP_K = "Coded(method=rs.TopK(density=0.05), "
# Whether all of a method's tensors stay on a GPU; add new methods by hand.
METHODS = {
    "RedSync(density=0.05, dense_below=64)": True,
    "RedSync(density=0.05, dense_below=64, selection='threshold', momentum=0.9)": True,
    "RedSync(density=0.05, dense_below=64, quantized=True)": True,
    "RedSync(density=0.001, dense_below=64)": True,  # totals are sparse
    "RedSync(density=0.001, dense_below=64, quantized=True)": True,
    f"RedSync(density=0.001, dense_below=64, {WARM_UP})": True,  # dense, then sparse
    "TopK(density=0.05)": True,
    "DGC()": True,
    "SIDCo()": True,
    "FixedThreshold()": True,
    "Strom()": True,
    "RandomBlock()": True,
    "RandomK()": True,
    "Wangni()": True,
    "Accordion(density=0.05)": True,  # messages of a dynamic size
    "GMC(density=0.05)": True,
    "GMCPlus(density=0.05)": True,
    "OkTopk(density=0.05)": True,
    "SparDL(density=0.05)": True,
    "GTopK(density=0.05)": True,
    "SparCML(density=0.05)": True,
    "MSTopK(density=0.05)": True,
    "CDSGD()": True,
    "CompAMS()": True,
    "EF21()": True,
    "LGC()": True,
    "SBC()": True,
    "LocalSGD()": True,
    "PostLocalSGD(start=3)": True,
    "DiLoCo()": True,
    "StreamingDiLoCo()": True,
    "StreamingDiLoCo(value_bits=16)": True,
    "SparseLoCo(steps=2)": True,
    "DeMo()": True,
    f"OneBitAdam({WARM_UP})": True,
    "ZeroOneAdam()": True,
    "QSGD()": True,
    "QuantizedFW()": True,
    "DoReFa()": True,
    "TwoBit()": True,
    "TernGrad()": True,
    "SparseDithering()": True,
    "SignSGD()": True,
    "Signum()": True,
    "EFSignSGD()": True,
    "NaturalCompression()": True,
    "OneBitSGD()": True,
    "HalfPrecision()": True,
    "BlockQuantized(bits=4)": True,
    "BlockQuantized(bits=2, method=rs.TopK(density=0.05))": True,
    "BlockQuantized(bits=4, method=rs.PowerSGD())": False,
    "CodedTopK(density=0.05)": True,
    "CodedTopK(density=0.05, value_bits=16)": True,
    "CodedGMC(density=0.05)": True,
    "CodedAdam(density=0.05)": True,
    "CodedAdam(density=0.05, average_every=100)": True,
    "DeepReduce()": True,
    f"{TOP_K} indices=rs.codings.Golomb())": True,
    f"{TOP_K} indices=rs.codings.Bitmap())": True,
    f"{TOP_K} indices=rs.contrib.codings.Bloom())": True,
    f"{TOP_K} indices=rs.codings.EliasFano())": True,
    f"{TOP_K} indices=rs.codings.RawIndices(), values=rs.codings.Half())": True,
    f"{TOP_K} values=rs.contrib.codings.QSGDValues())": True,
    "Dense()": True,
    f"{TOP_K} indices=rs.codings.Huffman())": False,  # codes are looked up and shifted as int32
    f"{TOP_K} values=rs.codings.SignedLevels())": False,
    "SphericalCompression()": False,
    "PacTrain()": False,  # masks are bool
    "PowerSGD()": False,  # QR decompositions
    "ACPSGD()": False,
}
# A commit tests one method per kind of exchange, and two whose tensors cross.
FEW = [
    "RedSync(density=0.05, dense_below=64, selection='threshold', momentum=0.9)",
    "RedSync(density=0.05, dense_below=64, quantized=True)",
    "RedSync(density=0.001, dense_below=64)",
    f"RedSync(density=0.001, dense_below=64, {WARM_UP})",
    "Accordion(density=0.05)",
    "SparDL(density=0.05)",  # all-to-all
    "GTopK(density=0.05)",  # pairs
    "StreamingDiLoCo(value_bits=16)",  # local steps, a delay, half precision
    "OneBitSGD()",
    "CodedTopK(density=0.05)",
    "CodedAdam(density=0.05, average_every=100)",  # means in a branch
    "BlockQuantized(bits=2, method=rs.TopK(density=0.05))",
    f"{TOP_K} indices=rs.codings.Huffman())",
    "PowerSGD()",
]
HALF = ["RedSync(density=0.05, dense_below=64)", "CodedTopK(density=0.05)"]
if DEEP:
    FEW, HALF = list(METHODS), list(METHODS)[:6] + HALF[1:]


def traced(methods, policy):
    """Traces a step with each method as for a GPU; returns the large tensors that cross.

    Without `--deep` each worker traces every other method.
    """
    import json

    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tests import placement
    from tests.distributed import problems
    from tf_redsync.ops import native

    native.are_on_cpus, native.gpu_problem = lambda tensors: False, lambda: ""
    keras.config.set_dtype_policy(policy)
    strategy = rs.MultiWorkerMirroredStrategy()
    x, y = tf.ones((8, 128)), tf.ones((8, 4))
    found, seen = {}, {}
    for number, text in enumerate(methods):
        with strategy.scope():
            layers = [keras.layers.Dense(256), keras.layers.Dense(4)]
            model = keras.Sequential([keras.layers.Input((128,)), *layers])
            home = "rs" if hasattr(rs, text.partition("(")[0]) else "rs.contrib"
            method = eval(f"{home}.{text}", {"rs": rs})
            moments = getattr(method, "adam", {})
            inner = keras.optimizers.Adam if moments else keras.optimizers.SGD
            optimizer = rs.DistributedOptimizer(inner(0.1, **moments), method)
            optimizer.build(model.trainable_variables)
        if not DEEP and number % 2 != problems.rank():
            continue

        def one(x, y, model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((tf.cast(model(x, training=True), tf.float32) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        step = tf.function(lambda x, y, one=one: strategy.run(one, (x, y)), autograph=False)
        crossings = placement.crossings(step.get_concrete_function(x, y))
        large = [c for c in crossings if c.elements is None or c.elements > SMALL]
        found[text] = [c.what for c in large if c.consumer not in AFTER_ALL]
        seen[text] = len(crossings)
    return {"found": json.dumps(found), "seen": json.dumps(seen)}


@pytest.mark.skipif(not native.has_gpu_kernels(), reason="the library was built without nvcc")
@pytest.mark.parametrize(
    ("methods", "policy"),
    [(FEW, "float32"), (HALF, "bfloat16")],
    ids=["float32", "bfloat16"],
)
def test_messages_stay_on_the_device(methods, policy):
    workers = run_workers(traced, args=(methods, policy), timeout=240)
    for rank, worker in enumerate(workers):
        found, seen = (json.loads(str(worker[name])) for name in ("found", "seen"))
        own_methods = methods if DEEP else methods[rank::2]
        assert {m: not crossing for m, crossing in found.items()} == {
            m: METHODS[m] for m in own_methods
        }, found
        assert min(seen.values()) > 0, "the ranks of senders must cross"
