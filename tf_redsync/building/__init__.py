"""Compiles the native libraries at first use, once for all processes, into the user's cache folder.

A wheel holds the C++ sources and no library: one is for one version of TensorFlow, and pip's cache
would hand it to the next. Nothing here imports TensorFlow, and nothing needs a network.

* `folders`: where the sources are, and where the libraries go;
* `once`: one process of many compiles, the others wait for it;
* `libraries`: which library is wanted, and how it is made.
"""

from tf_redsync.building.once import BuildError

__all__ = ["BuildError"]
