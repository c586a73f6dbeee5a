"""Whether a draft model has weights that go with the target's. A draft that lags behind costs acceptance, no answer."""

from __future__ import annotations

from rl_memory_plugins.tags import Draft, DraftShare


class DraftState:
    """The state of one rank's draft model. Every sleep preserves its weights; only updates change the state.

    Attributes:
        state: `None` as long as the rank has no draft model.
    """

    def __init__(self) -> None:
        self.state: Draft | None = None
        self._share = DraftShare.NONE  # of the update under way

    @property
    def torn(self) -> bool:
        """Whether the last load of the draft broke off."""
        return self.state is Draft.FAILED

    def found(self) -> None:
        """The engine has a draft model, whose weights came with the target's."""
        self.state = self.state or Draft.IN_STEP

    def begin(self, share: DraftShare) -> None:
        """An update begins to write."""
        self._share = share

    def finish(self, complete: bool) -> None:
        """The update is over on every rank."""
        share, self._share = self._share, DraftShare.NONE
        if self.state is None:
            return
        if not complete:
            if share is not DraftShare.NONE:
                self.state = Draft.FAILED
        elif share is DraftShare.WHOLE:
            self.state = Draft.IN_STEP
        elif share is DraftShare.NONE and self.state is Draft.IN_STEP:
            self.state = Draft.OUT_OF_STEP

    def note_target(self) -> None:
        """The engine's own call has loaded weights of the target."""
        if self.state is Draft.IN_STEP:
            self.state = Draft.OUT_OF_STEP

    def note_draft(self, complete: bool) -> None:
        """The engine's own call has loaded weights of the draft; or it broke off."""
        if self.state is not None:
            self.state = Draft.IN_STEP if complete else Draft.FAILED
