"""The methods, one file a family, each named after its papers. `table()` lists them."""

from tf_redsync.config import from_config, register, serialize
from tf_redsync.exchange.method import Method
from tf_redsync.exchange.sync_schedule import SyncSchedule
from tf_redsync.methods.catalogue import table
from tf_redsync.methods.cd_sgd import CDSGD
from tf_redsync.methods.coded import Coded, DeepReduce
from tf_redsync.methods.coded_topk import CodedTopK
from tf_redsync.methods.comp_ams import CompAMS
from tf_redsync.methods.demo import DeMo
from tf_redsync.methods.dense import Dense, NoExchange
from tf_redsync.methods.dgc import DGC
from tf_redsync.methods.dorefa import DoReFa
from tf_redsync.methods.ef21 import EF21
from tf_redsync.methods.gmc import GMC, CodedGMC, GMCPlus
from tf_redsync.methods.gtopk import GTopK
from tf_redsync.methods.half import HalfPrecision
from tf_redsync.methods.lgc import LGC
from tf_redsync.methods.local_sgd import DiLoCo, LocalSGD, PostLocalSGD
from tf_redsync.methods.low_rank import ACPSGD, PowerSGD
from tf_redsync.methods.ms_topk import MSTopK
from tf_redsync.methods.natural import NaturalCompression
from tf_redsync.methods.ok_topk import OkTopk
from tf_redsync.methods.one_bit import OneBitSGD
from tf_redsync.methods.one_bit_adam import OneBitAdam
from tf_redsync.methods.pactrain import PacTrain
from tf_redsync.methods.quantized import QSGD, TernGrad
from tf_redsync.methods.quantized_fw import QuantizedFW
from tf_redsync.methods.random_sparse import RandomBlock, RandomK
from tf_redsync.methods.redsync import RedSync
from tf_redsync.methods.sbc import SBC
from tf_redsync.methods.scheduled import Scheduled
from tf_redsync.methods.sidco import SIDCo
from tf_redsync.methods.signs import EFSignSGD, SignSGD, Signum
from tf_redsync.methods.sparcml import SparCML
from tf_redsync.methods.spardl import SparDL
from tf_redsync.methods.sparse_dithering import SparseDithering
from tf_redsync.methods.sparse_loco import SparseLoCo
from tf_redsync.methods.spherical import SphericalCompression
from tf_redsync.methods.streaming import StreamingDiLoCo
from tf_redsync.methods.thresholds import FixedThreshold, Strom
from tf_redsync.methods.topk import TopK
from tf_redsync.methods.two_bit import TwoBit
from tf_redsync.methods.wangni import Wangni
from tf_redsync.methods.zero_one_adam import ZeroOneAdam

__all__ = [
    "ACPSGD",
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
    "DoReFa",
    "EF21",
    "EFSignSGD",
    "FixedThreshold",
    "GMC",
    "GMCPlus",
    "GTopK",
    "HalfPrecision",
    "LGC",
    "LocalSGD",
    "MSTopK",
    "Method",
    "NaturalCompression",
    "NoExchange",
    "OkTopk",
    "OneBitAdam",
    "OneBitSGD",
    "PacTrain",
    "PostLocalSGD",
    "PowerSGD",
    "QSGD",
    "QuantizedFW",
    "RandomBlock",
    "RandomK",
    "RedSync",
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
    "SyncSchedule",
    "TernGrad",
    "TopK",
    "TwoBit",
    "Wangni",
    "ZeroOneAdam",
    "from_config",
    "register",
    "serialize",
    "table",
]
