"""Collectives over `tf.distribute`: they answer the requests that methods yield.

The modules here use private names of TensorFlow: launchers, instance keys, groups, tokens and the
transport (NCCL or gRPC). Nothing here knows a method, a bucket or a Keras object.
"""
