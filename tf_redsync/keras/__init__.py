"""Adapters between an exchange and the three families of Keras optimizers."""
