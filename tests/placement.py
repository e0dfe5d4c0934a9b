"""Finds tensors that would cross between GPU and host memory if a function were placed on a GPU.

This needs no GPU: TensorFlow's registry knows the GPU kernel of each op and which of its arguments
are in host memory. That holds for nearly all int32 tensors, which are mostly shapes. Without a
requested device TensorFlow chooses the kernel of the highest priority, then the GPU.
"""

from __future__ import annotations

import dataclasses
import functools

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import function_def_to_graph, kernels

CALLS = ("PartitionedCall", "StatefulPartitionedCall")
BRANCHES = ("If", "StatelessIf", "While", "StatelessWhile")
FUNCTIONS = ("f", "then_branch", "else_branch", "cond", "body")  # attributes that name functions
FREE = ("Placeholder", "Const", "_Arg")  # ops that can run on either device
HANDLES = (tf.resource, tf.variant, tf.string)


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A tensor produced on one device and consumed on the other."""

    producer: str  # op types
    consumer: str
    elements: int | None  # None if unknown at trace time
    what: str


def _fits(kernel, op) -> bool:
    for constraint in kernel.constraint:
        allowed = constraint.allowed_values.list.type
        types = op.get_attr(constraint.name) if allowed else []
        types = types if isinstance(types, (list, tuple)) else [types]
        if any(tf.as_dtype(t).as_datatype_enum not in allowed for t in types):
            return False
    return True


@functools.cache
def _registered(kind: str):
    return list(kernels.get_registered_kernels_for_op(kind).kernel)


def kernel_on_gpu(op):
    """The GPU kernel of an op; None if the op stays on the host."""
    for device in ("GPU", "DEFAULT"):
        for kernel in _registered(op.type):
            if kernel.device_type == device and _fits(kernel, op):
                return kernel
    return None


def _prefers_host(kind: str) -> bool:
    """Whether an op runs on the host unless a device is requested."""
    priorities = {k.device_type: k.priority for k in _registered(kind)}
    return priorities.get("CPU", 0) > max(priorities.get(d, 0) for d in ("GPU", "DEFAULT"))


def _requests_device(op) -> bool:
    return tf.DeviceSpec.from_string(op.device).device_type is not None


def _argument_names(arguments, op) -> list[str]:
    """The argument name of each tensor of an op; an argument may be a list."""
    names = []
    for argument in arguments:
        count = 1
        if argument.number_attr:
            count = op.get_attr(argument.number_attr)
        elif argument.type_list_attr:
            count = len(op.get_attr(argument.type_list_attr))
        names += [argument.name] * count
    return names


def _are_on_host(op, tensors, arguments, placed) -> list[bool | None]:
    """Whether each input or output of an op is in host memory; None means the producer's device."""
    if op.type in CALLS:
        return [None] * len(tensors)  # inlined
    names = _argument_names(arguments, op)
    if op.type in BRANCHES:
        # The condition and int32 or bool values pass through host memory.
        kinds = (tf.int32, tf.bool)
        return [
            n == "cond" or t.dtype in kinds or None for n, t in zip(names, tensors, strict=True)
        ]
    kernel = kernel_on_gpu(op)
    if kernel is None or (_prefers_host(op.type) and not placed and not _requests_device(op)):
        return [True] * len(tensors)
    return [name in kernel.host_memory_arg for name in names]


def _graphs(graph):
    """Graphs of a function and of all that it calls, each with whether its call has a device."""
    known, waiting = {"": graph}, [(graph, False)]
    while waiting:
        one, placed = waiting.pop()
        yield one, placed
        for op in one.get_operations():
            if op.type not in (*CALLS, *BRANCHES):
                continue
            names = {a.name for a in op.op_def.attr} & set(FUNCTIONS)
            for called in (op.get_attr(name).name for name in names):
                if called not in known:
                    definition = context.get_function_def(called)
                    known[called] = function_def_to_graph.function_def_to_graph(definition)
                    waiting.append((known[called], placed or _requests_device(op)))


def crossings(function) -> list[Crossing]:
    """All tensors that cross between devices in a concrete function and its callees."""
    found = []
    for graph, placed in _graphs(function.graph):
        sides = {}
        for op in graph.get_operations():
            where = _are_on_host(op, op.outputs, op.op_def.output_arg, placed)
            sides |= {t.ref(): side for t, side in zip(op.outputs, where, strict=True)}
        for op in graph.get_operations():
            where = _are_on_host(op, op.inputs, op.op_def.input_arg, placed)
            for tensor, side in zip(op.inputs, where, strict=True):
                left = sides[tensor.ref()]
                if None in (side, left) or side == left or tensor.op.type in FREE:
                    continue
                if tensor.dtype not in HANDLES:
                    what = f"{tensor.name} {tensor.dtype.name}{tensor.shape} -> {op.name}"
                    is_condition = op.type in BRANCHES and tensor is op.inputs[0]
                    elements = 1 if is_condition else tensor.shape.num_elements()
                    found.append(Crossing(tensor.op.type, op.type, elements, what))
    return found
