"""Formatting of byte counts and durations."""


def size(count: float) -> str:
    """Bytes in binary units: 268929536 -> `256.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def seconds(value: float) -> str:
    """A duration: `0.4 s`, `3 min 05 s`, `1 h 02 min`."""
    if value < 100:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 100:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def number_of(count: int, one: str, several: str = "") -> str:
    """`1 key`, `2 keys`; several: the plural, where it is not `one` with an s."""
    return f"{count} {one if count == 1 else several or one + 's'}"
