"""The bytes that a rank sends for a quantized all-reduce, by hand."""


def bytes_by_hand(format, algorithm, n, P, exact=0, exact_size=4):
    """Bytes that a rank sends for n elements in a format, and for `exact` values of `exact_size` bytes each."""
    size = {"fp32": 4, "fp16": 2, "bf16": 2}.get(format)
    if algorithm == "native":
        ring = [size * n + exact_size * exact] if format == "fp32" else [size * n, exact_size * exact]
        return sum(-(-2 * (P - 1) * nbytes // P) for nbytes in ring)
    if algorithm == "one_shot":
        numbers = 132 * -(-n // 128) if format == "int8" else size * n
        return (P - 1) * (numbers + exact_size * exact)
    if format == "int8":
        n_pad = 128 * P * -(-n // (128 * P))
        numbers = 2 * (P - 1) * n_pad * (128 + 4) // (128 * P)
    else:
        numbers = 2 * (P - 1) * -(-n // P) * size
    return numbers + 2 * (P - 1) * -(-exact // P) * exact_size
