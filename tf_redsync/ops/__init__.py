"""Ops of tf_redsync: select the elements to send, code messages, and sum received ones.

Every op has two implementations with equal bits: native (C++) and pure TensorFlow (`reference/`).
`backend()` returns the one in use; `set_backend` or the environment variable `TF_REDSYNC_BACKEND`
forces one. A requested backend that is missing raises; there is no silent fallback.

The ops do not depend on workers, methods or Keras.
"""

from tf_redsync.ops.message_layout import MessageLayout
from tf_redsync.ops.native import NativeLibraryError, backend, backend_reason, set_backend
from tf_redsync.ops.selection import Selection, accumulate_and_select, decode

__all__ = [
    "MessageLayout",
    "NativeLibraryError",
    "Selection",
    "accumulate_and_select",
    "backend",
    "backend_reason",
    "decode",
    "set_backend",
]
