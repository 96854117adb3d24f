"""Traces of training runs, read and written: the Chrome-trace JSON of torch.profiler."""

from bascule.workload.traces.step_parts import StepParts as StepParts
from bascule.workload.traces.step_parts import step_parts as step_parts
from bascule.workload.traces.trace_files import read_traces as read_traces
from bascule.workload.traces.trace_writing import Segment as Segment
from bascule.workload.traces.trace_writing import write_steps as write_steps
from bascule.workload.traces.worth import Worth as Worth
from bascule.workload.traces.worth import balancing_worth as balancing_worth
