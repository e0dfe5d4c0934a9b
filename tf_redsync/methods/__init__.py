"""The methods, one file a family, each named after its papers. `table()` lists them."""

from tf_redsync.methods.base import Method, from_config
from tf_redsync.methods.catalogue import table
from tf_redsync.methods.dense import Dense, NoExchange
from tf_redsync.methods.dgc import DGC
from tf_redsync.methods.low_rank import ACPSGD, PowerSGD
from tf_redsync.methods.random_sparse import RandomBlock, RandomK
from tf_redsync.methods.redsync import RedSync
from tf_redsync.methods.thresholds import FixedThreshold, Strom
from tf_redsync.methods.topk import TopK

__all__ = [
    "ACPSGD",
    "DGC",
    "Dense",
    "FixedThreshold",
    "Method",
    "NoExchange",
    "PowerSGD",
    "RandomBlock",
    "RandomK",
    "RedSync",
    "Strom",
    "TopK",
    "from_config",
    "table",
]
