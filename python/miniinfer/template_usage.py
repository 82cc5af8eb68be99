"""What forms of a message a chat template is written for, read off its syntax tree.

The API carries message content as a string or as a list of parts, and tool call arguments as JSON
text. Templates differ in what they take: most want a string and an object, some loop over parts,
and a few want the JSON text. Nothing declares which, but the template's own source shows it.
"""

from __future__ import annotations

from jinja2 import nodes

__all__ = ["TemplateUsage"]


class TemplateUsage:
    """How a template uses what it is given.

    Attributes:
        loops_over_content: it takes content as a list of parts.
        tests_content_for_string: it asks whether content is a string, so it takes strings too.
        tests_content_for_none: it asks whether content is null, so it takes null too.
        concatenates_arguments: it takes the arguments of a tool call as JSON text.
    """

    def __init__(self, syntax: nodes.Template) -> None:
        self._aliases = _aliases_of_content(syntax)
        content_tests = {
            test.name for test in syntax.find_all(nodes.Test) if self._is_content(test.node)
        }
        self.loops_over_content = any(
            self._is_content(_unfiltered(loop.iter)) for loop in syntax.find_all(nodes.For)
        )
        self.tests_content_for_string = "string" in content_tests
        self.tests_content_for_none = bool(content_tests & {"none", "None"}) or any(
            self._is_content(comparison.expr)
            and any(
                isinstance(operand.expr, nodes.Const) and operand.expr.value is None
                for operand in comparison.ops
            )
            for comparison in syntax.find_all(nodes.Compare)
        )
        self.concatenates_arguments = _concatenates_arguments(syntax)

    def _is_content(self, node: nodes.Node) -> bool:
        return _reads(node, "content", self._aliases)


def _reads(node: nodes.Node, key: str, aliases: set[str]) -> bool:
    """Whether `node` is `x.key`, `x['key']`, or a name known to hold that."""
    if isinstance(node, nodes.Getattr):
        return node.attr == key
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Name) and node.name in aliases


def _unfiltered(node: nodes.Node) -> nodes.Node:
    """Strip filters and slices: `content | list` and `content[1:]` loop over content too."""
    while True:
        sliced = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        if not sliced and not isinstance(node, nodes.Filter):
            return node
        inner: nodes.Node | None = node.node  # type: ignore[attr-defined]
        if inner is None:
            return node
        node = inner


def _aliases_of_content(syntax: nodes.Template) -> set[str]:
    """Names that hold a message's content: `set` from it, or passed it as a macro's argument."""
    aliases: set[str] = set()
    macros = {macro.name: macro for macro in syntax.find_all(nodes.Macro)}
    while True:
        found = set(aliases)
        for assignment in syntax.find_all(nodes.Assign):
            if isinstance(assignment.target, nodes.Name) and _reads(
                _unfiltered(assignment.node), "content", aliases
            ):
                found.add(assignment.target.name)
        for call in syntax.find_all(nodes.Call):
            macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
            if macro is not None:
                found.update(
                    parameter.name
                    for parameter, argument in zip(macro.args, call.args, strict=False)
                    if _reads(_unfiltered(argument), "content", aliases)
                )
        if found == aliases:
            return aliases
        aliases = found


def _concatenates_arguments(syntax: nodes.Template) -> bool:
    """Whether the template adds `arguments` to strings as they are, without ever looking inside.

    Most templates print an object with `tojson`. DeepSeek's add the JSON text that the API carries.
    """

    def is_arguments(node: nodes.Node) -> bool:
        return _reads(node, "arguments", set())

    for node in syntax.find_all((nodes.Filter, nodes.Test, nodes.For, nodes.Getattr)):
        inner = node.iter if isinstance(node, nodes.For) else node.node  # type: ignore[attr-defined]
        if inner is not None and is_arguments(inner):
            return False
    operands = [
        operand
        for node in syntax.find_all((nodes.Add, nodes.Concat, nodes.Output))
        for operand in node.iter_child_nodes()
    ]
    return any(is_arguments(operand) for operand in operands)
