"""What runs a step for one optimizer: its worker, its state, the exchange and its checks."""
