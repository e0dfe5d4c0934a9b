"""The networks of the tasks: Keras 3, float32, logits.

`mlp`, `conv`      for the 8x8 digits
`cnn`              three convolutions with BatchNormalization and two dense layers, for CIFAR-10
`resnet20`         He et al. (2016), section 4.2, n = 3
`resnet9`          a narrow ResNet-9, common for short trainings of CIFAR-10
`vgg`              six convolutions of a VGG with BatchNormalization and two dense layers
`transformer`      two blocks of causal self-attention, for characters
`gpt`              the same with four blocks of width 384
`translator`       encoder and decoder of three blocks each, for pairs of sentences
`lstm`             embedding and two LSTM layers, for words
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras


def mlp(shape: tuple[int, ...], classes: int) -> keras.Model:
    """64-256-128-10, as in `benchmarks/methods`."""
    from keras import Input, Sequential, layers

    hidden = [layers.Dense(n, "relu", kernel_initializer="he_normal") for n in (256, 128)]
    return Sequential([Input(shape), layers.Flatten(), *hidden, layers.Dense(classes)], name="mlp")


def conv(shape: tuple[int, ...], classes: int) -> keras.Model:
    """Two convolutions and two dense layers."""
    from keras import Input, Sequential, layers

    return Sequential(
        [
            Input(shape),
            *(layers.Conv2D(n, 3, padding="same", activation="relu") for n in (16, 32)),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, "relu"),
            layers.Dense(classes),
        ],
        name="conv",
    )


def cnn(shape: tuple[int, ...], classes: int) -> keras.Model:
    """16, 32 and 64 filters, each followed by pooling; a dense layer of 128."""
    from keras import Input, Sequential, layers

    parts: list[Any] = [Input(shape)]
    for filters in (16, 32, 64):
        parts += [*_normalized(layers.Conv2D(filters, 3, padding="same", use_bias=False))]
        parts.append(layers.MaxPooling2D())
    parts += [layers.Flatten(), layers.Dense(128, "relu"), layers.Dense(classes)]
    return Sequential(parts, name="cnn")


def vgg(shape: tuple[int, ...], classes: int) -> keras.Model:
    """Twice 32, 64 and 128 filters; a dense layer of 256."""
    from keras import Input, Sequential, layers

    parts: list[Any] = [Input(shape)]
    for filters in (32, 64, 128):
        for _ in range(2):
            parts += _normalized(layers.Conv2D(filters, 3, padding="same", use_bias=False))
        parts.append(layers.MaxPooling2D())
    parts += [layers.Flatten(), layers.Dense(256, "relu"), layers.Dense(classes)]
    return Sequential(parts, name="vgg")


def _normalized(layer: Any) -> list[Any]:
    from keras import layers

    return [layer, layers.BatchNormalization(momentum=0.9), layers.ReLU()]


def resnet20(shape: tuple[int, ...], classes: int) -> keras.Model:
    """Three stages of three blocks; projections are strided identities padded with zeros."""
    import keras
    from keras import layers

    def convolved(x: Any, filters: int, stride: int = 1) -> Any:
        layer = layers.Conv2D(
            filters, 3, stride, padding="same", use_bias=False, kernel_initializer="he_normal"
        )
        return layers.BatchNormalization(momentum=0.9)(layer(x))

    def shortcut(x: Any, filters: int) -> Any:
        if x.shape[-1] == filters:
            return x
        halved = layers.AveragePooling2D(1, 2)(x)
        return layers.Concatenate()([halved, layers.Rescaling(0.0)(halved)])

    inputs = keras.Input(shape)
    x = layers.ReLU()(convolved(inputs, 16))
    for filters in (16, 32, 64):
        for _ in range(3):
            y = layers.ReLU()(convolved(x, filters, 1 if x.shape[-1] == filters else 2))
            x = layers.ReLU()(layers.Add()([convolved(y, filters), shortcut(x, filters)]))
    logits = layers.Dense(classes)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, logits, name="resnet20")


def resnet9(shape: tuple[int, ...], classes: int, width: int = 32) -> keras.Model:
    """Stages of `width` to `8 * width` filters; two have a residual block of two convolutions."""
    import keras
    from keras import layers

    def convolved(x: Any, filters: int) -> Any:
        convolution = layers.Conv2D(
            filters, 3, padding="same", use_bias=False, kernel_initializer="he_normal"
        )
        for layer in _normalized(convolution):
            x = layer(x)
        return x

    inputs = keras.Input(shape)
    x = convolved(inputs, width)
    for factor, residual in ((2, True), (4, False), (8, True)):
        x = layers.MaxPooling2D()(convolved(x, factor * width))
        if residual:
            y = convolved(convolved(x, factor * width), factor * width)
            x = layers.Add()([x, y])
    x = layers.GlobalMaxPooling2D()(x)
    logits = layers.Rescaling(0.125)(layers.Dense(classes, use_bias=False)(x))
    return keras.Model(inputs, logits, name="resnet9")


def transformer(
    shape: tuple[int, ...], classes: int, width: int = 96, heads: int = 4, blocks: int = 2
) -> keras.Model:
    """Pre-norm blocks of attention and two dense layers; learned positions."""
    import keras
    from keras import layers

    inputs = keras.Input(shape, dtype="int32")
    positions = layers.Embedding(shape[0], width, name="positions")
    x = layers.Embedding(classes, width, name="characters")(inputs)
    x = layers.Add()([x, positions(layers.Lambda(_positions, output_shape=shape)(inputs))])
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)
        x = layers.Add()([x, y])
        y = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(width)(y)])
    logits = layers.Dense(classes, name="logits")(layers.LayerNormalization()(x))
    return keras.Model(inputs, logits, name="transformer")


def gpt(shape: tuple[int, ...], classes: int) -> keras.Model:
    """7.2 million weights: four blocks of width 384, six heads."""
    return transformer(shape, classes, width=384, heads=6, blocks=4)


def _positions(tokens: Any) -> Any:
    from keras import ops

    return ops.zeros_like(tokens) + ops.arange(tokens.shape[1], dtype="int32")


def translator(
    shape: tuple[int, ...],
    classes: int,
    width: int = 256,
    heads: int = 4,
    blocks: int = 3,
    dropout: float = 0.1,
) -> keras.Model:
    """A pre-norm encoder and decoder with a shared embedding.

    Inputs hold a source, padded with 0, followed by the beginning of a target.
    """
    import keras
    from keras import layers

    def embedded(tokens: Any) -> Any:
        positions = layers.Embedding(length, width)
        numbers = layers.Lambda(_positions, output_shape=(length,))(tokens)
        x = layers.Add()([pieces(tokens), positions(numbers)])
        return layers.Dropout(dropout)(x)

    def added(x: Any, part: Any) -> Any:
        return layers.Add()([x, layers.Dropout(dropout)(part(layers.LayerNormalization()(x)))])

    def attention(*memory: Any, **options: Any) -> Any:
        layer = layers.MultiHeadAttention(heads, width // heads)
        return lambda x: layer(x, *(memory or (x,)), **options)

    def dense(x: Any) -> Any:
        return layers.Dense(width)(layers.Dense(4 * width, "relu")(x))

    length = shape[0] // 2
    inputs = keras.Input(shape, dtype="int32")
    source, target = inputs[:, :length], inputs[:, length:]
    pieces = layers.Embedding(classes, width, name="pieces")
    mask = layers.Lambda(_is_not_padding, output_shape=(1, length))(source)
    x, y = embedded(source), embedded(target)
    for _ in range(blocks):
        x = added(added(x, attention(attention_mask=mask)), dense)
    x = layers.LayerNormalization()(x)
    for _ in range(blocks):
        y = added(y, attention(use_causal_mask=True))
        y = added(added(y, attention(x, attention_mask=mask)), dense)
    logits = layers.Dense(classes)(layers.LayerNormalization()(y))
    return keras.Model(inputs, logits, name="translator")


def _is_not_padding(tokens: Any) -> Any:
    return (tokens != 0)[:, None, :]


def lstm(shape: tuple[int, ...], classes: int, width: int = 200) -> keras.Model:
    """Embedding and two LSTM layers of 200, like the small model of Zaremba et al. (2014)."""
    from keras import Input, Sequential, layers

    return Sequential(
        [
            Input(shape, dtype="int32"),
            layers.Embedding(classes, width),
            layers.LSTM(width, return_sequences=True),
            layers.LSTM(width, return_sequences=True),
            layers.Dense(classes),
        ],
        name="lstm",
    )
