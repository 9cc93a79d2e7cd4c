"""Limits of torch's attention kernels, by which layers call them and the planner counts memory."""

WIDEST_OF_FLASH = 256  # values of a head that flash attention takes


def mask_columns(tokens: int) -> int:
    """Return the columns of a mask: efficient attention copies one whose rows are not aligned."""
    return -(-tokens // 16) * 16
