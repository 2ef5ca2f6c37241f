"""Type stubs of the C extension; every argument is an address or a size (see `_kernel.c`)."""

INTERFACE: int
BLOCK: int
GROUPS: int
TILE: int

def product(
    kind: int,
    block: int,
    m: int,
    n: int,
    k: int,
    x: int,
    x_scale: int,
    wide: int,
    codes: int,
    scale: int,
    table: int,
    start: int,
    stop: int,
    acc: int,
    out: int,
    out_bf16: bool,
    /,
) -> None: ...
def batched(
    count: int,
    m: int,
    n: int,
    k: int,
    x: int,
    x_next: int,
    x_row: int,
    kind: int,
    w: int,
    w_next: int,
    packed: int,
    acc: int,
    out: int,
    /,
) -> None: ...
def pack_fp8(
    x: int, stride: int, group: int, code_of: int, e4m3: int, e8m0: int, m: int, k: int, out: int, /
) -> None: ...
def pack_fp8_for_fp4(
    x: int,
    stride: int,
    group: int,
    code_of: int,
    e4m3: int,
    e8m0: int,
    m: int,
    k: int,
    out: int,
    x_scale: int,
    wide: int,
    /,
) -> None: ...
def pack_bf16(x: int, stride: int, m: int, k: int, out: int, /) -> None: ...
