"""From one version to another in place: prepared beforehand, done in one go, taken back in one go.

All conversion and copying to the device happens while generation goes on; what is left for the
pause is one scatter for each tensor that changed. The published values of the base are kept
beside the new ones, so that going back needs no disk. Converting each element alone gives the same
bits as converting the whole tensor, hence a flip ends where a full install would. Used by
`torch_engine` alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import torch

from echo2_mesh.wire.messages import Manifest, TensorSpan
from echo2_mesh.wire.types import Digest
from echo2_node.engines.differences import Change
from echo2_node.engines.matching import as_elements


class _Step(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor: `target` is the parameter, flat; values are in its dtype, on its device."""

    target: torch.Tensor
    positions: torch.Tensor | None
    """int64[C]; None: all of them."""
    old: torch.Tensor
    new: torch.Tensor


class Flip:
    """The way from the version `base` to the version `digest`, and back."""

    def __init__(
        self, steps: tuple[_Step, ...], *, base: tuple[Digest, Manifest], digest: Digest,
        manifest: Manifest,
    ) -> None:  # fmt: skip
        self._steps = steps
        self.base = base[0]
        self._base_manifest = base[1]
        self.digest = digest
        self.manifest = manifest
        self.changed = sum(step.new.numel() for step in steps)

    def apply(self) -> None:
        """Write the new values; on any failure the old ones are back before it is raised."""
        try:
            for step in self._steps:
                _write(step.target, step.positions, step.new)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Write the old values."""
        for step in self._steps:
            _write(step.target, step.positions, step.old)

    def reversed(self) -> Flip:
        """The way back, over the same tensors."""
        return Flip(
            tuple(
                _Step(target=s.target, positions=s.positions, old=s.new, new=s.old)
                for s in self._steps
            ),
            base=(self.digest, self.manifest),
            digest=self.base,
            manifest=self._base_manifest,
        )


def prepare_flip(
    pairs: Iterable[tuple[torch.Tensor, TensorSpan]],
    changes: Iterable[Change],
    *,
    base: tuple[Digest, Manifest],
    digest: Digest,
    manifest: Manifest,
) -> Flip | None:
    """Everything a flip needs, on the parameters' device; changes no parameter.

    Args:
        pairs: every parameter and the published tensor that fills it (`matching.match`).

    Returns:
        None where a parameter does not lie in one piece: it cannot be written by position.
    """
    targets: dict[str, list[torch.Tensor]] = {}
    for target, span in pairs:
        targets.setdefault(span.name, []).append(target)
    steps = []
    for change in changes:
        for target in targets[change.span.name]:
            if not target.is_contiguous():
                return None
            positions = change.positions
            steps.append(
                _Step(
                    target=target.view(-1),
                    positions=None
                    if positions is None
                    else torch.from_numpy(positions).to(target.device),
                    old=_values(change.span, change.old, target),
                    new=_values(change.span, change.new, target),
                )
            )
    return Flip(tuple(steps), base=base, digest=digest, manifest=manifest)


def _values(span: TensorSpan, patterns: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return as_elements(span, patterns).to(device=like.device, dtype=like.dtype)


def _write(target: torch.Tensor, positions: torch.Tensor | None, values: torch.Tensor) -> None:
    if positions is None:
        target.copy_(values)
    else:
        target.scatter_(0, positions, values)
