"""Every random draw of a run comes from a seed with a name."""

import hashlib


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the draw called `names` of the run seeded with `seed`.

    Equal arguments give equal seeds on every machine; different names give independent ones.
    """
    text = "\x1f".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
