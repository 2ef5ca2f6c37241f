"""Products of all kinds of weights with one backend, as one digest. Run as a script with a kernel.

`python -m tests.product_battery KERNEL CKPT IDS OUT` takes the extension module in the file KERNEL
in place of the installed one, and prints the digest of the products and the payload hash of a dump.
"""

import hashlib
import importlib.util
import json
import math
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from tests.quant_operands import fp4, fp8, generator, numerics, spread
from v4tool.quant.linear import batched_linear_hi, grouped_linear, linear_hi, q_linear

SHAPES = [
    # rows of x, rows of the weight, columns
    (1, 1, 32),
    (2, 16, 128),
    (3, 17, 96),
    (8, 33, 160),
    (33, 130, 256),
    (130, 40, 384),
    (400, 24, 128),
]
ORDINARY, ALL = (118, 136), (0, 256)
"""Scale codes; with all of them products are NaN, infinite and subnormal, too."""


def products(backend: str, threads: int) -> Iterator[Tensor]:
    """All products, in a fixed order."""
    how = numerics(backend, threads)
    for seed, (m, n, k) in enumerate(SHAPES):
        for scales, binades in ((ORDINARY, 0), (ORDINARY, 12), (ALL, 30)):
            g = generator(seed)
            x = spread(g, m, k, binades=binades).bfloat16()
            x[torch.rand(m, k, generator=g) < 0.1] = -0.0
            yield q_linear(x, fp4(g, n, k, scales), how)
            yield q_linear(x, fp8(g, n, k, scales, nan=scales == ALL), how)
            groups = x.unsqueeze(1).expand(m, 2, k)
            yield grouped_linear(groups, fp8(g, 2 * n, k, scales), how)
            w = spread(g, n, k, binades=binades)
            if scales == ALL:
                x[0, 0], w[-1, -1] = math.inf, math.nan
            yield linear_hi(x, w.bfloat16(), how)
            yield linear_hi(x, w.float(), how)
            many = spread(g, 3, n, k, binades=binades).bfloat16()
            yield batched_linear_hi(x.expand(3, m, k), many, how)
            by_columns = many.transpose(1, 2).contiguous().transpose(1, 2)
            yield batched_linear_hi(x.expand(3, m, k), by_columns, how)


def digest(backend: str, threads: int = 1) -> str:
    """SHA-256 over the bits of all products; every NaN is the same."""
    sha = hashlib.sha256()
    for product in products(backend, threads):
        sha.update(product.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def install(path: str) -> None:
    """Use the extension module in a file in place of `v4tool.quant._kernel`."""
    import v4tool.quant

    name = "v4tool.quant._kernel"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    v4tool.quant._kernel = module  # type: ignore[attr-defined]


def main(kernel: str, ckpt: str, ids: str, out: str) -> None:
    """Print what the kernel in a file gives: JSON on stdout."""
    install(kernel)

    import v4tool
    from v4tool.quant import _c_product

    assert _c_product._kernel.__file__ == kernel
    [result] = v4tool.dump(ckpt, input_ids=json.loads(ids), decode=2, out=out, backend="c")
    digests = sorted({digest("c", threads) for threads in (1, 2)})
    print(json.dumps({"products": digests, "payload": result.payload_sha256}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
