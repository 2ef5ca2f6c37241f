"""`model.vt` under a minimal implementation of vt-lang's published rules, without v4tool.

The host below binds weights, compares outputs as FP32 by allclose after an exact shape check, and
lets values flow on as computed. It knows no units, no handing on, no decode steps of the main
stack.
"""

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from tests.conftest import GOLDEN, MINI_FILES, needs_golden
from v4tool.quant.formats import E2M1, E4M3, E8M0
from v4tool.verify.tensors import OWN_DESCRIPTION

LEN3 = MINI_FILES[0]
Namespace = dict[str, Any]


class Host:
    """A module `vt_lang` over one recording and the shards of one checkpoint."""

    def __init__(self) -> None:
        self.namespace: Namespace = {}
        self.recorded = dict(LEN3.tensors())
        self.passed: list[str] = []
        self.module = types.ModuleType("vt_lang")
        self.module.__dict__.update(
            NodeChecker=self.node_checker,
            register_safetensors=self.register,
            load_weight=self.weight,
            load_activation=self.recorded.__getitem__,
        )

    def register(self, index: str, dump: str) -> None:
        assert index == str(LEN3.ckpt / "model.safetensors.index.json")
        assert dump == str(LEN3.path)
        shards = sorted(LEN3.ckpt.glob("*.safetensors"))
        files = [safe_open(str(shard), framework="pt") for shard in shards]
        self.files = {key: file for file in files for key in file.keys()}  # noqa: SIM118

    def weight(self, key: str) -> Tensor:
        return self.files[key].get_tensor(key)  # type: ignore[no-any-return]

    def node_checker(
        self, weights: dict[str, str], outputs: list[str | None], templates: list[str]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            def node(*args: Any, **kwargs: Any) -> Any:
                values = {name: kwargs[name] for name in templates}
                bound = {n: self.weight(k.format(**values)) for n, k in weights.items()}
                assert not bound.keys() & self.namespace.keys()
                self.namespace.update(bound)
                result = function(*args, **kwargs)
                for name in bound:
                    del self.namespace[name]
                given = result if isinstance(result, tuple) else (result,)
                for key, value in zip(outputs, given, strict=False):
                    if key is not None:
                        self.compare(key.format(**values), value)
                return result

            return node

        return decorate

    def compare(self, key: str, actual: Tensor) -> None:
        expected = self.recorded[key]
        assert actual.shape == expected.shape, key
        assert torch.allclose(actual.float(), expected.float(), rtol=1e-4, atol=1e-4), key
        self.passed.append(key)

    def load(self, monkeypatch: pytest.MonkeyPatch) -> Namespace:
        monkeypatch.setitem(sys.modules, "vt_lang", self.module)
        monkeypatch.setenv("VT_WEIGHT_FILE", str(LEN3.ckpt / "model.safetensors.index.json"))
        monkeypatch.setenv("VT_ACTIVATION_FILE", str(LEN3.path))
        monkeypatch.setenv("VT_NUM_THREADS", "1")
        exec(compile(OWN_DESCRIPTION.read_text(), "model.vt", "exec"), self.namespace)
        return self.namespace


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host()
    host.load(monkeypatch)
    return host


def test_runs_unchanged(host: Host) -> None:
    """The whole prefill and the MTP decode pass; weights are bound no longer than a node runs."""
    host.namespace["llm"]()
    host.namespace["mtp_decode"]()
    expected = {k for k in host.recorded if not k.startswith("decode.") and k != "input_ids"}
    assert set(host.passed) == expected
    assert len(host.passed) == len(expected)


def test_mtp_decode_alone(host: Host) -> None:
    """Without a prefill in this process it takes streams and window from the recording."""
    host.namespace["mtp_decode"]()
    assert set(host.passed) == {k for k in host.recorded if k.startswith("mtp.0.decode.")}


# ------------------------------------------------------------------ its number formats


def test_every_weight_code(host: Host) -> None:
    """All 256 bytes of two E2M1 codes, all E4M3 and E8M0 codes, as SPEC 2 has them."""
    values = host.namespace["weight_values"]
    byte = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    one = torch.full((16, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    found = values(byte.view(torch.int8), one)
    low, high = E2M1[(byte & 15).int()], E2M1[(byte >> 4).int()]
    expected = torch.stack([low, high], dim=-1).flatten(1).double()
    assert torch.equal(found.view(torch.int64), expected.view(torch.int64))
    codes, scales = torch.arange(256, dtype=torch.uint8), torch.arange(255, dtype=torch.uint8)
    grid = codes.view(torch.float8_e4m3fn).repeat(255, 1).repeat_interleave(128, 0)
    scale = scales.view(torch.float8_e8m0fnu)[:, None].repeat(1, 2)
    found = values(grid, scale)[::128]
    expected = E8M0.double()[:255, None] * E4M3.double()
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


@needs_golden
def test_quantisation_tables(host: Host) -> None:
    """Every scale byte of a finite amax and every rounded code of a finite BF16 value (SPEC 3)."""
    with safe_open(str(GOLDEN / "quant_tables.safetensors"), framework="pt") as file:
        table = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    power, rounded = (host.namespace[n] for n in ("power_of_two_above", "e2m1_round"))
    amax = table["bf16_bits"].view(torch.bfloat16).float()
    for name, floor, most in (("fp8", 1e-4, 448), ("fp4", 6 * 2.0**-126, 6)):
        factor = torch.tensor(1 / most, dtype=torch.float32)
        exponent = power(amax.clamp(min=floor) * factor).view(torch.int32) >> 23
        assert torch.equal(exponent, table[f"scale_e8m0_{name}"].int())
    x = table["all_bf16_bits"].view(torch.bfloat16).float()
    finite = x.isfinite()
    fp4 = rounded(x.clamp(-6, 6))[finite]
    expected = E2M1.double()[table["fp4_code"].int()][finite]
    assert torch.equal(fp4.view(torch.int64), expected.view(torch.int64))
    quantised = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(quantised[finite], table["fp8_code"][finite])
