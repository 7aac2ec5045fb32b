"""Numbers as reports print them."""


def ms(time_us: float | None) -> str:
    """Return a time in milliseconds; "-" for none."""
    return "-" if time_us is None else f"{time_us / 1e3:,.2f}"
