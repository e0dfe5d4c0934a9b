"""MuLoCo: the transformer of transformer.py by Muon, in local steps, exchanged in a few bits.

    python -m tf_redsync launch -n 2 examples/muloco.py
    ... --data_dir=tinyshakespeare.txt --epochs=20 --run_dir=runs/muloco20

Thérien et al. (2025), "MuLoCo: Muon is a Practical Inner Optimizer for DiLoCo", arXiv 2505.23725.
Each worker takes 30 steps of Muon; then the changes of the weights are exchanged with 4 bits an
element, and every rounding error is sent later.

Muon is for the matrices of hidden layers, those of attention among them (`rs.Muon`). Embeddings,
the output layer, biases and normalizations have AdamW, with the same learning rate. The outer
momentum is 0.5, not 0.9, because a training of a few dozen rounds is too short for that.
"""

import transformer
from absl import app, flags

import tf_redsync as rs

FLAGS = flags.FLAGS
FLAGS.set_default(
    "exchange",
    "BlockQuantized(method=DiLoCo(steps=30, "
    "outer=outer.Nesterov(learning_rate=0.7, momentum=0.5)), bits=4)",
)
FLAGS.set_default("run_dir", "runs/muloco")


def muon(rate) -> rs.Muon:
    """Muon, without weight decay of biases and normalizations."""
    inner = rs.Muon(
        rate,
        weight_decay=0.1,
        adam_weight_decay=0.1,
        exclude_layers=["positions", "logits"],
    )
    inner.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return inner


if __name__ == "__main__":
    flags.adopt_module_key_flags(transformer)  # for `--help`
    app.run(lambda argv: transformer.train(argv, muon))
