"""The states of a dirty file, against their table: what no arrow shows is refused, and changes nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.origin import ObjectInfo
from cachefs.upload.content import Attempt, Content, State, Stored

ALLOWED = {
    "changed": {State.DIRTY, State.COMMITTING, State.CLEAN, State.SETTLING},
    "begin": {State.DIRTY},
    "stored": {*State},
    "end": {State.COMMITTING},
    "settle": {State.CLEAN},
    "adopted": {State.SETTLING},
    "ours": {State.SETTLING},
    "renewed": {State.ADOPTED},
}


@given(st.lists(st.sampled_from([*ALLOWED])))
def test_the_states_follow_the_table(steps: list[str]) -> None:
    content, generation, stored = Content(), 0, -1
    expected = State.DIRTY
    for step in steps:
        attempt, info = Attempt(), ObjectInfo("k", 0, 0, str(generation))
        calls = {
            "changed": content.changed,
            "begin": lambda attempt=attempt: content.begin(attempt),
            "stored": lambda info=info, generation=generation: content.stored_as(Stored(generation, info)),
            "end": content.end,
            "settle": content.settle,
            "adopted": lambda: content.settled(True),
            "ours": lambda: content.settled(False),
            "renewed": content.renewed,
        }
        if expected not in ALLOWED[step]:
            with pytest.raises(AssertionError):
                calls[step]()
        else:
            calls[step]()
            generation += step == "changed"
            stored = generation if step == "stored" else stored
            rests = State.CLEAN if stored == generation else State.DIRTY
            match step:
                case "begin":
                    expected = State.COMMITTING
                    assert content.attempt is attempt
                case "settle":
                    expected = State.SETTLING
                case "adopted":
                    expected = State.ADOPTED
                case "end" | "ours" | "renewed":
                    expected = rests
                case _ if expected in (State.DIRTY, State.CLEAN):
                    expected = rests
        assert content.state is expected and content.generation == generation
        assert content.dirty is (stored != generation)
        assert (content.attempt is not None) is (expected is State.COMMITTING)
        assert content.adopted is (expected is State.ADOPTED)
        assert content.is_ours is (expected not in (State.SETTLING, State.ADOPTED))
