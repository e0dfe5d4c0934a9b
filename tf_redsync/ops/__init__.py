"""Ops of tf_redsync: select what to send, and add up what was received.

Every op exists twice with equal results: natively (C++) and in pure TensorFlow (`reference/`).
`backend()` says which one runs; `set_backend` or the environment variable `TF_REDSYNC_BACKEND`
forces one. A backend that is asked for and is missing is an error, never silently replaced.

Nothing here knows workers, methods or Keras.
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
