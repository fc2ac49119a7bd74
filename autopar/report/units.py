"""Numbers as people read them."""


def seconds_text(seconds: float) -> str:
    """`1.24 ms`: three digits and a unit."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= scale:
            return f"{_three(seconds / scale)} {unit}"
    return "0" if seconds == 0 else f"{_three(seconds / 1e-9)} ns"


def saving_text(seconds: float) -> str:
    """`saves 1.24 ms`, or what it costs where that is less than nothing."""
    return f"saves {seconds_text(seconds)}" if seconds >= 0 else f"costs {seconds_text(-seconds)}"


def nbytes_text(nbytes: float) -> str:
    """`8.39 MB`, decimal units."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= scale:
            return f"{_three(nbytes / scale)} {unit}"
    return f"{nbytes:.0f} B"


def count_text(count: float) -> str:
    """`814 k`, `3.2 M`: three digits of a count."""
    for scale, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= scale:
            return f"{_three(count / scale)}{unit}"
    return _three(count)


def percent_text(share: float) -> str:
    return f"{share * 100:.2g}%" if share < 0.1 else f"{share * 100:.0f}%"


def share_text(part: float, total: float) -> str:
    """A part of a total, which is nothing of nothing where a plan runs nothing."""
    return percent_text(part / total if total else 0.0)


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
