"""Collectives over `tf.distribute`, which answer the requests that methods yield.

The modules here use private names of TensorFlow: launchers, instance keys, groups, ordering tokens
and the transport (NCCL or gRPC). They do not depend on methods, buckets or Keras.
"""
