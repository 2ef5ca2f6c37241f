"""The port equals the released code's control flow, bit for bit, on every golden key."""

import pytest

from tests.conftest import GoldenFile, difference, every_golden, kind_of
from v4tool.checkpoint.shards import Checkpoint
from v4tool.config import Numerics
from v4tool.model.stream import Sequence, run


@pytest.mark.parametrize("golden", every_golden())
def test_golden(golden: GoldenFile) -> None:
    """BF16 values and integers bit for bit, values kept in acc within 1 ulp of FP32 (SPEC 8)."""
    found = {}
    ids, decode_ids = golden.metadata("input_ids"), golden.metadata("decode_ids")
    with Checkpoint.open(golden.ckpt) as checkpoint:
        sequence = Sequence(ids, found.__setitem__, len(decode_ids), decode_ids)
        run(checkpoint, checkpoint.config, Numerics(threads=2), [sequence])
        specs = golden.specs(checkpoint)
    wrong, compared = {}, 0
    for key, expected in golden.tensors():
        if key not in found:
            wrong[key] = "not computed"
            continue
        value = found.pop(key)
        value = value.float() if value.is_floating_point() else value
        if why := difference(expected, value, kind_of(key, specs)):
            wrong[key] = why
        compared += 1
    assert not wrong, f"{len(wrong)} of {compared} keys differ, first {list(wrong.items())[:5]}"
    if golden.complete:
        assert not found, f"{len(found)} keys that the reference has not, first {list(found)[:5]}"
