"""What this machine can do at most, to measure the engine against (csrc/bench/)."""

def measure_limits(instruction_set: str, threads: int, seconds: float, model_bytes: int) -> dict[str, float]:
    """What the machine can do at most: int8_macs_per_s, grouped_int8_macs_per_s (with a scale per 32 columns),
    read_bytes_per_s (over 256 MB), model_read_bytes_per_s (over `model_bytes`). Each is measured for `seconds`.

    Raises ValueError for an instruction set that this CPU does not run, or numbers that make no sense.
    """

def measure_copy(threads: int, seconds: float, bytes: int) -> float:
    """Bytes a second that memcpy copies on these threads, between two buffers of so many bytes. The GIL is released.

    Raises ValueError for numbers that make no sense, MemoryError.
    """
