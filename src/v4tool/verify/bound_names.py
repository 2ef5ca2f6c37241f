"""Names bound in a Python syntax tree: in a whole tree, by imports, or in one scope.

Left out: scoping rules beyond what `.vt` files need.
"""

import ast
from collections.abc import Iterator


def _bound_here(element: ast.AST) -> Iterator[str]:
    """The names that one node of a syntax tree binds, without its children."""
    if isinstance(element, ast.Name) and isinstance(element.ctx, ast.Store | ast.Del):
        yield element.id
    elif isinstance(element, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield element.name
    elif isinstance(element, ast.arg):
        yield element.arg
    elif isinstance(element, ast.alias):
        yield (element.asname or element.name).split(".")[0]
    elif isinstance(element, ast.ExceptHandler) and element.name:
        yield element.name


def bound_names(tree: ast.AST) -> set[str]:
    """Every name bound anywhere in the tree: functions, parameters, variables, imports."""
    return {name for element in ast.walk(tree) for name in _bound_here(element)}


def imported_names(tree: ast.Module) -> set[str]:
    """The names that the module's own import statements bind."""
    imports = [s for s in tree.body if isinstance(s, ast.Import | ast.ImportFrom)]
    return {name for s in imports for alias in s.names for name in _bound_here(alias)}


def local_names(scope: ast.Module | ast.FunctionDef) -> set[str]:
    """The names bound in one scope, without those bound inside functions and classes in it.

    Variables of comprehensions and lambdas count as if they were the scope's own.
    """
    names = set(_bound_here(scope.args)) if isinstance(scope, ast.FunctionDef) else set()
    waiting: list[ast.AST] = list(scope.body)
    if isinstance(scope, ast.FunctionDef):
        waiting.append(scope.args)
    while waiting:
        element = waiting.pop()
        names.update(_bound_here(element))
        if not isinstance(element, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(element))
    return names
