"""LGC: learned gradient compression. `method` has the algorithm, `autoencoder` its model."""

from tf_redsync.contrib.lgc.method import LGC

__all__ = ["LGC"]
