"""Random values for the tensors of a checkpoint, such that every path of the model is taken.

Every linear map has a gain near 1, so that activations neither grow nor vanish over many layers;
the experts' gate and up projections have a larger one, so that some of their values exceed the
SwiGLU limit. A tensor's bytes depend only on its name, its shape and the seed: raw words of a bit
generator are mapped through tables, without a library's samplers. Left out: any other likeness to
trained weights.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import torch

from v4tool.checkpoint.layout import TensorSpec
from v4tool.config import ModelConfig
from v4tool.quant.formats import E2M1, E4M3, e4m3_encode

SYNTH_VERSION = 1
"""Version of the values: with another one, a seed gives another checkpoint."""

CHUNK = 1 << 16
"""Bytes made at a time: it stays in the cache, and large tensors are never held whole."""

GAINS = {"w1": 3.5, "w3": 3.5, "w2": 0.1, "gate": 1.5, "head": 2.0, "e_proj": 0.7, "h_proj": 0.7}
"""RMS of a linear map's output for an input of RMS 1, by its name; 1 for all others.

With 3.5, about one value in 100 exceeds a limit of 10 on either side; 0.1 brings the rest back to
1.
"""

DEVIATIONS = {
    "embed": 1.0, "norm": 0.1, "attn_sink": 1.0, "ape": 0.5, "bias": 0.2,
    "_base": 0.5, "_scale": 0.25,
}  # fmt: skip
"""Standard deviation by the end of a tensor's name, for tensors without a gain."""

FP8_SPREAD = 112.0
"""Standard deviation of the values of FP8 codes: a quarter of the largest value."""
RARE_CODES = 16
"""Of 256 table entries, those drawn among all codes but NaN; the others follow the normal curve."""

SCALE_STEPS = (-2, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 2)
"""Exponents of block scales relative to their mean: neighbours differ, as in the release."""


def tensor_bytes(
    name: str, specs: Mapping[str, TensorSpec], config: ModelConfig, seed: int
) -> Iterator[bytes]:
    """A tensor's stored bytes in pieces of at most some hundred KB; the hash table in one."""
    spec = specs[name]
    words = _bit_generator(name, seed)
    if spec.dtype == "I8":
        return _raw(words, spec.nbytes)  # uniform E2M1 codes are nearly normal
    if spec.dtype == "F8_E4M3":
        table = _fp8_table(words)
        return (piece.translate(table) for piece in _raw(words, spec.nbytes))
    if spec.dtype == "F8_E8M0":
        table = _scale_table(name, specs[name.removesuffix("scale") + "weight"])
        return (piece.translate(table) for piece in _raw(words, spec.nbytes))
    if spec.dtype == "I64":
        return iter([_hash_table(words, spec.shape, config.n_routed_experts)])
    mean, deviation = _mean(name, spec, config), _deviation(name, spec)
    return _normal(words, spec, mean, deviation)


def _bit_generator(name: str, seed: int) -> np.random.SFC64:
    digest = hashlib.sha256(name.encode()).digest()
    return np.random.SFC64(np.random.SeedSequence([seed, int.from_bytes(digest[:16], "little")]))


def _words(words: np.random.SFC64, count: int) -> npt.NDArray[np.uint64]:
    """`count` raw 64-bit words; little endian in memory on every machine."""
    return np.asarray(words.random_raw(count)).astype("<u8", copy=False)


