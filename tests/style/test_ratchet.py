"""Style as a test, with a ratchet: what ratchet.json records may stand, new code may not be worse.

ratchet.json maps a rule to {name: recorded number}. An entry is a debt: it is lowered when the code gets
better, removed when the rule is met, and never raised. Lines of a function are those that carry code: its
docstring, comments and blank lines are free.
"""

import ast
import io
import json
import re
import statistics
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.style.sources import SRC, TESTS, modules, name_of, parse

Function = ast.FunctionDef | ast.AsyncFunctionDef
MEDIAN = "median_function_lines"
LIMITS = {"function_lines": 50, "module_lines": 400, "positional_parameters": 5, MEDIAN: 8}
NAMES_REFUSED = {"util", "utils", "helper", "helpers", "common", "base", "manager"}
RECORDED: dict[str, dict[str, float]] = json.loads((Path(__file__).parent / "ratchet.json").read_text())


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function, bool]]:
    """Each function with its qualified name, and whether it is a method that gets self or cls."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            static = any(ast.unparse(decorator) == "staticmethod" for decorator in node.decorator_list)
            yield prefix + node.name, node, isinstance(tree, ast.ClassDef) and not static
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            inside = f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix
            yield from functions(node, inside)


@cache
def code_lines(path: Path) -> frozenset[int]:
    """The lines of a file that carry code."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    return frozenset(lines)


def has_docstring(node: Function) -> bool:
    return ast.get_docstring(node, clean=False) is not None


def lines_of(node: Function, path: Path) -> int:
    lines = set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    if has_docstring(node):
        lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines & code_lines(path))


def is_stub(node: Function) -> bool:
    """A protocol's method or an overload: a docstring and `...`, or less."""
    return all(isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) for line in node.body)


@cache
def measured(rule: str) -> dict[str, float]:
    """Name to number, for every place that the rule looks at."""
    if rule == "module_lines":
        return {name_of(path): len(path.read_text().splitlines()) for path in modules(SRC)}
    if rule == MEDIAN:
        bodies = [
            lines_of(node, path) for path in modules(SRC) for _, node, _ in functions(parse(path)) if not is_stub(node)
        ]
        return {"src": statistics.median(bodies) if bodies else 0}
    return {
        f"{name_of(path)}:{name}": lines_of(node, path)
        if rule == "function_lines"
        else len(node.args.posonlyargs) + len(node.args.args) - method
        for path in modules(SRC)
        for name, node, method in functions(parse(path))
    }


@pytest.mark.parametrize("rule", LIMITS)
def test_nothing_is_worse_than_recorded(rule: str) -> None:
    """Functions, modules and parameter lists keep to the numbers of the style, or to what is recorded."""
    recorded = RECORDED.get(rule, {})
    worse = [
        f"{name}: {number:g}, allowed {recorded.get(name, LIMITS[rule]):g}"
        for name, number in measured(rule).items()
        if number > recorded.get(name, LIMITS[rule])
    ]
    assert not worse, f"{rule}\n" + "\n".join(worse)


def test_the_ratchet_only_tightens() -> None:
    """What is recorded is still true: better code lowers or removes its entry."""
    loose = [
        f"{rule}: {name}: recorded {number:g}, now {measured(rule).get(name, 0):g}"
        for rule, entries in RECORDED.items()
        for name, number in entries.items()
        if measured(rule).get(name, 0) < number or number <= LIMITS[rule]
    ]
    assert not loose, "lower or remove in tests/style/ratchet.json:\n" + "\n".join(loose)


def test_no_module_is_named_after_nothing() -> None:
    """A module is named by its noun: never utils, helpers, common, base or manager."""
    found = [name_of(path) for path in modules(SRC) if NAMES_REFUSED & {*path.with_suffix("").parts}]
    assert not found, "\n".join(found)


def test_no_type_checker_is_silenced() -> None:
    """There is no `type: ignore`, nor another checker's form of it, in src."""
    silencer = re.compile(r"#\s*(type:\s*ignore|pyright:|mypy:)")
    found = [
        f"{name_of(path)}:{token.start[0]}: {token.string}"
        for path in modules(SRC)
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if token.type == tokenize.COMMENT and silencer.search(token.string)
    ]
    assert not found, "\n".join(found)


def swallows(node: ast.AST) -> bool:
    """`except Exception: pass` in any of its forms."""
    everything = {"Exception", "BaseException"}
    if isinstance(node, ast.ExceptHandler):
        caught = {"Exception"} if node.type is None else set(re.findall(r"\w+", ast.unparse(node.type)))
        silent = all(
            isinstance(line, ast.Pass | ast.Continue)
            or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
            for line in node.body
        )
        return bool(caught & everything) and silent
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
        return bool({ast.unparse(argument) for argument in node.args} & everything)
    return False


def test_nothing_is_swallowed() -> None:
    """No handler catches everything and says nothing."""
    found = [
        f"{name_of(path)}:{node.lineno}" for path in modules(SRC) for node in ast.walk(parse(path)) if swallows(node)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("try: f()\nexcept Exception: pass", True),
        ("try: f()\nexcept: ...", True),
        ("try: f()\nexcept (ValueError, BaseException): pass", True),
        ("with suppress(Exception): f()", True),
        ("try: f()\nexcept ValueError: pass", False),
        ("try: f()\nexcept Exception: log()", False),
        ("with contextlib.suppress(OSError): f()", False),
    ],
)
def test_swallowing_is_recognised(source: str, expected: bool) -> None:
    """The walk tells a swallowed exception from an expected or a reported one."""
    assert any(swallows(node) for node in ast.walk(ast.parse(source))) is expected


def test_every_test_has_a_sentence() -> None:
    """Each test function, those of the shipped contract suites too, states its behaviour in a docstring."""
    found = [
        f"{name_of(path)}:{node.lineno}: {name}"
        for path in modules(TESTS, SRC / "testing")
        for name, node, _ in functions(parse(path))
        if node.name.startswith("test_") and not has_docstring(node)
    ]
    assert not found, "\n".join(found)


def test_the_numbers_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """The style's numbers are printed with every check, so that a drift is seen before it hurts."""
    sizes = measured("function_lines").values()
    longest = max(measured("module_lines").values(), default=0)
    with capsys.disabled():
        print(
            f"\nstyle: {len(sizes)} functions, median {measured(MEDIAN)['src']:g} lines, longest "
            f"{max(sizes, default=0):g}; {len(measured('module_lines'))} modules, longest {longest:g} lines; "
            f"{sum(map(len, RECORDED.values()))} recorded exceptions"
        )
