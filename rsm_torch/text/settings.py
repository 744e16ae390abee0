"""What a text memory was made with, and whether it may be opened with something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from rsm_torch.calibrate import Calibration, calibrate_tau
from rsm_torch.config import RSMConfig
from rsm_torch.text.embedders import Embedder
from rsm_torch.text.store import ItemStore

CALIBRATE_AT = 32  # items in the memory when a tau that nobody gave is calibrated


@dataclass(frozen=True, slots=True)
class Settings:
    """`pending`: tau is a default that the first items will replace."""

    embedder: str
    config: RSMConfig
    calibration: Calibration | None = None
    pending: bool = False

    @staticmethod
    def enough(sizes: Sequence[int]) -> bool:
        """Whether a tau can be calibrated from streams of so many items."""
        least = CALIBRATE_AT if max(sizes, default=0) > 1 else 2 * CALIBRATE_AT
        return sum(sizes) >= least

    def calibrated(self, vectors: Tensor, streams: Tensor) -> Settings:
        """With the tau of these embeddings [N, D] of the streams [N]: of pairs within a stream,
        or of all pairs if no stream has two."""
        alone = len(streams.unique()) == len(streams)
        groups = None if alone else streams
        found = calibrate_tau(vectors, embedder=self.embedder, groups=groups)
        return replace(self, config=replace(self.config, tau=found.tau), pending=False)

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` accepts; JSON can hold it."""
        return {
            "embedder": self.embedder,
            "config": self.config.to_dict(),
            "calibration": None if self.calibration is None else self.calibration.to_dict(),
            "pending": self.pending,
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Settings:
        """The inverse of `to_dict`, of a file that anybody may have written.

        Raises:
            ValueError: these are no settings of a text memory.
        """
        try:
            found = cls(
                saved["embedder"],
                RSMConfig.from_dict(saved["config"]),
                None
                if saved["calibration"] is None
                else Calibration.from_dict(saved["calibration"]),
                saved["pending"],
            )
            if found.calibration is not None:
                found.calibration.check_width(found.config.dim)
        except (KeyError, TypeError, RuntimeError, OverflowError, RecursionError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error).split("\n")[0]
            raise ValueError(f"settings: {what}") from error
        if not isinstance(found.embedder, str) or not isinstance(found.pending, bool):
            raise ValueError("settings: embedder and pending: expected a str and a bool")
        _check_kept(found.config)
        return found

    def save(self, store: ItemStore) -> None:
        store.set_meta(self.to_dict())

    @classmethod
    def load(cls, store: ItemStore) -> Settings | None:
        """What the store was made with, None if it is new."""
        names = [field.name for field in fields(cls)]
        saved = {name: store.get_meta(name) for name in names}
        if saved["embedder"] is None and store.is_empty():
            return None
        try:
            return cls.from_dict(saved)
        except ValueError as error:
            raise store.damaged(error) from error

    def same_space(self, other: Settings) -> bool:
        """Whether embeddings of one are embeddings of the other."""
        return (self.embedder, self.config.dim) == (other.embedder, other.config.dim)

    def moved(
        self, embedder: Embedder, tau: float | None, calibration: Calibration | None
    ) -> Settings:
        """The same for another embedder, whose tau is pending unless it is given."""
        _check(embedder, None, tau, calibration)
        rank = min(self.config.rank, embedder.dim)
        config = replace(self.config, dim=embedder.dim, rank=rank, tau=RSMConfig.tau)
        return _with_tau(embedder, config, tau, calibration)


def _with_tau(
    embedder: Embedder, config: RSMConfig, tau: float | None, calibration: Calibration | None
) -> Settings:
    """`config` with the tau given, or pending."""
    given = calibration.tau if tau is None and calibration is not None else tau
    if given is not None:
        config = replace(config, tau=given)
    return Settings(embedder.name, config, calibration, pending=given is None)


def settle(
    store: ItemStore,
    embedder: Embedder,
    config: RSMConfig | None,
    tau: float | None,
    calibration: Calibration | None,
) -> Settings:
    """The settings of a memory: those of its file, which arguments may repeat but not change.

    Raises:
        ValueError: arguments that contradict each other, the embedder or the file.
    """
    _check(embedder, config, tau, calibration)
    saved = Settings.load(store)
    if saved is not None:
        _check_same(store, saved, embedder, config, tau, calibration)
        return saved
    if config is None:
        defaults = RSMConfig(embedder.dim, rank=min(RSMConfig.rank, embedder.dim))
        settings = _with_tau(embedder, defaults, tau, calibration)
    else:
        settings = Settings(embedder.name, config, calibration)
    with store.transaction():
        settings.save(store)
    return settings


def _check(
    embedder: Embedder,
    config: RSMConfig | None,
    tau: float | None,
    calibration: Calibration | None,
) -> None:
    if config is not None and not isinstance(config, RSMConfig):
        raise TypeError(f"config: expected an RSMConfig, got {type(config).__name__}")
    if config is not None and tau is not None:
        raise ValueError(f"tau: config already has one ({config.tau}); give tau={tau} there")
    if config is not None and config.dim != embedder.dim:
        raise ValueError(
            f"config: dim is {config.dim}, embedder {embedder.name!r} has width {embedder.dim}"
        )
    if config is not None:
        _check_kept(config)
    if not isinstance(calibration, Calibration | None):
        raise TypeError(f"calibration: expected a Calibration, got {type(calibration).__name__}")
    if calibration is not None and calibration.embedder not in (None, embedder.name):
        raise ValueError(
            f"calibration: is of embedder {calibration.embedder!r}, the memory's is "
            f"{embedder.name!r}"
        )


def _check_kept(config: RSMConfig) -> None:
    if config.members == "none":
        raise ValueError(
            "config: members='none' keeps nothing of a single item, so that none could be found; "
            "choose members='full' or 'coefficients'"
        )


def _check_same(
    store: ItemStore,
    saved: Settings,
    embedder: Embedder,
    config: RSMConfig | None,
    tau: float | None,
    calibration: Calibration | None,
) -> None:
    if embedder.name != saved.embedder or embedder.dim != saved.config.dim:
        raise ValueError(
            f"embedder: {store.path} was written with {saved.embedder!r} of width "
            f"{saved.config.dim}, opened with {embedder.name!r} of width {embedder.dim}"
        )
    if config is not None and config != saved.config:
        raise ValueError(f"config: {store.path} has {saved.config}, opened with {config}")
    if tau is not None and (saved.pending or tau != saved.config.tau):
        kept = "calibrates its own" if saved.pending else f"has {saved.config.tau}"
        raise ValueError(f"tau: {store.path} {kept}, opened with {tau}")
    if calibration is not None and (
        saved.calibration is None or calibration.to_dict() != saved.calibration.to_dict()
    ):
        raise ValueError(f"calibration: {store.path} was written with another or with none")
