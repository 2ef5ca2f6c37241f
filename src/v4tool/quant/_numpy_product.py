"""The products of `linear` without the C kernel."""

from v4tool.quant._readable_product import grouped, plain, quantized

__all__ = ["grouped", "plain", "quantized"]
