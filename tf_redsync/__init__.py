"""tf_redsync: gradient compression for Keras training on several workers.

    strategy = tf_redsync.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = build_model()
        model.compile(
            optimizer=tf_redsync.DistributedOptimizer(
                keras.optimizers.SGD(0.1), tf_redsync.RedSync(density=0.001, momentum=0.9)
            ),
            loss=...,
        )
    model.fit(dataset)

Map of the package, bottom up:

* `ops`: selection and decoding, native and in pure TensorFlow;
* `exchange`: requests, buckets, wire format, collectives, state, the loopback;
* `methods`, `feedback`, `schedules`: the algorithms, one file a family; `codings`: messages
  in few bits;
* `policy`, `programs`: which variable by which method, and when;
* `cost`, `probe`, `auto`: what an exchange costs, and the choice by measurement; `planning`: a
  prediction without a cluster;
* `keras`, `optimizer`, `strategy`, `callbacks`, `addons`: what users touch; `metrics`: what is
  recorded of a training, and the report;
* `launch`, `doctor`, `plan`, `report`, `build`: command line.

The import brings TensorFlow and Keras, and registers the optimizers, except on the command line.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tf_redsync import requirements
from tf_redsync.version import __version__ as __version__

if TYPE_CHECKING:
    from tf_redsync import addons, callbacks, codings, methods, ops, outer
    from tf_redsync.auto import Auto
    from tf_redsync.cluster.tf_config import rank, size
    from tf_redsync.errors import DistributedError
    from tf_redsync.keras.accuracy import AccuracyWarning
    from tf_redsync.keras.amsgrad import AMSGrad
    from tf_redsync.methods import (
        ACPSGD,
        CDSGD,
        DGC,
        EF21,
        GMC,
        LGC,
        QSGD,
        SBC,
        Coded,
        CodedGMC,
        CodedTopK,
        CompAMS,
        DeepReduce,
        DeMo,
        Dense,
        DiLoCo,
        DoReFa,
        EFSignSGD,
        FixedThreshold,
        GMCPlus,
        GTopK,
        HalfPrecision,
        LocalSGD,
        Method,
        MSTopK,
        NaturalCompression,
        NoExchange,
        OkTopk,
        OneBitAdam,
        OneBitSGD,
        PacTrain,
        PostLocalSGD,
        PowerSGD,
        QuantizedFW,
        RandomBlock,
        RandomK,
        RedSync,
        Scheduled,
        SIDCo,
        SignSGD,
        Signum,
        SparCML,
        SparDL,
        SparseDithering,
        SparseLoCo,
        SphericalCompression,
        StreamingDiLoCo,
        Strom,
        TernGrad,
        TopK,
        TwoBit,
        Wangni,
        ZeroOneAdam,
    )
    from tf_redsync.metrics.page import report
    from tf_redsync.optimizer import DistributedOptimizer
    from tf_redsync.policy import Policy, Rule
    from tf_redsync.saving import read_worker_state
    from tf_redsync.schedules import DenseWarmUp, DensityStages, ExponentialWarmUp
    from tf_redsync.sharding import already_sharded
    from tf_redsync.strategy import MultiWorkerMirroredStrategy


__all__ = [
    "ACPSGD",
    "AMSGrad",
    "AccuracyWarning",
    "Auto",
    "CDSGD",
    "Coded",
    "CodedGMC",
    "CodedTopK",
    "CompAMS",
    "DGC",
    "DeMo",
    "DeepReduce",
    "DiLoCo",
    "Dense",
    "DenseWarmUp",
    "DensityStages",
    "DistributedError",
    "DistributedOptimizer",
    "DoReFa",
    "EF21",
    "EFSignSGD",
    "ExponentialWarmUp",
    "FixedThreshold",
    "GMC",
    "GMCPlus",
    "GTopK",
    "HalfPrecision",
    "LGC",
    "LocalSGD",
    "MSTopK",
    "Method",
    "MultiWorkerMirroredStrategy",
    "NaturalCompression",
    "NoExchange",
    "OkTopk",
    "OneBitAdam",
    "OneBitSGD",
    "PacTrain",
    "Policy",
    "PostLocalSGD",
    "PowerSGD",
    "QSGD",
    "QuantizedFW",
    "RandomBlock",
    "RandomK",
    "RedSync",
    "Rule",
    "SBC",
    "SIDCo",
    "Scheduled",
    "SignSGD",
    "Signum",
    "SparCML",
    "SparDL",
    "SparseDithering",
    "SparseLoCo",
    "SphericalCompression",
    "StreamingDiLoCo",
    "Strom",
    "TernGrad",
    "TopK",
    "TwoBit",
    "Wangni",
    "ZeroOneAdam",
    "addons",
    "already_sharded",
    "callbacks",
    "codings",
    "methods",
    "ops",
    "outer",
    "rank",
    "read_worker_state",
    "report",
    "size",
]

# Where the public names live; all that are not here are methods. They are loaded at first use: the
# command line needs no TensorFlow.
_HOMES = {name: f"{__name__}.methods" for name in __all__} | {
    "addons": "tf_redsync.addons",
    "callbacks": "tf_redsync.callbacks",
    "codings": "tf_redsync.codings",
    "ops": "tf_redsync.ops",
    "outer": "tf_redsync.outer",
    "AMSGrad": "tf_redsync.keras.amsgrad",
    "AccuracyWarning": "tf_redsync.keras.accuracy",
    "Auto": "tf_redsync.auto",
    "already_sharded": "tf_redsync.sharding",
    "DistributedError": "tf_redsync.errors",
    "DistributedOptimizer": "tf_redsync.optimizer",
    "Policy": "tf_redsync.policy",
    "Rule": "tf_redsync.policy",
    "DenseWarmUp": "tf_redsync.schedules",
    "DensityStages": "tf_redsync.schedules",
    "ExponentialWarmUp": "tf_redsync.schedules",
    "MultiWorkerMirroredStrategy": "tf_redsync.strategy",
    "rank": "tf_redsync.cluster.tf_config",
    "read_worker_state": "tf_redsync.saving",
    "report": "tf_redsync.metrics.page",
    "size": "tf_redsync.cluster.tf_config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        folded = {known.lower(): known for known in _HOMES}
        close = difflib.get_close_matches(name.lower(), folded, 1)
        hint = f". Did you mean {folded[close[0]]}?" if close else ""
        # With `obj` Python would add a hint of its own to a traceback, and only there.
        text = f"module {__name__!r} has no attribute {name!r}{hint}"
        raise AttributeError(text, name=name, obj=None)
    _prepare()
    module = importlib.import_module(_HOMES[name])
    value = module if _HOMES[name] == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


def _check_backend(backend: str) -> None:
    """Refuse a Keras on JAX or PyTorch, which `tf.distribute` does not support."""
    if backend != "tensorflow":
        raise ImportError(
            "tf_redsync needs Keras on TensorFlow. Received: the Keras backend "
            f"{backend!r}. Set KERAS_BACKEND=tensorflow before Keras is imported."
        )


@functools.cache
def _prepare() -> None:
    """Check what is installed, and register the optimizers, for `keras.saving.load_model`."""
    requirements.check_tensorflow()
    requirements.check_legacy_keras()
    _check_backend(importlib.import_module("keras").backend.backend())
    importlib.import_module("tf_redsync.keras.keras3")
    importlib.import_module("tf_redsync.keras.amsgrad")


def _is_command_line(words: Sequence[str]) -> bool:
    """Whether a process is `tf-redsync` or `python -m tf_redsync...`: help needs no TensorFlow.

    Args:
        words: With which it was started, the interpreter first.
    """
    script = next((w for w in words[1:] if not w.startswith("-")), "")
    module = words[words.index("-m") + 1 :][:1] if "-m" in words else []
    if module and script == module[0]:
        return module[0].partition(".")[0] == __name__
    return os.path.basename(script) == "tf-redsync"


_check_backend(os.environ.get("KERAS_BACKEND") or "tensorflow")
if not _is_command_line(sys.orig_argv):
    _prepare()