def _raw(words: np.random.SFC64, nbytes: int) -> Iterator[bytes]:
    for start in range(0, nbytes, CHUNK):
        size = min(CHUNK, nbytes - start)
        yield _words(words, -(-size // 8)).tobytes()[:size]


@lru_cache
def _quantiles(count: int) -> npt.NDArray[np.float64]:
    """Quantiles of the normal distribution at the midpoints of `count` equal intervals, ascending.

    Rounded to multiples of 2^-20, far more than C libraries' logarithms differ by.
    """
    inverse = NormalDist().inv_cdf
    upper = np.array([inverse((i + 0.5) / count) for i in range(count // 2, count)])
    upper = np.round(upper * 2.0**20) / 2.0**20
    return np.concatenate([-upper[::-1], upper])


def _fp8_table(words: np.random.SFC64) -> bytes:
    """256 E4M3 codes, normally distributed but for `RARE_CODES` of them; no NaN."""
    codes = e4m3_encode(torch.from_numpy(_quantiles(256) * FP8_SPREAD)).numpy()
    drawn = _words(words, RARE_CODES)
    rare = (drawn % 127 | (drawn >> 63) << 7).astype(np.uint8)
    codes[:: 256 // RARE_CODES] = rare
    return bytes(codes)


def _scale_table(name: str, weight: TensorSpec) -> bytes:
    """256 E8M0 codes around the exponent that gives the weight its standard deviation.

    That exponent is no integer: some of the entries are one larger, so that the mean square is
    right.
    """
    steps = np.array(SCALE_STEPS)
    unit = _code_rms(weight.dtype) * math.sqrt(np.mean(4.0**steps))
    exponent = math.log2(_deviation(name.removesuffix("scale") + "weight", weight) / unit)
    low = math.floor(exponent)
    share = (4.0 ** (exponent - low) - 1) / 3
    above = np.arange(16) < round(16 * share)
    return bytes((127 + low + np.add.outer(above, steps)).astype(np.uint8))


@lru_cache
def _code_rms(dtype: str) -> float:
    """Root mean square of the codes' values of an FP4 or FP8 weight before scaling."""
    if dtype == "I8":
        return float(E2M1.double().square().mean().sqrt())
    codes = e4m3_encode(torch.from_numpy(_quantiles(256) * FP8_SPREAD))
    return float(E4M3[codes.long()].double().square().mean().sqrt())


def _deviation(name: str, spec: TensorSpec) -> float:
    """Standard deviation of a tensor's values."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    for ending, deviation in DEVIATIONS.items():
        if module.endswith(ending):
            return deviation
    inputs = spec.shape[-1] * (2 if spec.dtype == "I8" else 1)
    return GAINS.get(module, 1.0) / math.sqrt(inputs)


def _mean(name: str, spec: TensorSpec, config: ModelConfig) -> npt.NDArray[np.float64] | float:
    """Mean of a tensor's values: 1 for norms and hc scales; hc bases keep the streams different."""
    if name.endswith("norm.weight") or name.endswith("_scale"):
        return 1.0
    if name.endswith(("hc_attn_base", "hc_ffn_base")):
        mixed = 2 * config.hc_mult  # the entries of pre and post come first
        return np.concatenate([np.zeros(mixed), 3 * np.eye(config.hc_mult).reshape(-1)])
    return 0.0


def _normal(
    words: np.random.SFC64,
    spec: TensorSpec,
    mean: npt.NDArray[np.float64] | float,
    deviation: float,
) -> Iterator[bytes]:
    """BF16 or F32 values; 16 random bits choose one of 65536 quantiles."""
    count, quantiles = math.prod(spec.shape), _quantiles(1 << 16)
    if count <= quantiles.size:
        drawn = next(_indices(words, count, count))
        return iter([bytes(_encode(mean + deviation * quantiles[drawn], spec.dtype))])
    table = _encode(mean + deviation * quantiles, spec.dtype)
    indices = _indices(words, count, CHUNK // table.itemsize)
    return (bytes(np.take(table, drawn, mode="clip")) for drawn in indices)


def _indices(words: np.random.SFC64, count: int, step: int) -> Iterator[npt.NDArray[np.uint16]]:
    """`count` 16-bit numbers, `step` at a time."""
    for start in range(0, count, step):
        size = min(step, count - start)
        yield _words(words, -(-size // 4)).view("<u2")[:size]


def _encode(values: npt.NDArray[np.float64], dtype: str) -> npt.NDArray[np.uint16 | np.uint32]:
    """Binary64 to the bits of F32, or of BF16 by way of F32, ties to even, little endian."""
    bits = values.astype("<f4").view("<u4")
    if dtype == "F32":
        return bits
    rounded: npt.NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return rounded


def _hash_table(words: np.random.SFC64, shape: tuple[int, ...], experts: int) -> bytes:
    """`tid2eid` [V, K]: K different experts per row, all choices equally likely."""
    rows, picks = shape
    out = np.empty(shape, "<i8")
    for k in range(picks):
        drawn = (_words(words, rows) >> np.uint64(32)).astype(np.int64) % (experts - k)
        for taken in np.sort(out[:, :k], axis=1).T:
            drawn += drawn >= taken  # the drawn number counts only the experts still free
        out[:, k] = drawn
    return out.tobytes()
