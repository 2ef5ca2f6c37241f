"""Parser and static checks of `.vt` files (the published rules of vt-lang); nothing is executed.

A `.vt` file is Python. A function decorated with `@vt.NodeChecker(weights, outputs, templates)` is
a node, and only the operators listed below may appear in its body. `read_description` parses a file
and raises VtError, with file, line and node, for the first rule that is broken. Left out: running
it (`runtime`), and shapes.
"""

import ast
import builtins
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from v4tool.errors import VtError
from v4tool.untrusted import read_small, shortened
from v4tool.verify.bound_names import bound_names, imported_names, local_names


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TORCH_FUNCTIONS = _words(
    "abs add clamp div exp gelu log mul neg pow reciprocal rsqrt sigmoid silu sqrt sub tanh "
    "bmm embedding linear matmul layer_norm rms_norm softmax argmax cumsum max mean min sum "
    "cat gather index_select permute reshape squeeze stack transpose unsqueeze "
    "maximum minimum where arange full ones ones_like zeros zeros_like"
)
METHODS = TORCH_FUNCTIONS | _words(
    "contiguous expand view float half to masked_fill clone detach item size numel"
)
ATTRIBUTES = _words("T device dim dtype ndim numel shape size")
DTYPES = _words("bfloat16 bool double float float16 half int int32 int64 long")
BUILTINS = _words(
    "abs bool enumerate float int len list max min print range reversed round sorted sum tuple zip"
)
TORCH_MODULES = frozenset({"torch", "torch.nn.functional", "F"})
VT_FUNCTIONS = frozenset({"load_weight", "load_activation"})
FORBIDDEN_STATEMENTS = (
    ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.Delete, ast.ClassDef,
    ast.AsyncFunctionDef, ast.Try, ast.With, ast.Raise,
)  # fmt: skip
PLACEHOLDER = re.compile(r"\{(\w*)[^{}]*\}")


@dataclass(frozen=True)
class NodeSpec:
    """The declaration of one node.

    line: of the function. weights: local name -> checkpoint key. outputs: key of each returned
    value, None for an unkeyed one. templates: names that appear as `{name}` in keys. parameters: of
    the function, in order. doc: its docstring.
    """

    name: str
    line: int
    weights: dict[str, str]
    outputs: tuple[str | None, ...]
    templates: tuple[str, ...]
    parameters: tuple[str, ...]
    doc: str

    @property
    def keys(self) -> tuple[str, ...]:
        """The output keys, without the unkeyed values."""
        return tuple(key for key in self.outputs if key is not None)


@dataclass(frozen=True)
class Description:
    """A valid `.vt` file: its path, source and nodes by name."""

    path: Path
    source: str
    nodes: dict[str, NodeSpec]

    def error(self, node: NodeSpec, problem: str) -> VtError:
        """A VtError about one node, in one line, to be raised by the caller."""
        return VtError(f"{self.path.name}:{node.line}: node {node.name}: {problem}")


def read_description(path: Path | str) -> Description:
    """Parse a `.vt` file and check it; VtError names file, line and node."""
    path = Path(path)
    try:
        source = read_small(path).decode("utf-8")
    except OSError as error:
        raise VtError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise VtError(f"{path.name}: not UTF-8 text: {error.reason}") from None
    except ValueError as error:
        raise VtError(f"{path}: {error}") from None
    return _parsed(path, source)


