"""Dependencies between operations of a traced step, through branches and functions.

TensorFlow runs a conditional's branches as parts of the surrounding graph: an operation in a branch
waits for its own inputs and the predicate, not for the inputs of the rest of the branch.
"""

import functools

_FUNCTIONS = {
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "PartitionedCall": ("f",),
    "StatefulPartitionedCall": ("f",),
}
BACKWARD = "gradient_tape"  # part of the names of operations recorded by a tape


class Operation:
    """An operation and its position.

    Attributes:
        node: its definition.
        body: the function or graph that contains it.
        path: the enclosing calls, outermost first: `(operation, attribute)`.
    """

    def __init__(self, node, body):
        self.node, self.body, self.path = node, body, body.path

    @property
    def name(self):
        names = [call.node.name for call, _ in self.path]
        return "/".join([*names, self.node.name])

    @property
    def type(self):
        return self.node.op

    @property
    def is_conditional(self):
        return self.type in ("If", "StatelessIf")

    @property
    def data(self):
        return [text for text in self.node.input if not text.startswith("^")]

    @property
    def control(self):
        return [text[1:] for text in self.node.input if text.startswith("^")]

    @functools.cached_property
    def called(self):
        """The functions that it calls, each with this operation in its path."""
        library = self.body.library
        return [
            Body(
                library[self.node.attr[attribute].func.name],
                library,
                (*self.path, (self, attribute)),
            )
            for attribute in _FUNCTIONS.get(self.type, ())
        ]


class Body:
    """The operations of a graph, or of a function at one call site."""

    def __init__(self, definition, library, path=()):
        self.definition, self.library, self.path = definition, library, path
        nodes = definition.node_def if path else definition.node
        self.operations = {node.name: Operation(node, self) for node in nodes}
        arguments = definition.signature.input_arg if path else ()
        self.arguments = {argument.name: i for i, argument in enumerate(arguments)}

    def all_operations(self):
        """All operations of this body and of the functions that it calls."""
        for operation in self.operations.values():
            yield operation
            for body in operation.called:
                yield from body.all_operations()

    def source(self, text):
        """The operation that produces an input, and the number of its output."""
        name, *number = text.split(":")
        if name in self.arguments:
            call, _ = self.path[-1]
            position = self.arguments[name] + call.is_conditional
            return call.body.source(call.data[position])
        return self.operations[name], int(number[-1]) if number else 0

    def result(self, number):
        """The operation that produces an output of this function."""
        name = self.definition.signature.output_arg[number].name
        return self.source(self.definition.ret[name])


class Step:
    """The operations of a traced step and their dependencies.

    Args:
        concrete: a concrete function.
    """

    def __init__(self, concrete):
        graph = concrete.graph
        definition = graph.as_graph_def()
        self.top = Body(definition, {f.signature.name: f for f in definition.library.function})
        self.operations = list(self.top.all_operations())
        self._captured = {id(outer): inner.op.name for outer, inner in graph.captures}

    @property
    def collectives(self):
        return [o for o in self.operations if o.type.startswith(("Collective", "Nccl"))]

    def capture(self, variable):
        """Name of a variable's placeholder, or `None` if the step does not use it."""
        return self._captured.get(id(variable.handle))

    def assigned(self, variables):
        """Operations that assign to any of the variables."""
        names = {self.capture(v) for v in variables} - {None}
        found = [o for o in self.operations if o.type.startswith("Assign") and o.data]
        return [o for o in found if o.body.source(o.data[0])[0].name in names]

    def waits_for(self, operation):
        """All operations that must finish before `operation` starts."""
        return self._closure(operation, self._inputs(operation, control=True), control=True)

    def computed_from(self, operation):
        """All operations that an operation's values depend on."""
        return self._closure(operation, self._inputs(operation, control=False), control=False)

    def decided_by(self, conditional):
        """All operations that the predicate of a conditional depends on."""
        source = conditional.body.source(conditional.data[0])
        return {source[0]} | self._closure(None, [source], control=False)

    def _closure(self, first, sources, control):
        seen, waiting, found = set(), list(sources), set()
        while waiting:
            operation, number = waiting.pop()
            if (id(operation), number) in seen:
                continue
            seen.add((id(operation), number))
            if operation is not first:
                found.add(operation)
            waiting.extend(self._before(operation, number, control))
        return found

    def _before(self, operation, number, control):
        """Dependencies of an output; without a number, of the whole operation."""
        if not operation.called or number is None:
            yield from self._inputs(operation, control)
            if number is None:
                for body in operation.called:
                    yield from ((inner, None) for inner in body.operations.values())
            return
        if operation.is_conditional:
            yield operation.body.source(operation.data[0])
        if control:
            yield from ((operation.body.source(text)[0], None) for text in operation.control)
        yield from (body.result(number) for body in operation.called)

    def _inputs(self, operation, control):
        yield from (operation.body.source(text) for text in operation.data)
        if not control:
            return
        for inner in (operation, *(call for call, _ in operation.path)):
            yield from ((inner.body.source(text)[0], None) for text in inner.control)
            if inner is not operation and inner.is_conditional:
                yield inner.body.source(inner.data[0])


def is_backward(operation):
    return BACKWARD in operation.node.name
