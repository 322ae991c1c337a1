"""What a run tells about itself: flat events, handed to sinks.

Knows nothing of torch, sessions or workers: it takes plain values and names. An event is one flat
dict, ``{"event": kind, "time": unix_seconds, **fields}``. This table is the contract between those
who emit events (the session, the launcher) and those who read them (the plots, the status command,
your scripts). ``EVENT_FIELDS`` is the same in code; more fields may be added to any kind.

============  ======================================================================================
event         fields
============  ======================================================================================
start         elastane_version, torch_version, rule, policy, base_batch_size [samples],
              num_steps [base steps], num_samples (in the dataset), world_size, generation, seed,
              parameters (their number)
step          step, progress, epoch, position [samples], loss, lr, factor, gain, scale,
              batch_samples, num_gradients, world_size, generation, grad_norm, variance, sqr_norm,
              noise_scale [samples], single_share, seconds, skipped
membership    generation, world_size, cause, pause_s, progress, step
pause         reason, seconds, step
evaluation    step, progress, num_samples, seconds, metric_NAME (any number of them)
policy        choice, reason
checkpoint    step, path, seconds
end           step, progress, seconds, cause
============  ======================================================================================

What the fields mean, where their names leave room:

- ``step`` is the number of optimizer steps committed so far, ``progress`` what they were worth in
  base steps; both include the step that the event tells of. A skipped step commits nothing.
- ``start`` is written again when a run is resumed; readers take the last.
- ``lr`` is the learning rate that the optimizer used, the schedule's times ``factor``; of several
  parameter groups, the first one's.
- ``loss``, and every estimate that is not known yet, may be None. A number that is not finite is
  written as null.
- ``variance``, ``sqr_norm`` and ``noise_scale`` are the averaged moments s and mu^2, and s / mu^2.
- ``single_share`` is the part of the moments, 0 to 1, from single gradients: estimated
  from some layers (see `Measuring.single`); at 1 they are the moments of these layers alone.
- ``num_gradients`` is how many gradient samples (workers times micro-batches) the step measured.
- ``seconds`` is how long the thing itself took; for ``end``, the whole run since its start.
- ``pause_s`` is a survivor's gap between two finished steps minus its median step.
- A step number that comes again (after a resume, or when a step was void) replaces what was
  written for it, and all later steps, before.
"""

from elastane.telemetry.contract import EVENT_FIELDS
from elastane.telemetry.emitter import Telemetry
from elastane.telemetry.jsonl import JsonlSink
from elastane.telemetry.progress import ProgressBar
from elastane.telemetry.reader import EVENTS_NAME, read_events
from elastane.telemetry.sink import Sink
from elastane.telemetry.tensorboard import TensorBoardSink

__all__ = [
    "EVENTS_NAME",
    "EVENT_FIELDS",
    "JsonlSink",
    "ProgressBar",
    "Sink",
    "Telemetry",
    "TensorBoardSink",
    "read_events",
]
