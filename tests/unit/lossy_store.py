"""A coordination service whose requests fail once."""

import threading

import tensorflow as tf


class LossyStore:
    """A key-value store in this process whose first `set` of each key fails.

    Args:
        stores: Whether a failing `set` has stored its text, so that only the answer is lost.
    """

    def __init__(self, stores):
        self._stores = stores
        self._texts, self._failed = {}, set()
        self._changed = threading.Condition()

    def set_config_key_value(self, key, value):
        with self._changed:
            first = key not in self._failed
            self._failed.add(key)
            if key in self._texts:
                raise tf.errors.AlreadyExistsError(None, None, key)
            if not first or self._stores:
                self._texts[key] = value
                self._changed.notify_all()
            if first:
                raise tf.errors.UnavailableError(None, None, "the connection was reset")

    def get_config_key_value(self, key, timeout_in_ms):
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._texts, timeout_in_ms / 1000):
                raise tf.errors.DeadlineExceededError(None, None, key)
            return self._texts[key]

    def delete_config_key_value(self, key):
        with self._changed:
            below = [k for k in self._texts if k == key or k.startswith(f"{key}/")]
            for one in below:
                del self._texts[one]

    def keys(self):
        with self._changed:
            return sorted(self._texts)
