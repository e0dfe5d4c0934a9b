"""LGC: learned gradient compression. See `LGC`."""

from tf_redsync.contrib.lgc.method import LGC

__all__ = ["LGC"]
