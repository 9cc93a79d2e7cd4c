"""Limits of torch's attention kernels, by which layers call them and the planner counts memory."""

WIDEST_OF_FLASH = 256  # values of a head that flash attention takes


def fits_flash(head_dim: int) -> bool:
    """Return whether flash attention takes sequences of any lengths with such heads."""
    return head_dim % 8 == 0 and head_dim <= WIDEST_OF_FLASH


def mask_columns(tokens: int) -> int:
    """Return the columns of a mask: efficient attention copies one whose rows are not aligned."""
    return -(-tokens // 16) * 16
