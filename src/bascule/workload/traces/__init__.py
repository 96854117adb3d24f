"""Traces of training runs, read and written: the Chrome-trace JSON of torch.profiler."""

from bascule.workload.traces.reading import read_traces as read_traces
from bascule.workload.traces.steps import StepParts as StepParts
from bascule.workload.traces.steps import step_parts as step_parts
from bascule.workload.traces.worth import Worth as Worth
from bascule.workload.traces.worth import balancing_worth as balancing_worth
from bascule.workload.traces.writing import Segment as Segment
from bascule.workload.traces.writing import write_steps as write_steps
