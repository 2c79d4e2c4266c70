"""A run that goes on from a checkpoint keeps its name, and says in what it is another one than before."""

from __future__ import annotations

from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_asyncpp.core.manifest import Manifest, changes

_AS_ASKED = ("versions", "trainer", "hyper-parameters")
SEED = "seed"
"""Section of a manifest, of what ``seed_everything`` was given."""


def go_on_from(manifest: Manifest, saved: Any) -> None:
    """Take up the name of the run that wrote a checkpoint, and log what differs.

    Args:
        manifest: this run's, of what its script asks for; changed.
        saved: the checkpoint's, as ``Manifest.as_plain`` gave it; anything else is of an older release.
    """
    before = Manifest.of_plain(saved)
    if before is None:
        return
    manifest.run, manifest.attempt = before.run, before.attempt + 1
    if asked := _differences(before, manifest, _AS_ASKED):
        rank_zero_info(f"Pipeline: run {manifest.run} goes on with {asked}")
    for name, old, new in changes(before.sections.get(SEED, {}), manifest.sections.get(SEED, {})):
        rank_zero_warn(
            f"this run asks for {name}={new} (it was {old}); the checkpoint's random numbers go on: to draw others,"
            " leave ckpt_path out, and load its weights alone"
        )
    if other := _differences(before, manifest, ("model",)):
        rank_zero_warn(f"the checkpoint's weights go on in another model: {other}")


def _differences(before: Manifest, now: Manifest, sections: tuple[str, ...]) -> str:
    return ", ".join(
        f"{section} {name}={new} (it was {old})"
        for section in sections
        for name, old, new in changes(before.sections.get(section, {}), now.sections.get(section, {}))
        if name != "class"  # which the pipeline's own line names
    )
