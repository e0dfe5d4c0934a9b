"""What runs a step for one optimizer: who the worker is, its state, the exchange, its checks."""
