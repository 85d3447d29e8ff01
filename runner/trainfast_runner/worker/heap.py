"""What the C library keeps of blocks that were freed."""

from __future__ import annotations

import ctypes


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2` (malloc.h, from 2.33 on)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *(
                "arena",
                "ordblks",
                "smblks",
                "hblks",
                "hblkhd",
                "usmblks",
                "fsmblks",
                "uordblks",
                "fordblks",
                "keepcost",
            ),
        )
    ]


def free_in_heap_bytes() -> int:
    """Free blocks in the heap, which count as reserved all the same; 0 where the C library does not say.

    `fordblks` of mallinfo2(3): blocks large enough for a mapping of their own are none of these.
    """
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return 0
    mallinfo2.restype = _Mallinfo2
    return int(mallinfo2().fordblks)
