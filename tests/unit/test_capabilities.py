"""What ranks and engine declare becomes one record."""

import pytest

from rl_memory_plugins.capabilities import MOST_LAYERS, Capabilities, fixed_by
from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.tags import PauseMode


def test_an_engine_can_do_what_all_its_ranks_can():
    engine = Capabilities(ranks=2, steps_with_peers=True, modes=(PauseMode.ABORT,))
    merged = engine.merged([Capabilities(resident_graphs="custom all-reduce"), Capabilities(fixed_weights="packed")])
    assert merged == Capabilities(
        ranks=2,
        steps_with_peers=True,
        modes=(PauseMode.ABORT,),
        fixed_weights="packed",
        resident_graphs="custom all-reduce",
    )


def test_the_mode_freeze_is_required_by_its_reason():
    Capabilities().require_mode(PauseMode.FREEZE)
    unable = Capabilities(no_freeze="of its tree", modes=(PauseMode.KEEP,))
    unable.require_mode(PauseMode.KEEP)
    with pytest.raises(UnsupportedError, match="of its tree") as caught:
        unable.require_mode(PauseMode.FREEZE)
    assert caught.value.details == {"modes": ["keep"]}


def test_the_first_rank_says_why():
    ranks = [Capabilities(fixed_weights="a", fixed_layers={"x": "A"}), Capabilities(fixed_weights="b")]
    merged = Capabilities().merged(ranks)
    assert (merged.fixed_weights, merged.fixed_layers) == ("a", {"x": "A"})


def test_a_record_of_many_layers_stays_small():
    error = UnsupportedError("packed", layers={f"layers.{i}": "Packed" for i in range(10 * MOST_LAYERS)})
    assert len(fixed_by(error).fixed_layers) == MOST_LAYERS


def test_updatable_weights_are_required_by_name():
    Capabilities().require_updatable("sleep(level=2)")
    with pytest.raises(UnsupportedError, match=r"^sleep\(level=2\) is refused.*: packed$"):
        Capabilities(fixed_weights="packed").require_updatable("sleep(level=2)")
