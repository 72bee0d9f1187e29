"""The next batch's frozen work in a trial's idle time.

training    rank 0   F0 F1 .. .. B0 B1          ->    to fill   the bound of the room that promises the shortest step
            rank 1   .. F0 B0 F1 B1 ..          ->    filled    rank 0   F0 F1 T  .. B0 B1
                                                                rank 1   T  F0 B0 F1 B1 T
"""

from collections.abc import Sequence
from dataclasses import replace

from passes.case import Case
from passes.fill.ahead import filled, groups
from passes.fill.per_device import no_fill, per_device
from passes.tuner.bounds import filled_seconds
from passes.tuner.request import Request
from passes.tuner.room import Room, rooms
from passes.tuner.simulate import Simulated
from passes.tuner.trial import Trial
from passes.tuner.walks import Walks


class AheadFill:
    """Where `request` fills "after" the training, frozen work is in the last idle time alone."""

    def __init__(self, case: Case, request: Request, walks: Walks) -> None:
        self.case, self.walks = case, walks
        self.is_after = request.fill == "after"

    def to_fill(self, trial: Trial, training: Simulated) -> Trial:
        """In whichever idle time there is room for as many samples at once as promise most."""
        room = min(rooms(self.case, trial.placed, training.clock), key=lambda room: self.seconds(trial, training, room))
        bound = self.seconds(trial, training, room, self.is_after)
        return replace(trial, room=room, bound_seconds=max(trial.bound_seconds, bound))

    def seconds(self, trial: Trial, training: Simulated, room: Room, is_after: bool = False) -> float:
        """No step is shorter whose frozen work is in this room."""
        idle = (0.0,) * self.case.world_size if is_after else room.idle_seconds
        walked = [*groups(trial.placed, trial.sizes(self.case), training.schedule)]
        return filled_seconds(self.case, walked, training.seconds, idle, room.most)

    def filled(self, trial: Trial, training: Simulated, room: Room, only: Sequence[int] | None = None) -> Trial:
        """On as many samples at once as there is room for, of all pipelines or `only` these."""
        case, staged, sizes = self.case, trial.placed, trial.sizes(self.case)
        before, filler = replace(training.training, idle=room.idle), no_fill if self.is_after else per_device
        schedule = filled(before, case.frozen, staged, sizes, filler, room.most, not case.divisible)
        found = self.walks.step(trial, schedule, only)
        return replace(trial, is_filled=True).known(found, done=only is None)

    def filled_alike(self, trial: Trial, training: Simulated) -> Trial:
        """With the training of all pipelines, in room for as many samples as in the trial's of some."""
        assert trial.room is not None
        every, most = rooms(self.case, trial.placed, training.clock), trial.room.most
        room = next((room for room in every if room.most == most), Room.everywhere(training.clock, 0.0))
        return self.filled(trial, training, room)
