"""Compiles the native libraries at first use, once for all processes, into the user's cache folder.

A wheel has the C++ sources and no library: a library serves one version of TensorFlow, and pip's
cache would install it for the next version. The modules do not import TensorFlow and need no
network.

* `libraries`: chooses and builds the library for a TensorFlow;
* `once`: lets one process compile while the others wait.
"""

from tf_redsync.building.once import BuildError

__all__ = ["BuildError"]
