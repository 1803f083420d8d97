def hash_granules(digest: int, source: int, num_bytes: int, granule_bytes: int, out: int) -> None:
    """Put the hash of each granule of ``num_bytes`` at address ``source`` to the address ``out``, eight bytes each; the
    last granule may be short. ``digest``: the address of a C function of an address and a number of bytes. Raises
    ValueError for granules of no bytes."""
