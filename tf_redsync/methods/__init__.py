"""The methods, one file a family, each named after its papers."""

from tf_redsync.methods.base import Method, from_config
from tf_redsync.methods.dense import Dense, NoExchange
from tf_redsync.methods.redsync import RedSync

__all__ = ["Dense", "Method", "NoExchange", "RedSync", "from_config"]