@lru_cache(maxsize=4)
def _parsed(path: Path, source: str) -> Description:
    try:
        tree = ast.parse(source, str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise VtError(f"{path.name}:{line}: not Python: {getattr(error, 'msg', error)}") from None
    except (RecursionError, MemoryError):
        raise VtError(f"{path.name}: nested too deeply for Python's parser") from None
    try:
        return Description(path, source, _nodes(path, tree))
    except RecursionError:
        raise VtError(f"{path.name}: nested too deeply") from None


def _nodes(path: Path, tree: ast.Module) -> dict[str, NodeSpec]:
    """Every node of a file; VtError for the first rule that one breaks."""
    rules = _Rules(path, tree)
    nodes = {spec.name: spec for spec, _ in rules.declared}
    if not nodes:
        raise VtError(f"{path.name}: no function is decorated with @vt.NodeChecker")
    for spec, function in rules.declared:
        rules.check(spec, function, nodes)
    return nodes


class _Rules:
    """The names and nodes of one file, and the static rules about declarations as methods."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        self.path = path
        self.bound = bound_names(tree)
        self.imported = imported_names(tree) - {"torch", "F"}
        self.top_level = local_names(tree)
        self.vt = self._alias(tree, "vt_lang")
        self.imported.discard(self.vt or "")
        self.declared = [
            (self._declare(function, decorator), function)
            for function in tree.body
            if isinstance(function, ast.FunctionDef)
            for decorator in function.decorator_list
            if self._is_checker(decorator)
        ]

    def _fail(self, node: str, element: ast.AST, problem: str) -> VtError:
        line = getattr(element, "lineno", 1)
        return VtError(
            f"{self.path.name}:{line}: node {shortened(node)}: {shortened(problem, 200)}"
        )

    @staticmethod
    def _alias(tree: ast.Module, module: str) -> str | None:
        for statement in tree.body:
            for name in statement.names if isinstance(statement, ast.Import) else ():
                if name.name == module:
                    return name.asname or name.name
        return None

    def _is_checker(self, decorator: ast.expr) -> bool:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        return (
            isinstance(called, ast.Attribute)
            and called.attr == "NodeChecker"
            and isinstance(called.value, ast.Name)
            and called.value.id == self.vt
        )

    def _declare(self, function: ast.FunctionDef, decorator: ast.expr) -> NodeSpec:
        names = ("weights", "outputs", "templates")
        if not isinstance(decorator, ast.Call) or len(decorator.args) > len(names):
            raise self._fail(function.name, decorator, "expected weights, outputs and templates")
        given = dict(zip(names, decorator.args, strict=False))
        given |= {keyword.arg or "": keyword.value for keyword in decorator.keywords}
        if set(given) != set(names):
            raise self._fail(
                function.name, decorator, f"expected {', '.join(names)}, found {', '.join(given)}"
            )
        try:
            values = {name: ast.literal_eval(value) for name, value in given.items()}
        except (ValueError, TypeError):  # a list as a dict's key is a TypeError
            raise self._fail(
                function.name, decorator, "weights, outputs and templates must be literals"
            ) from None
        self._check_types(function, decorator, values)
        arguments = function.args
        return NodeSpec(
            name=function.name,
            line=function.lineno,
            weights=values["weights"],
            outputs=tuple(values["outputs"]),
            templates=tuple(values["templates"]),
            parameters=tuple(
                a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            ),
            doc=ast.get_docstring(function) or "",
        )

    def _check_types(
        self, function: ast.FunctionDef, decorator: ast.expr, values: dict[str, object]
    ) -> None:
        weights, outputs, templates = values["weights"], values["outputs"], values["templates"]
        good = (
            isinstance(weights, dict)
            and all(isinstance(x, str) for pair in weights.items() for x in pair)
            and isinstance(outputs, list | tuple)
            and all(x is None or isinstance(x, str) for x in outputs)
            and isinstance(templates, list | tuple)
            and all(isinstance(x, str) for x in templates)
        )
        if not good:
            raise self._fail(
                function.name,
                decorator,
                "expected {local name: checkpoint key}, [dump key or None, …], [template, …]",
            )

    def check(self, spec: NodeSpec, function: ast.FunctionDef, nodes: dict[str, NodeSpec]) -> None:
        """Check every static rule for one node; VtError for the first that is broken."""
        self._check_templates(spec, function)
        self._check_weight_names(spec, function)
        _Body(self, spec, function, nodes).check()

    def _check_templates(self, spec: NodeSpec, function: ast.FunctionDef) -> None:
        keys = [*spec.weights.values(), *spec.keys]
        used = {name for key in keys for name in PLACEHOLDER.findall(key)}
        for name in sorted(used - set(spec.templates)):
            raise self._fail(spec.name, function, f"placeholder {{{name}}} is not a template")
        for name in spec.templates:
            if name not in used:
                raise self._fail(spec.name, function, f"template {name} is used in no key")
            if name not in spec.parameters:
                raise self._fail(spec.name, function, f"template {name} is no parameter")

    def _check_weight_names(self, spec: NodeSpec, function: ast.FunctionDef) -> None:
        for name in spec.weights:
            if name in self.bound:
                raise self._fail(
                    spec.name, function, f"weight {name} has a name that the file binds itself"
                )
            if name in BUILTINS:
                raise self._fail(spec.name, function, f"weight {name} has the name of a builtin")


class _Body:
    """Checks the statements of one node against the permitted operators."""

    def __init__(
        self,
        rules: _Rules,
        spec: NodeSpec,
        function: ast.FunctionDef,
        nodes: dict[str, NodeSpec],
    ) -> None:
        self.rules, self.spec, self.function, self.nodes = rules, spec, function, nodes
        self.locals = local_names(function)
        self.called: set[ast.expr] = set()

    def _fail(self, element: ast.AST, problem: str) -> VtError:
        return self.rules._fail(self.spec.name, element, problem)

    def check(self) -> None:
        """Walk the body; calls are checked before the names and attributes in them."""
        elements = [e for statement in self.function.body for e in ast.walk(statement)]
        for element in elements:
            if isinstance(element, FORBIDDEN_STATEMENTS):
                word = type(element).__name__.lower()
                raise self._fail(element, f"the statement {word} is not in the language")
            if isinstance(element, ast.Call):
                self._check_call(element)
        for element in elements:
            if isinstance(element, ast.Attribute) and element not in self.called:
                self._check_attribute(element)
            elif isinstance(element, ast.Name) and isinstance(element.ctx, ast.Load):
                self._check_name(element)

    def _check_call(self, call: ast.Call) -> None:
        called = call.func
        if isinstance(called, ast.Name):
            if called.id in self.nodes:
                self._check_node_call(call, self.nodes[called.id])
        elif isinstance(called, ast.Attribute):
            self.called.add(called)
            owner = ast.unparse(called.value)
            if owner in TORCH_MODULES:
                self._require(called, called.attr in TORCH_FUNCTIONS, f"{owner}.{called.attr}")
            elif owner == self.rules.vt:
                self._require(called, called.attr in VT_FUNCTIONS, f"{owner}.{called.attr}")
            else:
                self._require(called, called.attr in METHODS, f"method {called.attr}")

    def _check_node_call(self, call: ast.Call, callee: NodeSpec) -> None:
        keywords = {keyword.arg for keyword in call.keywords}
        for name in callee.templates:
            if name not in keywords:
                raise self._fail(call, f"calls {callee.name} without template {name} as a keyword")

    def _check_attribute(self, attribute: ast.Attribute) -> None:
        owner = ast.unparse(attribute.value)
        if owner in TORCH_MODULES or owner == "torch.nn":
            inner = f"{owner}.{attribute.attr}" in {"torch.nn", *TORCH_MODULES}
            self._require(attribute, inner or attribute.attr in DTYPES, f"{owner}.{attribute.attr}")
        else:
            self._require(attribute, attribute.attr in ATTRIBUTES, f"attribute {attribute.attr}")

    def _require(self, element: ast.AST, allowed: bool, what: str) -> None:
        if not allowed:
            raise self._fail(element, f"{what} is not in the language")

    def _check_name(self, name: ast.Name) -> None:
        if name.id in self.rules.imported and name.id not in self.locals:
            raise self._fail(name, f"the imported {name.id} is for helpers, not for nodes")
        known = (
            name.id in self.locals
            or name.id in self.spec.weights
            or name.id in self.rules.top_level
            or name.id in BUILTINS
        )
        if not known:
            problem = (
                f"the builtin {name.id} is not in the language"
                if hasattr(builtins, name.id)
                else f"the name {name.id} is bound nowhere"
            )
            raise self._fail(name, problem)
