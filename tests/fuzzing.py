"""Mutation of texts for fuzz tests (tokens replaced, dropped, repeated), and a memory limit.

A text of the corpus is cut into tokens; some are replaced by what is known to be hard for parsers
of that language (`HOSTILE`), the rest of the damage is on bytes. Left out: what a parser must do
with the result (`test_fuzz.py`).
"""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hypothesis import strategies as st

CORPUS = Path(__file__).parent / "fuzz_corpus"
TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|[\w.+-]+|\s+|.', re.DOTALL)

_NUMBERS = (
    *("0", "-0", "-1", "1.5", "1e999", "-1e-999", "true", "inf", "nan", "NaN", "-Infinity"),
    *(str(2**31), str(2**63 - 1), str(2**63), str(2**64), "9" * 30, "9" * 4300, "9" * 5000),
)
_TEXTS = (
    *('""', '"x"', r'"\u0000"', r'"\n"', r'"\ud800"', '"\u2028"', '"../../x"', '"/dev/zero"'),
    *('"' + "x" * 300 + '.safetensors"', '"' + "9" * 5000 + '"', '"~nobody-there/x"', '"."'),
)
_NESTS = (
    *("[]", "{}", "[[[]]]", "[" * 3000, "[" * 990 + "]" * 990, "[" * 300 + "]" * 300),
    *('{"a":' * 3000, '{"a":' * 300 + "1" + "}" * 300),
)
_JSON = (
    *(*_NUMBERS, *_TEXTS, *_NESTS, "null", "[" + "4611686018427387903," * 399 + "1]"),
    *('{"a": 1, "a": 2}', '{"shape": [0], "dtype": "F32", "data_offsets": [0, 0]}'),
)
_TOML = (
    *(*_NUMBERS, *_TEXTS, *_NESTS, "0x" + "f" * 5000, "1979-05-27T07:32:00Z", "99:99:99", "'''"),
    *('"""', "[[cases]]", "[a]", "a." * 3000 + "b = 1", "a = {b = 1}\n", "\\", "\0", "\r", "#"),
)
_STEPS = ("reshape", "transpose", "squeeze", "take -1", "split", "deinterleave", "offset")
_MAP = (
    *(*_TOML, '"{n}"', '"{n}.{n}"', '"{key}{key}"', '"{i+1}"', '"{i}"', '"("', '"take -1 0:1"'),
    *(f'"{verb} {size}"' for verb in _STEPS for size in ("0", "-1", "9" * 30, "1,1", "x", "0 0/0")),
)
_PYTHON = (
    *(*_NUMBERS, *_TEXTS, *_NESTS, "(" * 90 + ")" * 90, "-" * 20000, "x" + ".a" * 20000),
    *("{[]: 1}", "{**x}", "{{}}", "{1, []}", "b'x'", "1j", "f'{x!r}'", "f'{'", r"'\N{no}'", "\0"),
    *("@vt", "@vt.NodeChecker", "@vt.NodeChecker()", "*", "**", ":=", "await", "yield", "..."),
    *("match x:\n", "if 1:\n", "    ", "\t", "\\\n", "*a, **b", "lambda: 0", "x for x in x"),
    *("vt", "torch", "F", "print", "exec"),
)
HOSTILE = {
    "header": _JSON,
    "recording": _JSON,
    "index": _JSON,
    "config": _JSON,
    "profile": _TOML,
    "map": _MAP,
    "vt": _PYTHON,
}
"""Tokens that are hard to parse, by the folder of the corpus."""


class Text(bytes):
    """Bytes that are shown shortened when a test fails; whole they lie in the test's directory."""

    def __repr__(self) -> str:
        shown = super().__repr__()
        return shown if len(shown) <= 400 else f"{shown[:200]}...{shown[-200:]}"


def texts(kind: str) -> list[str]:
    """The corpus of one kind."""
    return [path.read_text(encoding="utf-8") for path in sorted((CORPUS / kind).iterdir())]


@st.composite
def damaged(draw: st.DrawFn, originals: Sequence[str], hostile: Sequence[str]) -> Text:
    """A text of the corpus after 0 to 4 changes of tokens, then perhaps one of bytes."""
    tokens: list[str] = TOKEN.findall(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(tokens)))
        change = draw(st.sampled_from(("replace", "replace", "insert", "drop", "repeat", "take")))
        if change == "replace":
            tokens[at : at + 1] = [draw(st.sampled_from(hostile))]
        elif change == "insert":
            tokens.insert(at, draw(st.one_of(st.sampled_from(hostile), st.text(max_size=5))))
        elif change == "drop":
            del tokens[at : at + draw(st.integers(1, 5))]
        elif change == "repeat":
            tokens[at:at] = tokens[at : at + draw(st.integers(1, 40))]
        else:
            tokens[at : at + 1] = tokens[(there := draw(st.integers(0, len(tokens)))) : there + 1]
    return Text(draw(_bytes("".join(tokens).encode("utf-8", "surrogatepass"))))


@st.composite
def _bytes(draw: st.DrawFn, data: bytes) -> bytes:
    change = draw(st.sampled_from(("none",) * 6 + ("cut", "byte", "mark", "utf-16", "other")))
    at = draw(st.integers(0, len(data)))
    if change == "cut":
        return data[:at]
    if change == "byte":
        return data[:at] + draw(st.binary(min_size=1, max_size=2)) + data[at + 1 :]
    if change == "mark":
        return b"\xef\xbb\xbf" + data
    if change == "utf-16":
        return data.decode("utf-8", "replace").encode("utf-16")
    return draw(st.binary(max_size=200)) if change == "other" else data


@contextmanager
def memory_limit(extra: int) -> Iterator[None]:
    """Let the process take `extra` bytes of address space more than now; a no-op but on Linux."""
    if sys.platform != "linux":
        yield
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + extra
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
