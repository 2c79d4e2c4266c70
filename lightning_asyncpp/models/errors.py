"""What is raised when saved weights cannot be used."""

from __future__ import annotations

from collections.abc import Sequence


class WeightsError(ValueError):
    """Saved weights, or what was asked of them, are wrong; the message names the file and the mend."""

    @classmethod
    def from_problems(cls, what: str, problems: Sequence[str]) -> WeightsError:
        """One error with all problems of ``what``, a line each."""
        return cls(f"{what}:\n" + "\n".join(f"  - {problem}" for problem in problems))
