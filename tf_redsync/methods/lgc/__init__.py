"""LGC: learned gradient compression. See `LGC`."""

from tf_redsync.methods.lgc.method import LGC

__all__ = ["LGC"]
