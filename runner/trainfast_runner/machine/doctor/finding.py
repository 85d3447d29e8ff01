"""One finding of `doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One finding. `fail`: no run can be started here; `warn`: something will not work, or may surprise."""

    name: str
    state: State
    finding: str
    cure: str | None = None
