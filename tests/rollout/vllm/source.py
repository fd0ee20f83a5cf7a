"""Looks names up in the source text of an unpacked vLLM, which is never imported."""

import ast
from pathlib import Path

from vapo_megatron.rollout.vllm.interface import Used


class Missing(Exception):
    """The source has no such name."""


class Source:
    """The Python files of a folder that holds the package vllm, such as site-packages."""

    def __init__(self, folder):
        self._folder = Path(folder)
        self._trees = {}

    def with_text(self, module, text):
        """Return the same source with another text for one module."""
        other = Source(self._folder)
        other._trees = {**self._trees, module: ast.parse(text)}
        return other

    def text(self, module):
        """Return a module's text."""
        path = self._folder.joinpath(*module.split("."))
        files = [f for f in (path.with_suffix(".py"), path / "__init__.py") if f.is_file()]
        if not files:
            raise Missing(f"there is no module {module}")
        return files[0].read_text()

    def complaints(self, row: Used) -> list[str]:
        """Say what of a row of the table is not as it says."""
        try:
            found = self.find(row.name) if row.name.startswith("vllm") else None
            places = [(place, self.find(place)) for place in row.used_in]
        except Missing as error:
            return [str(error)]
        said = []
        if row.takes:
            lacks = sorted(set(row.takes) - self._parameters(*found))
            said += [f"{row.name} does not take {name}" for name in lacks]
        if row.holds:
            strings = {n.value for n in ast.walk(found[1]) if isinstance(n, ast.Constant)}
            said += [f"{row.name} does not hold {s}" for s in row.holds if s not in strings]
        last = row.name.rpartition(":")[2].rpartition(".")[2]
        said += [f"{place} does not use {last}" for place, (_, n) in places if not uses(n, last)]
        return said

    def find(self, name):
        """Return the module that defines MODULE:NAME, and the node that does."""
        module, _, path = name.partition(":")
        where, node = module, self._tree(module)
        for part in path.split(".") if path else ():
            look = self._attribute if isinstance(node, ast.ClassDef) else self._global
            where, node = look(where, node, part)
            if node is None:
                raise Missing(f"{name}: there is no {part}")
        return where, node

    def _tree(self, module):
        if module not in self._trees:
            self._trees[module] = ast.parse(self.text(module))
        return self._trees[module]

    def _global(self, module, tree, name):
        for node in statements(tree):
            if name in bound(node):
                # What another package defines is not looked into.
                if not isinstance(node, ast.ImportFrom) or not is_vllms(node.module):
                    return module, node
                original = next(a.name for a in node.names if name in (a.asname, a.name))
                return self.find(f"{node.module}:{original}")
        return module, None

    def _attribute(self, module, node, name):
        for inner in statements(node):
            if name in bound(inner):
                return module, inner
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                if inner.attr == name and getattr(inner.value, "id", "") == "self":
                    return module, inner
        for where, base in self._bases(module, node):
            found = self._attribute(where, base, name)
            if found[1] is not None:
                return found
        return module, None

    def _bases(self, module, node):
        for base in node.bases:
            where, found = self._global(module, self._tree(module), getattr(base, "id", ""))
            if isinstance(found, ast.ClassDef):
                yield where, found

    def _parameters(self, module, node):
        """Names of a function's parameters, or of a class's fields and its constructor's."""
        if isinstance(node, ast.FunctionDef):
            arguments = node.args
            every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            return {a.arg for a in every}
        assert isinstance(node, ast.ClassDef), ast.dump(node)[:100]
        fields = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}
        constructors = (n for n in node.body if getattr(n, "name", "") == "__init__")
        return fields.union(
            *(self._parameters(module, n) for n in constructors),
            *(self._parameters(*base) for base in self._bases(module, node)),
        )


def statements(node):
    """A body's statements, with those under if, try and with."""
    for inner in node.body:
        yield inner
        if isinstance(inner, (ast.If, ast.Try, ast.With)):
            yield from statements(inner)
            for others in (getattr(inner, "orelse", []), getattr(inner, "finalbody", [])):
                yield from statements(ast.Module(others, []))


def bound(node):
    """Names that a statement binds."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.ImportFrom):
        return {a.asname or a.name for a in node.names}
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return {t.id for t in targets if isinstance(t, ast.Name)}


def is_vllms(module):
    """Whether an imported module is vLLM's; its own relative imports are not looked into."""
    return (module or "").partition(".")[0] == "vllm"


def uses(node, name):
    """Whether code refers to a global, an attribute or an imported name."""
    return any(
        name in (getattr(n, "id", None), getattr(n, "attr", None))
        or (isinstance(n, ast.alias) and n.name == name)
        for n in ast.walk(node)
    )
